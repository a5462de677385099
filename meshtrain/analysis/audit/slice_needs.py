"""Explains the messages between TPU slices whose shape says little, because XLA pads them to tiles."""

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import GRADIENT_SUM
from meshtrain.analysis.collective_ops import MESSAGE_NOTE, Collective

TILE = 8 * 128  # elements


def padded(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains a padded sum over axes between slices, along which gradients are summed; or of metrics, in one tile.

    The larger messages claim the bytes that are needed, so padding is reported for the smaller ones.
    """
    if MESSAGE_NOTE not in c.notes or c.kind != "all-reduce":
        return None
    axes, claimed = {*(c.axes or "-")}, 0.0
    needs = [one for one in ledger.needs if one.role == GRADIENT_SUM and {*one.axes} <= axes]
    for need in needs:
        part = min(c.bytes - claimed, ledger.unclaimed[need.key])
        ledger.unclaimed[need.key] -= part
        claimed += part
    reason = "padded to tiles of 8 x 128 elements" if claimed < c.bytes else ""
    if not claimed and c.array.size <= TILE:
        return Explanation(c, "scalars", 0, reason)
    return Explanation(c, GRADIENT_SUM, claimed, reason) if needs else None
