"""A plan as lines of text and as JSON, and one layout explained: timeline, memory, cost of each mesh axis."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from xml.sax.saxutils import escape

from meshtrain.config import schema
from meshtrain.config.schema import AXES, SyncConfig
from meshtrain.parallel.sharding import ZERO_AXES
from meshtrain.tools.plan.cost import COST_OF_AXIS, launches, step_cost
from meshtrain.tools.plan.layout import Layout, overrides
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.search import Candidate, Plan
from meshtrain.tools.plan.subject import PlanInput

GB = 1e9

# Tenth and ninetieth percentile of measured / predicted over the published steps that
# benchmarks/plan/published_steps.py predicts: of other frameworks as they are, and of each
# framework after one factor, which --measured takes from a run.
RANGE, RANGE_MEASURED = (0.91, 1.43), (0.89, 1.21)

COMPUTE = ("products and attention", "head")


class Report:
    """What the lines and the JSON need besides the plan."""

    def __init__(self, subject: PlanInput, machine: Machine, *, limit: float, scale: float | None):
        self.subject, self.machine, self.limit, self.scale = subject, machine, limit, scale
        flops = subject.model.flops_per_token
        self.flops = flops(subject.seq_len) if flops else None

    @property
    def tokens(self) -> int:
        return self.subject.global_batch * self.subject.seq_len

    def mfu(self, one: Candidate) -> float | None:
        """Returns the model FLOPs utilisation, None if the model does not say its FLOPs."""
        peak = self.machine.num_devices * self.machine.device.flops_16
        return self.flops and self.flops * self.tokens / one.seconds / peak

    def range(self, one: Candidate) -> tuple[float, float]:
        low, high = RANGE if self.scale is None else RANGE_MEASURED
        return low * one.seconds, high * one.seconds

    def limited_by(self, one: Candidate) -> str:
        """Returns what takes the most time besides the arithmetic, or compute if that is 70 % of the step."""
        parts = one.cost.parts
        if sum(parts[name] for name in COMPUTE) > 0.7 * one.seconds:
            return "compute"
        name = max((name for name in parts if name not in COMPUTE), key=parts.get)
        axis = next((axis for axis, names in COST_OF_AXIS.items() if name in names), None)
        if axis is None or name == "bubble":
            return name
        link = self.machine.link_of(getattr(one.layout, axis), one.layout.stride(axis))
        return f"{name} over the {link}"


def name_of(p: Layout) -> str:
    """Returns a layout in one line."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in p.sizes().items() if size > 1)
    words = [mesh or "one device", f"zero {p.zero_stage}", f"{p.num_microbatches} x {p.rows} rows"]
    if p.pipeline > 1:
        chunks = f" of {p.num_chunks} chunks" if p.num_chunks > 1 else ""
        words.append(f"{p.schedule}{chunks}, {p.keep} kept")
    words.append(f"remat {p.remat}")
    if p.members[0] > 1 and schema.changed_sync_key(p.sync):
        words.append(f"gradients in {p.sync.wire}, {p.sync.pattern}")
    return " · ".join(words)


def lines(plan: Plan, report: Report, *, tokens: float, price: float) -> list[str]:
    """Returns the table, the best layout taken apart, and the overrides."""
    machine, best = report.machine, plan.found[0]
    device = machine.device
    text = [
        f"{plan.num_tried:,} layouts of {machine.num_devices} {device.name}, "
        f"{machine.per_host} on each {'host' if machine.kind == 'gpu' else 'slice'}; a step may use "
        f"{report.limit / GB:.0f} of {device.memory / GB:.0f} GB; {report.tokens:,} tokens a step",
        "",
        f"     step    MFU   tokens/s  memory  {'compiled  ' if best.compiled_memory else ''}layout",
    ]
    for one in plan.found:
        mfu, compiled = report.mfu(one), ""
        if best.compiled_memory:
            compiled = f"{f'{one.compiled_memory / GB:5.0f} GB' if one.compiled_memory else '':10}"
        text.append(
            f"{one.seconds:7.3f} s {f'{100 * mfu:4.1f} %' if mfu else '      '} "
            f"{report.tokens / one.seconds:10,.0f} {one.memory_bytes / GB:4.0f} GB  {compiled}{name_of(one.layout)}"
        )
    for one, reason in plan.rejected:
        text.append(f"{one.seconds:7.3f} s  rejected, {reason}: {name_of(one.layout)}")
    low, high = report.range(best)
    basis = "after the factor of the measured run" if report.scale else "without a measured run"
    text += [
        "",
        f"the first is limited by {report.limited_by(best)}; {basis}, nine of ten measured steps of other "
        f"frameworks took less than {high:.3g} s, and nine of ten more than {low:.3g} s",
        "time    " + _shares(best.cost.parts, best.seconds, "s", 1.0),
        "memory  " + _shares(best.memory, best.memory_bytes, "GB", GB),
    ]
    if len(plan.found) > 1:
        text.append(f"the second {why_slower(plan.found[1], best)}")
    if faster := _with_fewer_bytes(best, report):
        text.append(faster)
    if tokens:
        days = tokens / report.tokens * best.seconds / 86400
        cost = (
            f" · {days * 24 * machine.num_devices * price:,.0f} in all at {price:g} per device-hour"
        )
        text.append(f"{tokens:.3g} tokens take {days:.1f} days{cost if price else ''}")
    if launches(report.subject.work, best.layout, machine) > 0.3 * best.seconds:
        text.append(
            "the model is small: operations take about as long to start as to run, and such steps took twice the "
            "predicted time"
        )
    keys = overrides(best.layout)
    text += ["", *(f"  --config.{key}={value}" for key, value in keys.items())]
    return text


