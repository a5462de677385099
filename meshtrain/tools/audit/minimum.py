"""The minimum that a layout needs: bytes that each device must send per step, and what explains them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshtrain.tools.audit.layout import Axes, Leaf, Placement, ShardedAttention, Spec
from meshtrain.tools.hlo.collective_ops import Collective, bytes_sent

# What bytes are sent for, as printed.
PARAMETER_GATHER = "parameters gathered"

GRADIENT_SUM = "gradients summed"

UPDATE_GATHER = "updated parameters gathered"

ACTIVATIONS = "activations"

SOFTMAX_STATISTICS = "softmax statistics"

STAGE_MESSAGES = "messages from stage to stage"

END_BROADCAST = "last stage's output or first stage's gradient, for all stages"

KEYS_AND_VALUES = "keys and values between parts of a sequence"

TOKENS_OF_EXPERTS = "tokens for experts"

RESULTS_OF_EXPERTS = "results of experts"

LAYER_TRANSFER = "layers sent to the stage that runs them, gradients sent back"

SYNCHRONISED = (GRADIENT_SUM, "in buckets")  # key of all sums that `parallel.sync.Sync` does

# No layout needs these bytes, but compilers may send them.
SEPARATE_INPUT_GRADIENTS = "input gradients summed one by one"


@dataclass(frozen=True)
class RequiredBytes:
    """Bytes that have to be sent over some axes, for one purpose."""

    role: str  # one of the purposes above
    axes: Axes
    leaf: Leaf | None  # the parameter; None for activations
    key: tuple  # needs with equal keys cannot be distinguished
    bytes_once: float  # that a device sends each time that the tensor moves
    times: int  # per step
    idle_times: float = 0  # extra times in lock step, by stages without work
    recompute_times: float = 0  # extra times for what a stage recomputes in the backward pass
    necessary: float = 1  # fraction of its bytes that another method would send too: the minimum

    @property
    def bytes(self) -> float:
        return self.bytes_once * self.times


def needs(placement: Placement) -> list[RequiredBytes]:
    """Returns all needs, parameter by parameter; needs of activations only for a model with blocks."""
    found = [need for leaf in placement.leaves for need in _parameter_needs(placement, leaf)]
    if placement.has_blocks:
        for axis in placement.model_axes:
            found += _activation_needs(placement, axis)
        found += [*_embed_and_head_needs(placement), *_stage_needs(placement)]
        found += [*_sequence_needs(placement), *_expert_needs(placement)]
    return [need for need in found if need.bytes]


def _parameter_needs(placement: Placement, leaf: Leaf) -> Iterator[RequiredBytes]:
    """Yields the needs of one parameter over the axes of tokens: gathers, gradient sums, updates."""

    def among(axes: Axes, spec: Spec) -> Axes:
        return tuple(axis for axis in axes if any(axis in dim for dim in spec))

    M, token_axes = placement.num_microbatches, placement.token_axes_of(leaf)

    def gathered_bytes(spec: Spec, itemsize: int) -> float:
        """Bytes on a device once the leaf is gathered over the axes of tokens."""
        still_sharded = {axis for dim in spec for axis in dim} - {*token_axes}
        return leaf.size * itemsize / placement.num_devices(tuple(still_sharded))

    idle = placement.idle_microbatches * leaf.is_stacked
    gathered = among(token_axes, leaf.spec)
    size = gathered_bytes(leaf.spec, leaf.compute_itemsize)
    once = bytes_sent("all-gather", size, placement.num_devices(gathered))
    # ZeRO-3 frees the gathered parameter after the forward pass and again after the backward pass.
    recompute = (M + idle) * leaf.is_stacked * placement.num_recomputes
    key = (PARAMETER_GATHER, leaf.name)
    yield RequiredBytes(PARAMETER_GATHER, gathered, leaf, key, once, 2 * M, 2 * idle, recompute)
    if not leaf.is_trained:
        return

    # Sharded gradients are reduce-scattered after each micro-batch. The sum over the other axes can wait
    # for the last micro-batch, and is then in float32. Where the optimizer state is sharded, a device
    # needs only its slice of the sum.
    deferred = tuple(axis for axis in placement.deferred_axes if axis in token_axes)
    immediate = tuple(axis for axis in token_axes if axis not in deferred)
    spec = leaf.grad_spec if placement.zero_stage >= 2 else leaf.moment_spec
    size = gathered_bytes(leaf.grad_spec, leaf.compute_itemsize)
    yield _gradient_sum(placement, leaf, immediate, among(immediate, spec), size, M, idle)
    size = gathered_bytes(leaf.grad_spec, max(4, leaf.itemsize))
    size /= placement.num_devices(among(immediate, spec))
    if placement.sync and deferred:
        yield _synchronised(placement.sync, leaf, size)
    else:
        yield _gradient_sum(placement, leaf, deferred, among(deferred, spec), size, 1)

    updated = tuple(axis for axis in among(token_axes, leaf.moment_spec) if axis not in gathered)
    size = gathered_bytes(leaf.moment_spec, leaf.itemsize) / placement.num_devices(gathered)
    once = bytes_sent("all-gather", size, placement.num_devices(updated))
    yield RequiredBytes(UPDATE_GATHER, updated, leaf, (UPDATE_GATHER, leaf.name), once, 1)


def _synchronised(sync: Any, leaf: Leaf, size: float) -> RequiredBytes:
    """Returns the need of a sum of `size` bytes as `Sync` does it."""
    compressed = sync.is_compressed(leaf.name.replace("/", "."))
    itemsize = max(4, leaf.itemsize)
    once = size / itemsize * sync.bytes_per_element(itemsize, compressed=compressed)
    return RequiredBytes(GRADIENT_SUM, sync.axes, leaf, SYNCHRONISED, once, 1)


def _gradient_sum(
    placement: Placement,
    leaf: Leaf,
    axes: Axes,
    scattered: Axes,
    size: float,
    times: int,
    idle_times: float = 0,
) -> RequiredBytes:
    """Returns the need of a sum of `size` bytes over `axes`, reduce-scattered over the axes `scattered`."""
    others = placement.num_devices(tuple(axis for axis in axes if axis not in scattered))
    num_slices = placement.num_devices(scattered)
    once = bytes_sent("reduce-scatter", size, num_slices)
    once += bytes_sent("all-reduce", size / num_slices, others)
    # Sums of one shape look the same, whichever parameter they belong to.
    gathered = placement.token_axes_of(leaf)
    shape = placement.local_shape(leaf, leaf.grad_spec, gathered)[leaf.is_stacked :]
    key = (GRADIENT_SUM, axes, *sorted(n for n in shape if n > 1))
    return RequiredBytes(GRADIENT_SUM, axes, leaf, key, once, times, idle_times)


def _activation_needs(placement: Placement, axis: str) -> Iterator[RequiredBytes]:
    """Yields what a model axis sends between blocks, after Megatron (arXiv 1909.08053, 2205.05198).

    Each row-parallel matrix of a block needs an all-reduce of partial products in the forward pass; the
    column-parallel matrices before it need one in the backward pass. If the axis shards the sequence
    between blocks, a reduce-scatter and an all-gather replace an all-reduce; they send as many bytes.
    Recomputation (for remat, or for a pipeline that keeps only inputs) is not counted.
    """

    def need(role: str, times: int) -> RequiredBytes:
        times, idle_times = placement.num_microbatches * times, placement.idle_microbatches * times
        return RequiredBytes(role, (axis,), None, (role, (axis,)), once, times, idle_times)

    row, column = row_and_column_parallel(placement, axis)
    num_row, num_column = (sum(leaf.num_layers for leaf in group) for group in (row, column))
    num_with_experts = sum(leaf.num_layers for leaf in row if "expert" in leaf.dim_names)
    once = bytes_sent("all-reduce", placement.activation_bytes, placement.mesh[axis])
    yield need(ACTIVATIONS, 2 * num_row)
    yield need(SEPARATE_INPUT_GRADIENTS, max(0, num_column - num_row + num_with_experts))


def _embed_and_head_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields the sums that a sharded embedding and a sharded head need, over the axes that shard each."""
    M = placement.num_microbatches
    for user in ("embed", "head"):
        leaves = [leaf for leaf in placement.leaves if user in leaf.used_by and not leaf.is_first]
        sharded_over = {axis for leaf in leaves for axis in leaf.axes}
        axes = tuple(axis for axis in placement.model_axes if axis in sharded_over)
        size = placement.num_devices(axes)
        once = bytes_sent("all-reduce", placement.activation_bytes, size)
        yield RequiredBytes(ACTIVATIONS, axes, None, (ACTIVATIONS, axes), once, M)
        if user == "head":
            # For each position: the largest logit, the sum of exponentials, the target's logit.
            itemsize = max(4, placement.compute_itemsize)
            once = bytes_sent("all-reduce", placement.num_tokens * itemsize, size)
            yield RequiredBytes(
                SOFTMAX_STATISTICS, axes, None, (SOFTMAX_STATISTICS, axes), once, 3 * M
            )


