"""Formats an audit as text of at most 100 columns."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshtrain.analysis.audit.ledger import Explanation
from meshtrain.analysis.audit.minimum import PARAMETER_GATHER
from meshtrain.analysis.audit.warn import axes_label

WIDTH = 100
MAX_WARNINGS = 20


def lines(audit: Any) -> Iterator[str]:
    """Yields the lines of an Audit: totals by axis, collectives, bytes above the minimum, warnings."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in audit.mesh.items() if size > 1)
    yield f"mesh {mesh or 'one device'} · {audit.device} · compiled for {audit.platform}"
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
    yield from _collectives(audit.explanations)
    yield from _differences(audit)
    yield ""
    yield f"{len(audit.warnings) or 'no'} warning{'s' * (len(audit.warnings) != 1)}"
    for warning in audit.warnings[:MAX_WARNINGS]:
        yield from _wrapped("! ", warning)
    if len(audit.warnings) > MAX_WARNINGS:
        yield f"! and {len(audit.warnings) - MAX_WARNINGS} more warnings, about fewer bytes"


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
        reason = "this program does not need them"
        if role == PARAMETER_GATHER:
            reason = (
                "parameters stay gathered for several passes or micro-batches, which costs memory"
            )
        text = f"{axes}: {role}: {num_bytes:,.0f} bytes that this layout may send are not sent: {reason}"
        yield from _wrapped("  note: ", text)
    notes = [explanation.collective.notes for explanation in audit.explanations]
    for note in sorted({note for each in notes for note in each}):
        count = sum(note in each for each in notes)
        yield from _wrapped("  note: ", f"{count} of the tensors: {note}")


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
    )
