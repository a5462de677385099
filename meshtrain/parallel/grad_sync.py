"""Adds the partial sums of the batch shards to the gradients of the global batch.

By default XLA does. `Sync` does it where the network between hosts or slices is slow: in another
pattern of messages, and with fewer bytes per element. The words of this file:

  shard      one of N parts of the batch; a device has one shard and its partial sums
  level      a round of messages within groups of devices; a pattern is a sequence of levels
  part       what a device of a group adds up: 1 / size of an array, for a group of this size
  wire       the format of the messages of the last level: fewer bits, with a scale for each block
  residual   the rounding errors of earlier steps, which are added to the next partial sums
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.metrics import Metrics
from meshtrain.parallel import sharding

# ---- the gradients of a step ----

# N batch shards

# The number by which the key of a step is folded; rows and micro-batches have smaller ones.
AT_ROUNDING = 2**32 - 1
SCOPE = "synchronise"  # name of the collectives of `Sync` in compiled programs, for the audit


@dataclass(frozen=True)
class Sync:
    """Adds the gradient sums of N batch shards along the mesh axes `axes`.

    The residual is the rounding error of earlier steps, divided by the batch weight. Each shard
    keeps its own: (N, ...) per compressed parameter. It is added to the shard's sums of the next
    step.
    """

    axes: tuple[str, ...]
    levels: tuple["Level", ...]
    wire: "Wire | None"  # None: nothing is compressed
    exact: tuple[str, ...]  # names in the paths of parameters whose gradients are not compressed
    feedback: bool  # whether there is a residual

    @property
    def num_shards(self) -> int:
        return math.prod(level.size for level in self.levels)

    def is_compressed(self, name: str) -> bool:
        """Returns whether a gradient is compressed; `name` is such as layers.mlp.up.kernel."""
        is_exact = bool({*name.split(".")} & {*self.exact})
        return self.wire is not None and not is_exact

    def bytes_per_element(self, itemsize: int, *, compressed: bool) -> float:
        """Returns the bytes that a device sends for each element of a gradient that it holds."""
        return bytes_sent(self.levels, self.wire if compressed else None, itemsize)

    def start_residual(self, params: Any) -> dict[str, jax.Array] | None:
        """Returns the residual before the first step, by the name of the parameter.

        It is zero, in float32 or float64; None without feedback.
        """
        if not self.feedback:
            return None
        residual = {}
        for name, leaf in _leaves_by_name(params):
            if self.is_compressed(name):
                dtype = jnp.promote_types(leaf.dtype, jnp.float32)
                residual[name] = jnp.zeros((self.num_shards, *leaf.shape), dtype)
        return residual

    def residual_shardings(self, grad_shardings: Any) -> dict[str, jax.NamedSharding] | None:
        """Returns the shardings of `start_residual`."""
        if not self.feedback:
            return None
        shardings = {}
        for name, grad_sharding in _leaves_by_name(grad_shardings):
            if self.is_compressed(name):
                spec = jax.P(self.axes, *self.spec_of_sums(grad_sharding))
                shardings[name] = jax.NamedSharding(grad_sharding.mesh, spec)
        return shardings

    def spec_of_sums(self, grad_sharding: jax.NamedSharding) -> jax.P:
        """Returns the spec of the partial sums, without the dim of shards, of such a gradient."""
        return sharding.without_axes(grad_sharding, self.axes).spec


def synchronise(
    grads: Any,
    metrics: Metrics,
    grad_shardings: Any,
    *,
    grad_sync: Sync | None = None,
    residual: Any = None,
    key: jax.Array | None = None,
) -> tuple[Any, Metrics, Any]:
    """Sums gradients and Metrics over their leading dim of N batch shards.

    It is the only collective over the mesh axis `data`. Returns the gradients, the Metrics and the
    new residual. Without `grad_sync` XLA chooses the collective, and the residual is returned as it
    is. `key` is that of the step, for stochastic rounding.
    """
    metrics = jax.tree.map(lambda leaf: leaf.sum(0), metrics)
    if grad_sync is None:
        grads = jax.tree.map(lambda leaf: leaf.sum(0), grads)
    else:
        weight = jnp.where(metrics.weight == 0, 1, metrics.weight)
        with jax.named_scope(SCOPE):
            grads, residual = _synchronise_on_devices(
                grads,
                grad_shardings,
                grad_sync,
                residual=residual,
                key=jax.random.fold_in(jax.random.key(0) if key is None else key, AT_ROUNDING),
                weight=weight,
            )
    grads = jax.lax.with_sharding_constraint(grads, grad_shardings)
    return grads, metrics, residual


def _synchronise_on_devices(
    grads: Any,
    grad_shardings: Any,
    grad_sync: Sync,
    *,
    residual: dict[str, jax.Array] | None,
    key: jax.Array,
    weight: jax.Array,
) -> tuple[Any, Any]:
    """Returns the gradients and the new residual; a device adds up its shards of the parameters."""
    names, leaves = zip(*_leaves_by_name(grads), strict=True)
    grad_specs = [
        grad_sync.spec_of_sums(grad_sharding) for grad_sharding in jax.tree.leaves(grad_shardings)
    ]
    sum_specs = [jax.P(grad_sync.axes, *spec) for spec in grad_specs]
    spec_of_name = dict(zip(names, sum_specs, strict=True))
    residual_specs = {name: spec_of_name[name] for name in residual or {}}

    def on_device(leaves, residual, key, weight):
        # A device has one shard of the batch: the dim of shards is 1.
        sums = [leaf[0] for leaf in leaves]
        for number, name in enumerate(names):
            if name in residual:
                sums[number] = sums[number] + weight * residual[name][0]

        totals = [None] * len(sums)
        new_residual = {}
        for bucket_number, bucket in enumerate(_buckets(grad_sync, names, grad_specs, sums)):
            is_compressed = grad_sync.is_compressed(names[bucket[0]])
            bucket_key = jax.random.fold_in(key, bucket_number)
            # Devices with other values round them with other bits; those with the same values, to
            # the same result.
            if axes := _sharding_axes(grad_specs[bucket[0]]):
                bucket_key = jax.random.fold_in(bucket_key, lax.axis_index(axes))
            total, error = all_reduce(
                jnp.concatenate([sums[i].reshape(-1) for i in bucket]),
                grad_sync.axes,
                grad_sync.levels,
                grad_sync.wire if is_compressed else None,
                bucket_key,
            )
            ends = np.cumsum([sums[i].size for i in bucket])[:-1]
            for i, part in zip(bucket, jnp.split(total, ends), strict=True):
                totals[i] = part.reshape(sums[i].shape)
            if residual and is_compressed:
                for i, part in zip(bucket, jnp.split(error, ends), strict=True):
                    new_residual[names[i]] = (part.reshape(sums[i].shape) / weight)[None]
        return totals, new_residual

    run = jax.shard_map(
        on_device,
        in_specs=(sum_specs, residual_specs, jax.P(), jax.P()),
        out_specs=(grad_specs, residual_specs),
        # It cannot prove that an exchange in groups ends with equal sums on all devices. It may be
        # off, because this is not differentiated.
        check_vma=False,
    )
    totals, new_residual = run(list(leaves), residual or {}, key, weight)
    grads = jax.tree.unflatten(jax.tree.structure(grads), totals)
    return grads, new_residual if residual else residual


# Elements of a device that are sent together; a larger parameter is sent alone.
BUCKET = 2**25


def _buckets(
    grad_sync: Sync, names: Sequence[str], specs: Sequence[jax.P], sums: Sequence[jax.Array]
) -> Iterator[list[int]]:
    """Yields the numbers of parameters that are sent together.

    They are sharded over the same axes: values that are equal on some devices must not share blocks
    with values that differ there.
    """

    def kind(i: int) -> tuple:
        return grad_sync.is_compressed(names[i]), _sharding_axes(specs[i]), sums[i].dtype.name

    numbers = sorted(range(len(sums)), key=kind)
    for _, numbers_of_kind in itertools.groupby(numbers, key=kind):
        bucket: list[int] = []
        size = 0
        for i in numbers_of_kind:
            if bucket and size + sums[i].size > BUCKET:
                yield bucket
                bucket = []
                size = 0
            bucket.append(i)
            size += sums[i].size
        yield bucket


def _sharding_axes(spec: jax.P) -> tuple[str, ...]:
    """Returns the mesh axes, of more than one device, that a parameter is sharded over; sorted."""
    axes = {axis for entry in spec for axis in sharding.axes_of(entry)}
    return tuple(sorted(axis for axis in axes if sharding.num_devices([axis]) > 1))


def _leaves_by_name(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves, each with its name, such as layers.mlp.up.kernel."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


# ---- patterns: flat, ring, tree and hierarchical all-reduce, inside `shard_map` ----

# N devices of a group, L elements, C elements of a device's part


class Level(NamedTuple):
    """Groups of `size` devices whose numbers along the mesh axes are `stride` apart."""

    size: int
    stride: int
    is_ring: bool = False  # in steps to the next device, else one collective of XLA

    def groups(self, num_devices: int) -> list[list[int]]:
        """Returns the numbers of the devices of each group."""
        numbers = np.arange(num_devices).reshape(-1, self.size, self.stride)
        return numbers.swapaxes(1, 2).reshape(-1, self.size).tolist()

    def index_in_group(self, axes: Sequence[str]) -> jax.Array:
        """Returns the index of this device in its group."""
        return lax.axis_index(axes) // self.stride % self.size


def levels_of(pattern: str, num_devices: int, num_islands: int) -> tuple[Level, ...]:
    """Returns the levels of a pattern.

    The devices form `num_islands` islands of equal size, each with neighbouring devices and a fast
    network of its own: hosts, or slices.
    """
    island_size = num_devices // num_islands
    if pattern == "ring":
        return (Level(num_devices, 1, is_ring=True),)
    if pattern == "tree":
        sizes = [*_prime_factors(island_size), *_prime_factors(num_islands)]
        strides = np.cumprod([1, *sizes]).tolist()
        return tuple(
            Level(size, stride, is_ring=True) for size, stride in zip(sizes, strides, strict=False)
        )
    if pattern == "hierarchical" and 1 < num_islands < num_devices:
        within_islands = Level(island_size, 1)
        between_islands = Level(num_islands, island_size)
        return within_islands, between_islands
    return (Level(num_devices, 1),)


def bytes_sent(levels: Sequence[Level], wire: "Wire | None", itemsize: int) -> float:
    """Returns the bytes that a device sends per element: 2 (N - 1) / N of each level's part."""
    total = 0.0
    part = 1.0
    for level in levels:
        element_bytes: float = itemsize
        if wire is not None and level is levels[-1]:
            element_bytes = wire.bytes_per_element
        total += 2 * (level.size - 1) / level.size * part * element_bytes
        part /= level.size
    return total


