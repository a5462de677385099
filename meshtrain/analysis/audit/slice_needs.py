"""Explains the messages between TPU slices whose shape says little, because XLA pads them to tiles."""

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import GRADIENT_SUM
from meshtrain.analysis.collective_ops import MESSAGE_NOTE, Collective

TILE = 8 * 128  # elements


def padded(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains a padded sum over the axes between slices: gradients that no collective has claimed, or scalars."""
    if MESSAGE_NOTE not in c.notes or c.kind != "all-reduce":
        return None
    claimed = 0.0
    for need in ledger.needs:
        if need.role == GRADIENT_SUM and {*need.axes} <= {*(c.axes or "-")}:
            part = min(c.bytes - claimed, ledger.unclaimed[need.key])
            ledger.unclaimed[need.key] -= part
            claimed += part
    reason = "padded to tiles of 8 x 128 elements"
    if claimed:
        return Explanation(c, GRADIENT_SUM, claimed, reason if claimed < c.bytes else "")
    return Explanation(c, "scalars", 0, reason) if c.array.size <= TILE else None
