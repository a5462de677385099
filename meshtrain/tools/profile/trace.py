"""Reads a trace of jax.profiler: operations by device, with their time outside nested ones."""

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
    """Returns the operations in an .xplane.pb: of the accelerators, or of the CPU without them."""
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about how jaxlib defines these iterators.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        operations = [operation for plane in planes for operation in _accelerator_operations(plane)]
        if not operations:
            for plane in planes:
                if plane.name == HOST:
                    operations += _cpu_operations(plane)
    lines: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for operation in operations:
        lines[operation.device, operation.line].append(operation)
    for line in lines.values():
        assign_own_time(line)
    return operations


def _accelerator_operations(plane: Any) -> Iterator[Operation]:
    """Yields kernels and copies by stream (GPU), or operations (TPU)."""
    match = ACCELERATOR.fullmatch(plane.name)
    if not match:
        return
    kind, number = match.groups()
    for line in plane.lines:
        # Other lines repeat the same events: by module, by name, by step.
        is_wanted = line.name.startswith("Stream #") if kind == "GPU" else line.name == "XLA Ops"
        if not is_wanted:
            continue
        for event in line.events:
            yield Operation(
                device=f"{kind} {number}",
                line=line.name,
                path=str(dict(event.stats).get("hlo_op", "")),
                name=event.name,
                start=event.start_ns,
                end=event.end_ns,
            )


def _cpu_operations(plane: Any) -> Iterator[Operation]:
    """Yields operations by thread; simulated devices share one thread pool."""
    for number, line in enumerate(plane.lines):
        if line.name == "python":
            continue
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" not in stats:
                continue
            yield Operation(
                device=f"CPU {stats.get('device_ordinal', 0)}",
                line=f"thread {number}",
                path=str(stats["hlo_op"]),
                name=event.name,
                start=event.start_ns,
                end=event.end_ns,
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

    for operation in sorted(line, key=lambda operation: (operation.start, -operation.end)):
        advance(operation.start)
        stack.append(operation)
    advance(math.inf)


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """Returns the seconds covered by at least one of these intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e9
