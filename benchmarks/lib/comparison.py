"""Times training steps of several programs alternately, each in its own process.

Such a process runs implementation.py: meshtrain with some config, or another implementation. In a
single process, they would compete for threads and memory. The losses of all are compared step by
step, so that all compute the same maths.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SCRIPT = Path(__file__).with_name("implementation.py")
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # folders


class Failed(Exception):
    """The process of an implementation reported an error or ended early."""


class Case(NamedTuple):
    """A row of the table: an implementation, and the config that it trains."""

    name: str
    implementation: str
    config: Mapping[str, Any]


class Implementation:
    """A process of implementation.py; once created, it has done its first step or its task.

    `file` has the config. The compile caches are in a folder next to it.
    """

    def __init__(self, name: str, file: Path):
        caches = file.with_name(re.sub(r"\W+", "-", f"{file.stem} {name}"))
        env = os.environ | {variable: str(caches / variable) for variable in CACHES}
        command, pipe = [sys.executable, SCRIPT, name, file], subprocess.PIPE
        began = time.perf_counter()
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        self.facts = self._read_reply()
        self.seconds = time.perf_counter() - began

    def run_steps(self, steps: int) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # _read_reply raises Failed
            print(steps, file=self.process.stdin, flush=True)
        return self._read_reply()

    def close(self) -> None:
        """Waits until the process has ended, because only then its memory is free."""
        with contextlib.suppress(BrokenPipeError), self.process:
            pass

    def _read_reply(self) -> dict[str, Any]:
        lines = (line for line in self.process.stdout if line.startswith("{"))
        reply = json.loads(next(lines, "null"))
        if reply is None or "error" in reply:
            self.close()
            raise Failed(reply["error"] if reply else f"exit code {self.process.returncode}")
        return reply


class Results(NamedTuple):
    facts: dict[str, dict[str, Any]]  # by the name of the case
    # For each group that was timed alternately, by case: the seconds per step of each round, and
    # all losses.
    groups: list[dict[str, dict[str, list]]]
    failed: dict[str, str]  # name of the case -> error


def ceiling() -> dict[str, Any]:
    """Returns the measured rates of the device: of matrix products and of copies."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Implementation("ceiling", Path(folder, "none.json"))) as process,
    ):
        return process.facts


