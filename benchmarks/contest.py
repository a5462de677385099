"""Steps of several contestants (contestant.py) that take turns on one machine, a process for each.

Threads and memory of one would be in the way of another in the same process. Losses are compared
step by step: a fast step with other maths is no peer.
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

SCRIPT = Path(__file__).with_name("contestant.py")
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # folders


class Failed(Exception):
    """A contestant ended early."""


class Contestant:
    """A process that has done its first step, or whatever else its name stands for."""

    def __init__(self, name: str, folder: Path):
        caches = folder / re.sub(r"\W+", "-", name)
        env = os.environ | {variable: str(caches / variable) for variable in CACHES}
        command, pipe = [sys.executable, SCRIPT, name, folder], subprocess.PIPE
        began = time.perf_counter()
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        self.facts = self._answer()
        self.seconds = time.perf_counter() - began

    def turn(self, steps: int) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # no answer will come then
            print(steps, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Waits for its end: only then its memory is free."""
        with contextlib.suppress(BrokenPipeError), self.process:
            pass

    def _answer(self) -> dict[str, Any]:
        lines = (line for line in self.process.stdout if line.startswith("{"))
        reply = json.loads(next(lines, "null"))
        if reply is None or "error" in reply:
            self.close()
            raise Failed(reply["error"] if reply else f"exit code {self.process.returncode}")
        return reply


class Results(NamedTuple):
    facts: dict[str, dict[str, Any]]  # of each contestant
    heats: list[dict[str, dict[str, list]]]  # of each: seconds a step, by turn; losses of all steps
    failed: dict[str, str]  # and why


def ceiling() -> dict[str, Any]:
    """Returns what the device can do at most, and its name."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Contestant("ceiling", Path(folder))) as one,
    ):
        return one.facts


def present(names: Sequence[str]) -> list[str]:
    """Returns those that can take part: torch only where it is installed."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [name for name in names if has_torch or not name.startswith("torch")]


def hold(
    config: Mapping[str, Any], names: Sequence[str], *, rounds: int, steps: int, pairs: bool
) -> Results:
    """Lets each have `rounds` turns of `steps` steps; with `pairs` each peer alone with the first.

    The first start of each is with empty compile caches, its others with what that left in them.
    """
    found = Results({}, [], {})
    first, *peers = names
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "config.json").write_text(json.dumps(config))
        if names != ["meshtrain"]:
            Contestant("initial", folder).close()
        for heat in [[first, peer] for peer in peers] if pairs and peers else [names]:
            _hold_heat(found, heat, folder, rounds=rounds, steps=steps)
    return found


def _hold_heat(
    found: Results, names: Sequence[str], folder: Path, *, rounds: int, steps: int
) -> None:
    found.heats.append({name: {"seconds": [], "losses": []} for name in names})
    running = {}
    with contextlib.ExitStack() as stack:
        for name in names:  # one after the other: compilers would slow each other down
            if names[0] not in found.failed:
                with _noting(found.failed, name):
                    running[name] = _start(found, name, folder)
                    stack.callback(running[name].close)
        for turn in range(rounds):
            for name in names[:: 1 if turn % 2 else -1]:
                if name in found.failed or names[0] in found.failed:
                    continue
                with _noting(found.failed, name):
                    reply = running[name].turn(steps)
                    found.heats[-1][name]["seconds"].append(reply["seconds"])
                    found.heats[-1][name]["losses"] += reply["losses"]
                    found.facts[name]["bytes"] = reply["bytes"]


def _start(found: Results, name: str, folder: Path) -> Contestant:
    if name in found.facts:
        return Contestant(name, folder)
    cold = Contestant(name, folder)
    cold.close()
    warm = Contestant(name, folder)
    found.facts[name] = {**cold.facts, "cold_seconds": cold.seconds, "warm_seconds": warm.seconds}
    return warm


@contextlib.contextmanager
def _noting(failed: dict[str, str], name: str) -> Iterator[None]:
    """Those that are left go on."""
    try:
        yield
    except Failed as error:
        failed[name] = str(error)
        print(f"{name} failed: {error}", file=sys.stderr)


def table(found: Results) -> list[dict[str, Any]]:
    """Returns a row for each that did not fail; none where the first did, for what would it say?

    Ratios are of medians within a heat; the first is shown as it was in the first heat.
    """
    first, rows = next(iter(found.heats[0])), {}
    for heat in [] if first in found.failed else found.heats:
        medians = {
            name: statistics.median(score["seconds"])
            for name, score in heat.items()
            if name not in found.failed
        }
        for name in [name for name in medians if name not in rows]:
            facts = found.facts[name]
            rows[name] = {
                "step of": name,
                "ms": 1e3 * medians[name],
                f"{first} / it": medians[first] / medians[name],
                "compiled in s": facts["compile_seconds"],
                "first step, cold s": facts["cold_seconds"],
                "warm s": facts["warm_seconds"],
                "GB": facts["bytes"] and facts["bytes"] / 1e9,
                "loss": heat[name]["losses"][-1],
            }
    return list(rows.values())


def faults(found: Results, *, rtol: float) -> list[str]:
    """Returns a line where the first failed, and for each whose first losses are others than its."""
    first = next(iter(found.heats[0]))
    if first in found.failed:
        return [f"{first} failed: {found.failed[first]}"]
    right = np.array(found.heats[0][first]["losses"][:5], float)
    scores = [item for heat in found.heats for item in heat.items()]
    return [
        f"{name} has the losses {score['losses'][:5]}, {first} {right.tolist()}"
        for name, score in scores
        if name not in found.failed
        and not np.allclose(np.array(score["losses"][:5], float), right, rtol=rtol, atol=0)
    ]
