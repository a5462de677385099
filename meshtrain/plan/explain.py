"""One layout taken apart: the time line of a step, its memory, and what each axis costs, as text and as SVG."""

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from meshtrain.config.schema import AXES
from meshtrain.parallel.sharding import ZERO_AXES
from meshtrain.plan.cost import COST_OF_AXIS
from meshtrain.plan.search import Candidate
from meshtrain.plan.text import GB, Report, name_of

COLUMNS = 40  # of a bar in the text
# In pixels.
NAMES, BARS, NUMBERS, ROW = 190, 420, 130, 22
COLOUR, INK = "#2f6db3", "#222222"


def lines(one: Candidate, report: Report) -> Iterator[str]:
    """Yields the time line, the memory up to what a step may use, and a row for each axis of the mesh."""
    yield name_of(one.layout)
    yield ""
    yield f"a step takes {one.seconds:.3g} s on each device; each bar starts where the one above ends"
    yield from _bars(one.cost.parts, one.seconds, "s", 1.0)
    if one.layout.pipeline > 1:
        turns = one.layout.num_microbatches
        idle = one.layout.idle_turns / (one.layout.idle_turns + turns)
        yield f"stages are idle {100 * idle:.0f} % of the {turns} micro-batches' time"
    yield ""
    yield (
        f"{one.memory_bytes / GB:.3g} GB are needed at the peak; a step may use {report.limit / GB:.3g} GB"
    )
    yield from _bars(one.memory, max(report.limit, one.memory_bytes), "GB", GB)
    yield ""
    yield "axis      devices  link     seconds that computation does not hide"
    for axis in AXES:
        if (size := getattr(one.layout, axis)) > 1:
            names = COST_OF_AXIS[axis]
            if axis in ZERO_AXES and one.layout.zero_stage < 3:
                names += ("gradients",)  # one sum over these axes and data
            seconds = sum(one.cost.parts.get(name, 0.0) for name in names)
            link = report.machine.link_of(size, one.layout.stride(axis))
            yield f"{axis:9} {size:7}  {link:8} {seconds:.3g}"


def _bars(parts: Mapping[str, float], total: float, unit: str, size: float) -> Iterator[str]:
    at = 0.0
    for name, value in parts.items():
        if value <= 0:
            continue
        before = round(COLUMNS * at / total)
        length = max(1, round(COLUMNS * (at + value) / total) - before)
        share = f"{100 * value / total:4.1f} %"
        bar = f"{'':{before}}{'█' * length}"
        yield f"  {name:23} {value / size:8.3g} {unit}  {share}  {bar}"
        at += value


def svg(one: Candidate, report: Report) -> str:
    """Returns the time line and the memory as a drawing."""
    time, memory = one.cost.parts, one.memory
    groups = (
        (f"{one.seconds:.3g} s a step", time, one.seconds, "s", 1.0),
        (f"{one.memory_bytes / GB:.3g} GB", memory, max(report.limit, one.memory_bytes), "GB", GB),
    )
    rows, y = [_text(10, 20, name_of(one.layout))], 30
    for title, parts, total, unit, size in groups:
        y += ROW
        rows.append(_text(10, y + 14, title))
        at = 0.0
        for name, value in parts.items():
            if value <= 0:
                continue
            y += ROW
            x, width = NAMES + BARS * at / total, max(1.0, BARS * value / total)
            rows.append(_text(NAMES - 8, y + 14, name, anchor="end"))
            rows.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{COLOUR}"/>'
            )
            rows.append(_text(NAMES + BARS + 8, y + 14, f"{value / size:.3g} {unit}"))
            at += value
        y += ROW // 2
    width, height = NAMES + BARS + NUMBERS, y + 2 * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