def all_reduce(
    x_L: jax.Array,
    axes: Sequence[str],
    levels: Sequence[Level],
    wire: "Wire | None" = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sum of `x` over the devices along the mesh axes, and this device's error (L,).

    Each level reduce-scatters, so the next one works on a part; then the levels all-gather in
    reverse order. With a `wire` the last level, that of the slowest links, sends its format, and
    adds in the dtype of `x`; summed over all devices, the errors are the exact sum minus the
    result. Without a wire the error is None. All devices return the same bits. `key` is the same on
    all devices.
    """
    num_devices = math.prod(level.size for level in levels)
    if wire is None and levels == (Level(num_devices, 1),):
        return lax.psum(x_L, axes), None

    block = wire.block if wire else 1
    x = jnp.pad(x_L, (0, -len(x_L) % (num_devices * block)))
    exact_levels = levels[:-1] if wire else levels
    for level in exact_levels:
        x = _reduce_scatter(x, axes, level, level.groups(num_devices))

    error = None
    if wire:
        keys = None
        if key is not None:
            keys = jax.random.split(jax.random.fold_in(key, lax.axis_index(axes)))
        groups = levels[-1].groups(num_devices)
        x, error = _compressed_all_reduce(x, axes, levels[-1], groups, wire=wire, keys=keys)

    for level in reversed(exact_levels):
        x = _all_gather(x, axes, level, level.groups(num_devices))
        if wire:
            # Of the level's array this device has rounded its own part only.
            error = _zeros_around(error, level.index_in_group(axes), level.size)
    return x[: len(x_L)], None if error is None else error[: len(x_L)]


def _compressed_all_reduce(
    x_L: jax.Array,
    axes: Sequence[str],
    level: Level,
    groups: list[list[int]],
    *,
    wire: "Wire",
    keys: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum over the group, sent in the format of `wire`, and this device's error."""
    rows_NC = x_L.reshape(level.size, -1)
    length = rows_NC.shape[1]
    index = level.index_in_group(axes)
    first_key, second_key = (None, None) if keys is None else keys

    # Reduce-scatter: row i goes to device i of the group, which adds up the rows it receives.
    sent = wire.encode(rows_NC, first_key)
    error_NC = rows_NC - wire.decode(sent, length, x_L.dtype)
    received = lax.all_to_all(sent, axes, 0, 0, axis_index_groups=groups, tiled=True)
    part_NC = wire.decode(received, length, x_L.dtype)
    # This device's own part is not rounded, because it is not sent; it already contains the last
    # step's residual.
    part_NC = part_NC.at[index].set(rows_NC[index])
    part_C = part_NC.sum(0)

    # All-gather. A device uses its own part as it was sent, too: else replicas would differ.
    sent = wire.encode(part_C[None], second_key)
    error_C = part_C - wire.decode(sent, length, x_L.dtype)[0]
    rows = lax.all_gather(sent[0], axes, axis_index_groups=groups)
    error = error_NC.at[index].set(error_C).reshape(-1)
    return wire.decode(rows, length, x_L.dtype).reshape(-1), error


def _reduce_scatter(
    x_L: jax.Array, axes: Sequence[str], level: Level, groups: list[list[int]]
) -> jax.Array:
    """Returns this device's part of the sum over its group: (L / size,)."""
    if not level.is_ring:
        return lax.psum_scatter(x_L, axes, axis_index_groups=groups, tiled=True)
    rows_NC = x_L.reshape(level.size, -1)
    index = level.index_in_group(axes)

    def row(number):
        return lax.dynamic_index_in_dim(rows_NC, number % level.size, keepdims=False)

    # A partial sum travels once round the ring, and each device adds its own row. The last row is
    # that of the device on which the sum ends.
    def step(part_C, number):
        received_C = lax.ppermute(part_C, axes, _pairs_to_next(groups))
        return received_C + row(index - 2 - number), None

    part_C, _ = lax.scan(step, row(index - 1), jnp.arange(level.size - 1))
    return part_C


def _all_gather(
    x_C: jax.Array, axes: Sequence[str], level: Level, groups: list[list[int]]
) -> jax.Array:
    """Returns the parts of all devices of the group: (size x C,)."""
    if not level.is_ring:
        return lax.all_gather(x_C, axes, axis_index_groups=groups, tiled=True)
    index = level.index_in_group(axes)

    def step(carry, number):
        part_C, rows_NC = carry
        part_C = lax.ppermute(part_C, axes, _pairs_to_next(groups))
        source = (index - 1 - number) % level.size
        return (part_C, lax.dynamic_update_index_in_dim(rows_NC, part_C, source, 0)), None

    rows_NC = _zeros_around(x_C, index, level.size).reshape(level.size, -1)
    (_, rows_NC), _ = lax.scan(step, (x_C, rows_NC), jnp.arange(level.size - 1))
    return rows_NC.reshape(-1)


def _zeros_around(x_C: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Returns (size x C,) with `x` as part number `index`, and zeros as all other parts."""
    rows_NC = jnp.zeros((size, len(x_C)), x_C.dtype)
    return lax.dynamic_update_index_in_dim(rows_NC, x_C, index, 0).reshape(-1)


def _pairs_to_next(groups: list[list[int]]) -> list[tuple[int, int]]:
    """Returns the pairs (source, target) that send from each device to the next in its group."""
    pairs = []
    for group in groups:
        next_devices = [*group[1:], group[0]]
        pairs += zip(group, next_devices, strict=True)
    return pairs


def _prime_factors(number: int) -> list[int]:
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


# ---- formats of messages ----

# R rows, C elements of a row

BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


class Wire(NamedTuple):
    """A format: `bits` per element; but for bfloat16, a float32 scale per `block` elements."""

    bits: int
    block: int
    # rounds up or down at random, so that the mean of many roundings is the value
    stochastic: bool = False

    @property
    def bytes_per_element(self) -> float:
        """Returns the bytes that an element takes, with its share of the scale."""
        scale_bytes = 4 / self.block if self.bits < 16 else 0
        return self.bits / 8 + scale_bytes

    def encode(self, rows_RC: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns rows (R, C), C a multiple of `block`, as they are sent.

        They are (R, bytes) uint8, or of bfloat16 (R, C) uint16. Raises ValueError without a `key`
        if the rounding is stochastic.
        """
        if self.bits == 16:
            # As integers, because XLA on CPU would send bfloat16 as float32.
            return jax.lax.bitcast_convert_type(rows_RC.astype(jnp.bfloat16), jnp.uint16)
        if self.stochastic and key is None:
            raise ValueError("stochastic rounding needs a key")
        largest = 2 ** (self.bits - 1) - 1
        blocks = rows_RC.reshape(len(rows_RC), -1, self.block)
        scale = _scale(blocks, largest)
        values = blocks / scale[..., None].astype(blocks.dtype)
        if self.stochastic:
            values = jnp.floor(values + jax.random.uniform(key, values.shape, jnp.float32))
        else:
            values = jnp.round(values)
        values = jnp.clip(values, -largest, largest).astype(jnp.int8).reshape(rows_RC.shape)
        if self.bits == 4:
            nibbles = (values + 8).astype(jnp.uint8)
            payload = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        else:
            payload = jax.lax.bitcast_convert_type(values, jnp.uint8)
        # One message: payload and scales travel together.
        scales = jax.lax.bitcast_convert_type(scale, jnp.uint8).reshape(len(rows_RC), -1)
        return jnp.concatenate([payload, scales], axis=1)

    def decode(self, sent: jax.Array, length: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the rows (R, C = `length`) that `encode` has written."""
        if self.bits == 16:
            return jax.lax.bitcast_convert_type(sent, jnp.bfloat16).astype(dtype)
        payload, scales = jnp.split(sent, [length * self.bits // 8], axis=1)
        if self.bits == 4:
            nibbles = jnp.stack([payload & 15, payload >> 4], axis=-1)
            values = nibbles.astype(jnp.int8) - 8
        else:
            values = jax.lax.bitcast_convert_type(payload, jnp.int8)
        scale = jax.lax.bitcast_convert_type(scales.reshape(len(sent), -1, 4), jnp.float32)
        blocks = values.reshape(*scale.shape, self.block).astype(dtype)
        return (blocks * scale[..., None].astype(dtype)).reshape(len(sent), length)


def _scale(blocks: jax.Array, largest: int) -> jax.Array:
    """Returns the float32 scale of each block (..., b); a block of zeros has the scale 1.

    It is rounded up, so that no value is clipped.
    """
    exact = jnp.abs(blocks).max(-1) / largest
    scale = exact.astype(jnp.float32)
    too_small = scale.astype(blocks.dtype) < exact
    scale = jnp.where(too_small, jnp.nextafter(scale, jnp.float32(jnp.inf)), scale)
    scale = jnp.where(scale == 0, 1, scale)
    # Not left to the maximum: on CPU XLA loses a NaN in a large array.
    return jnp.where(jnp.isfinite(blocks).all(-1), scale, jnp.nan)
