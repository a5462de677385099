"""Rules that explain single collectives: of gradient buckets, slices, stages, sequences and experts."""

import math

from meshtrain.parallel.grad_sync import SCOPE
from meshtrain.tools.audit.layout import ShardedAttention, ShardedExperts
from meshtrain.tools.audit.minimum import (
    END_BROADCAST,
    GRADIENT_SUM,
    KEYS_AND_VALUES,
    LAYER_TRANSFER,
    RESULTS_OF_EXPERTS,
    STAGE_MESSAGES,
    SYNCHRONISED,
    TOKENS_OF_EXPERTS,
    ExplainedBytes,
    Explanation,
    RequiredBytes,
)
from meshtrain.tools.hlo.collective_ops import MESSAGE_NOTE, Collective


def synchronised_gradients(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a sum of gradients in buckets."""
    if f"/{SCOPE}/" not in c.op_name:
        return None
    claimed = min(c.bytes, ledger.unclaimed[SYNCHRONISED])
    ledger.unclaimed[SYNCHRONISED] -= claimed
    reason = "buckets are padded to a whole number of blocks for each device"
    return Explanation(c, GRADIENT_SUM, claimed, reason if claimed < c.bytes else "")


def synchronised_scalar(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what is sent of single numbers."""
    if c.array.size > 1:
        return None
    return Explanation(c, "scalars", 0, "metrics, and the norm of the gradient")


SYNC_RULES = synchronised_gradients, synchronised_scalar

TILE = 8 * 128  # elements


def padded_slice_transfer(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
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


def stage_message(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of a chunk's output, or its input's gradient, to the stage that uses it next."""
    if not _is_activation_between_stages(ledger, c, "collective-permute"):
        return None
    needs = _pipeline_needs(ledger, STAGE_MESSAGES)
    _, claimed = ledger.claim(c, needs, 1)
    if claimed > 0.99 * c.bytes:
        return Explanation(c, STAGE_MESSAGES, claimed)
    return ledger.explain_extra(c, STAGE_MESSAGES, needs, claimed)


def layer_transfer(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of layers or gradients between the stage that stores and the one that runs them."""
    if c.kind != "collective-permute" or c.axes != ("pipeline",):
        return None
    placement = ledger.placement
    for need in _pipeline_needs(ledger, LAYER_TRANSFER):
        for spec in (need.leaf.spec, need.leaf.grad_spec):
            size = math.prod(placement.local_shape(need.leaf, spec, ()))
            if c.array.size * placement.num_chunks != size:
                continue
            _, claimed = ledger.claim(c, [need], c.bytes / (need.bytes_once * c.count))
            reason = "exchanges in which some stages have nothing to send"
            reason = reason if claimed < c.bytes else ""
            return Explanation(c, LAYER_TRANSFER, claimed, reason, is_needed=claimed > 0)
    return None


def end_broadcast(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the broadcast of the last chunk's output, or of the gradient of the first chunk's input."""
    is_activation = _is_activation_between_stages(ledger, c, "all-reduce")
    if not is_activation or "/share/" not in c.op_name:
        return None
    if claimed := ledger.claim(c, _pipeline_needs(ledger, END_BROADCAST), 1)[1]:
        reason = "an all-reduce of one stage's values and zeros, where a broadcast would suffice"
        return Explanation(c, END_BROADCAST, claimed, reason if claimed < c.bytes else "")
    return None


PIPELINE_RULES = stage_message, layer_transfer, end_broadcast


def _is_activation_between_stages(ledger: ExplainedBytes, c: Collective, kind: str) -> bool:
    size = ledger.placement.num_tokens * ledger.placement.d_model
    return c.kind == kind and c.axes == ("pipeline",) and c.array.size == size > 0


def _pipeline_needs(ledger: ExplainedBytes, role: str) -> list[RequiredBytes]:
    return [need for need in ledger.needs if need.role == role]


SEGMENTS = "segments and positions of keys"

KINDS = {
    "ring": ("collective-permute",),
    "gather": ("all-gather", "collective-permute"),  # of keys and values; of their gradients
    "ulysses": ("all-to-all",),
}


def keys_and_values(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of keys, values and their gradients, by the method of context parallelism."""
    placement = ledger.placement
    attention = placement.attention
    if not c.axes or c.axes != placement.sequence_axes or c.origin or attention is None:
        return None
    padding = _sequence_padding(attention, c)
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


def segments(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of int32 numbers of tokens: segments and positions."""
    placement = ledger.placement
    if not c.axes or c.axes != placement.sequence_axes or c.array.dtype != "s32":
        return None
    if c.array.size > placement.num_tokens * placement.num_devices(c.axes):
        return None
    return Explanation(c, SEGMENTS, 0, "an int32 for each token, which travels with its keys")


def unknown_attention(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what the attention of a user's own model may send."""
    placement = ledger.placement
    is_other = (
        c.axes != placement.sequence_axes or c.origin or c.kind not in sum(KINDS.values(), ())
    )
    if not c.axes or is_other or placement.attention is not None:
        return None
    reason = "the model does not say how many heads its attention has, so its minimum is unknown"
    return Explanation(c, KEYS_AND_VALUES, 0, reason)


def sum_in_stages(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
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


SEQUENCE_RULES = segments, keys_and_values, unknown_attention


def _sequence_padding(attention: ShardedAttention, c: Collective) -> float:
    """Returns the elements of a tensor over those that attention sends as this tensor; 0 if it does not fit."""
    size = c.array.size / (attention.num_devices if c.kind == "all-gather" else 1)
    of_keys = attention.key_size, attention.value_size
    if attention.method == "ulysses":
        return float(size in (attention.query_size, attention.output_size, *of_keys))
    # Keys, or values, of an early or a late chunk.
    return attention.padding if size in [one * attention.padding / 2 for one in of_keys] else 0


ROUTING = "experts of tokens"

LAYER_LOSSES = "losses of the layers"

ROLES = {"all-gather": TOKENS_OF_EXPERTS, "all-to-all": RESULTS_OF_EXPERTS}


def tokens_and_results(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gather of the tokens of a group, or of their gradients, and the all-to-all that returns results."""
    placement, experts = ledger.placement, ledger.placement.experts
    size = _size_of_group(ledger, c)
    if experts is None or c.kind not in ROLES or size != placement.d_model:
        return None
    label = ROLES[c.kind]
    if "rematted" in c.op_name:
        reason = f"sent again, because train.remat={placement.remat} recomputes the layer"
        return Explanation(c, label, 0, reason)
    needs = [need for need in ledger.needs if need.role == label]
    asked, claimed = ledger.claim(c, needs[:1], 1)
    if claimed > 0.99 * asked:
        reason = _wide(c, claimed) or _instead_of_dispatch(experts)
        return Explanation(c, label, claimed * experts.necessary, reason)
    if extra := ledger.explain_extra(c, label, needs, claimed):
        return _with_dispatch(extra, experts)
    reason = "sent more often than the experts need"
    return Explanation(c, label, claimed * experts.necessary, reason, is_needed=False)


def _with_dispatch(extra: Explanation, experts: ShardedExperts) -> Explanation:
    """Returns the explanation of bytes beyond those `claimed`, with what a dispatch would not send of the latter."""
    c, claimed = extra.collective, extra.needed_bytes
    needed = claimed * experts.necessary
    parts = {reason: part * (c.bytes - claimed) for reason, part in extra.fractions.items()}
    if claimed > needed:
        parts[_instead_of_dispatch(experts)] = claimed - needed
    fractions = {reason: part / (c.bytes - needed) for reason, part in parts.items()}
    return Explanation(c, extra.label, needed, extra.reason, fractions=fractions)


def _instead_of_dispatch(experts: ShardedExperts) -> str:
    if experts.necessary == 1:
        return ""
    return (
        f"sent for all {experts.num_shards} shards of the experts; an all-to-all of each token to its "
        f"{experts.per_token} experts would send {experts.necessary:.4g} times as many bytes, if they are used equally"
    )


def _wide(c: Collective, claimed: float) -> str:
    return (
        f"sent as {c.array.dtype}, a wider dtype than necessary" if c.bytes > 1.01 * claimed else ""
    )


def routing(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the gather of the numbers and weights of each token's experts, and what returns their gradient."""
    experts = ledger.placement.experts
    if experts is None or c.origin or not c.axes:
        return None
    is_sum = c.kind == "all-reduce" and c.axes == experts.others
    is_sum = is_sum and c.array.size == ledger.placement.num_tokens * experts.per_token
    is_moved = c.kind in ROLES and _size_of_group(ledger, c) == experts.per_token
    if not is_sum and not is_moved:
        return None
    return Explanation(c, ROUTING, 0, "numbers and weights, which each token's devices need")


def scores(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the gather of the router's scores of all tokens, from which XLA on CPU chooses on every device."""
    experts = ledger.placement.experts
    if experts is None or c.kind != "all-gather" or "top_k" not in c.op_name:
        return None
    if c.array.size % experts.num_experts or c.origin:
        return None
    reason = "XLA on CPU gathers the router's scores of all tokens for top_k; on GPU it does not"
    return Explanation(c, ROUTING, 0, reason)


def layer_losses(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a pipeline sends for the loss that layers add to each token."""
    placement = ledger.placement
    is_loss = placement.experts is not None and c.array.size == placement.num_tokens
    if not is_loss or c.axes != ("pipeline",):
        return None
    if c.kind != "collective-permute" and "/share/" not in c.op_name:
        return None
    reason = "one number for each token, which travels with its activations"
    return Explanation(c, LAYER_LOSSES, 0, reason)


def layer_metrics(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the gather of the metrics of each layer from the stages, for process 0, which logs them."""
    is_of_layers = ledger.placement.experts is not None and c.array.size in _numbers_of_layers(
        ledger
    )
    if not is_of_layers or c.kind != "all-gather" or c.axes != ("pipeline",) or c.origin or c.phase:
        return None
    return Explanation(c, "scalars", 0, "metrics of each layer")


EXPERT_RULES = tokens_and_results, routing, scores, layer_losses, layer_metrics


def _numbers_of_layers(ledger: ExplainedBytes) -> set[int]:
    """Returns the numbers of layers of the stacks of the model."""
    return {leaf.shape[0] for leaf in ledger.placement.leaves if leaf.used_by == ("block",)}


def _size_of_group(ledger: ExplainedBytes, c: Collective) -> float:
    """Returns how many elements a collective over a group moves for each of its tokens; 0 for other collectives."""
    placement, experts = ledger.placement, ledger.placement.experts
    if experts is None or not c.axes or c.axes != experts.gathered or c.origin:
        return 0
    return c.array.size / (placement.num_tokens * experts.num_devices)
