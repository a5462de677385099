"""Explains each collective by the needs of the layout; the rest is reported as not needed."""

import math
from collections.abc import Callable, Iterable

from meshtrain.tools.audit import collective_rules, minimum
from meshtrain.tools.audit.layout import Leaf, Placement, Spec
from meshtrain.tools.audit.minimum import RECOMPUTED, ExplainedBytes, Explanation, RequiredBytes
from meshtrain.tools.hlo.collective_ops import Collective


def explain(
    placement: Placement, found: list[Collective]
) -> tuple[list[Explanation], ExplainedBytes]:
    """Returns what each collective is for, and the ledger with the needs that none of them met."""
    ledger = ExplainedBytes(placement)

    def order(c: Collective) -> tuple:
        # Collectives of known origin come first, then the largest, so that a stack of layers is not
        # mistaken for one layer of another parameter. Over model axes the forward pass comes first:
        # extra bytes are then reported for the backward pass, where they arise.
        late = c.phase == "backward" and not {*(c.axes or ())} & {*placement.token_axes}
        return late, c.origin == "", -c.bytes

    ordered = sorted(found, key=order)
    rules = (
        *collective_rules.SYNC_RULES,
        *collective_rules.EXPERT_RULES,
        *collective_rules.SEQUENCE_RULES,
        *collective_rules.PIPELINE_RULES,
        _parameter_gather,
        _gradient_sum,
        _update_gather,
        _activation,
        _replicated_parameter,
        _loss_function,
    )
    by_shape = [_first(rules, ledger, c) for c in ordered]
    # A match by the number of elements alone is tried after every match by shape.
    by_size = (
        collective_rules.sum_in_stages,
        _gradient_sum_by_size,
        collective_rules.padded_slice_transfer,
        _not_needed,
    )
    return [
        explanation or _first(by_size, ledger, c)
        for c, explanation in zip(ordered, by_shape, strict=True)
    ], ledger


