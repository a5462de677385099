"""A schedule's table as text for a terminal, and as an SVG timeline in lock-step time."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np

from meshtrain.parallel.pipeline.schedules import IDLE, Table, Work

FORWARD, BACKWARD = 1, 2  # times that one stage takes for a micro-batch
EVERY = 5  # ticks from one number above the text's columns to the next
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# One colour for each micro-batch, dark enough for white numbers.
COLOURS = "#2f6db3 #b3541a #2d7d4f #8a4bb0 #8a6a00 #b53a56 #17798a #a23a86".split()
BLACK, WHITE, PALE, INK, FAINT = "#000000", "#ffffff", "#ececec", "#222222", "#999999"
# In pixels; a box of one forward is BOX wide, and DIGIT more for each digit of its number.
BOX, DIGIT, ROW, GAP, LEFT, TOP, BOTTOM, MARGIN, TITLE = 12, 7, 26, 4, 76, 66, 56, 20, 640


def text(table: Table, columns: int) -> list[str]:
    """Returns the lines of a table: F and B of each stage, a column a tick, cut into what `columns` hold."""
    works = (("F", table.forward), ("B", table.backward))
    V = table.num_chunks
    cells = [[[cell(*entry, V) for entry in row] for row in _entries(work)] for _, work in works]
    size = 1 + max(len(name) for work in cells for row in work for name in row)
    heads = [f"stage {stage}" for stage in range(table.num_stages)]
    left = max(map(len, heads)) + 2
    per_block = max(EVERY, (columns - left) // size // EVERY * EVERY)
    lines = []
    for start in range(0, table.num_ticks, per_block):
        ticks = range(start, min(start + per_block, table.num_ticks))
        numbers = [f"{t:{size if t == start else EVERY * size}}" for t in ticks[::EVERY]]
        lines += [""] * bool(start) + ["tick".ljust(left) + "".join(numbers)]
        for stage, head in enumerate(heads):
            for (letter, _), rows in zip(works, cells, strict=True):
                row = "".join(rows[t][stage].rjust(size) for t in ticks)
                lines.append(f"{head if letter == 'F' else '':{left - 1}}{letter}{row}")
    return lines


def cell(microbatch: int, chunk: int, num_chunks: int) -> str:
    """Returns a piece of work in few letters: '3', or '3b' for chunk 1 of several; '·' where there is none."""
    if microbatch == IDLE:
        return "·"
    if num_chunks == 1:
        return f"{microbatch}"
    return f"{microbatch}{LETTERS[chunk] if num_chunks <= len(LETTERS) else f'.{chunk}'}"


def _entries(work: Work) -> list[list[tuple[int, int]]]:
    return np.stack([work.microbatch, work.chunk], axis=-1).tolist()


def svg(name: str, table: Table) -> str:
    """Returns the timeline: a row a stage, a box a piece of work, as wide as it takes in lock step."""
    P, M, V = table.num_stages, table.num_microbatches, table.num_chunks
    unit = BOX + DIGIT * len(str(M - 1))  # of time, for one chunk
    length = unit * table.cost(FORWARD, BACKWARD) * V
    width = LEFT + max(length, TITLE + 28 * V) + MARGIN
    height = TOP + P * (ROW + GAP) + BOTTOM
    title = (
        f"{name}: P = {P} stages, M = {M} micro-batches, V = {V} chunk{'s' * (V > 1)} a stage, "
        f"bubble {100 * table.bubble:.1f} %"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.9g} {height}" width="{width:.9g}"'
            f' height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            _rect(0, 0, width, height, WHITE),
            _label(LEFT, 24, title, size=14),
            *_legend(V),
            *_idle(P, length),
            *_boxes(table, "forward", unit),
            *_boxes(table, "backward", unit),
            *_axis(P, unit * V, length),
            "</svg>\n",
        ]
    )


def _idle(P: int, length: float) -> Iterator[str]:
    """Yields the rows; what no box will cover is the bubble."""
    for stage in range(P):
        y = TOP + stage * (ROW + GAP)
        yield _label(LEFT - 8, y + ROW / 2 + 4, f"stage {stage}", anchor="end")
        yield _rect(LEFT, y, length, ROW, PALE)


def starts(table: Table) -> dict[str, np.ndarray]:
    """Returns when the forwards and the backwards of each tick start, (T,), V times as fine as FORWARD.

    A tick lasts as long as what any stage does in it; each stage's forward comes before its backward.
    """
    forward = table.forward.active.any(1) * FORWARD
    both = forward + table.backward.active.any(1) * BACKWARD
    begin = np.cumsum(both) - both
    return {"forward": begin, "backward": begin + forward}


def _boxes(table: Table, kind: str, unit: int) -> Iterator[str]:
    work, start = getattr(table, kind), starts(table)[kind]
    time, ink = {"forward": (FORWARD, INK), "backward": (BACKWARD, WHITE)}[kind]
    wide, entries = unit * time, _entries(work)
    yield f'<g class="{kind}" stroke="{WHITE}" fill="{ink}">'
    for tick, stage in np.argwhere(work.active):
        m, v = entries[tick][stage]
        x, y = LEFT + start[tick] * unit, TOP + stage * (ROW + GAP)
        tip = f"stage {stage}, tick {tick}: {kind} of micro-batch {m}, chunk {v}"
        yield _rect(x, y, wide, ROW, shade(kind, m, v, table.num_chunks), tip)
        yield _label(x + wide / 2, y + ROW / 2 + 4, str(m), anchor="middle", fill=None)
    yield "</g>"


def shade(kind: str, microbatch: int, chunk: int, num_chunks: int) -> str:
    """Returns the colour of a micro-batch: forwards pale, backwards full, the first chunk the darkest."""
    light = chunk / (num_chunks - 1) if num_chunks > 1 else 1
    colour = COLOURS[microbatch % len(COLOURS)]
    if kind == "forward":
        return _mixed(colour, WHITE, 0.42 + 0.24 * light)
    return _mixed(colour, BLACK, 0.4 * (1 - light))


def _mixed(colour: str, other: str, share: float) -> str:
    parts = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (colour, other)]
    mixed = (round(a * (1 - share) + b * share) for a, b in zip(*parts, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _legend(V: int) -> Iterator[str]:
    """Yields samples of what the boxes' shades say."""
    x = LEFT
    samples = [
        ("forward", [shade("forward", 0, v, V) for v in range(V)]),
        ("backward", [shade("backward", 0, v, V) for v in range(V)]),
        ("idle", [PALE]),
    ]
    chunks = f", chunks 0 to {V - 1}" if V > 1 else ""
    for name, fills in samples:
        for fill in fills:
            yield _rect(x, 37, 14, 14, fill)
            x += 14
        words = f"{name}{chunks if name != 'idle' else ''}"
        yield _label(x + 6, 48, words)
        x += 20 + 7 * len(words)
    yield _label(x, 48, "number and colour: micro-batch")


