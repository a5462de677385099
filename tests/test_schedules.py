"""Schedules as tables: counted figures equal the closed forms, and a wrong table is rejected."""

import copy

import numpy as np
import pytest

from meshtrain.schedules import IDLE, SCHEDULES, check, gpipe, interleaved, tabulate

STAGES, MICROBATCHES = range(1, 9), range(1, 33)


def grid(M, P):
    """Returns micro-batch and stage of each forward of a schedule with one chunk per stage."""
    m, _, i = np.meshgrid(np.arange(M), [0], np.arange(P), indexing="ij")
    return m, i


def num_ticks(schedule: str, P: int, M: int, V: int = 1) -> int:
    """Ticks of a step."""
    return 2 * (M + P - 1) if schedule == "gpipe" else span(P, M, V) + V * P + P - 2


def bubble(P: int, M: int, V: int = 1) -> float:
    """Fraction of a step in which a stage is idle: (P - 1) / (M V + P - 1) where P divides M."""
    return 1 - M * V / (span(P, M, V) + P - 1)


def live_inputs(schedule: str, P: int, M: int, V: int = 1) -> int:
    """Most chunk inputs kept at once by a stage: at most (V + 1) P - 1; M for gpipe."""
    return M if schedule == "gpipe" else V * min(M, P) + min(max(M - P, 0), P - 1)


def span(P: int, M: int, V: int) -> int:
    """Ticks from a stage's first forward to its last: M V where P divides M."""
    return (M - 1) // P * P * V + (V - 1) * P + (M - 1) % P + 1


