"""Which process failed, what it may take, and how often all restart."""

import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)

from meshtrain.errors import EXIT_PREEMPTED, ConfigError
from meshtrain.supervise import restart_policy
from meshtrain.supervise.restart_policy import Outcome, RestartBudget, Settings
from tests.lib.machines import run_machine
from tests.lib.supervised import PromisedBudget, ended, status


def test_the_process_that_failed_first_is_found():
    def cause(*codes, lost_peer=()):
        exits = [ended(code, rank) for rank, code in enumerate(codes)]
        for rank in lost_peer:
            exits[rank].tail.append("Gloo all-reduce failed: Connection closed by peer [127.0.0.1]")
        return restart_policy.first_failure(exits).code

    assert cause(0, -6, -9) == -9
    assert cause(-6, 1) == 1
    assert cause(-6, 1, lost_peer=[1]) == -6
    assert cause(1, -11, -6) == 1
    assert cause(1, -11, -6, lost_peer=[0, 2]) == -11
    assert cause(1, 2, -9) == 2
    assert restart_policy.first_failure([ended(0)]) is None


def test_each_phase_has_its_time_limit():
    def late(**fields):
        found = restart_policy.find_stall([status(**fields)], 60.0)
        return found and found.why

    assert late(phase_age=59) is None and "no progress for 61 s" in late(phase_age=61)
    assert late(phase_age=200, step_seconds=50) is None and late(phase_age=251, step_seconds=50)
    assert late(phase="compile", phase_age=3000) is None and late(phase="compile", phase_age=3601)
    assert "no heartbeat" in late(phase="compile", phase_age=70, heartbeat_age=61)
    assert "stopped by a signal" in late(phase="save", stopped_for=11)
    two = [status(0, "step", 8, phase_age=61), status(1, "data", 7, phase_age=61.5)]
    assert restart_policy.find_stall(two, 60.0).status.rank == 1
    # The save that is due comes after step 7: only rank 1 has reached it.
    two = [status(0, "step", 7, phase_age=61), status(1, "save", 7, phase_age=61)]
    assert restart_policy.find_stall(two, 60.0).status.rank == 0
    # The first steps have a higher limit: NCCL makes its connections then.
    assert late(step_seconds=0.0, phase_age=599) is None and late(step_seconds=0.0, phase_age=601)


LIMITS = dict(start=30, restore=30, compile=60, save=30, eval=30, check=5, end=10, data=1, step=1)


@pytest.mark.parametrize("phase", LIMITS)
def test_the_limit_of_a_phase_is_a_multiple_of_stall_seconds(phase):
    def is_late(age, **fields):
        return restart_policy.find_stall([status(phase=phase, phase_age=age, **fields)], 2.0)

    limit = 2.0 * LIMITS[phase]
    assert not is_late(limit - 0.1) and is_late(limit + 0.1)
    if phase in ("data", "step"):
        assert not is_late(49.9, step_seconds=10.0) and is_late(50.1, step_seconds=10.0)
        assert not is_late(19.9, step_seconds=0.0) and is_late(20.1, step_seconds=0.0)
    assert is_late(0.0, heartbeat_age=2.1) and not is_late(0.0, heartbeat_age=1.9)
    assert is_late(0.0, stopped_for=10.1) and not is_late(0.0, stopped_for=9.9)


ORDER = ["start", "restore", "compile", "data", "step", "check", "eval", "save", "end"]
PLACES = st.tuples(st.integers(0, 2), st.sampled_from(ORDER), st.sampled_from([0.0, 9.0, 1e6]))


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(PLACES, min_size=1, max_size=5))
def test_of_processes_that_wait_the_one_furthest_behind_is_named(places):
    """By step, by phase, then by its time in the phase; the limits are those of each phase."""
    statuses = [
        status(rank, phase, step, phase_age=age) for rank, (step, phase, age) in enumerate(places)
    ]
    found = restart_policy.find_stall(statuses, 2.0)
    is_late = any(age > 2.0 * LIMITS[phase] for _, phase, age in places)
    assert bool(found) == is_late
    if found:
        order = [(step, ORDER.index(phase), -age) for step, phase, age in places]
        assert order[found.status.rank] == min(order)


