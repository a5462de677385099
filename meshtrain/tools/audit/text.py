"""Formats an audit as text of at most 100 columns."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from meshtrain.tools.audit.minimum import PARAMETER_GATHER, Explanation
from meshtrain.tools.audit.warnings import axes_label

WIDTH = 100
MAX_WARNINGS = 20

MAX_OPERATIONS = 20


def lines(audit: Any) -> Iterator[str]:
    """Yields the lines of an Audit: totals, collectives, bytes above the minimum, warnings."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in audit.mesh.items() if size > 1)
    slices = f" · {audit.links.num_slices} slices" if audit.links.num_slices > 1 else ""
    yield f"mesh {mesh or 'one device'}{slices} · {audit.device} · compiled for {audit.platform}"
    yield f"{audit.param_bytes:,} bytes of parameters on each device"
    yield ""
    yield f"{'bytes each device sends in a step, over':44}{'bytes':>16}{'minimum':>16}{'ratio':>9}"
    for total in audit.axes:
        is_known = total.minimum is not None
        minimum = f"{total.minimum:>16,.0f}" if is_known else f"{'unknown':>16}"
        ratio = f"{total.ratio:>9.3f}" if total.ratio is not None else ""
        yield f"  {total.name:42}{total.bytes:>16,.0f}{minimum}{ratio}"
    if not audit.axes:
        yield "  nothing: no collective, and none needed"
    yield from _links(audit.links)
    yield from _collectives(audit.explanations)
    yield from _differences(audit)
    yield from _imbalance(audit.imbalance)
    yield from _memory(audit.memory)
    yield from (f"  {line}" for line in audit.ways_out)
    yield from _roofline(audit.roofline)
    yield ""
    yield f"{len(audit.warnings) or 'no'} warning{'s' * (len(audit.warnings) != 1)}"
    for warning in audit.warnings[:MAX_WARNINGS]:
        yield from _wrapped("! ", warning)
    if len(audit.warnings) > MAX_WARNINGS:
        yield f"! and {len(audit.warnings) - MAX_WARNINGS} more warnings, about fewer bytes"


def _links(links: Any) -> Iterator[str]:
    """Yields the bytes by link, if there is more than one link."""
    if links.num_hosts == 1 or not links.by_axes:
        return
    columns = {"host": "within a host", "hosts": "between hosts", "slices": "between slices"}
    if links.num_hosts == links.num_slices:
        # All hosts of a TPU slice share its fast network.
        columns = {"host": "within a slice", "slices": "between slices"}
    if links.num_slices == 1:
        del columns["slices"]
    yield ""
    heads = "".join(f"{name:>16}" for name in columns.values())
    yield f"{'of these bytes, over links':44}{heads}"
    for row in links.by_axes:
        cells = "".join(f"{getattr(row, link):>16,.0f}" for link in columns)
        yield f"  {row.axes:42}{cells}"
    leaving = {"hosts": links.leaving_host, "slices": links.leaving_slice}
    for link in [*columns][1:]:
        place = link.removesuffix("s")
        yield f"  {f'all devices of a {place} send to other {link}':42}{leaving[link]:>16,.0f}"


def _collectives(explanations: list[Explanation]) -> Iterator[str]:
    merged: dict[tuple, list[Explanation]] = defaultdict(list)
    for explanation in explanations:
        c = explanation.collective
        merged[axes_label(c.axes), explanation.label, c.kind, c.source].append(explanation)
    last = None
    for (axes, label, kind, source), group in sorted(merged.items(), key=lambda item: item[0]):
        if (axes, label) != last:
            yield ""
            yield f"{axes}: {label}"
            last = axes, label
        count = sum(explanation.collective.count for explanation in group)
        num_bytes = sum(explanation.collective.bytes for explanation in group)
        where = textwrap.shorten(source or "(no source line)", 50, placeholder="...")
        yield f"  {kind:20}{count:>6g} x{num_bytes / count:>13,.0f}  {where}"


def _differences(audit: Any) -> Iterator[str]:
    yield ""
    yield "bytes above the minimum"
    for axes, label, reason, num_bytes in audit.extra_bytes:
        yield from _wrapped(f"  {num_bytes:+15,.0f}  ", f"{axes}: {label}: {reason}")
    if not audit.extra_bytes:
        yield "  none"
    for axes, role, num_bytes in audit.unsent_bytes:
        if role == PARAMETER_GATHER:
            reason = (
                "parameters stay gathered for several passes or micro-batches, which costs memory"
            )
        else:
            reason = "this program does not need them"
        note = f"{num_bytes:,.0f} bytes that this layout may send are not sent: {reason}"
        yield from _wrapped("  note: ", f"{axes}: {role}: {note}")
    num_tensors = Counter()
    for explanation in audit.explanations:
        num_tensors.update({*explanation.collective.notes})
    for note, count in sorted(num_tensors.items()):
        yield from _wrapped("  note: ", f"{count} of the tensors: {note}")


def _imbalance(imbalance: Any) -> Iterator[str]:
    if imbalance is None:
        return
    yield ""
    yield f"most query/key pairs of a device over the mean: {imbalance.zigzag:.3f} (zigzag order)"
    contiguous = f"{imbalance.contiguous:.3f} with contiguous parts of sequences"
    yield from _wrapped("  ", f"{contiguous} · of {imbalance.of}")


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
    )