@pytest.mark.parametrize("V", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_is_valid_and_its_counts_equal_the_closed_forms(name, V):
    if V > 1 and name != "interleaved":
        with pytest.raises(ValueError, match="1 chunk per stage"):
            SCHEDULES[name](4, 8, V)
        return
    for P in STAGES:
        for M in MICROBATCHES:
            table, case = SCHEDULES[name](P, M, V), f"{P=} {M=}"
            check(table)
            assert table.num_ticks == num_ticks(name, P, M, V), case
            assert table.bubble == pytest.approx(bubble(P, M, V), abs=1e-12), case
            assert table.num_live == live_inputs(name, P, M, V), case
            assert table.num_slots - table.num_live in (0, 1), case


@pytest.mark.parametrize("name", SCHEDULES)
def test_figures_are_counted_from_the_table(name):
    P, M, V = 4, 10, 3 if name == "interleaved" else 1
    table = SCHEDULES[name](P, M, V)
    forward, backward = table.forward.active, table.backward.active
    assert forward.sum() == backward.sum() == M * V * P
    F, B = 1.5, 2.5
    assert table.cost(F, B) * V == pytest.approx(
        forward.any(1).sum() * F + backward.any(1).sum() * B
    )
    busy = (forward.sum() * 1 + backward.sum() * 2) / P
    assert table.bubble == pytest.approx(1 - busy / V / table.cost())
    kept = np.cumsum(forward, 0) - np.cumsum(backward, 0) + backward  # after a tick's forwards
    assert table.num_live == kept.max()


@pytest.mark.parametrize(
    ("name", "P", "M", "V", "bubble"),
    [
        ("gpipe", 4, 8, 1, 3 / 11),
        ("1f1b", 4, 8, 1, 3 / 11),
        ("1f1b", 8, 64, 1, 7 / 71),
        ("interleaved", 4, 8, 1, 3 / 11),
        ("interleaved", 4, 8, 2, 3 / 19),
        ("interleaved", 8, 64, 4, 7 / 263),
        ("interleaved", 1, 5, 2, 0),
    ],
)
def test_the_bubble_equals_the_papers(name, P, M, V, bubble):
    assert SCHEDULES[name](P, M, V).bubble == pytest.approx(bubble, abs=1e-12)


def test_more_chunks_shrink_the_bubble_and_1f1b_memory_is_independent_of_microbatches():
    bubbles = [interleaved(4, 16, V).bubble for V in (1, 2, 4)]
    assert bubbles == sorted(bubbles, reverse=True) and len(set(bubbles)) == 3
    assert {SCHEDULES["1f1b"](4, M, 1).num_live for M in (7, 8, 32)} == {7}
    assert [gpipe(4, M).num_live for M in (7, 8, 32)] == [7, 8, 32]


def test_a_small_table_by_hand():
    table = gpipe(2, 2)
    x = IDLE
    assert table.forward.microbatch.tolist() == [[0, x], [1, 0], [x, 1], [x, x], [x, x], [x, x]]
    assert table.backward.microbatch.tolist() == [[x, x], [x, x], [x, x], [x, 0], [0, 1], [1, x]]
    table = SCHEDULES["1f1b"](2, 2, 1)
    assert table.forward.microbatch.tolist() == [[0, x], [1, 0], [x, 1], [x, x]]
    assert table.backward.microbatch.tolist() == [[x, x], [x, 0], [0, 1], [1, x]]
    # chunk 1 of stage 0 follows chunk 0 of stage 1
    table = interleaved(2, 2, 2)
    assert table.forward.chunk[:5].tolist() == [[0, x], [0, 0], [1, 0], [1, 1], [x, 1]]


def erase(table):
    for column in table.backward:
        column[-1, 0] = IDLE


def repeat(table):
    idle = np.argwhere(~table.forward.active)[-1]
    done = np.argwhere(table.forward.active[:, idle[1]])[0, 0]
    for column in table.forward:
        column[tuple(idle)] = column[done, idle[1]]


def one_too_many(table):
    table.forward.microbatch[0, 0] = table.num_microbatches


def another_chunk(table):
    table.backward.chunk[table.backward.active] += 1


def one_slot(table):
    for work in (table.forward, table.backward):
        work.slot[work.active] = 0


def swap_slots(table):
    slots = table.backward.slot
    ticks = np.flatnonzero(slots[:, 0] != IDLE)[:2]
    slots[ticks, 0] = slots[ticks[::-1], 0]


def idle_overwrites(table):
    table.forward.slot[8:11, 0] = 0  # where stage 0 keeps the input of its last micro-batch


def no_slot(table):
    for work in (table.forward, table.backward):
        work.slot[...] = IDLE


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (erase, "backward of micro-batch 7, chunk 0 on stage 0 is missing"),
        (repeat, "forward of 0, 0 is unknown or repeated"),
        (one_too_many, "tick 0, stage 0: forward of 8, 0 is unknown or repeated"),
        (another_chunk, "backward of 0, 1 is unknown or repeated"),
        (one_slot, "tick 1, stage 0: slot 0 is overwritten"),
        (swap_slots, "tick 6, stage 0: slot 1 holds another input"),
        (idle_overwrites, "tick 8, stage 0: slot 0 is overwritten"),
        (no_slot, "tick 0, stage 0: no slot to write to"),
    ],
)
def test_an_invalid_table_is_rejected(damage, message):
    table = copy.deepcopy(SCHEDULES["1f1b"](4, 8, 1))
    check(table)
    damage(table)
    with pytest.raises(ValueError, match=message):
        check(table)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        # gpipe with one change each
        (lambda m, i: m + 2 * i, lambda m, i: 20 + m - i, "forward of .* 2 ticks between"),
        (lambda m, i: m - i + 3, lambda m, i: 20 + m - i, "forward of .* -1 ticks between"),
        (lambda m, i: m + i, lambda m, i: 20 + m - 2 * i, "backward of .* 2 ticks between"),
        (lambda m, i: m + i, lambda m, i: 20 + m + i, "backward of .* -1 ticks between"),
        (lambda m, i: m + i, lambda m, i: m + 5 - i, "backward starts before the forward"),
    ],
)
def test_a_message_that_waits_or_is_used_too_early_is_rejected(forward, backward, message):
    m, i = grid(8, 4)
    check(tabulate(m + i, 20 + m - i))
    with pytest.raises(ValueError, match=message):
        check(tabulate(forward(m, i), backward(m, i)))


def test_two_chunks_in_one_slot_are_rejected():
    m, i = grid(8, 4)
    with pytest.raises(ValueError, match="is missing"):
        check(tabulate(m // 2 + i, 20 + m - i))


def test_a_slot_is_free_only_after_the_tick_of_its_backward():
    # A forward comes before the backward of the same tick, and would overwrite what that needs.
    m, i = grid(2, 1)
    table = tabulate(m, m + 1)
    check(table)
    assert table.num_slots == table.num_live == 2
    for work in (table.forward, table.backward):
        assert work.slot[work.active].tolist() == [0, 1]
