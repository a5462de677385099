"""A plan as lines of text and as JSON; one layout explained by its timeline, memory and axes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from xml.sax.saxutils import escape

from meshtrain.config.schema import SyncConfig
from meshtrain.parallel.sharding import ZERO_AXES
from meshtrain.tools.plan.cost import COST_OF_AXIS, launches, step_cost
from meshtrain.tools.plan.layout import name_of, overrides
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.plan_input import PlanInput
from meshtrain.tools.plan.search import Candidate, Plan, why_slower

GB = 1e9

# Tenth and ninetieth percentile of measured / predicted over the published steps that
# benchmarks/plan/published_steps.py predicts: of other frameworks as they are, and of each
# framework after one factor, which --measured takes from a run.
RANGE, RANGE_MEASURED = (0.93, 1.20), (0.92, 1.16)
COMPUTE = ("products and attention", "head")


class Report:
    """What the lines and the JSON need besides the plan."""

    def __init__(
        self, plan_input: PlanInput, machine: Machine, *, limit: float, scale: float | None
    ):
        self.plan_input, self.machine, self.limit, self.scale = plan_input, machine, limit, scale
        flops_per_token = plan_input.model.flops_per_token
        self.flops = flops_per_token(plan_input.seq_len) if flops_per_token else None

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.plan_input.global_batch * self.plan_input.seq_len

    def mfu(self, candidate: Candidate) -> float | None:
        """Returns the model FLOPs utilisation, None if the model does not say its FLOPs."""
        if not self.flops:
            return None
        peak = self.machine.num_devices * self.machine.device.flops_16
        return self.flops * self.tokens / candidate.seconds / peak

    def range(self, candidate: Candidate) -> tuple[float, float]:
        """Returns the seconds between which eight of ten measured steps lie."""
        low, high = RANGE if self.scale is None else RANGE_MEASURED
        return low * candidate.seconds, high * candidate.seconds

    def limited_by(self, candidate: Candidate) -> str:
        """Returns what takes the most time besides the arithmetic.

        Returns "compute" if the arithmetic is 70 % of the step.
        """
        parts = candidate.cost.parts
        if sum(parts[name] for name in COMPUTE) > 0.7 * candidate.seconds:
            return "compute"
        others = [name for name in parts if name not in COMPUTE]
        largest = max(others, key=parts.get)
        axis = next((axis for axis, names in COST_OF_AXIS.items() if largest in names), None)
        if axis is None or largest == "bubble":
            return largest
        layout = candidate.layout
        link = self.machine.link_of(getattr(layout, axis), layout.stride(axis))
        return f"{largest} over the {link}"


# ---- the plan ----


def lines(plan: Plan, report: Report, *, tokens: float, price: float) -> list[str]:
    """Returns the table, the parts of the best layout, and its overrides.

    `tokens` are those of a whole run, `price` that of a device-hour; 0: not printed.
    """
    machine, best = report.machine, plan.candidates[0]
    device = machine.device
    host = "host" if machine.kind == "gpu" else "slice"
    text = [
        f"{plan.num_tried:,} layouts of {machine.num_devices} {device.name}, "
        f"{machine.per_host} on each {host}; a step may use "
        f"{report.limit / GB:.0f} of {device.memory / GB:.0f} GB; {report.tokens:,} tokens a step",
        "",
    ]
    text += _table(plan, report)
    low, high = report.range(best)
    basis = "after the factor of the measured run" if report.scale else "without a measured run"
    text += [
        "",
        f"the first is limited by {report.limited_by(best)}; {basis}, nine of ten measured steps "
        f"of other frameworks took less than {high:.3g} s, and nine of ten more than {low:.3g} s",
        "time    " + _shares(best.cost.parts, best.seconds, "s", 1.0),
        "memory  " + _shares(best.memory, best.memory_bytes, "GB", GB),
    ]
    if len(plan.candidates) > 1:
        text.append(f"the second {why_slower(plan.candidates[1], best)}")
    faster = _with_fewer_bytes(best, report)
    if faster:
        text.append(faster)
    if tokens:
        days = tokens / report.tokens * best.seconds / 86400
        line = f"{tokens:.3g} tokens take {days:.1f} days"
        if price:
            total = days * 24 * machine.num_devices * price
            line += f" · {total:,.0f} in all at {price:g} per device-hour"
        text.append(line)
    if launches(report.plan_input.work, best.layout, machine) > 0.3 * best.seconds:
        text.append(
            "the model is small: operations take about as long to start as to run, and such steps "
            "took twice the predicted time"
        )
    text.append("")
    for key, value in overrides(best.layout).items():
        text.append(f"  --config.{key}={value}")
    return text


def _table(plan: Plan, report: Report) -> Iterator[str]:
    """Yields the header, a row for each layout, and the rejected ones."""
    # Once one was compiled, all rows have the column.
    has_compiled = plan.candidates[0].compiled_memory is not None
    compiled = "compiled  " if has_compiled else ""
    yield f"     step    MFU   tokens/s  memory  {compiled}layout"
    for candidate in plan.candidates:
        mfu = report.mfu(candidate)
        mfu = f"{100 * mfu:4.1f} %" if mfu else "      "
        if has_compiled:
            size = candidate.compiled_memory
            compiled = f"{f'{size / GB:5.0f} GB' if size else '':10}"
        yield (
            f"{candidate.seconds:7.3f} s {mfu} "
            f"{report.tokens / candidate.seconds:10,.0f} {candidate.memory_bytes / GB:4.0f} GB  "
            f"{compiled}{name_of(candidate.layout)}"
        )
    for candidate, reason in plan.rejected:
        yield f"{candidate.seconds:7.3f} s  rejected, {reason}: {name_of(candidate.layout)}"


def _with_fewer_bytes(best: Candidate, report: Report, least: float = 0.03) -> str:
    """Returns what fewer bytes of gradients would save.

    Returns "" unless their sum over the network takes a part of the step of at least `least`.
    """
    layout, machine = best.layout, report.machine
    work, seq_len = report.plan_input.work, report.plan_input.seq_len
    over_network = False
    for axis in ("data", *ZERO_AXES):
        size = getattr(layout, axis)
        if size > 1 and machine.link_of(size, layout.stride(axis)) == "network":
            over_network = True
    if not over_network or best.cost.parts["gradients"] < least * best.seconds:
        return ""
    compressed = replace(layout, sync=SyncConfig(dtype="int8", pattern="hierarchical"))
    compressed_seconds = step_cost(work, compressed, machine, seq_len).seconds
    best_seconds = step_cost(work, layout, machine, seq_len).seconds
    if compressed_seconds > (1 - least) * best_seconds:
        return ""
    return (
        f"the sum of gradients takes {best.cost.parts['gradients']:.3g} s over the network; with "
        f"sync.dtype=int8 and sync.pattern=hierarchical a step would take "
        f"{compressed_seconds / best_seconds * best.seconds:.3g} s, but rounds gradients: "
        f"docs/guides/slow_networks.md"
    )


def _shares(parts: Mapping[str, float], total: float, unit: str, size: float) -> str:
    shown = {name: value for name, value in parts.items() if value >= 0.005 * total}
    return " · ".join(f"{name} {value / size:.3g} {unit}" for name, value in shown.items())


def to_dict(plan: Plan, report: Report) -> dict[str, Any]:
    """Returns the plan for JSON."""

    def entry(candidate: Candidate) -> dict[str, Any]:
        return {
            "mesh": candidate.layout.sizes(),
            "overrides": overrides(candidate.layout),
            "step_seconds": candidate.seconds,
            "step_seconds_range": [*report.range(candidate)],
            "seconds": candidate.cost.parts,
            "mfu": report.mfu(candidate),
            "tokens_per_second": report.tokens / candidate.seconds,
            "memory_bytes": candidate.memory_bytes,
            "memory": candidate.memory,
            "compiled_memory_bytes": candidate.compiled_memory,
            "limited_by": report.limited_by(candidate),
        }

    return {
        "device": report.machine.device.name,
        "devices": report.machine.num_devices,
        "devices_per_host": report.machine.per_host,
        "memory_limit_bytes": report.limit,
        "scale": report.scale,
        "tried": plan.num_tried,
        "layouts": [entry(candidate) for candidate in plan.candidates],
        "rejected": [{**entry(candidate), "reason": reason} for candidate, reason in plan.rejected],
    }


# ---- one layout explained ----

COLUMNS = 40  # of a bar in the text


def explain_lines(candidate: Candidate, report: Report) -> Iterator[str]:
    """Yields the timeline, the memory up to what a step may use, and a row for each mesh axis."""
    layout, seconds, size = candidate.layout, candidate.seconds, candidate.memory_bytes
    yield name_of(layout)
    yield ""
    yield f"a step takes {seconds:.3g} s on each device; each bar starts where the one above ends"
    yield from _bars(candidate.cost.parts, seconds, "s", 1.0)
    if layout.pipeline > 1:
        turns = layout.num_microbatches
        idle = layout.idle_turns / (layout.idle_turns + turns)
        yield f"stages are idle {100 * idle:.0f} % of the {turns} micro-batches' time"
    yield ""
    yield f"{size / GB:.3g} GB are needed at the peak; a step may use {report.limit / GB:.3g} GB"
    yield from _bars(candidate.memory, max(report.limit, size), "GB", GB)
    yield ""
    yield "axis      devices  link     seconds that computation does not hide"
    for axis, num_devices in layout.sizes().items():
        if num_devices == 1:
            continue
        names = COST_OF_AXIS[axis]
        if axis in ZERO_AXES and layout.zero_stage < 3:
            names += ("gradients",)  # one sum over these axes and data
        exposed = sum(candidate.cost.parts.get(name, 0.0) for name in names)
        link = report.machine.link_of(num_devices, layout.stride(axis))
        yield f"{axis:9} {num_devices:7}  {link:8} {exposed:.3g}"


def _bars(parts: Mapping[str, float], total: float, unit: str, size: float) -> Iterator[str]:
    start = 0.0
    for name, value in parts.items():
        if value <= 0:
            continue
        first_column = round(COLUMNS * start / total)
        length = max(1, round(COLUMNS * (start + value) / total) - first_column)
        share = f"{100 * value / total:4.1f} %"
        bar = f"{'':{first_column}}{'█' * length}"
        yield f"  {name:23} {value / size:8.3g} {unit}  {share}  {bar}"
        start += value


# Widths of the columns and height of a row of the drawing, in pixels.
NAMES, BARS, NUMBERS, ROW = 190, 420, 130, 22
COLOUR, INK = "#2f6db3", "#222222"


def explain_svg(candidate: Candidate, report: Report) -> str:
    """Returns the timeline and the memory as a drawing."""
    y = 30
    shapes = [_svg_text(10, 20, name_of(candidate.layout))]

    def draw(title: str, parts: Mapping[str, float], total: float, unit: str, size: float) -> None:
        """Adds a title and a bar for each part, each of which starts where the one above ends."""
        nonlocal y
        y += ROW
        shapes.append(_svg_text(10, y + 14, title))
        start = 0.0
        for name, value in parts.items():
            if value <= 0:
                continue
            y += ROW
            x = NAMES + BARS * start / total
            width = max(1.0, BARS * value / total)
            shapes.append(_svg_text(NAMES - 8, y + 14, name, anchor="end"))
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" '
                f'fill="{COLOUR}"/>'
            )
            shapes.append(_svg_text(NAMES + BARS + 8, y + 14, f"{value / size:.3g} {unit}"))
            start += value
        y += ROW // 2

    seconds, memory = candidate.seconds, candidate.memory_bytes
    draw(f"{seconds:.3g} s a step", candidate.cost.parts, seconds, "s", 1.0)
    draw(f"{memory / GB:.3g} GB", candidate.memory, max(report.limit, memory), "GB", GB)

    width, height = NAMES + BARS + NUMBERS, y + 2 * ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, background, *shapes, "</svg>\n"])


def _svg_text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
