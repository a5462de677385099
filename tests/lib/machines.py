"""Runs a state machine of hypothesis: random but seeded sequences of its rules."""

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def run_machine(machine, *, num_examples, num_rules):
    """Runs `num_examples` sequences of up to `num_rules` rules; the same ones in every run."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_rules,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # Phase.shrink gives a short story for a failure, in minutes
        ),
    )
