"""Explains the collectives that add gradients in buckets, as `parallel.sync.Sync` does, and those that add metrics."""

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import GRADIENT_SUM, SYNCHRONISED
from meshtrain.analysis.collective_ops import Collective
from meshtrain.parallel.sync import SCOPE


def synchronised(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains a sum of gradients in buckets."""
    if f"/{SCOPE}/" not in c.op_name:
        return None
    claimed = min(c.bytes, ledger.unclaimed[SYNCHRONISED])
    ledger.unclaimed[SYNCHRONISED] -= claimed
    reason = "buckets are padded to a whole number of blocks for each device"
    return Explanation(c, GRADIENT_SUM, claimed, reason if claimed < c.bytes else "")


def scalar(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains what is sent of single numbers."""
    if c.array.size > 1:
        return None
    return Explanation(c, "scalars", 0, "metrics, and the norm of the gradient")


RULES = synchronised, scalar
