"""The bytes that each device must send per step, as a layout needs them, and what claims them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshtrain.parallel.grad_sync import Sync
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
DISPATCHED = "tokens sent to experts, and results"
LAYER_TRANSFER = "layers sent to the stage that runs them, gradients sent back"

# No layout needs these bytes, but compilers may send them.
SEPARATE_INPUT_GRADIENTS = "input gradients summed one by one"

# The key of all sums that `parallel.grad_sync.Sync` does: its buckets mix parameters.
SYNCHRONISED = (GRADIENT_SUM, "in buckets")


@dataclass(frozen=True)
class RequiredBytes:
    """A need: bytes that have to be sent over some axes, for one purpose."""

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
    """Returns all needs; those of activations only for a model with blocks."""
    all_needs: list[RequiredBytes] = []
    for leaf in placement.leaves:
        all_needs += _parameter_needs(placement, leaf)
    if placement.has_blocks:
        for axis in placement.model_axes:
            all_needs += _activation_needs(placement, axis)
        all_needs += _embed_and_head_needs(placement)
        all_needs += _stage_needs(placement)
        all_needs += _sequence_needs(placement)
        all_needs += _expert_needs(placement)
    return [need for need in all_needs if need.bytes]


# ---- parameters and gradients ----


def _parameter_needs(placement: Placement, leaf: Leaf) -> Iterator[RequiredBytes]:
    """Yields the gathers, gradient sums and updates of a parameter over the axes of tokens."""
    num_microbatches = placement.num_microbatches
    token_axes = placement.token_axes_of(leaf)
    idle_times = placement.idle_microbatches * leaf.is_stacked

    def gathered_bytes(spec: Spec, itemsize: int) -> float:
        """Returns the bytes on a device once the leaf is gathered over the axes of tokens."""
        still_sharded = {axis for dim in spec for axis in dim} - {*token_axes}
        return leaf.size * itemsize / placement.num_devices(tuple(still_sharded))

    # ZeRO-3 frees the gathered parameter after the forward pass and again after the backward pass.
    gathered = _axes_in(token_axes, leaf.spec)
    size = gathered_bytes(leaf.spec, leaf.compute_itemsize)
    num_recomputes = leaf.is_stacked * placement.num_recomputes
    yield RequiredBytes(
        role=PARAMETER_GATHER,
        axes=gathered,
        leaf=leaf,
        key=(PARAMETER_GATHER, leaf.name),
        bytes_once=bytes_sent("all-gather", size, placement.num_devices(gathered)),
        times=2 * num_microbatches,
        idle_times=2 * idle_times,
        recompute_times=(num_microbatches + idle_times) * num_recomputes,
    )
    if not leaf.is_trained:
        return

    # Sharded gradients are reduce-scattered after each micro-batch. The sum over the other axes can
    # wait for the last micro-batch, and is then in float32. Where the optimizer state is sharded, a
    # device needs only its slice of the sum.
    deferred = tuple(axis for axis in placement.deferred_axes if axis in token_axes)
    immediate = tuple(axis for axis in token_axes if axis not in deferred)
    spec = leaf.grad_spec if placement.zero_stage >= 2 else leaf.moment_spec
    scattered = _axes_in(immediate, spec)
    yield _gradient_sum(
        placement,
        leaf,
        axes=immediate,
        scattered=scattered,
        size=gathered_bytes(leaf.grad_spec, leaf.compute_itemsize),
        times=num_microbatches,
        idle_times=idle_times,
    )
    size = gathered_bytes(leaf.grad_spec, max(4, leaf.itemsize))
    size /= placement.num_devices(scattered)
    if placement.sync and deferred:
        yield _synchronised_sum(placement.sync, leaf, size)
    else:
        yield _gradient_sum(
            placement,
            leaf,
            axes=deferred,
            scattered=_axes_in(deferred, spec),
            size=size,
            times=1,
        )

    # The devices of a ZeRO shard update their part of the parameter, and then share it.
    updated = tuple(axis for axis in _axes_in(token_axes, leaf.moment_spec) if axis not in gathered)
    size = gathered_bytes(leaf.moment_spec, leaf.itemsize) / placement.num_devices(gathered)
    yield RequiredBytes(
        role=UPDATE_GATHER,
        axes=updated,
        leaf=leaf,
        key=(UPDATE_GATHER, leaf.name),
        bytes_once=bytes_sent("all-gather", size, placement.num_devices(updated)),
        times=1,
    )


def _axes_in(axes: Axes, spec: Spec) -> Axes:
    """Returns those of `axes` that shard a dim of `spec`."""
    return tuple(axis for axis in axes if any(axis in dim for dim in spec))


def _synchronised_sum(sync: Sync, leaf: Leaf, size: float) -> RequiredBytes:
    """Returns the need of a sum of `size` bytes as `Sync` does it."""
    compressed = sync.is_compressed(leaf.name.replace("/", "."))
    itemsize = max(4, leaf.itemsize)
    return RequiredBytes(
        role=GRADIENT_SUM,
        axes=sync.axes,
        leaf=leaf,
        key=SYNCHRONISED,
        bytes_once=size / itemsize * sync.bytes_per_element(itemsize, compressed=compressed),
        times=1,
    )


def _gradient_sum(
    placement: Placement,
    leaf: Leaf,
    *,
    axes: Axes,
    scattered: Axes,
    size: float,
    times: int,
    idle_times: float = 0,
) -> RequiredBytes:
    """Returns the need of a sum of `size` bytes over `axes`, reduce-scattered over `scattered`."""
    others = tuple(axis for axis in axes if axis not in scattered)
    num_slices = placement.num_devices(scattered)
    once = bytes_sent("reduce-scatter", size, num_slices)
    once += bytes_sent("all-reduce", size / num_slices, placement.num_devices(others))
    # Sums of one shape look the same, whichever parameter they belong to.
    shape = placement.local_shape(leaf, leaf.grad_spec, placement.token_axes_of(leaf))
    dims = shape[leaf.is_stacked :]
    return RequiredBytes(
        role=GRADIENT_SUM,
        axes=axes,
        leaf=leaf,
        key=(GRADIENT_SUM, axes, *sorted(size for size in dims if size > 1)),
        bytes_once=once,
        times=times,
        idle_times=idle_times,
    )


# ---- activations ----


def _activation_needs(placement: Placement, axis: str) -> Iterator[RequiredBytes]:
    """Yields what a model axis sends between blocks, after Megatron (arXiv 1909.08053, 2205.05198).

    Each row-parallel matrix of a block needs an all-reduce of partial products in the forward pass;
    the column-parallel matrices before it need one in the backward pass. If the axis shards the
    sequence between blocks, a reduce-scatter and an all-gather replace an all-reduce; they send as
    many bytes. Recomputation (for remat, or for a pipeline that keeps only inputs) is not counted.
    """
    row, column = row_and_column_parallel(placement, axis)
    num_row = sum(leaf.num_layers for leaf in row)
    num_column = sum(leaf.num_layers for leaf in column)
    num_of_experts = sum(leaf.num_layers for leaf in row if "expert" in leaf.dim_names)
    num_separate = max(0, num_column - num_row + num_of_experts)
    once = bytes_sent("all-reduce", placement.activation_bytes, placement.mesh[axis])
    for role, times in ((ACTIVATIONS, 2 * num_row), (SEPARATE_INPUT_GRADIENTS, num_separate)):
        yield RequiredBytes(
            role=role,
            axes=(axis,),
            leaf=None,
            key=(role, (axis,)),
            bytes_once=once,
            times=placement.num_microbatches * times,
            idle_times=placement.idle_microbatches * times,
        )


def _embed_and_head_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields the sums that a sharded embedding and a sharded head need, over the axes of each."""
    num_microbatches = placement.num_microbatches
    for user in ("embed", "head"):
        leaves = [leaf for leaf in placement.leaves if user in leaf.used_by and not leaf.is_first]
        sharded_over = {axis for leaf in leaves for axis in leaf.axes}
        axes = tuple(axis for axis in placement.model_axes if axis in sharded_over)
        num_devices = placement.num_devices(axes)
        yield RequiredBytes(
            role=ACTIVATIONS,
            axes=axes,
            leaf=None,
            key=(ACTIVATIONS, axes),
            bytes_once=bytes_sent("all-reduce", placement.activation_bytes, num_devices),
            times=num_microbatches,
        )
        if user == "head":
            # For each position: the largest logit, the sum of exponentials, the target's logit.
            size = placement.num_tokens * max(4, placement.compute_itemsize)
            yield RequiredBytes(
                role=SOFTMAX_STATISTICS,
                axes=axes,
                leaf=None,
                key=(SOFTMAX_STATISTICS, axes),
                bytes_once=bytes_sent("all-reduce", size, num_devices),
                times=3 * num_microbatches,
            )


