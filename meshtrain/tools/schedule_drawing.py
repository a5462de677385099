"""Draws a pipeline schedule as text for a terminal, and as an SVG timeline."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np

from meshtrain.schedules import IDLE, Slot, Table

FORWARD, BACKWARD = 1, 2  # assumed times of a stage for one micro-batch
TICKS_PER_NUMBER = 5  # every fifth column of the text is numbered
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# One colour per micro-batch, dark enough for white numbers.
COLOURS = "#2f6db3 #b3541a #2d7d4f #8a4bb0 #8a6a00 #b53a56 #17798a #a23a86".split()
BLACK, WHITE, IDLE_COLOUR, INK, AXIS_COLOUR = "#000000", "#ffffff", "#ececec", "#222222", "#999999"

# In pixels. The box of a forward is BOX_WIDTH wide, plus DIGIT_WIDTH for each digit of its number.
BOX_WIDTH, DIGIT_WIDTH, TITLE_WIDTH = 12, 7, 640
ROW, GAP = 26, 4  # height of a stage's row, and between rows
LEFT, TOP, BOTTOM, RIGHT = 76, 66, 56, 20  # margins


def text_lines(table: Table, columns: int) -> list[str]:
    """Returns a table as lines: rows F and B for each stage, a column per tick.

    Wrapped at `columns` characters.
    """
    works = (("F", table.forward), ("B", table.backward))
    V = table.num_chunks
    cells = [
        [[cell(*entry, V) for entry in row] for row in _microbatches_and_chunks(work)]
        for _, work in works
    ]
    size = 1 + max(len(name) for work in cells for row in work for name in row)
    heads = [f"stage {stage}" for stage in range(table.num_stages)]
    left = max(map(len, heads)) + 2
    # Ticks per block of lines: a multiple of TICKS_PER_NUMBER.
    per_block = TICKS_PER_NUMBER * max(1, (columns - left) // size // TICKS_PER_NUMBER)
    lines = []
    for start in range(0, table.num_ticks, per_block):
        ticks = range(start, min(start + per_block, table.num_ticks))
        numbers = [
            f"{t:{size if t == start else TICKS_PER_NUMBER * size}}"
            for t in ticks[::TICKS_PER_NUMBER]
        ]
        lines += [""] * bool(start) + ["tick".ljust(left) + "".join(numbers)]
        for stage, head in enumerate(heads):
            for (letter, _), rows in zip(works, cells, strict=True):
                row = "".join(rows[t][stage].rjust(size) for t in ticks)
                lines.append(f"{head if letter == 'F' else '':{left - 1}}{letter}{row}")
    return lines


def cell(microbatch: int, chunk: int, num_chunks: int) -> str:
    """Returns "3" for micro-batch 3, "3b" for its chunk 1 of several, "·" for an idle stage."""
    if microbatch == IDLE:
        return "·"
    if num_chunks == 1:
        return f"{microbatch}"
    if num_chunks <= len(LETTERS):
        return f"{microbatch}{LETTERS[chunk]}"
    return f"{microbatch}.{chunk}"


def _microbatches_and_chunks(work: Slot) -> list[list[tuple[int, int]]]:
    return np.stack([work.microbatch, work.chunk], axis=-1).tolist()


def svg(name: str, table: Table) -> str:
    """Returns the timeline: a row per stage, a box per forward or backward, as wide as its time."""
    P, M, V = table.num_stages, table.num_microbatches, table.num_chunks
    unit = BOX_WIDTH + DIGIT_WIDTH * len(str(M - 1))  # width of one chunk's forward
    length = unit * table.cost(FORWARD, BACKWARD) * V
    width = LEFT + max(length, TITLE_WIDTH + 28 * V) + RIGHT
    height = TOP + P * (ROW + GAP) + BOTTOM
    title = (
        f"{name}: P = {P} stages, M = {M} micro-batches, V = {V} chunk{'s' * (V > 1)} per stage, "
        f"bubble {100 * table.bubble:.1f} %"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.9g} {height}"'
            f' width="{width:.9g}" height="{height}"'
            f' font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            _rect(0, 0, width, height, WHITE),
            _label(LEFT, 24, title, size=14),
            *_legend(V),
            *_rows(P, length),
            *_boxes(table, "forward", unit),
            *_boxes(table, "backward", unit),
            *_axis(P, unit * V, length),
            "</svg>\n",
        ]
    )


def _rows(P: int, length: float) -> Iterator[str]:
    """Yields the rows in the idle colour, which stays visible only in the bubble."""
    for stage in range(P):
        y = TOP + stage * (ROW + GAP)
        yield _label(LEFT - 8, y + ROW / 2 + 4, f"stage {stage}", anchor="end")
        yield _rect(LEFT, y, length, ROW, IDLE_COLOUR)


def start_times(table: Table) -> dict[str, np.ndarray]:
    """Returns the start times of the forwards and of the backwards by tick, (T,).

    The unit is the time of one chunk's forward. A tick has time for a forward if any stage has one,
    then for a backward if any stage has one.
    """
    forward = table.forward.active.any(1) * FORWARD
    both = forward + table.backward.active.any(1) * BACKWARD
    begin = np.cumsum(both) - both
    return {"forward": begin, "backward": begin + forward}


def _boxes(table: Table, kind: str, unit: int) -> Iterator[str]:
    """Yields the boxes of all forwards, or of all backwards."""
    work = getattr(table, kind)
    starts = start_times(table)[kind]
    entries = _microbatches_and_chunks(work)
    width = unit * (FORWARD if kind == "forward" else BACKWARD)
    ink = INK if kind == "forward" else WHITE
    yield f'<g class="{kind}" stroke="{WHITE}" fill="{ink}">'
    for tick, stage in np.argwhere(work.active):
        microbatch, chunk = entries[tick][stage]
        x = LEFT + starts[tick] * unit
        y = TOP + stage * (ROW + GAP)
        colour = shade(kind, microbatch, chunk, table.num_chunks)
        tip = f"stage {stage}, tick {tick}: {kind} of micro-batch {microbatch}, chunk {chunk}"
        yield _rect(x, y, width, ROW, colour, tip)
        yield _label(x + width / 2, y + ROW / 2 + 4, str(microbatch), anchor="middle", fill=None)
    yield "</g>"


def shade(kind: str, microbatch: int, chunk: int, num_chunks: int) -> str:
    """Returns the colour of a micro-batch: lighter for forwards; the first chunk is darkest."""
    light = chunk / (num_chunks - 1) if num_chunks > 1 else 1
    colour = COLOURS[microbatch % len(COLOURS)]
    if kind == "forward":
        return _blended(colour, WHITE, 0.42 + 0.24 * light)
    return _blended(colour, BLACK, 0.4 * (1 - light))


def _blended(colour: str, other: str, share: float) -> str:
    """Returns a colour #rrggbb with a `share` of the other one."""
    mixed = "#"
    for start in (1, 3, 5):
        part, other_part = int(colour[start : start + 2], 16), int(other[start : start + 2], 16)
        mixed += f"{round(part * (1 - share) + other_part * share):02x}"
    return mixed