def _first(rules: Iterable[Callable], ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    return next((found for rule in rules if (found := rule(ledger, c))), None)


def _parameter_gather(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gather of a parameter that is sharded over axes of tokens, for computing with it."""
    placement, label, claimed = ledger.placement, minimum.PARAMETER_GATHER, 0.0
    candidates = _parameter_candidates(ledger, c, label)
    fits = [fit for fit in candidates if c.origin in ("", fit[0].leaf.argument)]

    def has_shape(leaf: Leaf) -> bool:
        return _has_shape(c, placement.local_shape(leaf, leaf.spec, c.axes), leaf)

    same_shape = [(need, fraction) for need, fraction in fits if has_shape(need.leaf)]
    for need, fraction in same_shape or fits:
        leaf = need.leaf
        claimed += ledger.claim(c, [need], fraction * (1 - claimed / c.bytes))[1]
        if claimed > 0.99 * c.bytes:
            return Explanation(c, label, claimed)
        if claimed and c.itemsize > leaf.compute_itemsize:
            return Explanation(c, label, claimed, _wide_dtype(c))
    if extra := ledger.explain_extra(c, label, [need for need, _ in same_shape], claimed):
        return extra
    if fits and (c.origin or claimed):
        is_tied, is_recomputed = len(leaf.used_by) > 1, "rematted" in c.op_name
        reason = f"{leaf.name} is gathered more than once in a pass"
        reason += f", by {' and '.join(leaf.used_by)}" if is_tied else ""
        reason += f", recomputed for train.remat={placement.remat}" if is_recomputed else ""
        return Explanation(c, label, claimed, reason, is_needed=is_tied or is_recomputed)
    return None


def _update_gather(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gather of a parameter whose shards were updated on different devices."""
    if c.origin or c.phase:
        return None
    for need, fraction in _parameter_candidates(ledger, c, minimum.UPDATE_GATHER):
        if claimed := ledger.claim(c, [need], fraction)[1]:
            return Explanation(c, minimum.UPDATE_GATHER, claimed, _wide_dtype(c))
    return None


def _parameter_candidates(
    ledger: ExplainedBytes, c: Collective, role: str
) -> Iterable[tuple[RequiredBytes, float]]:
    """Yields the needs that a gather of this size may serve, and the fraction of each."""
    for need in ledger.needs:
        if c.kind == "all-gather" and need.role == role and {*(c.axes or "-")} <= {*need.axes}:
            is_gather = role == minimum.PARAMETER_GATHER
            spec = need.leaf.spec if is_gather else need.leaf.moment_spec
            if fraction := _fraction_of_leaf(ledger.placement, c, need.leaf, spec):
                yield need, fraction


def _fraction_of_leaf(placement: Placement, c: Collective, leaf: Leaf, spec: Spec) -> float:
    """Returns how much of a leaf a tensor holds: 1, or some of its layers; 0 if it does not fit."""
    return _fraction(c, placement.local_shape(leaf, spec, c.axes), leaf.num_layers)


def _fraction(c: Collective, shape: list[int], num_pieces: int) -> float:
    num_tensors = math.prod(shape) / c.array.size
    return 1 / num_tensors if num_tensors >= 1 and num_pieces % num_tensors == 0 else 0


def _gradient_sum(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a sum of a parameter's gradient over devices with different tokens."""
    candidates = [fit for fit in _gradient_candidates(ledger, c) if fit[0]]
    if not {*(c.axes or ())} <= {*ledger.placement.deferred_axes}:
        # A sum in each micro-batch is of one layer rather than of a stack.
        candidates.sort(key=lambda fit: fit[1])
    if found := _claim_gradient_sum(ledger, c, candidates):
        return found
    for _, _, leaf in candidates:
        if len(leaf.used_by) > 1:
            reason = f"{leaf.name} is used by {' and '.join(leaf.used_by)}, each sums its part"
            return Explanation(c, minimum.GRADIENT_SUM, 0, reason)
    return None


def _gradient_sum_by_size(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains a gradient sum of another shape, or one that is repeated too often."""
    candidates = _gradient_candidates(ledger, c)
    if found := _claim_gradient_sum(ledger, c, candidates):
        return found
    for has_shape, _, leaf in candidates:
        if has_shape:
            return Explanation(c, minimum.GRADIENT_SUM, 0, _too_often(leaf), is_needed=False)
    return None


def _gradient_candidates(ledger: ExplainedBytes, c: Collective) -> list[tuple[bool, float, Leaf]]:
    """Returns the leaves whose gradient a tensor may be: (same shape?, fraction of the leaf, leaf)."""
    placement, axes = ledger.placement, {*(c.axes or ())}
    token_axes = axes & {*placement.token_axes}
    if c.kind not in ("all-reduce", "reduce-scatter") or c.phase == "forward" or not token_axes:
        return []
    found = []
    for leaf in placement.leaves:
        # Over axes that do not shard the leaf, each device may still sum only a slice of it.
        unused = placement.num_devices(tuple({*placement.model_axes} - {*leaf.axes} - axes))
        # Over the deferred axes the gradient is not sharded yet.
        shape = placement.local_shape(leaf, leaf.grad_spec, (*c.axes, *placement.deferred_axes))
        fraction = _fraction(c, shape, leaf.num_layers * unused)
        if fraction and not axes & {*leaf.axes} - {*placement.token_axes_of(leaf)}:
            found.append((_has_shape(c, shape, leaf), fraction, leaf))
    return found


def _claim_gradient_sum(
    ledger: ExplainedBytes, c: Collective, candidates: list
) -> Explanation | None:
    label = minimum.GRADIENT_SUM
    for _, fraction, leaf in candidates:
        of_leaf = [n for n in ledger.needs if n.role == label and n.leaf is leaf]
        needs = [n for n in of_leaf if {*n.axes} <= {*c.axes}]
        needs = needs or [n for n in of_leaf if {*n.axes} & {*c.axes}]
        asked, claimed = ledger.claim(c, needs, fraction)
        if extra := ledger.explain_extra(c, label, needs, claimed, asked):
            return extra
        if claimed < 0.99 * min(asked, c.bytes) and claimed:
            is_tied = len(leaf.used_by) > 1
            return Explanation(c, label, claimed, _too_often(leaf), is_needed=is_tied)
        if claimed:
            reason = _reason_for_larger_sum(ledger.placement, leaf, c, claimed)
            return Explanation(c, label, claimed, reason)
    return None


def _too_often(leaf: Leaf) -> str:
    return f"{leaf.name}, or a parameter of the same shape, is summed more often than necessary"


def _reason_for_larger_sum(placement: Placement, leaf: Leaf, c: Collective, claimed: float) -> str:
    if c.bytes <= 1.01 * claimed:
        return ""
    if model_axes := [axis for axis in c.axes if axis not in placement.token_axes]:
        over = " x ".join(model_axes)
        return f"{leaf.name} is replicated over {over}, so its gradient is summed over {over} too"
    if placement.zero_stage == 1:
        return "train.zero_stage=1 replicates gradients: all-reduce instead of reduce-scatter"
    if c.kind == "all-reduce" and {*c.axes} & {axis for dim in leaf.grad_spec for axis in dim}:
        return "all-reduced, then sliced: the compiler did not make a reduce-scatter of it"
    return _wide_dtype(c)


def _wide_dtype(c: Collective) -> str:
    return f"sent as {c.array.dtype}, a wider dtype than necessary"


def _activation(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains sums or gathers of activations between blocks, or of one statistic for each position."""
    placement, axes = ledger.placement, c.axes or ()
    if not placement.has_blocks or not axes or c.origin or not {*axes} <= {*placement.model_axes}:
        return None
    sums = ("all-reduce", "reduce-scatter")
    if c.kind not in (sums if "pipeline" in axes else (*sums, "all-gather")):
        return None
    needs = {need.role: need for need in ledger.needs if need.leaf is None and need.axes == axes}
    if c.array.size == placement.num_tokens and (need := needs.get(minimum.SOFTMAX_STATISTICS)):
        if claimed := ledger.claim(c, [need], 1)[1]:
            return Explanation(c, minimum.SOFTMAX_STATISTICS, claimed, _wide_dtype(c))
    if c.array.size != placement.num_tokens * placement.d_model:
        return None
    if "rematted" in c.op_name:
        reason = f"summed or gathered again, because train.remat={placement.remat} recomputes it"
        return Explanation(c, "recomputed activations", 0, reason)
    if placement.pipeline_keep == "inputs" and c.phase == "forward" and "pipeline" not in axes:
        return Explanation(c, "recomputed activations", 0, RECOMPUTED)
    return _claim_activation(ledger, c, needs)


def _claim_activation(
    ledger: ExplainedBytes, c: Collective, needs: dict[str, RequiredBytes]
) -> Explanation | None:
    # An all-gather or a reduce-scatter does half the work of an all-reduce.
    fraction = 1 if c.kind == "all-reduce" else 0.5
    claimed = 0.0
    if need := needs.get(minimum.ACTIVATIONS):
        asked, claimed = ledger.claim(c, [need], fraction)
        if claimed > 0.99 * asked:
            return Explanation(c, minimum.ACTIVATIONS, claimed, _wide_dtype(c))
        if extra := ledger.explain_extra(c, minimum.ACTIVATIONS, [need], claimed):
            return extra
        fraction *= 1 - claimed / asked
    label = minimum.SEPARATE_INPUT_GRADIENTS
    if c.phase == "backward" and (need := needs.get(label)):
        asked, separate = ledger.claim(c, [need], fraction)
        if separate > 0.99 * asked:
            _, leaves = minimum.row_and_column_parallel(ledger.placement, *c.axes)
            names = [leaf.name.removesuffix("/kernel").split("/")[-1] for leaf in leaves]
            reason = (
                f"matrices with the same input ({', '.join(names)}) all-reduce its gradient separately; "
                "one all-reduce of the sum would suffice (XLA does so on TPU, not on CPU)"
            )
            return Explanation(c, label, claimed, reason)
        if extra := ledger.explain_extra(c, label, [need], claimed + separate):
            return extra
    if not claimed:
        return None
    reason = "summed more often than the row-parallel matrices need"
    return Explanation(c, minimum.ACTIVATIONS, claimed, reason, is_needed=False)


def _replicated_parameter(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a parameter replicated over a model axis sends in the backward pass."""
    placement, axes = ledger.placement, {*(c.axes or "-")}
    if c.phase != "backward" or c.origin:
        return None
    for leaf in placement.leaves:
        if not axes <= {*placement.model_axes} - {*leaf.axes}:
            continue
        over = " x ".join(c.axes)
        shape = placement.local_shape(leaf, leaf.spec, placement.token_axes)
        label = f"gradients of parameters that are replicated over {over}"
        reason = f"{leaf.name} and perhaps others are replicated over {over}"
        if c.kind != "all-gather" and _fraction_of_leaf(placement, c, leaf, leaf.spec):
            reason += "; devices with different positions or heads add up their gradients"
            return Explanation(c, label, 0, reason)
        # For example key/value heads, of which there are fewer than devices along this axis.
        if leaf.is_stacked and placement.d_model in leaf.shape[1:-1]:
            size = placement.num_tokens * math.prod(shape[1:]) / placement.d_model
            if size / c.array.size in range(1, placement.num_devices(c.axes) + 1):
                reason += "; the gradients of its output are gathered"
                return Explanation(c, label, 0, reason)
    return None


def _loss_function(ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    """Explains what a model that is only a loss function sends over the axes that shard its parameters."""
    placement = ledger.placement
    if placement.has_blocks or c.origin or not {*(c.axes or "-")} <= {*placement.model_axes}:
        return None
    reason = "the model is a loss function without blocks, so its minimum is unknown"
    return Explanation(c, "partial results of your loss", 0, reason)


def _not_needed(ledger: ExplainedBytes, c: Collective) -> Explanation:
    """Describes a tensor that the layout does not need, by its origin or its shape."""
    leaves = ledger.placement.leaves
    origins = [leaf.name for leaf in leaves if leaf.argument == c.origin]
    same_shape = [leaf.name for leaf in leaves if _has_shape(c, [*leaf.shape], leaf)]
    reason = "no parameter has its shape"
    if same_shape:
        reason = f"it has the unsharded shape of {same_shape[0]}"
    if origins:
        reason = f"it holds {origins[0]}"
    return Explanation(c, "not needed by this layout", 0, reason, is_needed=False)


def _has_shape(c: Collective, shape: list[int], leaf: Leaf) -> bool:
    """Whether a tensor has the dims of a leaf or of one of its layers, in any order."""
    shapes = [shape, shape[1:]] if leaf.is_stacked else [shape]
    dims = sorted(size for size in c.array.shape if size > 1)
    return any(dims == sorted(size for size in shape if size > 1) for shape in shapes)