def _stage_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what pipeline stages send to each other, for the stage that sends most."""
    num_stages, num_chunks = placement.mesh["pipeline"], placement.num_chunks
    num_microbatches = placement.num_microbatches
    if num_stages == 1:
        return
    # A stage sends every output and every input gradient, except the last chunk's output and the
    # first chunk's input gradient. With two stages, each of them has one of these two chunks.
    num_messages = num_microbatches * (2 * num_chunks - (num_stages == 2))
    yield RequiredBytes(
        role=STAGE_MESSAGES,
        axes=("pipeline",),
        leaf=None,
        key=(STAGE_MESSAGES,),
        bytes_once=placement.activation_bytes,
        times=num_messages,
        idle_times=2 * placement.num_ticks - num_messages,
    )
    yield RequiredBytes(
        role=END_BROADCAST,
        axes=("pipeline",),
        leaf=None,
        key=(END_BROADCAST,),
        bytes_once=placement.activation_bytes,
        times=2 * num_microbatches,
    )
    # Layers are stored in order, so chunk c is on stage c // V; it runs on stage c % P.
    chunks = np.arange(num_stages * num_chunks)
    stored_on = chunks // num_chunks
    num_transfers = np.bincount(stored_on, stored_on != chunks % num_stages).max()
    for leaf in placement.leaves:
        if not leaf.is_stacked:
            continue
        num_weights = math.prod(placement.local_shape(leaf, leaf.spec, ()))
        num_grads = math.prod(placement.local_shape(leaf, leaf.grad_spec, ())) * leaf.is_trained
        num_bytes = num_weights * leaf.compute_itemsize + num_grads * max(4, leaf.itemsize)
        yield RequiredBytes(
            role=LAYER_TRANSFER,
            axes=("pipeline",),
            leaf=leaf,
            key=(LAYER_TRANSFER,),
            bytes_once=num_bytes / num_chunks,
            times=num_transfers,
        )


def _sequence_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what attention sends between the devices of a sequence: keys, values, their gradients.

    With "ulysses", queries and outputs too.
    """
    if placement.attention is None:
        return
    num_microbatches = placement.num_microbatches
    num_layers, num_first = placement.num_layers
    idle_times = placement.idle_microbatches * num_layers
    recompute_times = (num_microbatches * num_layers + idle_times) * placement.num_recomputes
    recompute_times += num_microbatches * num_first
    forward, backward = _attention_bytes(placement.attention)
    for once, repeated in ((forward, recompute_times), (backward, 0)):
        yield RequiredBytes(
            role=KEYS_AND_VALUES,
            axes=placement.sequence_axes,
            leaf=None,
            # A loop of the ring does not say which pass it belongs to.
            key=(KEYS_AND_VALUES, placement.sequence_axes),
            bytes_once=once,
            times=num_microbatches * (num_layers + num_first),
            idle_times=idle_times,
            recompute_times=repeated,
        )


