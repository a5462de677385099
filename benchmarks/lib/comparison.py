"""Times training steps of several implementations alternately, each in its own process.

Such a process runs implementation.py. In a single process, implementations would compete for
threads and memory. The losses of all are compared step by step, so that all compute the same maths.
"""

import contextlib
import importlib.util
import json
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


class Implementation:
    """A process of implementation.py; once created, it has done its first step or its task."""

    def __init__(self, name: str, folder: Path):
        caches = folder / re.sub(r"\W+", "-", name)
        env = os.environ | {variable: str(caches / variable) for variable in CACHES}
        command, pipe = [sys.executable, SCRIPT, name, folder], subprocess.PIPE
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
    facts: dict[str, dict[str, Any]]  # by implementation
    # For each group that was timed alternately, by implementation: the seconds per step of each
    # round, and all losses.
    groups: list[dict[str, dict[str, list]]]
    failed: dict[str, str]  # implementation -> error


def ceiling() -> dict[str, Any]:
    """Returns the measured rates of the device: of matrix products and of copies."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Implementation("ceiling", Path(folder))) as process,
    ):
        return process.facts


def available(names: Sequence[str]) -> list[str]:
    """Returns the implementations that can run: torch only if it is installed."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [name for name in names if has_torch or not name.startswith("torch")]


def run(
    config: Mapping[str, Any], names: Sequence[str], *, rounds: int, steps: int, pairs: bool
) -> Results:
    """Times each implementation for `rounds` rounds of `steps` steps, alternately.

    With `pairs`, each of the others is timed only together with the first one. The first start of
    each has empty compile caches; its later starts use the caches that the first start filled.
    """
    results = Results({}, [], {})
    first, *others = names
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if names != ["meshtrain"]:
            Implementation("initial", folder).close()
        for group in [[first, other] for other in others] if pairs and others else [names]:
            _run_group(results, group, folder, rounds=rounds, steps=steps)
    return results


def _run_group(
    results: Results, names: Sequence[str], folder: Path, *, rounds: int, steps: int
) -> None:
    results.groups.append({name: {"seconds": [], "losses": []} for name in names})
    running = {}
    with contextlib.ExitStack() as stack:
        for name in names:  # one after the other: compilers would slow each other down
            if names[0] not in results.failed:
                with _recording(results.failed, name):
                    running[name] = _start(results, name, folder)
                    stack.callback(running[name].close)
        for i in range(rounds):
            for name in names[:: 1 if i % 2 else -1]:
                if name in results.failed or names[0] in results.failed:
                    continue
                with _recording(results.failed, name):
                    reply = running[name].run_steps(steps)
                    results.groups[-1][name]["seconds"].append(reply["seconds"])
                    results.groups[-1][name]["losses"] += reply["losses"]
                    results.facts[name]["bytes"] = reply["bytes"]


def _start(results: Results, name: str, folder: Path) -> Implementation:
    if name in results.facts:
        return Implementation(name, folder)
    cold = Implementation(name, folder)
    cold.close()
    warm = Implementation(name, folder)
    results.facts[name] = {**cold.facts, "cold_seconds": cold.seconds, "warm_seconds": warm.seconds}
    return warm


@contextlib.contextmanager
def _recording(failed: dict[str, str], name: str) -> Iterator[None]:
    """Records the failure of an implementation, so that the others continue."""
    try:
        yield
    except Failed as error:
        failed[name] = str(error)
        print(f"{name} failed: {error}", file=sys.stderr)


def table(results: Results) -> list[dict[str, Any]]:
    """Returns a row for each implementation that did not fail; no rows if the first one failed.

    Ratios are of medians within a group; the first implementation's row is from the first group.
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
                "implementation": name,
                "ms per step": 1e3 * medians[name],
                f"speed / {first}": medians[first] / medians[name],
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