def _legend(V: int) -> Iterator[str]:
    """Yields the legend of the boxes' colours."""
    x = LEFT
    samples = [
        ("forward", [shade("forward", 0, v, V) for v in range(V)]),
        ("backward", [shade("backward", 0, v, V) for v in range(V)]),
        ("idle", [IDLE_COLOUR]),
    ]
    chunks = f", chunks 0 to {V - 1}" if V > 1 else ""
    for name, fills in samples:
        for fill in fills:
            yield _rect(x, 37, 14, 14, fill)
            x += 14
        text = f"{name}{chunks if name != 'idle' else ''}"
        yield _label(x + 6, 48, text)
        x += 20 + 7 * len(text)
    yield _label(x, 48, "number and colour: micro-batch")


def _axis(P: int, unit: int, length: float) -> Iterator[str]:
    """Yields the time axis with as many numbers as fit; `unit`: the width of a stage's forward."""
    y = TOP + P * (ROW + GAP) + 4
    # The least of 1, 2, 5, 10, 20 ... whose numbers are 50 pixels apart.
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    step = next(step for step in steps if step * unit >= 50)
    yield f'<g stroke="{AXIS_COLOUR}">'
    yield f'<path d="M{LEFT} {y}H{LEFT + length:.9g}" fill="none"/>'
    numbers = range(0, int(length / unit) + 1, step)
    yield from (f'<path d="M{LEFT + n * unit} {y}v5" fill="none"/>' for n in numbers)
    yield "</g>"
    yield from (_label(LEFT + n * unit, y + 18, str(n), anchor="middle") for n in numbers)
    text = (
        f"time \u2192 (a stage's forward of a micro-batch takes {FORWARD}, its backward {BACKWARD})"
    )
    yield _label(LEFT, y + 38, text)


def _rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    rect = f'<rect x="{x:.9g}" y="{y:g}" width="{width:.9g}" height="{height:g}" fill="{fill}"'
    return f"{rect}><title>{escape(tip)}</title></rect>" if tip else f"{rect}/>"


def _label(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str | None = INK
) -> str:
    ink = f' fill="{fill}"' if fill else ""  # empty: the group's fill
    return (
        f'<text x="{x:.9g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" stroke="none"{ink}>'
        f"{escape(text)}</text>"
    )