def _axis(P: int, unit: int, length: float) -> Iterator[str]:
    """Yields the axis of time, numbered where there is room; `unit` is a stage's forward."""
    y = TOP + P * (ROW + GAP) + 4
    step = next(
        step for n in range(9) for step in (10**n, 2 * 10**n, 5 * 10**n) if step * unit >= 50
    )
    yield f'<g stroke="{FAINT}">'
    yield f'<path d="M{LEFT} {y}H{LEFT + length:.9g}" fill="none"/>'
    numbers = range(0, int(length / unit) + 1, step)
    yield from (f'<path d="M{LEFT + n * unit} {y}v5" fill="none"/>' for n in numbers)
    yield "</g>"
    yield from (_label(LEFT + n * unit, y + 18, str(n), anchor="middle") for n in numbers)
    words = (
        f"time \u2192 (a stage's forward of a micro-batch takes {FORWARD}, its backward {BACKWARD})"
    )
    yield _label(LEFT, y + 38, words)


def _rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    rect = f'<rect x="{x:.9g}" y="{y:g}" width="{width:.9g}" height="{height:g}" fill="{fill}"'
    return f"{rect}><title>{escape(tip)}</title></rect>" if tip else f"{rect}/>"


def _label(
    x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str | None = INK
) -> str:
    ink = f' fill="{fill}"' if fill else ""  # else the group's
    return (
        f'<text x="{x:.9g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" stroke="none"{ink}>'
        f"{escape(words)}</text>"
    )