def _with_fewer_bytes(best: Candidate, report: Report, least: float = 0.03) -> str:
    """Returns what fewer bytes of gradients would save, if their sum over the network takes a part of the step."""
    p, machine = best.layout, report.machine
    axes = [axis for axis in ("data", *ZERO_AXES) if getattr(p, axis) > 1]
    over_network = any(
        machine.link_of(getattr(p, axis), p.stride(axis)) == "network" for axis in axes
    )
    if not over_network or best.cost.parts["gradients"] < least * best.seconds:
        return ""
    compressed = replace(p, sync=SyncConfig(wire="int8", pattern="hierarchical"))
    of_compressed, of_best = (
        step_cost(report.subject.work, layout, machine, report.subject.seq_len).seconds
        for layout in (compressed, p)
    )
    if of_compressed > (1 - least) * of_best:
        return ""
    return (
        f"the sum of gradients takes {best.cost.parts['gradients']:.3g} s over the network; with sync.wire=int8 and "
        f"sync.pattern=hierarchical a step would take {of_compressed / of_best * best.seconds:.3g} s, but rounds "
        f"gradients: docs/guides/slow_networks.md"
    )


def _shares(parts: dict[str, float], total: float, unit: str, size: float) -> str:
    shown = {name: value for name, value in parts.items() if value >= 0.005 * total}
    return " · ".join(f"{name} {value / size:.3g} {unit}" for name, value in shown.items())


def why_slower(one: Candidate, best: Candidate) -> str:
    """Returns by what a layout is slower than the best, largest difference first."""
    names = {**best.cost.parts, **one.cost.parts}
    gaps = {n: one.cost.parts.get(n, 0.0) - best.cost.parts.get(n, 0.0) for n in names}
    worst = max(gaps, key=gaps.get)
    if one.seconds <= best.seconds:
        return "is as fast within the error, and has more axes or needs more memory"
    return f"takes {one.seconds - best.seconds:.3g} s more, {gaps[worst]:.3g} s of it for {worst}"


def to_dict(plan: Plan, report: Report) -> dict[str, Any]:
    """Returns the plan for JSON."""

    def entry(one: Candidate) -> dict[str, Any]:
        low, high = report.range(one)
        return {
            "mesh": one.layout.sizes(),
            "overrides": overrides(one.layout),
            "step_seconds": one.seconds,
            "step_seconds_range": [low, high],
            "seconds": one.cost.parts,
            "mfu": report.mfu(one),
            "tokens_per_second": report.tokens / one.seconds,
            "memory_bytes": one.memory_bytes,
            "memory": one.memory,
            "compiled_memory_bytes": one.compiled_memory,
            "limited_by": report.limited_by(one),
        }

    rejected = [{**entry(one), "reason": reason} for one, reason in plan.rejected]
    return {
        "device": report.machine.device.name,
        "devices": report.machine.num_devices,
        "devices_per_host": report.machine.per_host,
        "memory_limit_bytes": report.limit,
        "scale": report.scale,
        "tried": plan.num_tried,
        "layouts": [entry(one) for one in plan.found],
        "rejected": rejected,
    }


COLUMNS = 40  # of a bar in the text

# In pixels.
NAMES, BARS, NUMBERS, ROW = 190, 420, 130, 22

COLOUR, INK = "#2f6db3", "#222222"


def explain_lines(one: Candidate, report: Report) -> Iterator[str]:
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


def explain_svg(one: Candidate, report: Report) -> str:
    """Returns the time line and the memory as a drawing."""
    time, memory = one.cost.parts, one.memory
    groups = (
        (f"{one.seconds:.3g} s a step", time, one.seconds, "s", 1.0),
        (f"{one.memory_bytes / GB:.3g} GB", memory, max(report.limit, one.memory_bytes), "GB", GB),
    )
    rows, y = [_svg_text(10, 20, name_of(one.layout))], 30
    for title, parts, total, unit, size in groups:
        y += ROW
        rows.append(_svg_text(10, y + 14, title))
        at = 0.0
        for name, value in parts.items():
            if value <= 0:
                continue
            y += ROW
            x, width = NAMES + BARS * at / total, max(1.0, BARS * value / total)
            rows.append(_svg_text(NAMES - 8, y + 14, name, anchor="end"))
            rows.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{COLOUR}"/>'
            )
            rows.append(_svg_text(NAMES + BARS + 8, y + 14, f"{value / size:.3g} {unit}"))
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


def _svg_text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