def _memory(memory: Any) -> Iterator[str]:
    if memory is None:
        return
    yield ""
    yield f"{'memory of each device, in the step':44}{'bytes':>16}"
    rows = [("parameters", memory.parameters), ("optimizer state", memory.optimizer_state)]
    if memory.residual:
        rows.append(("residual", memory.residual))
    rows += [
        ("batch", memory.batch),
        ("activations kept", memory.activations),
        ("gradients", memory.gradients),
        ("temporaries", memory.temporaries),
        ("peak", memory.peak),
    ]
    for label, num_bytes in rows:
        yield f"  {label:42}{num_bytes:>16,}"
    on_host = [
        ("in host memory: optimizer state", memory.optimizer_state_on_host),
        ("in host memory: activations kept", memory.activations_on_host),
    ]
    for label, num_bytes in on_host:
        if num_bytes:
            yield f"  {label:42}{num_bytes:>16,}"
    if memory.capacity:
        free = memory.capacity - memory.peak
        if memory.fits:
            verdict = f"fits: {free / 1e9:,.1f} GB free"
        else:
            verdict = f"does NOT fit: {-free / 1e9:,.1f} GB too much"
        yield f"  {'capacity':42}{memory.capacity:>16,.0f}  {verdict}"


def _roofline(roofline: Any) -> Iterator[str]:
    if roofline is None:
        return
    yield ""
    expected = roofline.expected
    title = f"roofline on {roofline.device}, of one step"
    heading = f"{title:32}{'TFLOPs':>12}{'GB of HBM':>12}{'ms at peak':>12}{'ms by rule':>12}"
    yield heading + (f"{'ms expected':>13}" if expected else "")
    for row in roofline.rows:
        times = f"{row.seconds * 1e3:>12,.2f}{row.ceiling_seconds * 1e3:>12,.2f}"
        times += f"{row.expected_seconds * 1e3:>13,.2f}" if expected else ""
        yield f"  {row.name:30}{row.flops / 1e12:>12,.3f}{row.hbm_bytes / 1e9:>12,.2f}{times}"
    for transfer in roofline.transfers:
        times = f"{transfer.seconds * 1e3:>12,.2f}{transfer.exposed * 1e3:>12,.2f}"
        # Nothing was measured about collectives: as by rule.
        times += f"{transfer.exposed * 1e3:>13,.2f}" if expected else ""
        link = f"{transfer.bytes / 1e9:,.2f} GB at {transfer.rate / 1e9:,.0f} GB/s"
        yield f"  {transfer.kind + ' over ' + transfer.name:30}{link:>24}{times}"
    total = f"a step takes at least {roofline.seconds * 1e3:,.2f} ms"
    if roofline.mfu:
        ceiling = f"MFU at most {roofline.mfu:.1%}"
    elif roofline.has_all_counts:
        ceiling = "no ceiling of MFU: the model does not count its FLOPs"
    else:
        ceiling = "no ceiling of MFU: see the note"
    yield from _wrapped("  ", f"{total} · {ceiling} · rule: {roofline.rule}")
    yield from _expected(roofline)
    if not roofline.has_all_counts:
        yield "  note: a loop of unknown length counts as one iteration: the figures are too low"
    if roofline.is_balanced:
        yield "  note: for balanced routing: rows of experts beyond an equal share are not counted"
    yield from _farthest(expected)
    yield ""
    yield f"{'GB of HBM':>9}{'runs':>7}  most bytes: group, pass, source, operation"
    for operation in roofline.operations[:MAX_OPERATIONS]:
        text = f"{operation.group}, {operation.phase}, {operation.source}, {operation.name}"
        yield f"{operation.hbm_bytes / 1e9:>9,.2f}{operation.runs:>7,.0f}  {text}"


def _expected(roofline: Any) -> Iterator[str]:
    """Yields the expected time and MFU, where they are from, and what is not covered by factors."""
    expected = roofline.expected
    if expected is None:
        yield (
            f"  no expected time: meshtrain/hardware.toml has no factors of kernels measured on "
            f"{roofline.device}"
        )
        return
    total = f"a step is expected to take {expected.seconds * 1e3:,.2f} ms"
    utilization = f" · MFU {expected.mfu:.1%}" if expected.mfu else ""
    how = "computed, not measured: the limit of each kernel times the factor of its kind"
    yield from _wrapped("  ", f"{total}{utilization} · {how}, from {expected.source}")
    without = [f"{seconds * 1e3:,.2f} ms of {kind}" for kind, seconds in expected.by_rule.items()]
    if without:
        yield from _wrapped("  ", f"by rule, as no factor was measured: {' · '.join(without)}")


def _farthest(expected: Any) -> Iterator[str]:
    """Yields the kernels whose expected time is most above their limit."""
    if expected is None or not expected.farthest:
        return
    yield ""
    yield f"{'ms above':>9}{'runs':>7}  farthest from their limit by rule: kind, pass, source"
    for row in expected.farthest:
        text = f"{row.kind}, {row.phase}, {row.source}"
        yield f"{row.above_seconds * 1e3:>9,.2f}{row.runs:>7,.0f}  {text}"
