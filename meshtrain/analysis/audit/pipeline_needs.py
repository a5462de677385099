"""What is for the pipeline, of the collectives of a step: between stages, not within them."""

import math

from meshtrain.analysis.audit.ledger import Explained, Ledger
from meshtrain.analysis.audit.minimum import MESSAGES, MOVED, SHARED, Need
from meshtrain.analysis.collective_ops import Collective


def message(ledger: Ledger, c: Collective) -> Explained | None:
    """What a chunk makes, or the gradient of its input, on the way to the stage that goes on with it."""
    if not _between_stages(ledger, c, "collective-permute"):
        return None
    needs = _needs(ledger, MESSAGES)
    _, taken = ledger.take(c, needs, 1)
    if taken > 0.99 * c.bytes:
        return Explained(c, MESSAGES, taken)
    return ledger.beyond(c, MESSAGES, needs, taken)


def moved(ledger: Ledger, c: Collective) -> Explained | None:
    """Layers, or their gradients, between where they live and where they run."""
    if c.kind != "collective-permute" or c.axes != ("pipeline",):
        return None
    plan = ledger.plan
    for need in _needs(ledger, MOVED):
        for dims in (need.leaf.dims, need.leaf.grad_dims):
            if c.array.size * plan.num_chunks != math.prod(plan.local(need.leaf, dims, ())):
                continue
            _, taken = ledger.take(c, [need], c.bytes / (need.once * c.count))
            why = "in exchanges in which some stages give nothing" if taken < c.bytes else ""
            return Explained(c, MOVED, taken, why, called_for=taken > 0)
    return None


def shared(ledger: Ledger, c: Collective) -> Explained | None:
    """The last chunk's output for the head, and the gradient of the first's input for the table."""
    if not _between_stages(ledger, c, "all-reduce") or "/share/" not in c.op_name:
        return None
    if taken := ledger.take(c, _needs(ledger, SHARED), 1)[1]:
        why = "a sum of one stage's values and zeros, where a broadcast would do"
        return Explained(c, SHARED, taken, why if taken < c.bytes else "")
    return None


def _between_stages(ledger: Ledger, c: Collective, kind: str) -> bool:
    plan = ledger.plan
    size = plan.tokens * plan.width
    return c.kind == kind and c.axes == ("pipeline",) and c.array.size == size > 0


def _needs(ledger: Ledger, role: str) -> list[Need]:
    return [need for need in ledger.needs if need.role == role]