def _attention_bytes(attention: ShardedAttention) -> tuple[float, float]:
    """Returns the bytes that a device sends in the forward and in the backward pass of a layer."""
    num_devices = attention.num_devices
    kv_size = attention.key_size + attention.value_size
    if attention.method == "ulysses":
        size = attention.query_size + attention.output_size + kv_size
        once = bytes_sent("all-to-all", size * attention.itemsize, num_devices)
        return once, once
    forward = (num_devices - 1) * kv_size * attention.itemsize
    # Partial sums are in float32 or wider. In a ring of blocks they travel once more, since they
    # start with those at home.
    num_sums = num_devices - (attention.method == "gather" or attention.is_fused)
    return forward, forward + num_sums * kv_size * max(4, attention.itemsize)


def _expert_needs(placement: Placement) -> Iterator[RequiredBytes]:
    """Yields what a group sends for its experts.

    Tokens and gradients are gathered, an all-to-all returns results; or all-to-alls do both.
    """
    experts = placement.experts
    if experts is None:
        return
    num_microbatches = placement.num_microbatches
    num_layers, _ = placement.num_layers
    idle_times = placement.idle_microbatches * num_layers
    recompute_times = (num_microbatches * num_layers + idle_times) * placement.num_recomputes
    num_tokens = (experts.num_devices - 1) * experts.num_places
    roles = TOKENS_OF_EXPERTS, RESULTS_OF_EXPERTS
    if experts.method == "dispatch":
        roles = DISPATCHED, DISPATCHED
    for role in roles:
        for repeated in (recompute_times, 0):  # the forward and the backward pass
            yield RequiredBytes(
                role=role,
                axes=experts.gathered,
                leaf=None,
                key=(role,),
                bytes_once=num_tokens * placement.d_model * experts.itemsize,
                times=num_microbatches * num_layers,
                idle_times=idle_times,
                recompute_times=repeated,
                necessary=experts.necessary,
            )


