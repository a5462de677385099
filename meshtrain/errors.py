"""How a user's mistake is told: one line per fault, each with the key, its value and the way out."""

import difflib
from collections.abc import Iterable
from typing import Any

# Exit codes; 0 is done.
EXIT_FAILED = 1  # a crash, a lost process, a device that computes wrongly: worth another try
EXIT_USER = 2  # the configuration or the data is wrong
EXIT_NOT_FINITE = 17
EXIT_STALLED = 18  # no process went on
EXIT_PREEMPTED = 75  # stopped from outside, state saved


class ConfigError(ValueError):
    """What the user has to change; `faults` holds one line for each."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean "x"?)' for the nearest known name, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f' (did you mean "{near[0]}"?)' if near else ""


def choice_faults(key: str, value: Any, choices: Iterable[str]) -> list[str]:
    return [] if value in choices else [f"{key}={value!r}: use one of {', '.join(choices)}"]


def minimum_faults(low: float, values: dict[str, float]) -> list[str]:
    return [
        f"{key}={value}: use {low} or more" for key, value in values.items() if not value >= low
    ]


def seed_faults(key: str, seed: int) -> list[str]:
    """Without jax_enable_x64, jax keeps 32 bits of a seed: a larger one is a lower one's run."""
    if seed < 2**32:
        return minimum_faults(0, {key: seed})
    return [f"{key}={seed}: use a number below 2^32"]


def nearest_multiples(value: int, step: int) -> str:
    """Returns the multiples around a value that is none: '24 or 32'."""
    down, up = value // step * step, (value // step + 1) * step
    return f"{down} or {up}" if down > 0 else f"{max(up, step)}"