def available(names: Sequence[str]) -> list[str]:
    """Returns the implementations that can run: torch only if it is installed."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [name for name in names if has_torch or not name.startswith("torch")]


def with_config(config: Mapping[str, Any], names: Sequence[str]) -> list[Case]:
    """Returns a case for each of these implementations, all with the same config."""
    return [Case(name, name, config) for name in names]


def run(
    cases: Sequence[Case],
    *,
    rounds: int,
    steps: int,
    pairs: bool,
    warm: bool = True,
    seconds: float = math.inf,
) -> Results:
    """Times each case for `rounds` rounds of `steps` steps, alternately.

    With `pairs`, each of the others is timed only together with the first one. The first start of
    each has empty compile caches. With `warm`, it is started once more, with the caches that the
    first start filled, and that process is timed. After `seconds` no other case is started, and no
    other round after the first.
    """
    results = Results({}, [], {})
    deadline = time.monotonic() + seconds
    first, *others = cases
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for number, case in enumerate(cases):
            files[case.name] = Path(folder, f"{number}.json")
            files[case.name].write_text(json.dumps(case.config), encoding="utf-8")
        if any(case.implementation != "meshtrain" for case in cases):
            Implementation("initial", files[first.name]).close()
        for group in [[first, other] for other in others] if pairs and others else [cases]:
            timed = {case.name: {"seconds": [], "losses": []} for case in group}
            results.groups.append(timed)
            with contextlib.ExitStack() as stack:
                running = _start_all(
                    results, group, files, stack=stack, warm=warm, deadline=deadline
                )
                _time_alternately(
                    results, timed, running, rounds=rounds, steps=steps, deadline=deadline
                )
    return results


def _start_all(
    results: Results,
    group: Sequence[Case],
    files: Mapping[str, Path],
    *,
    stack: contextlib.ExitStack,
    warm: bool,
    deadline: float,
) -> dict[str, Implementation]:
    """Starts the cases of a group, and returns their processes, which `stack` closes."""
    running = {}
    first = group[0].name
    for case in group:  # one after the other: compilers would slow each other down
        if first in results.failed:
            break
        with _recording(results.failed, case.name):
            if case.name != first and time.monotonic() > deadline:
                raise Failed("not started: no time was left")
            running[case.name] = _start(results, case, files[case.name], warm=warm)
            stack.callback(running[case.name].close)
    return running


def _start(results: Results, case: Case, file: Path, *, warm: bool) -> Implementation:
    if case.name in results.facts:
        return Implementation(case.implementation, file)
    process = Implementation(case.implementation, file)
    facts = {**process.facts, "cold_seconds": process.seconds, "warm_seconds": None}
    if warm:
        process.close()
        process = Implementation(case.implementation, file)
        facts["warm_seconds"] = process.seconds
    results.facts[case.name] = facts
    return process


def _time_alternately(
    results: Results,
    timed: dict[str, dict[str, list]],
    running: Mapping[str, Implementation],
    *,
    rounds: int,
    steps: int,
    deadline: float,
) -> None:
    """Runs the rounds; adds the times and losses to `timed`, and the memory to the facts."""
    names = list(timed)
    for i in range(rounds):
        if i > 0 and time.monotonic() > deadline:
            break
        for name in names[:: 1 if i % 2 else -1]:
            if name in results.failed or names[0] in results.failed:
                continue
            with _recording(results.failed, name):
                reply = running[name].run_steps(steps)
                timed[name]["seconds"].append(reply["seconds"])
                timed[name]["losses"] += reply["losses"]
                results.facts[name]["bytes"] = reply["bytes"]


@contextlib.contextmanager
def _recording(failed: dict[str, str], name: str) -> Iterator[None]:
    """Records the failure of a case, so that the others continue."""
    try:
        yield
    except Failed as error:
        failed[name] = str(error)
        print(f"{name} failed: {error}", file=sys.stderr)


def table(
    results: Results, *, column: str = "implementation", ratio: str = ""
) -> list[dict[str, Any]]:
    """Returns a row for each case that did not fail; no rows if the first one failed.

    `column` is the heading of their names, `ratio` of their speed relative to the first. Ratios are
    of medians within a group; the first case's row is from the first group.
    """
    first, rows = next(iter(results.groups[0])), {}
    for group in [] if first in results.failed else results.groups:
        medians = {
            name: statistics.median(times["seconds"])
            for name, times in group.items()
            if name not in results.failed
        }
        for name in [name for name in medians if name not in rows]:
            facts = results.facts[name]
            rows[name] = {
                column: name,
                "ms per step": 1e3 * medians[name],
                ratio or f"speed / {first}": medians[first] / medians[name],
                "compile s": facts["compile_seconds"],
                "to first step, cold s": facts["cold_seconds"],
                "warm s": facts["warm_seconds"],
                "GB": facts["bytes"] and facts["bytes"] / 1e9,
                "loss": group[name]["losses"][-1],
            }
    return list(rows.values())


def faults(results: Results, *, rtol: float) -> list[str]:
    """Returns a line if the first failed, and one for each other whose first five losses differ."""
    first = next(iter(results.groups[0]))
    if first in results.failed:
        return [f"{first} failed: {results.failed[first]}"]
    expected = np.array(results.groups[0][first]["losses"][:5], float)
    timed = [item for group in results.groups for item in group.items()]
    return [
        f"{name} has the losses {times['losses'][:5]}, {first} {expected.tolist()}"
        for name, times in timed
        if name not in results.failed
        and not np.allclose(np.array(times["losses"][:5], float), expected, rtol=rtol, atol=0)
    ]
