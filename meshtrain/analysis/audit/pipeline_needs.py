"""Explains the collectives that a pipeline runs between its stages."""

import math

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import END_BROADCAST, LAYER_TRANSFER, STAGE_MESSAGES, Need
from meshtrain.analysis.collective_ops import Collective


def stage_message(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the transfer of a chunk's output, or its input's gradient, to the stage that uses it next."""
    if not _is_activation_between_stages(ledger, c, "collective-permute"):
        return None
    needs = _needs(ledger, STAGE_MESSAGES)
    _, claimed = ledger.claim(c, needs, 1)
    if claimed > 0.99 * c.bytes:
        return Explanation(c, STAGE_MESSAGES, claimed)
    return ledger.explain_extra(c, STAGE_MESSAGES, needs, claimed)


def layer_transfer(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the transfer of layers or gradients between the stage that stores and the one that runs them."""
    if c.kind != "collective-permute" or c.axes != ("pipeline",):
        return None
    placement = ledger.placement
    for need in _needs(ledger, LAYER_TRANSFER):
        for spec in (need.leaf.spec, need.leaf.grad_spec):
            size = math.prod(placement.local_shape(need.leaf, spec, ()))
            if c.array.size * placement.num_chunks != size:
                continue
            _, claimed = ledger.claim(c, [need], c.bytes / (need.bytes_once * c.count))
            reason = "exchanges in which some stages have nothing to send"
            reason = reason if claimed < c.bytes else ""
            return Explanation(c, LAYER_TRANSFER, claimed, reason, is_needed=claimed > 0)
    return None


def end_broadcast(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the broadcast of the last chunk's output, or of the gradient of the first chunk's input."""
    is_activation = _is_activation_between_stages(ledger, c, "all-reduce")
    if not is_activation or "/share/" not in c.op_name:
        return None
    if claimed := ledger.claim(c, _needs(ledger, END_BROADCAST), 1)[1]:
        reason = "an all-reduce of one stage's values and zeros, where a broadcast would suffice"
        return Explanation(c, END_BROADCAST, claimed, reason if claimed < c.bytes else "")
    return None


RULES = stage_message, layer_transfer, end_broadcast


def _is_activation_between_stages(ledger: Ledger, c: Collective, kind: str) -> bool:
    size = ledger.placement.num_tokens * ledger.placement.d_model
    return c.kind == kind and c.axes == ("pipeline",) and c.array.size == size > 0


def _needs(ledger: Ledger, role: str) -> list[Need]:
    return [need for need in ledger.needs if need.role == role]
