"""An audit as text within 100 columns."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshtrain.analysis.audit.ledger import Explained
from meshtrain.analysis.audit.minimum import GATHERED
from meshtrain.analysis.audit.warn import name_of

WIDTH = 100
MOST = 20  # warnings


def lines(audit: Any) -> Iterator[str]:
    """Yields the lines of an Audit: totals by axis, what moves, why more than the least, warnings."""
    used = " x ".join(f"{axis} {size}" for axis, size in audit.mesh.items() if size > 1)
    yield f"mesh {used or 'one device'} · {audit.device} · compiled for {audit.platform}"
    yield f"{audit.held:,} bytes of parameters on each device"
    yield ""
    yield f"{'bytes each device sends in a step, over':44}{'bytes':>16}{'minimum':>16}{'ratio':>9}"
    for total in audit.axes:
        known = total.minimum is not None
        least = f"{total.minimum:>16,.0f}" if known else f"{'unknown':>16}"
        ratio = f"{total.ratio:>9.3f}" if total.ratio is not None else ""
        yield f"  {total.name:42}{total.bytes:>16,.0f}{least}{ratio}"
    if not audit.axes:
        yield "  nothing: no collective, and none needed"
    yield from _moves(audit.explained)
    yield from _differences(audit)
    yield ""
    yield f"{len(audit.warnings) or 'no'} warning{'s' * (len(audit.warnings) != 1)}"
    for warning in audit.warnings[:MOST]:
        yield from _wrapped("! ", warning)
    if len(audit.warnings) > MOST:
        yield f"! and {len(audit.warnings) - MOST} more, of fewer bytes"


def _moves(explained: list[Explained]) -> Iterator[str]:
    merged: dict[tuple, list[Explained]] = defaultdict(list)
    for one in explained:
        c = one.collective
        merged[name_of(c.axes), one.label, c.kind, c.source].append(one)
    last = None
    for (axes, label, kind, source), group in sorted(merged.items(), key=lambda item: item[0]):
        if (axes, label) != last:
            yield ""
            yield f"{axes}: {label}"
            last = axes, label
        count = sum(one.collective.count for one in group)
        moved = sum(one.collective.bytes for one in group)
        where = textwrap.shorten(source or "(no source line)", 50, placeholder="...")
        yield f"  {kind:20}{count:>6g} x{moved / count:>13,.0f}  {where}"


def _differences(audit: Any) -> Iterator[str]:
    yield ""
    yield "beyond the minimum"
    for name, label, reason, moved in audit.excess:
        yield from _wrapped(f"  {moved:+15,.0f}  ", f"{name}: {label}: {reason}")
    if not audit.excess:
        yield "  nothing"
    for name, role, kept in audit.saved:
        text = f"{name}: {role}: {kept:,.0f} bytes less than the layout has room for: "
        gathered = "kept whole for more than one pass or micro-batch, which takes memory"
        why = gathered if role == GATHERED else "this program does without"
        yield from _wrapped("  note: ", text + why)
    for note in sorted({note for one in audit.explained for note in one.collective.notes}):
        count = sum(note in one.collective.notes for one in audit.explained)
        yield from _wrapped("  note: ", f"{count} of the tensors: {note}")


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
    )
