"""Explains what devices that hold parts of the same sequences send to each other."""

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import GRADIENT_SUM, KEYS_AND_VALUES
from meshtrain.analysis.audit.placement import ShardedAttention
from meshtrain.analysis.collective_ops import Collective

SEGMENTS = "segments and positions of keys"
KINDS = {
    "ring": ("collective-permute",),
    "gather": ("all-gather", "collective-permute"),  # of keys and values; of their gradients
    "ulysses": ("all-to-all",),
}


def keys_and_values(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the transfer of keys, values and their gradients, by the method of context parallelism."""
    placement = ledger.placement
    attention = placement.attention
    if not c.axes or c.axes != placement.sequence_axes or c.origin or attention is None:
        return None
    padding = _padding(attention, c)
    if c.kind not in KINDS[attention.method] or not padding:
        return None
    if "rematted" in c.op_name:
        reason = f"sent again, because train.remat={placement.remat} recomputes attention"
        return Explanation(c, KEYS_AND_VALUES, 0, reason)
    needs = [need for need in ledger.needs if need.role == KEYS_AND_VALUES]
    _, claimed = ledger.claim(c, needs[:1], c.bytes / padding / (needs[0].bytes_once * c.count))
    if claimed > 0.99 * c.bytes / padding:
        reason = "chunks are padded to a multiple of the block size" if padding > 1 else ""
        return Explanation(c, KEYS_AND_VALUES, claimed, reason)
    if extra := ledger.explain_extra(c, KEYS_AND_VALUES, needs, claimed):
        return extra
    reason = f"sent more often than context.method={attention.method} needs"
    return Explanation(c, KEYS_AND_VALUES, claimed, reason, is_needed=False)


def segments(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the transfer of int32 numbers of tokens: segments and positions."""
    placement = ledger.placement
    if not c.axes or c.axes != placement.sequence_axes or c.array.dtype != "s32":
        return None
    if c.array.size > placement.num_tokens * placement.num_devices(c.axes):
        return None
    return Explanation(c, SEGMENTS, 0, "an int32 for each token, which travels with its keys")


def unknown_attention(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains what the attention of a user's own model may send."""
    placement = ledger.placement
    is_other = (
        c.axes != placement.sequence_axes or c.origin or c.kind not in sum(KINDS.values(), ())
    )
    if not c.axes or is_other or placement.attention is not None:
        return None
    reason = "the model does not say how many heads its attention has, so its minimum is unknown"
    return Explanation(c, KEYS_AND_VALUES, 0, reason)


def sum_in_stages(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains a gradient that is summed over fsdp and over the axes of a sequence one after the other."""
    placement, axes = ledger.placement, {*(c.axes or ())}
    is_sum = c.kind in ("all-reduce", "reduce-scatter")
    if not placement.sequence_axes or not axes or not is_sum or c.phase != "backward":
        return None
    for need in ledger.needs:
        if need.role != GRADIENT_SUM or not axes < {*need.axes}:
            continue
        gathered = placement.token_axes_of(need.leaf)
        shape = placement.local_shape(need.leaf, need.leaf.grad_spec, gathered)
        dims = shape[need.leaf.is_stacked :]
        if sorted(n for n in c.array.shape if n > 1) == sorted(n for n in dims if n > 1):
            _, claimed = ledger.claim(c, [need], 1)
            over = " and ".join(need.axes)
            reason = f"summed over {over} one after the other, then sliced"
            return Explanation(c, GRADIENT_SUM, claimed, f"{reason}: not one reduce-scatter")
    return None


RULES = segments, keys_and_values, unknown_attention


def _padding(attention: ShardedAttention, c: Collective) -> float:
    """Returns the elements of a tensor over those that attention sends as this tensor; 0 if it does not fit."""
    size = c.array.size / (attention.num_devices if c.kind == "all-gather" else 1)
    of_keys = attention.key_size, attention.value_size
    if attention.method == "ulysses":
        return float(size in (attention.query_size, attention.output_size, *of_keys))
    # Keys, or values, of an early or a late chunk.
    return attention.padding if size in [one * attention.padding / 2 for one in of_keys] else 0
