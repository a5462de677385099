"""Pipeline schedules as tables: what each stage does in each tick. Plain numpy, no devices needed.

The stack of layers is split into P x V chunks of equal length. Chunk v of stage i is number v P + i
of the stack, so an activation passes through all stages V times. In one tick every stage runs at
most one forward and then at most one backward of a chunk, all stages in lock step. The neighbour
uses a message in the next tick, so no buffers for waiting messages are needed.

A schedule is a function of (num_stages, num_microbatches, num_chunks), P, M and V for short.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

IDLE = -1


class Slot(NamedTuple):
    """The forwards, or the backwards, of each tick and stage: (T, P) int32 arrays.

    They are IDLE where there is none.
    """

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
        """Number of buffers for chunk inputs.

        One more than `num_live` if a stage is idle while all `num_live` are in use: an idle forward
        needs a free buffer.
        """
        return int(self.forward.slot.max()) + 1

    def cost(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Time of a step in lock step, if one stage's layers take these times for a micro-batch."""
        forward_ticks = self.forward.active.any(1).sum()
        backward_ticks = self.backward.active.any(1).sum()
        return float(forward_ticks * forward + backward_ticks * backward) / self.num_chunks

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a stage is idle."""
        busy = self.num_microbatches * 3.0  # a forward costs 1, a backward 2
        return 1 - busy / self.cost()


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """All forwards, then all backwards (arXiv 1811.06965): keeps all inputs; one chunk each."""
    P, M = num_stages, num_microbatches
    if num_chunks != 1:
        raise ValueError(f"gpipe has 1 chunk per stage, not {num_chunks}")
    m, _, i = _grid(M, 1, P)
    forward_tick = m + i
    backward_tick = (M + P - 1) + m + (P - 1 - i)
    return tabulate(forward_tick, backward_tick)


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """Each backward as early as possible (PipeDream-flush, arXiv 2104.04473); one chunk each."""
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
    # The tick at which stage 0 begins with the micro-batch.
    start = m // P * P * V + m % P
    forward_tick = start + v * P + i
    backward_tick = (V * P - 1) + start + (V - 1 - v) * P + (P - 1 - i)
    return tabulate(forward_tick, backward_tick)


SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
}


def tabulate(forward_ticks: np.ndarray, backward_ticks: np.ndarray) -> Table:
    """Returns the table from the tick of each forward and each backward: two (M, V, P) arrays."""
    M, V, P = forward_ticks.shape
    num_ticks = int(max(forward_ticks.max(), backward_ticks.max())) + 1
    forward = _slots(forward_ticks, num_ticks)
    backward = _slots(backward_ticks, num_ticks)

    # The input of a chunk needs a buffer from its forward to its backward: each stage takes the
    # first free one. An idle forward writes to a buffer too, which is free again in the next tick.
    is_forward_tick = forward.active.any(1)
    for stage in range(P):
        backward_of_forward = dict(
            zip(forward_ticks[:, :, stage].flat, backward_ticks[:, :, stage].flat, strict=True)
        )
        used_until: list[int] = []  # tick of the last use of each buffer
        for tick in np.flatnonzero(is_forward_tick):
            free = [slot for slot, last_use in enumerate(used_until) if last_use < tick]
            slot = free[0] if free else len(used_until)
            forward.slot[tick, stage] = slot
            if tick in backward_of_forward:
                last_use = backward_of_forward[tick]
                if slot == len(used_until):
                    used_until.append(last_use)
                else:
                    used_until[slot] = last_use
                backward.slot[last_use, stage] = slot
    return Table(P, M, V, forward, backward)


def _slots(ticks: np.ndarray, num_ticks: int) -> Slot:
    """Returns micro-batch and chunk of each tick and stage, and IDLE as the index of the buffer."""
    M, V, P = ticks.shape
    microbatch, chunk, buffer = (np.full((num_ticks, P), IDLE, np.int32) for _ in range(3))
    m, v, i = _grid(M, V, P)
    microbatch[ticks, i] = m
    chunk[ticks, i] = v
    return Slot(microbatch, chunk, buffer)


def check(table: Table) -> None:
    """Raises ValueError unless the table does all work exactly once, in an order that can be run.

    The input of a forward must be computed exactly one tick earlier, on the stage of the previous
    chunk, and the input of a backward on the stage of the next chunk. No slot may be overwritten
    while its content is still needed, not even by an idle forward. Tests run it on every schedule;
    training does not.
    """
    forward = _checked_ticks("forward", table.forward, table)
    backward = _checked_ticks("backward", table.backward, table)
    # Along the stack a forward is a tick later from chunk to chunk, and a backward a tick earlier.
    for name, gaps in (("forward", np.diff(forward)), ("backward", -np.diff(backward))):
        if (gaps != 1).any():
            m, c = np.argwhere(gaps != 1)[0]
            raise ValueError(
                f"{name} of micro-batch {m}: {gaps[m, c]} ticks between chunks {c} and {c + 1} "
                f"of the stack"
            )
    if (backward[:, -1] < forward[:, -1]).any():
        raise ValueError("a backward starts before the forward of its micro-batch has ended")
    _check_slots(table)


def _checked_ticks(name: str, work: Slot, table: Table) -> np.ndarray:
    """Returns the tick of each micro-batch and chunk of the stack, (M, V P)."""
    P, M, V = table.num_stages, table.num_microbatches, table.num_chunks
    ticks = np.full((M, V * P), IDLE)
    for tick, stage in np.argwhere(work.active):
        m, v = work.microbatch[tick, stage], work.chunk[tick, stage]
        is_known = 0 <= m < M and 0 <= v < V
        if not is_known or ticks[m, v * P + stage] != IDLE:
            raise ValueError(
                f"tick {tick}, stage {stage}: {name} of {m}, {v} is unknown or repeated"
            )
        ticks[m, v * P + stage] = tick
    if (ticks == IDLE).any():
        m, c = np.argwhere(ticks == IDLE)[0]
        raise ValueError(f"{name} of micro-batch {m}, chunk {c // P} on stage {c % P} is missing")
    return ticks


def _check_slots(table: Table) -> None:
    """Raises ValueError if a buffer is overwritten before the backward that reads it."""
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


def _grid(M: int, V: int, P: int) -> tuple[np.ndarray, ...]:
    """Returns micro-batch, chunk and stage of each forward: three (M, V, P) arrays."""
    return np.meshgrid(np.arange(M), np.arange(V), np.arange(P), indexing="ij")