def test_only_restarts_within_the_window_count():
    budget = RestartBudget(max_restarts=2, window=0.3)
    for reached in range(2):
        assert not budget.reason_to_give_up(Outcome(1, status=status(current_step=reached)), 2)
    assert budget.reason_to_give_up(Outcome(1, status=status(current_step=2)), 2)
    time.sleep(0.35)
    assert not budget.reason_to_give_up(Outcome(1, status=status(current_step=3)), 2)


def test_attempts_in_a_row_are_those_without_a_preemption_between_them():
    budget = RestartBudget(max_restarts=9, window=60.0)
    crash, preempted = Outcome(1, status=status()), Outcome(EXIT_PREEMPTED, status=status())
    for _ in range(3):
        assert budget.reason_to_give_up(crash, 2) == ""
        assert budget.reason_to_give_up(preempted, 2) == ""
    assert budget.reason_to_give_up(crash, 2) == ""
    assert "2 attempts in a row ended this way at step 5" in budget.reason_to_give_up(crash, 2)


class BudgetStates(RuleBasedStateMachine):
    """Attempts that end in any way, beside the list of all ends."""

    @initialize(max_restarts=st.integers(0, 6))
    def open(self, max_restarts):
        self.seconds = 0.0
        self.patch = pytest.MonkeyPatch()
        clock = types.SimpleNamespace(monotonic=lambda: self.seconds)
        self.patch.setattr(restart_policy, "time", clock)
        self.own = dict(max_restarts=max_restarts, window=100.0)
        self.begin()

    def begin(self):
        self.real, self.promised = RestartBudget(**self.own), PromisedBudget(**self.own)

    @rule(
        seconds=st.sampled_from([0.0, 1.0, 30.0, 99.0, 101.0]),
        code=st.sampled_from([1, 1, 1, -9, -9, -11, 18, 18, 75, 75, 2, 17]),
        step=st.integers(3, 5),
        taken=st.integers(0, 2),
        reached=st.booleans(),
        num_processes=st.sampled_from([4, 4, 4, 3]),
        has_status=st.sampled_from([True, True, True, False]),
    )
    def an_attempt_ends(self, *, seconds, code, step, taken, reached, num_processes, has_status):
        self.seconds += seconds
        first = step - taken if reached else -1
        own = status(current_step=step, first_step=first) if has_status else None
        reason = self.real.reason_to_give_up(Outcome(code, status=own), num_processes)
        gives_up = self.promised.gives_up(
            self.seconds,
            code,
            reached=reached and has_status,
            step=step if has_status else None,
            taken=taken if reached and has_status else 0,
            num_processes=num_processes,
        )
        assert bool(reason) == gives_up, reason
        if gives_up:
            self.begin()
        else:
            assert self.real.backoff() == self.promised.wait()

    @rule(code=st.sampled_from([1, -9, 75]), count=st.integers(1, 40))
    def attempts_fail_at_the_start(self, code, count):
        """Each with another number of processes, as if one after the other was left out."""
        for number in range(count):
            self.an_attempt_ends(
                seconds=200.0,
                code=code,
                step=3,
                taken=0,
                reached=False,
                num_processes=number,
                has_status=True,
            )

    def teardown(self):
        self.patch.undo()


def test_restarts_are_limited_as_promised_whatever_ends_the_attempts():
    run_machine(BudgetStates, num_examples=60, num_rules=30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(nproc=0), "--nproc=0: use 1 or more"),
        (dict(nproc=2, min_nproc=3), "--min_nproc=3: there are 2 processes in all"),
        (dict(nnodes=2), "--coordinator=None: use HOST:PORT"),
        (dict(nnodes=2, node_rank=2, coordinator="a:1"), "--node_rank=2: use 0 to 1"),
        (dict(max_restarts=-1, grace=0), "--max_restarts=-1"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**settings)
