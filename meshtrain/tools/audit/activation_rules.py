"""Rules that explain collectives of activations and of scalars."""

from collections.abc import Mapping

from meshtrain.tools.audit.layout import ShardedAttention, ShardedExperts
from meshtrain.tools.audit.minimum import (
    ACTIVATIONS,
    DISPATCHED,
    END_BROADCAST,
    KEYS_AND_VALUES,
    RECOMPUTED,
    RESULTS_OF_EXPERTS,
    SEPARATE_INPUT_GRADIENTS,
    SOFTMAX_STATISTICS,
    STAGE_MESSAGES,
    TOKENS_OF_EXPERTS,
    ExplainedBytes,
    Explanation,
    RequiredBytes,
    row_and_column_parallel,
    wide_dtype_reason,
)
from meshtrain.tools.hlo.collective_ops import Collective

# Labels of what has no minimum.
SEGMENTS = "segments and positions of keys"
ROUTING = "experts of tokens"
LAYER_LOSSES = "losses of the layers"

# ---- axes that shard the model ----


def activation_sum(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains sums or gathers of activations between blocks, or of the softmax statistics."""
    placement, axes = ledger.placement, c.axes or ()
    if not placement.has_blocks or not axes or c.origin or not {*axes} <= {*placement.model_axes}:
        return None
    kinds = ("all-reduce", "reduce-scatter", "all-gather")
    if c.kind not in (kinds[:2] if "pipeline" in axes else kinds):
        return None
    needs = {need.role: need for need in ledger.needs if need.leaf is None and need.axes == axes}
    statistics = needs.get(SOFTMAX_STATISTICS)
    if c.array.size == placement.num_tokens and statistics:
        _, claimed = ledger.claim(c, [statistics], 1)
        if claimed:
            return Explanation(c, SOFTMAX_STATISTICS, claimed, wide_dtype_reason(c))
    if c.array.size != placement.num_tokens * placement.d_model:
        return None
    if "rematted" in c.op_name:
        reason = f"summed or gathered again, because train.remat={placement.remat} recomputes it"
        return Explanation(c, "recomputed activations", 0, reason)
    if placement.pipeline_keep == "inputs" and c.phase == "forward" and "pipeline" not in axes:
        return Explanation(c, "recomputed activations", 0, RECOMPUTED)
    return _claim_activation(ledger, c, needs)


def _claim_activation(
    ledger: ExplainedBytes, c: Collective, needs: Mapping[str, RequiredBytes]
) -> Explanation | None:
    # An all-gather or a reduce-scatter does half the work of an all-reduce.
    fraction = 1 if c.kind == "all-reduce" else 0.5
    claimed = 0.0
    if need := needs.get(ACTIVATIONS):
        asked, claimed = ledger.claim(c, [need], fraction)
        if claimed > 0.99 * asked:
            return Explanation(c, ACTIVATIONS, claimed, wide_dtype_reason(c))
        if extra := ledger.explain_extra(c, ACTIVATIONS, [need], claimed):
            return extra
        fraction *= 1 - claimed / asked
    need = needs.get(SEPARATE_INPUT_GRADIENTS)
    if c.phase == "backward" and need:
        asked, separate = ledger.claim(c, [need], fraction)
        if separate > 0.99 * asked:
            _, leaves = row_and_column_parallel(ledger.placement, *need.axes)
            names = [leaf.name.removesuffix("/kernel").split("/")[-1] for leaf in leaves]
            reason = (
                f"matrices with the same input ({', '.join(names)}) all-reduce its gradient "
                "separately; one all-reduce of the sum would suffice "
                "(XLA does so on TPU, not on CPU)"
            )
            return Explanation(c, SEPARATE_INPUT_GRADIENTS, claimed, reason)
        total = claimed + separate
        if extra := ledger.explain_extra(c, SEPARATE_INPUT_GRADIENTS, [need], total):
            return extra
    if not claimed:
        return None
    reason = "summed more often than the row-parallel matrices need"
    return Explanation(c, ACTIVATIONS, claimed, reason, is_needed=False)


def loss_function(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a model that is only a loss function sends over the axes of its parameters."""
    placement = ledger.placement
    if placement.has_blocks or c.origin or not {*(c.axes or "-")} <= {*placement.model_axes}:
        return None
    reason = "the model is a loss function without blocks, so its minimum is unknown"
    return Explanation(c, "partial results of your loss", 0, reason)


def scalar(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what is sent of single numbers."""
    if c.array.size > 1:
        return None
    return Explanation(c, "scalars", 0, "metrics, and the norm of the gradient")


# ---- pipeline stages ----


def stage_message(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of a chunk's output, or its input's gradient, to the next stage."""
    if c.kind != "collective-permute" or not _is_activation_between_stages(ledger, c):
        return None
    needs = ledger.of_role(STAGE_MESSAGES)
    _, claimed = ledger.claim(c, needs, 1)
    if claimed > 0.99 * c.bytes:
        return Explanation(c, STAGE_MESSAGES, claimed)
    return ledger.explain_extra(c, STAGE_MESSAGES, needs, claimed)


def end_broadcast(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the broadcast of the last chunk's output, or of the first's input gradient."""
    return end_broadcast_by_size(ledger, c) if "/share/" in c.op_name else None


def end_broadcast_by_size(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what `end_broadcast` does: XLA may give the sum the name of what reads it."""
    if c.kind != "all-reduce" or not _is_activation_between_stages(ledger, c):
        return None
    _, claimed = ledger.claim(c, ledger.of_role(END_BROADCAST), 1)
    if not claimed:
        return None
    reason = ""
    if claimed < c.bytes:
        reason = "an all-reduce of one stage's values and zeros, where a broadcast would suffice"
    return Explanation(c, END_BROADCAST, claimed, reason)


def _is_activation_between_stages(ledger: ExplainedBytes, c: Collective) -> bool:
    size = ledger.placement.num_tokens * ledger.placement.d_model
    return c.axes == ("pipeline",) and c.array.size == size > 0


# ---- parts of sequences ----

# The collectives of each method of context parallelism.
METHOD_KINDS = {
    "ring": ("collective-permute",),
    "gather": ("all-gather", "collective-permute"),  # of keys and values; of their gradients
    "ulysses": ("all-to-all",),
}


def keys_and_values(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of keys, values and their gradients, by the method of context."""
    placement = ledger.placement
    attention = placement.attention
    if not c.axes or c.axes != placement.sequence_axes or c.origin or attention is None:
        return None
    padding = _sequence_padding(attention, c)
    if c.kind not in METHOD_KINDS[attention.method] or not padding:
        return None
    if "rematted" in c.op_name:
        reason = f"sent again, because train.remat={placement.remat} recomputes attention"
        return Explanation(c, KEYS_AND_VALUES, 0, reason)
    needs = ledger.of_role(KEYS_AND_VALUES)
    unpadded = c.bytes / padding
    _, claimed = ledger.claim(c, needs[:1], unpadded / (needs[0].bytes_once * c.count))
    if claimed > 0.99 * unpadded:
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
    if not c.axes or c.axes != placement.sequence_axes or c.origin:
        return None
    is_known_kind = any(c.kind in kinds for kinds in METHOD_KINDS.values())
    if placement.attention is not None or not is_known_kind:
        return None
    reason = "the model does not say how many heads its attention has, so its minimum is unknown"
    return Explanation(c, KEYS_AND_VALUES, 0, reason)


def _sequence_padding(attention: ShardedAttention, c: Collective) -> float:
    """Returns the elements of a tensor over those that attention needs; 0 if it does not fit."""
    size = c.array.size / (attention.num_devices if c.kind == "all-gather" else 1)
    kv_sizes = (attention.key_size, attention.value_size)
    if attention.method == "ulysses":
        return float(size in (attention.query_size, attention.output_size, *kv_sizes))
    if attention.is_fused:
        return float(size in kv_sizes)
    # Keys, or values, of an early or a late chunk.
    chunk_sizes = [kv_size * attention.padding / 2 for kv_size in kv_sizes]
    return attention.padding if size in chunk_sizes else 0


# ---- experts ----

ROLES = {
    ("gather", "all-gather"): TOKENS_OF_EXPERTS,
    ("gather", "all-to-all"): RESULTS_OF_EXPERTS,
    ("dispatch", "all-to-all"): DISPATCHED,
}


def tokens_and_results(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a group sends for its experts: tokens, results, and the gradients of both."""
    placement, experts = ledger.placement, ledger.placement.experts
    if experts is None or (experts.method, c.kind) not in ROLES:
        return None
    if _elements_per_token(ledger, c) != placement.d_model:
        return None
    label = ROLES[experts.method, c.kind]
    if "rematted" in c.op_name:
        reason = f"sent again, because train.remat={placement.remat} recomputes the layer"
        return Explanation(c, label, 0, reason)
    needs = ledger.of_role(label)
    asked, claimed = ledger.claim(c, needs[:1], 1)
    if claimed > 0.99 * asked:
        is_wide = c.bytes > 1.01 * claimed
        reason = wide_dtype_reason(c) if is_wide else _more_than_needed(experts)
        return Explanation(c, label, claimed * experts.necessary, reason)
    if extra := ledger.explain_extra(c, label, needs, claimed):
        return _with_needed(extra, experts)
    reason = "sent more often than the experts need"
    return Explanation(c, label, claimed * experts.necessary, reason, is_needed=False)


def _with_needed(extra: Explanation, experts: ShardedExperts) -> Explanation:
    """Returns an explanation whose needed bytes are only those of tokens that are needed."""
    c, claimed = extra.collective, extra.needed_bytes
    needed = claimed * experts.necessary
    extra_bytes = {
        reason: fraction * (c.bytes - claimed) for reason, fraction in extra.fractions.items()
    }
    if claimed > needed:
        extra_bytes[_more_than_needed(experts)] = claimed - needed
    fractions = {
        reason: num_bytes / (c.bytes - needed) for reason, num_bytes in extra_bytes.items()
    }
    return Explanation(c, extra.label, needed, extra.reason, fractions=fractions)


def _more_than_needed(experts: ShardedExperts) -> str:
    if experts.necessary == 1:
        return ""
    if experts.method == "dispatch":
        return (
            f"buffers have {1 / experts.necessary:.4g} times the places that tokens fill, if all "
            "experts are used equally"
        )
    return (
        f"sent for all {experts.num_shards} shards of the experts; an all-to-all of each token to "
        f"its {experts.per_token} experts would send {experts.necessary:.4g} times as many bytes, "
        f"if they are used equally"
    )


def routing(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what is sent of each token's experts, numbers and weights, and its gradient."""
    experts = ledger.placement.experts
    if experts is None or c.origin or not c.axes:
        return None
    if c.kind == "all-reduce":
        num_routes = ledger.placement.num_tokens * experts.per_token
        is_routing = c.axes == experts.others and c.array.size == num_routes
    else:
        sizes = [experts.per_token]
        if experts.method == "dispatch":
            sizes = [experts.num_routes, 2 * experts.num_routes]  # XLA may leave out the numbers
        is_routing = (experts.method, c.kind) in ROLES and _elements_per_token(ledger, c) in sizes
    if not is_routing:
        return None
    return Explanation(c, ROUTING, 0, "numbers and weights, which each token's devices need")


def router_scores(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the gather of all router scores, from which XLA on CPU chooses on every device."""
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
    if placement.experts is None or c.axes != ("pipeline",):
        return None
    if c.array.size != placement.num_tokens:
        return None
    if c.kind != "collective-permute" and "/share/" not in c.op_name:
        return None
    reason = "one number for each token, which travels with its activations"
    return Explanation(c, LAYER_LOSSES, 0, reason)


def layer_metrics(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the gather of each layer's metrics for process 0, which logs them."""
    placement = ledger.placement
    if placement.experts is None or c.kind != "all-gather" or c.axes != ("pipeline",):
        return None
    # One number per layer of a stack.
    stack_sizes = {leaf.shape[0] for leaf in placement.leaves if leaf.is_stacked}
    if c.origin or c.phase or c.array.size not in stack_sizes:
        return None
    return Explanation(c, "scalars", 0, "metrics of each layer")


def _elements_per_token(ledger: ExplainedBytes, c: Collective) -> float:
    """Returns how many elements a collective over a group moves for each token; 0 for others."""
    experts = ledger.placement.experts
    if experts is None or not c.axes or c.axes != experts.gathered or c.origin:
        return 0
    return c.array.size / (experts.num_places * experts.num_devices)