def _stage_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what pipeline stages send to each other, for the stage that sends most."""
    P, V, M = placement.mesh["pipeline"], placement.num_chunks, placement.num_microbatches
    if P == 1:
        return
    once = placement.activation_bytes
    # A stage sends every output and every input gradient, except the last chunk's output and the
    # first chunk's input gradient. With two stages, each of them has one of these two chunks.
    messages = M * (2 * V - (P == 2))
    idle = 2 * placement.num_ticks - messages
    yield RequiredBytes(
        STAGE_MESSAGES, ("pipeline",), None, (STAGE_MESSAGES,), once, messages, idle
    )
    yield RequiredBytes(END_BROADCAST, ("pipeline",), None, (END_BROADCAST,), once, 2 * M)
    chunk = np.arange(P * V)  # stored on stage chunk // V, runs on stage chunk % P
    times = np.bincount(chunk // V, chunk // V != chunk % P).max()
    for leaf in placement.leaves:
        if leaf.is_stacked:
            weights = math.prod(placement.local_shape(leaf, leaf.spec, ()))
            grads = math.prod(placement.local_shape(leaf, leaf.grad_spec, ()))
            grads *= leaf.is_trained
            once = weights * leaf.compute_itemsize + grads * max(4, leaf.itemsize)
            yield RequiredBytes(
                LAYER_TRANSFER, ("pipeline",), leaf, (LAYER_TRANSFER,), once / V, times
            )


def _sequence_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what attention sends between the devices of a sequence; with "ulysses" queries and outputs too."""
    if placement.attention is None:
        return
    axes, M = placement.sequence_axes, placement.num_microbatches
    num_layers, num_first = placement.num_layers
    idle = placement.idle_microbatches * num_layers
    recompute = (M * num_layers + idle) * placement.num_recomputes
    key = (KEYS_AND_VALUES, axes)  # a loop of the ring does not say which pass it belongs to
    forward, backward = _attention_bytes(placement.attention)
    times = M * (num_layers + num_first)
    for once, repeated in ((forward, recompute + M * num_first), (backward, 0)):
        yield RequiredBytes(KEYS_AND_VALUES, axes, None, key, once, times, idle, repeated)


