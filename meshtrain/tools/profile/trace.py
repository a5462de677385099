"""Reads a trace of jax.profiler: operations by device, each with its time outside nested operations."""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

ACCELERATOR = re.compile(r"/device:(GPU|TPU):(\d+)")

HOST = "/host:CPU"

Interval = tuple[float, float]  # nanoseconds


@dataclass
class Operation:
    """One run of one operation."""

    device: str  # "GPU 0"
    line: str  # the stream, or the thread
    path: str  # instructions, outermost first, joined by "/"; empty if the trace has none
    name: str  # of the kernel; on CPU, of the instruction
    start: float
    end: float
    own: list[Interval] = field(default_factory=list)  # without nested operations

    @property
    def seconds(self) -> float:
        """Own time, without nested operations."""
        return sum(end - start for start, end in self.own) / 1e9


def read(file: Path) -> list[Operation]:
    """Returns the operations in an .xplane.pb: of the accelerators, or of the CPU if there are none."""
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about how jaxlib defines these iterators.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        found = [one for plane in planes for one in _of_accelerator(plane)]
        found = found or [one for plane in planes if plane.name == HOST for one in _of_cpu(plane)]
    lines = defaultdict(list)
    for one in found:
        lines[one.device, one.line].append(one)
    for line in lines.values():
        assign_own_time(line)
    return found


def _of_accelerator(plane: Any) -> Iterator[Operation]:
    """Yields kernels and copies by stream (GPU), or operations (TPU)."""
    if not (named := ACCELERATOR.fullmatch(plane.name)):
        return
    for line in plane.lines:
        # Other lines repeat the same events: by module, by name, by step.
        if line.name.startswith("Stream #") if named[1] == "GPU" else line.name == "XLA Ops":
            for event in line.events:
                path = str(dict(event.stats).get("hlo_op", ""))
                where = f"{named[1]} {named[2]}", line.name
                yield Operation(*where, path, event.name, event.start_ns, event.end_ns)


def _of_cpu(plane: Any) -> Iterator[Operation]:
    """Yields operations by thread; simulated devices share one thread pool."""
    for number, line in enumerate(plane.lines):
        for event in line.events if line.name != "python" else ():
            stats = dict(event.stats)
            if "hlo_op" in stats:
                where = f"CPU {stats.get('device_ordinal', 0)}", f"thread {number}"
                yield Operation(
                    *where, str(stats["hlo_op"]), event.name, event.start_ns, event.end_ns
                )


def assign_own_time(line: Iterable[Operation]) -> None:
    """Sets `own`: assigns every moment of a line to the innermost operation that runs then."""
    stack: list[Operation] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        while stack and now < to:
            end = min(stack[-1].end, to)
            if end > now:
                stack[-1].own.append((now, end))
                now = end
            if stack[-1].end <= now:
                stack.pop()
        now = to

    for one in sorted(line, key=lambda one: (one.start, -one.end)):
        advance(one.start)
        stack.append(one)
    advance(math.inf)


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """Returns the seconds covered by at least one of these intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e9
