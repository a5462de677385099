"""Pipeline schedules as tables: what each stage does in each tick. Plain numpy, no devices needed.

The stack of layers is split into P x V chunks of equal length. Chunk v of stage i is the (v P +
i)-th of the stack, so an activation passes through all stages V times. In one tick every stage runs
at most one forward and then at most one backward of a chunk, all stages in lock step. The neighbour
uses a message in the next tick, so no buffers for waiting messages are needed.

A schedule is a function of (num_stages, num_microbatches, num_chunks), P, M and V for short.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

IDLE = -1


class Slot(NamedTuple):
    """The forwards, or the backwards, of each tick and stage: (T, P) int32 arrays; IDLE where there is none."""

    microbatch: np.ndarray
    chunk: np.ndarray
    # Index of the buffer that holds the chunk's input; an idle forward writes to a free one.
    slot: np.ndarray

    @property
    def active(self) -> np.ndarray:
        """(T, P) bool."""
        return self.microbatch != IDLE


@dataclass(frozen=True)
class Table:
    """A schedule as arrays; its properties are counted from them."""

    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: Slot
    backward: Slot

    @property
    def num_ticks(self) -> int:
        return len(self.forward.microbatch)

    @property
    def num_live(self) -> int:
        """Largest number of chunk inputs that a stage keeps at once."""
        return int(self.forward.slot[self.forward.active].max()) + 1

    @property
    def num_slots(self) -> int:
        """Number of buffers for chunk inputs: `num_live`, plus one if a stage with that many is idle."""
        return int(self.forward.slot.max()) + 1

    @property
    def phases(self) -> list[slice]:
        """Ranges of ticks with forwards only, with both, and with backwards only: one loop each."""
        kinds = self.forward.active.any(1) + 2 * self.backward.active.any(1)
        bounds = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), self.num_ticks]
        return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]

    def cost(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Time of a step in lock step, if one stage's layers take these times for a micro-batch."""
        ticks = [work.active.any(1).sum() for work in (self.forward, self.backward)]
        return float(ticks[0] * forward + ticks[1] * backward) / self.num_chunks

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a stage is idle."""
        return 1 - self.num_microbatches * 3.0 / self.cost()


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """All forwards, then all backwards (arXiv 1811.06965). Keeps all inputs; one chunk per stage."""
    P, M = num_stages, num_microbatches
    if num_chunks != 1:
        raise ValueError(f"gpipe has 1 chunk per stage, not {num_chunks}")
    m, _, i = _grid(M, 1, P)
    return tabulate(m + i, (M + P - 1) + m + (P - 1 - i))


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """Each backward as early as possible (PipeDream-flush, arXiv 2104.04473); one chunk per stage."""
    if num_chunks != 1:
        raise ValueError(f"1f1b has 1 chunk per stage, not {num_chunks}; interleaved has several")
    return interleaved(num_stages, num_microbatches, 1)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Table:
    """1F1B with V chunks per stage and a bubble V times shorter (arXiv 2104.04473).

    Micro-batches are scheduled in groups of P: a group passes through chunk 0 of all stages, then
    through chunk 1, and so on. A last group of fewer than P leaves the other ticks idle.
    """
    P, V = num_stages, num_chunks
    m, v, i = _grid(num_microbatches, V, P)
    start = m // P * P * V + m % P  # tick at which stage 0 begins with the micro-batch
    return tabulate(start + v * P + i, (V * P - 1) + start + (V - 1 - v) * P + (P - 1 - i))


SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
}


def tabulate(forward: np.ndarray, backward: np.ndarray) -> Table:
    """Returns the table of a schedule from the tick of each forward and each backward: (M, V, P) arrays."""
    M, V, P = forward.shape
    shape = (int(max(forward.max(), backward.max())) + 1, P)
    works = [Slot(*(np.full(shape, IDLE, np.int32) for _ in Slot._fields)) for _ in range(2)]
    for work, ticks in zip(works, (forward, backward), strict=True):
        m, v, i = _grid(M, V, P)
        work.microbatch[ticks, i], work.chunk[ticks, i] = m, v
    for stage in range(P):
        ends = dict(zip(forward[:, :, stage].flat, backward[:, :, stage].flat, strict=True))
        used_until: list[int] = []  # of each slot
        for tick in np.flatnonzero(works[0].active.any(1)):
            free = [slot for slot, until in enumerate(used_until) if until < tick]
            slot = works[0].slot[tick, stage] = free[0] if free else len(used_until)
            if tick in ends:
                used_until[slot : slot + 1] = [ends[tick]]
                works[1].slot[ends[tick], stage] = slot
    return Table(P, M, V, *works)


def check(table: Table) -> None:
    """Raises ValueError unless the table does all work exactly once, in an order that the executor can run.

    The input of a forward must be computed exactly one tick earlier, on the stage of the previous
    chunk, and the input of a backward on the stage of the next chunk. No slot may be overwritten
    while its content is still needed, not even by an idle forward.
    """
    P, M, V = table.num_stages, table.num_microbatches, table.num_chunks
    ticks = [np.full((M, V * P), IDLE) for _ in range(2)]  # of each micro-batch and chunk
    works = (("forward", table.forward), ("backward", table.backward))
    for (name, work), seen in zip(works, ticks, strict=True):
        for tick, stage in np.argwhere(work.active):
            m, v = work.microbatch[tick, stage], work.chunk[tick, stage]
            if not (0 <= m < M and 0 <= v < V and seen[m, v * P + stage] == IDLE):
                raise ValueError(
                    f"tick {tick}, stage {stage}: {name} of {m}, {v} is unknown or repeated"
                )
            seen[m, v * P + stage] = tick
        if (seen == IDLE).any():
            m, c = np.argwhere(seen == IDLE)[0]
            raise ValueError(
                f"{name} of micro-batch {m}, chunk {c // P} on stage {c % P} is missing"
            )
    forward, backward = ticks
    for name, gaps in (("forward", np.diff(forward)), ("backward", -np.diff(backward))):
        if (gaps != 1).any():
            m, c = np.argwhere(gaps != 1)[0]
            raise ValueError(
                f"{name} of micro-batch {m}: {gaps[m, c]} ticks between chunks {c} and {c + 1} of the stack"
            )
    if (backward[:, -1] < forward[:, -1]).any():
        raise ValueError("a backward starts before the forward of its micro-batch has ended")
    _check_slots(table)


def _check_slots(table: Table) -> None:
    for stage in range(table.num_stages):
        held: dict[int, tuple[int, int]] = {}  # slot -> micro-batch and chunk
        for tick in range(table.num_ticks):
            where = f"tick {tick}, stage {stage}"
            if table.forward.active[tick].any():
                m, v, slot = (int(column[tick, stage]) for column in table.forward)
                if slot < 0:
                    raise ValueError(f"{where}: no slot to write to")
                if slot in held:
                    raise ValueError(f"{where}: slot {slot} is overwritten")
                if m != IDLE:
                    held[slot] = (m, v)
            if table.backward.active[tick, stage]:
                m, v, slot = (int(column[tick, stage]) for column in table.backward)
                if held.pop(slot, None) != (m, v):
                    raise ValueError(f"{where}: slot {slot} holds another input")


def _grid(M: int, V: int, P: int) -> list[np.ndarray]:
    """Returns micro-batch, chunk and stage of each forward: three (M, V, P) arrays."""
    return np.meshgrid(np.arange(M), np.arange(V), np.arange(P), indexing="ij")
