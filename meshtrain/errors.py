"""Exit codes, and ConfigError: one line per fault, with the key, its value and what to do."""

import difflib
from collections.abc import Iterable
from typing import Any

# Exit codes; 0 is done.
EXIT_FAILED = 1  # a crash, a lost process, silent data corruption: worth a restart
EXIT_USER = 2  # the configuration or the data is wrong
EXIT_NOT_FINITE = 17
EXIT_STALLED = 18  # no process makes progress
EXIT_PREEMPTED = 75  # stopped by a signal, state saved


class ConfigError(ValueError):
    """A mistake of the user; `faults` has one line for each thing to change."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


class TransientError(ConfigError):
    """A fault of the machines that may pass: if a supervisor started the run, it is worth a restart."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean "x"?)' with the most similar known name, or ''."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f' (did you mean "{near[0]}"?)' if near else ""


def choice_faults(key: str, value: Any, choices: Iterable[str]) -> list[str]:
    """Returns a fault if `value` is not one of `choices`."""
    return [] if value in choices else [f"{key}={value!r}: use one of {', '.join(choices)}"]


def minimum_faults(low: float, values: dict[str, float]) -> list[str]:
    """Returns a fault for each of `values` below `low`, and for NaN."""
    return [
        f"{key}={value}: use {low} or more" for key, value in values.items() if not value >= low
    ]


def seed_faults(key: str, seed: int) -> list[str]:
    """Returns a fault for a seed out of range. Without jax_enable_x64, jax drops all bits above the lowest 32."""
    if seed < 2**32:
        return minimum_faults(0, {key: seed})
    return [f"{key}={seed}: use a number below 2^32"]


def nearest_multiples(value: int, step: int) -> str:
    """Returns the positive multiples of `step` below and above `value`, as text: '24 or 32'."""
    down, up = value // step * step, (value // step + 1) * step
    return f"{down} or {up}" if down > 0 else f"{max(up, step)}"