def row_and_column_parallel(placement: Placement, axis: str) -> tuple[list[Leaf], list[Leaf]]:
    """Returns the row-parallel and the column-parallel matrices of a block over an axis.

    The axis shards the input dim of a row-parallel matrix, whose output is d_model, and the output
    dim of a column-parallel matrix, whose input is d_model. The matrices of experts have one input,
    whose gradient is summed once: the output matrix counts as row-parallel, the others as neither.
    """
    d_model = placement.d_model
    row, column = [], []
    for leaf in placement.leaves:
        if not (leaf.is_stacked or leaf.is_first):
            continue
        shape, spec = leaf.shape[leaf.is_stacked :], leaf.spec[leaf.is_stacked :]
        if not any(axis in dim for dim in spec):
            continue
        if leaf.shape[-1] == d_model and axis not in leaf.spec[-1]:
            row.append(leaf)
        elif d_model in shape[:-1] and "expert" not in leaf.dim_names:
            column.append(leaf)
    return row, column


# ---- the ledger: which of these bytes the program sends ----

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


def wide_dtype_reason(c: Collective) -> str:
    """Returns the reason for extra bytes where a dtype is wider than the computation needs."""
    return f"sent as {c.array.dtype}, a wider dtype than necessary"


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

    def of_role(self, role: str) -> list[RequiredBytes]:
        """Returns the needs for one purpose."""
        return [need for need in self.needs if need.role == role]

    def of_parameters(self, role: str) -> list[tuple[RequiredBytes, Leaf]]:
        """Returns the needs of parameters for one purpose, each with its parameter."""
        return [(need, need.leaf) for need in self.of_role(role) if need.leaf is not None]

    def claim(
        self, c: Collective, needs: Iterable[RequiredBytes], fraction: float
    ) -> tuple[float, float]:
        """Claims a `fraction` of these needs for a collective.

        Returns the bytes asked for, and how many of them were still unclaimed.
        A collective over several axes may serve needs over a subset of them.
        """
        axes = {*(c.axes or ())}
        asked = claimed = 0.0
        for need in needs:
            if {*need.axes} <= axes:
                wanted = fraction * need.bytes_once * c.count
            else:
                wanted = self._in_its_dtype(c, need)
            granted = max(0.0, min(wanted, self.unclaimed[need.key]))
            self.unclaimed[need.key] -= granted
            asked += wanted
            claimed += granted
        return asked, min(claimed, c.bytes)

    def _in_its_dtype(self, c: Collective, need: RequiredBytes) -> float:
        """Returns the bytes of a collective in the dtype of a need.

        Sums over deferred axes are in float32 by design, so they stay as they are.
        """
        leaf = need.leaf
        if leaf is None or c.itemsize <= leaf.compute_itemsize:
            return c.bytes
        if {*need.axes} <= {*self.placement.deferred_axes}:
            return c.bytes
        return c.bytes * leaf.compute_itemsize / c.itemsize

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
        keys = {need.key for need in needs}
        pools = [(reason, key) for reason in (LOCK_STEP, RECOMPUTED) for key in keys]
        # Counted in the dtype of the needs; a wider dtype has the same reason.
        itemsizes = {need.leaf.compute_itemsize for need in needs if need.leaf}
        itemsize = min(itemsizes, default=c.itemsize)
        rest = min(asked, c.bytes * itemsize / c.itemsize) - claimed
        if not 0 < rest <= 1.01 * sum(self.allowed_extra[pool] for pool in pools):
            return None
        drawn: Counter = Counter()
        for reason, key in pools:
            amount = min(rest - drawn.total(), self.allowed_extra[reason, key])
            self.allowed_extra[reason, key] -= amount
            drawn[reason] += amount
        fractions = {reason: amount / drawn.total() for reason, amount in drawn.items() if amount}
        most = max(fractions, key=fractions.get)
        return Explanation(c, label, claimed, most, fractions=fractions)
