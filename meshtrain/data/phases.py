"""Mixtures that change during a run: where each begins, and what a resumed run may change.

A phase begins at a step. Sample numbers follow from the steps: a run reads `global_batch` samples a
step. Where a resumed run reads more or fewer per step, only the phases ahead move.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from meshtrain.config.rounding import to_12_digits
from meshtrain.data.source import Phase, Timeline
from meshtrain.errors import ConfigError

KEY = "data.phases"

Part = tuple[str, float]  # a path and its weight


class Entry(NamedTuple):
    """An entry of data.phases."""

    length: int | float  # steps, or a fraction of the run
    parts: tuple[Part, ...]
    is_path: bool = False  # whether it is one path, whose samples keep their order


def parse(phases: Sequence[Any]) -> list[Entry]:
    """Returns the entries of data.phases; raises ConfigError with a line for each that is wrong."""
    entries = []
    faults = []
    for number, phase in enumerate(phases):
        match phase:
            case [int() | float() as length, mixture] if not isinstance(length, bool):
                pass
            case _:
                faults.append(f"{KEY}[{number}]={phase!r}: is not a (LENGTH, MIXTURE)")
                continue
        if not (0 < length < math.inf) or (isinstance(length, float) and length > 1):
            faults.append(
                f"{KEY}[{number}]: its length is {length!r}; use an integer of 1 or more for "
                f"steps, or a fraction of the run above 0, at most 1.0"
            )
        is_path = isinstance(mixture, str) and mixture != ""
        parts = ((mixture, 1.0),) if is_path else mixture
        try:
            parsed = parse_parts(f"{KEY}[{number}]", parts)
            entries.append(Entry(length, tuple(parsed), is_path))
        except ConfigError as error:
            faults += error.faults
    fractions = sum(entry.length for entry in entries if isinstance(entry.length, float))
    if to_12_digits(fractions) > 1:
        faults.append(f"{KEY}: its fractions of the run add up to {fractions:g}; use at most 1.0")
    if faults:
        raise ConfigError(*faults)
    return entries


def parse_parts(key: str, mixture: Any) -> list[Part]:
    """Returns the paths and weights of a mixture; raises ConfigError if one is invalid."""
    if not isinstance(mixture, list | tuple) or not mixture:
        raise ConfigError(f"{key}: {mixture!r} is not a mixture ((PATH, WEIGHT), ...)")
    parts = []
    for pair in mixture:
        match pair:
            case [str() as path, int() | float() as weight] if path and 0 < weight < math.inf:
                parts.append((path, weight))
            case _:
                raise ConfigError(f"{key}: {pair!r} is not a (path, weight above 0)")
    paths = [path for path, _ in parts]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated is not None and key != "data.mixture":  # where it always has been two parts
        raise ConfigError(f"{key}: {repeated} is named twice; add its weights up")
    return parts


def first_steps(entries: Sequence[Entry], num_steps: int) -> list[int]:
    """Returns the step at which each phase begins, in a run of `num_steps`.

    The last one lasts until the end of the run, whatever its length. Raises ConfigError for one
    that has no step.
    """
    ends = itertools.accumulate(
        entry.length if isinstance(entry.length, int) else entry.length * num_steps
        for entry in entries[:-1]
    )
    steps = [0, *(round(to_12_digits(end)) for end in ends)]
    for number, (step, following) in enumerate(itertools.pairwise(steps)):
        if step == following:
            raise ConfigError(
                f"{KEY}[{number}]: {entries[number].length!r} of train.steps={num_steps} is less "
                f"than half a step; use a longer phase"
            )
    return steps


def place(steps: Sequence[int], digests: Sequence[str], run: Timeline) -> list[Phase]:
    """Returns the phases that begin at `steps`, with the samples at which they begin.

    `digests` identify their data. Those that the run has begun keep their samples. Raises
    ConfigError if one of them has changed.
    """
    begun = [phase for phase in run.phases if phase.sample < run.position]
    planned = [*zip(steps, digests, strict=True)]
    for number, old in enumerate(begun):
        now = planned[number] if number < len(planned) else None
        if now == (old.step, old.digest):
            continue
        if now is None:
            change = "it is missing"
        elif now[0] != old.step:
            change = f"it would begin at step {now[0]} and began at step {old.step}"
        else:
            change = "it has other data or weights"
        raise ConfigError(
            f"{KEY}[{number}]: the run is at step {run.step} and has begun this phase, but {change}"
            f"; only what is ahead may change: restore it (lengths in steps do not move with "
            f"train.steps), or allow it with --config.checkpoint.allow_change=data"
        )
    if len(planned) > len(begun) > 0 and planned[len(begun)][0] < run.step:
        raise ConfigError(
            f"{KEY}[{len(begun)}]: would begin at step {planned[len(begun)][0]}, but the run is at "
            f"step {run.step}; make the phase before it longer"
        )
    phases = list(begun)
    for step, digest in planned[len(begun) :]:
        sample = run.position + (step - run.step) * run.global_batch
        known = run.phases[len(phases)] if len(phases) < len(run.phases) else None
        # After a rollback, which leaves samples out, a run that was not interrupted keeps its plan.
        if known and known.step == step and run.same_batch:
            sample = known.sample
        # Of a run whose earlier batches are not known to have been as large, the past is a guess.
        sample = max(sample, phases[-1].sample) if phases else 0
        phases.append(Phase(step, sample, digest))
    return phases