def _expert_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what a group sends for its experts: tokens and gradients are gathered, an all-to-all returns results."""
    experts = placement.experts
    if experts is None:
        return
    M, e = placement.num_microbatches, experts.num_devices
    num_layers, _ = placement.num_layers
    once = (e - 1) * placement.num_tokens * placement.d_model * experts.itemsize
    idle = placement.idle_microbatches * num_layers
    recompute = (M * num_layers + idle) * placement.num_recomputes
    for role in (TOKENS_OF_EXPERTS, RESULTS_OF_EXPERTS):
        for again in (recompute, 0):  # the forward and the backward pass
            times = M * num_layers, idle, again, experts.necessary
            yield RequiredBytes(role, experts.gathered, None, (role,), once, *times)


def _attention_bytes(attention: ShardedAttention) -> tuple[float, float]:
    """Returns the bytes that a device sends in the forward and in the backward pass of a layer."""
    c, kv = attention.num_devices, attention.key_size + attention.value_size
    if attention.method == "ulysses":
        size = (attention.query_size + attention.output_size + kv) * attention.itemsize
        return (bytes_sent("all-to-all", size, c),) * 2
    keys = (c - 1) * kv * attention.itemsize
    # Partial sums are in float32 or wider. In a ring they travel once more, to their own device.
    times = c - (attention.method == "gather")
    return keys, keys + times * kv * max(4, attention.itemsize)


def row_and_column_parallel(placement: Placement, axis: str) -> tuple[list[Leaf], list[Leaf]]:
    """Returns the row-parallel and the column-parallel matrices of a block over an axis.

    The axis shards the input dim of a row-parallel matrix, whose output is d_model, and the output dim of
    a column-parallel matrix, whose input is d_model. The matrices of experts have one input, whose gradient is summed
    once: the output matrix counts as row-parallel, the others as neither.
    """
    d_model = placement.d_model
    sharded = [
        leaf
        for leaf in placement.leaves
        if (leaf.is_stacked or leaf.is_first) and axis in sum(leaf.spec[leaf.is_stacked :], ())
    ]
    row = [leaf for leaf in sharded if leaf.shape[-1] == d_model and axis not in leaf.spec[-1]]
    column = [
        leaf
        for leaf in sharded
        if leaf not in row
        and d_model in leaf.shape[leaf.is_stacked : -1]
        and "expert" not in leaf.dim_names
    ]
    return row, column


LOCK_STEP = "lock step: all stages take part in every tick, including stages without work"

RECOMPUTED = (
    "recomputed in the backward pass: pipeline.keep=inputs keeps only inputs, or train.remat is on"
)


@dataclass(frozen=True)
class Explanation:
    """What a collective is for."""

    collective: Collective
    label: str  # its purpose
    needed_bytes: float = 0  # the part of its bytes that is in the minimum
    reason: str = ""  # for its other bytes
    is_needed: bool = True  # False: the layout does not need it, which is a warning
    # If there are several reasons: each one's fraction of the bytes above the minimum.
    fractions: Mapping[str, float] = field(default_factory=dict)

    @property
    def extra_bytes(self) -> float:
        """Bytes above the minimum."""
        return self.collective.bytes - self.needed_bytes


class ExplainedBytes:
    """The needs of a layout, and how many bytes of each no collective has claimed yet."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self.needs = needs(placement)
        self.unclaimed: Counter = Counter()
        # Bytes above the minimum that a pipeline may send, by (reason, key).
        self.allowed_extra: Counter = Counter()
        for need in self.needs:
            self.unclaimed[need.key] += need.bytes
            self.allowed_extra[LOCK_STEP, need.key] += need.bytes_once * need.idle_times
            self.allowed_extra[RECOMPUTED, need.key] += need.bytes_once * need.recompute_times

    def claim(
        self, c: Collective, needs: Iterable[RequiredBytes], fraction: float
    ) -> tuple[float, float]:
        """Claims a `fraction` of these needs for a collective.

        Returns the bytes asked for, and how many of them were still unclaimed.
        A collective over several axes may serve needs over a subset of them.
        """
        asked = claimed = 0.0
        for need in needs:
            is_subset = {*need.axes} <= {*c.axes}
            wanted = (
                fraction * need.bytes_once * c.count if is_subset else self._in_its_dtype(c, need)
            )
            granted = max(0.0, min(wanted, self.unclaimed[need.key]))
            self.unclaimed[need.key] -= granted
            asked, claimed = asked + wanted, claimed + granted
        return asked, min(claimed, c.bytes)

    def _in_its_dtype(self, c: Collective, need: RequiredBytes) -> float:
        """Returns the bytes of a collective in the dtype of a need; sums over deferred axes are in float32."""
        is_wider = need.leaf and c.itemsize > need.leaf.compute_itemsize
        if not is_wider or {*need.axes} <= {*self.placement.deferred_axes}:
            return c.bytes
        return c.bytes * need.leaf.compute_itemsize / c.itemsize

    def explain_extra(
        self,
        c: Collective,
        label: str,
        needs: list[RequiredBytes],
        claimed: float,
        asked: float = math.inf,
    ) -> Explanation | None:
        """Explains a collective if the pipeline accounts for all its bytes beyond those `claimed`.

        None if nearly all that it `asked` for was claimed; the rest is not due to repetition.
        """
        if claimed >= 0.99 * asked:
            return None
        pools = [(why, key) for why in (LOCK_STEP, RECOMPUTED) for key in {n.key for n in needs}]
        # Counted in the dtype of the needs; a wider dtype has the same reason.
        itemsizes = {need.leaf.compute_itemsize for need in needs if need.leaf}
        rest = min(asked, c.bytes * min(itemsizes, default=c.itemsize) / c.itemsize) - claimed
        if not 0 < rest <= 1.01 * sum(self.allowed_extra[pool] for pool in pools):
            return None
        drawn: Counter = Counter()
        for pool in pools:
            amount = min(rest - drawn.total(), self.allowed_extra[pool])
            self.allowed_extra[pool] -= amount
            drawn[pool[0]] += amount
        fractions = {why: amount / drawn.total() for why, amount in drawn.items() if amount}
        most = max(fractions, key=fractions.get)
        return Explanation(c, label, claimed, most, fractions=fractions)
