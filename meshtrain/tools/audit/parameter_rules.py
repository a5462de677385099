"""Rules that explain collectives of parameters and gradients."""

import math
from collections.abc import Iterator, Sequence

from meshtrain.parallel.grad_sync import SCOPE
from meshtrain.tools.audit.layout import Leaf, Placement, Spec
from meshtrain.tools.audit.minimum import (
    GRADIENT_SUM,
    LAYER_TRANSFER,
    PARAMETER_GATHER,
    SYNCHRONISED,
    UPDATE_GATHER,
    ExplainedBytes,
    Explanation,
    RequiredBytes,
    wide_dtype_reason,
)
from meshtrain.tools.hlo.collective_ops import MESSAGE_NOTE, Collective

TILE = 8 * 128  # elements

# ---- gathers of parameters ----


def parameter_gather(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gather of a parameter, sharded over axes of tokens, for computing with it."""
    placement = ledger.placement
    candidates = [
        (need, leaf, fraction)
        for need, leaf, fraction in _gathered_candidates(ledger, c, PARAMETER_GATHER)
        if c.origin in ("", leaf.argument)
    ]
    same_shape = []
    for need, leaf, fraction in candidates:
        shape = placement.local_shape(leaf, leaf.spec, c.axes)
        if has_shape(c, shape, leaf):
            same_shape.append((need, leaf, fraction))
    tried = same_shape or candidates
    claimed = 0.0
    for need, leaf, fraction in tried:
        # Later candidates claim only what the earlier ones left.
        claimed += ledger.claim(c, [need], fraction * (1 - claimed / c.bytes))[1]
        if claimed > 0.99 * c.bytes:
            return Explanation(c, PARAMETER_GATHER, claimed)
        if claimed and c.itemsize > leaf.compute_itemsize:
            return Explanation(c, PARAMETER_GATHER, claimed, wide_dtype_reason(c))
    needs = [need for need, _, _ in same_shape]
    if extra := ledger.explain_extra(c, PARAMETER_GATHER, needs, claimed):
        return extra
    if tried and (c.origin or claimed):
        _, leaf, _ = tried[-1]
        is_tied = len(leaf.used_by) > 1
        is_recomputed = "rematted" in c.op_name
        reason = f"{leaf.name} is gathered more than once in a pass"
        reason += f", by {' and '.join(leaf.used_by)}" if is_tied else ""
        reason += f", recomputed for train.remat={placement.remat}" if is_recomputed else ""
        is_needed = is_tied or is_recomputed
        return Explanation(c, PARAMETER_GATHER, claimed, reason, is_needed=is_needed)
    return None


def update_gather(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gather of a parameter whose shards were updated on different devices."""
    if c.origin or c.phase:
        return None
    for need, _, fraction in _gathered_candidates(ledger, c, UPDATE_GATHER):
        _, claimed = ledger.claim(c, [need], fraction)
        if claimed:
            return Explanation(c, UPDATE_GATHER, claimed, wide_dtype_reason(c))
    return None


def _gathered_candidates(
    ledger: ExplainedBytes, c: Collective, role: str
) -> Iterator[tuple[RequiredBytes, Leaf, float]]:
    """Yields the needs that a gather of this size may serve, the leaf and the fraction of each."""
    if c.kind != "all-gather":
        return
    for need, leaf in ledger.of_parameters(role):
        if not {*(c.axes or "-")} <= {*need.axes}:
            continue
        spec = leaf.spec if role == PARAMETER_GATHER else leaf.moment_spec
        fraction = _fraction_of_leaf(ledger.placement, c, leaf, spec)
        if fraction:
            yield need, leaf, fraction


def layer_transfer(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains the transfer of layers to the stage that runs them, or of gradients back."""
    if c.kind != "collective-permute" or c.axes != ("pipeline",):
        return None
    placement = ledger.placement
    for need, leaf in ledger.of_parameters(LAYER_TRANSFER):
        for spec in (leaf.spec, leaf.grad_spec):
            size = math.prod(placement.local_shape(leaf, spec, ()))
            if c.array.size * placement.num_chunks != size:
                continue
            _, claimed = ledger.claim(c, [need], c.bytes / (need.bytes_once * c.count))
            reason = ""
            if claimed < c.bytes:
                reason = "exchanges in which some stages have nothing to send"
            return Explanation(c, LAYER_TRANSFER, claimed, reason, is_needed=claimed > 0)
    return None


# ---- sums of gradients ----


def bucketed_sum(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a sum of gradients in the buckets of `parallel.grad_sync`."""
    if f"/{SCOPE}/" not in c.op_name:
        return None
    claimed = min(c.bytes, ledger.unclaimed[SYNCHRONISED])
    ledger.unclaimed[SYNCHRONISED] -= claimed
    reason = "buckets are padded to a whole number of blocks for each device"
    return Explanation(c, GRADIENT_SUM, claimed, reason if claimed < c.bytes else "")


def gradient_sum(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a sum of a parameter's gradient over devices with different tokens."""
    candidates = [
        (fraction, leaf) for same, fraction, leaf in _gradient_candidates(ledger, c) if same
    ]
    if not {*(c.axes or ())} <= {*ledger.placement.deferred_axes}:
        # A sum in each micro-batch is of one layer rather than of a stack.
        candidates.sort(key=lambda candidate: candidate[0])
    if explanation := _claim_gradient_sum(ledger, c, candidates):
        return explanation
    for _, leaf in candidates:
        if len(leaf.used_by) > 1:
            reason = f"{leaf.name} is used by {' and '.join(leaf.used_by)}, each sums its part"
            return Explanation(c, GRADIENT_SUM, 0, reason)
    return None


def gradient_sum_by_size(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gradient sum of another shape, or one that is repeated too often."""
    candidates = _gradient_candidates(ledger, c)
    by_size = [(fraction, leaf) for _, fraction, leaf in candidates]
    if explanation := _claim_gradient_sum(ledger, c, by_size):
        return explanation
    for same_shape, _, leaf in candidates:
        if same_shape:
            return Explanation(c, GRADIENT_SUM, 0, _too_often(leaf), is_needed=False)
    return None


def _gradient_candidates(ledger: ExplainedBytes, c: Collective) -> list[tuple[bool, float, Leaf]]:
    """Returns the leaves whose gradient a tensor may be.

    Each with whether it has the same shape, and the fraction of the leaf that the tensor holds.
    """
    placement, axes = ledger.placement, {*(c.axes or ())}
    is_sum = c.kind in ("all-reduce", "reduce-scatter")
    if not is_sum or c.phase == "forward" or not axes & {*placement.token_axes}:
        return []
    candidates = []
    for leaf in placement.leaves:
        expert_axes = {*leaf.axes} - {*placement.token_axes_of(leaf)}
        if axes & expert_axes:
            continue
        # Over axes that do not shard the leaf, each device may still sum only a slice of it.
        unused = placement.num_devices(tuple({*placement.model_axes} - {*leaf.axes} - axes))
        # Over the deferred axes the gradient is not sharded yet.
        shape = placement.local_shape(leaf, leaf.grad_spec, (*axes, *placement.deferred_axes))
        fraction = _fraction(c, shape, leaf.num_layers * unused)
        if fraction:
            candidates.append((has_shape(c, shape, leaf), fraction, leaf))
    return candidates


def _claim_gradient_sum(
    ledger: ExplainedBytes, c: Collective, candidates: list[tuple[float, Leaf]]
) -> Explanation | None:
    """Explains a sum by the first leaf that still needs it. Candidates are (fraction, leaf)."""
    axes = {*(c.axes or ())}
    for fraction, leaf in candidates:
        leaf_needs = [need for need in ledger.of_role(GRADIENT_SUM) if need.leaf is leaf]
        needs = [need for need in leaf_needs if {*need.axes} <= axes]
        needs = needs or [need for need in leaf_needs if {*need.axes} & axes]
        asked, claimed = ledger.claim(c, needs, fraction)
        if extra := ledger.explain_extra(c, GRADIENT_SUM, needs, claimed, asked):
            return extra
        if not claimed:
            continue
        if claimed < 0.99 * min(asked, c.bytes):
            is_tied = len(leaf.used_by) > 1
            return Explanation(c, GRADIENT_SUM, claimed, _too_often(leaf), is_needed=is_tied)
        reason = _reason_for_larger_sum(ledger.placement, leaf, c, claimed)
        return Explanation(c, GRADIENT_SUM, claimed, reason)
    return None


def _too_often(leaf: Leaf) -> str:
    return f"{leaf.name}, or a parameter of the same shape, is summed more often than necessary"


def _reason_for_larger_sum(placement: Placement, leaf: Leaf, c: Collective, claimed: float) -> str:
    if c.bytes <= 1.01 * claimed:
        return ""
    axes = c.axes or ()
    model_axes = [axis for axis in axes if axis not in placement.token_axes]
    if model_axes:
        over = " x ".join(model_axes)
        return f"{leaf.name} is replicated over {over}, so its gradient is summed over {over} too"
    if placement.zero_stage == 1:
        return "train.zero_stage=1 replicates gradients: all-reduce instead of reduce-scatter"
    if c.kind == "all-reduce" and {*axes} & {axis for dim in leaf.grad_spec for axis in dim}:
        return "all-reduced, then sliced: the compiler did not make a reduce-scatter of it"
    return wide_dtype_reason(c)


def gradient_sum_in_stages(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gradient that is summed over fsdp and the sequence one after the other."""
    placement, axes = ledger.placement, {*(c.axes or ())}
    is_sum = c.kind in ("all-reduce", "reduce-scatter")
    if not placement.sequence_axes or not axes or not is_sum or c.phase != "backward":
        return None
    for need, leaf in ledger.of_parameters(GRADIENT_SUM):
        if not axes < {*need.axes}:
            continue
        shape = placement.local_shape(leaf, leaf.grad_spec, placement.token_axes_of(leaf))
        if _essential(c.array.shape) == _essential(shape[leaf.is_stacked :]):
            _, claimed = ledger.claim(c, [need], 1)
            over = " and ".join(need.axes)
            reason = f"summed over {over} one after the other, then sliced"
            return Explanation(c, GRADIENT_SUM, claimed, f"{reason}: not one reduce-scatter")
    return None


def padded_slice_transfer(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a padded sum of gradients between TPU slices; or of metrics, in one tile.

    The larger messages claim the bytes that are needed; the smaller ones are reported as padding.
    """
    if MESSAGE_NOTE not in c.notes or c.kind != "all-reduce":
        return None
    needs = [need for need in ledger.of_role(GRADIENT_SUM) if {*need.axes} <= {*(c.axes or "-")}]
    claimed = 0.0
    for need in needs:
        part = min(c.bytes - claimed, ledger.unclaimed[need.key])
        ledger.unclaimed[need.key] -= part
        claimed += part
    reason = "padded to tiles of 8 x 128 elements" if claimed < c.bytes else ""
    if not claimed and c.array.size <= TILE:
        return Explanation(c, "scalars", 0, reason)
    return Explanation(c, GRADIENT_SUM, claimed, reason) if needs else None


def replicated_parameter(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a parameter replicated over a model axis sends in the backward pass."""
    placement, axes = ledger.placement, {*(c.axes or "-")}
    if c.phase != "backward" or c.origin:
        return None
    for leaf in placement.leaves:
        if not axes <= {*placement.model_axes} - {*leaf.axes}:
            continue
        over = " x ".join(c.axes)
        label = f"gradients of parameters that are replicated over {over}"
        reason = f"{leaf.name} and perhaps others are replicated over {over}"
        if c.kind != "all-gather" and _fraction_of_leaf(placement, c, leaf, leaf.spec):
            reason += "; devices with different positions or heads add up their gradients"
            return Explanation(c, label, 0, reason)
        # For example key/value heads, of which there are fewer than devices along this axis.
        if leaf.is_stacked and placement.d_model in leaf.shape[1:-1]:
            shape = placement.local_shape(leaf, leaf.spec, placement.token_axes)
            size = placement.num_tokens * math.prod(shape[1:]) / placement.d_model
            if size / c.array.size in range(1, placement.num_devices(c.axes) + 1):
                reason += "; the gradients of its output are gathered"
                return Explanation(c, label, 0, reason)
    return None


# ---- matches of a tensor with a parameter ----


def has_shape(c: Collective, shape: list[int], leaf: Leaf) -> bool:
    """Returns whether a tensor has the dims of a leaf or of one of its layers, in any order."""
    dims = _essential(c.array.shape)
    if dims == _essential(shape):
        return True
    return leaf.is_stacked and dims == _essential(shape[1:])


def _essential(shape: Sequence[int]) -> list[int]:
    return sorted(size for size in shape if size > 1)


def _fraction_of_leaf(placement: Placement, c: Collective, leaf: Leaf, spec: Spec) -> float:
    """Returns how much of a leaf a tensor holds: 1, or some of its layers; 0 if it does not fit."""
    return _fraction(c, placement.local_shape(leaf, spec, c.axes), leaf.num_layers)


def _fraction(c: Collective, shape: list[int], num_pieces: int) -> float:
    num_tensors = math.prod(shape) / c.array.size
    return 1 / num_tensors if num_tensors >= 1 and num_pieces % num_tensors == 0 else 0
