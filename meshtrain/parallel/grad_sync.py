"""Reduces the partial sums of the batch shards to the gradients of the global batch.

By default XLA does. `Sync` does it where the network between hosts or slices is slow: in another pattern of messages
(`patterns.py`), and with fewer bytes per element (`wire.py`).
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

BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


class Wire(NamedTuple):
    """A format: `bits` per element, and one float32 scale per `block` elements (bfloat16 has none)."""

    bits: int
    block: int
    stochastic: bool = (
        False  # rounds up or down at random, so that the mean of many roundings is the value
    )

    @property
    def bytes_per_element(self) -> float:
        """Returns what an element takes on the wire, with its share of the scale."""
        return self.bits / 8 + (4 / self.block if self.bits < 16 else 0)

    def encode(self, rows_RC: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns rows (R, C), C a multiple of `block`, as they are sent: (R, bytes) or, of bfloat16, (R, C).

        Raises ValueError without a `key` if the rounding is stochastic.
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

    def decode(self, sent: jax.Array, length: int, dtype: jnp.dtype) -> jax.Array:
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
    """Returns the float32 scale of each block (..., b), rounded up so that no value is clipped; 1 of zeros."""
    wide = jnp.abs(blocks).max(-1) / largest
    scale = wide.astype(jnp.float32)
    too_small = scale.astype(blocks.dtype) < wide
    scale = jnp.where(too_small, jnp.nextafter(scale, jnp.float32(jnp.inf)), scale)
    scale = jnp.where(scale == 0, 1, scale)
    # Not left to the maximum: on CPU XLA loses a NaN in a large array.
    return jnp.where(jnp.isfinite(blocks).all(-1), scale, jnp.nan)


# N members, L elements, C of a member's part


class Level(NamedTuple):
    """Groups of `size` members whose numbers are `stride` apart."""

    size: int
    stride: int
    is_ring: bool = False  # in steps to the next member, else one collective of XLA

    def groups(self, num_members: int) -> list[list[int]]:
        """Returns the numbers of the members of each group."""
        numbers = np.arange(num_members).reshape(-1, self.size, self.stride)
        return numbers.swapaxes(1, 2).reshape(-1, self.size).tolist()

    def place(self, axes: Sequence[str]) -> jax.Array:
        """Returns this member's place in its group."""
        return lax.axis_index(axes) // self.stride % self.size


def levels_of(pattern: str, num_members: int, num_networks: int) -> tuple[Level, ...]:
    """Returns the levels of a pattern; neighbouring members share one of `num_networks` fast networks of equal size."""
    inside = num_members // num_networks
    if pattern == "ring":
        return (Level(num_members, 1, is_ring=True),)
    if pattern == "tree":
        sizes = [*_prime_factors(inside), *_prime_factors(num_networks)]
        strides = np.cumprod([1, *sizes]).tolist()
        return tuple(Level(n, s, is_ring=True) for n, s in zip(sizes, strides, strict=False))
    if pattern == "hierarchical" and 1 < num_networks < num_members:
        return Level(inside, 1), Level(num_networks, inside)
    return (Level(num_members, 1),)


def bytes_sent(levels: Sequence[Level], wire: Wire | None, itemsize: int) -> float:
    """Returns the bytes that a member sends for each element: of each level 2 (N - 1) / N of the part it works on."""
    total, part = 0.0, 1.0
    for level in levels:
        size = wire.bytes_per_element if wire and level is levels[-1] else itemsize
        total += 2 * (level.size - 1) / level.size * part * size
        part /= level.size
    return total


def all_reduce(
    x_L: jax.Array,
    axes: Sequence[str],
    levels: Sequence[Level],
    wire: Wire | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sum of `x` over the members along the mesh axes, and what the sum lacks of this member's `x`.

    With a `wire` the last level, that of the slowest links, sends its format, and adds in the dtype of `x`. Summed
    over all members the second array (L,) is sum of x minus the result; without a wire it is None. All members return
    the same bits. `key` is the same on all members.
    """
    num_members = int(np.prod([level.size for level in levels]))
    if wire is None and levels == (Level(num_members, 1),):
        return lax.psum(x_L, axes), None
    multiple = num_members * (wire.block if wire else 1)
    x = jnp.pad(x_L, (0, -len(x_L) % multiple))
    exact = levels[:-1] if wire else levels
    for level in exact:
        x = _scatter(x, axes, level, level.groups(num_members))
    error = None
    if wire:
        keys = (
            None if key is None else jax.random.split(jax.random.fold_in(key, lax.axis_index(axes)))
        )
        x, error = _compressed(x, axes, levels[-1], levels[-1].groups(num_members), wire, keys)
    for level in reversed(exact):
        x = _gather(x, axes, level, level.groups(num_members))
        if wire:  # this member alone has compressed its part
            error = _at(error, level.place(axes), level.size)
    return x[: len(x_L)], None if error is None else error[: len(x_L)]


def _compressed(x_L, axes, level: Level, groups, wire: Wire, keys):
    """Returns the sum over the groups of one level, sent in the format of `wire`, and this member's error."""
    rows_NC = x_L.reshape(level.size, -1)
    length = rows_NC.shape[1]
    place = level.place(axes)
    first, second = (None, None) if keys is None else keys
    sent = wire.encode(rows_NC, first)
    error_NC = rows_NC - wire.decode(sent, length, x_L.dtype)
    received = lax.all_to_all(sent, axes, 0, 0, axis_index_groups=groups, tiled=True)
    # What this member adds up of its own is not sent, so it stays exact: what the sum lacked at the last step is in it.
    part_NC = wire.decode(received, length, x_L.dtype).at[place].set(rows_NC[place])
    part_C = part_NC.sum(0)
    sent = wire.encode(part_C[None], second)
    # Its own part decoded too, or replicas would differ.
    error_C = part_C - wire.decode(sent, length, x_L.dtype)[0]
    rows = lax.all_gather(sent[0], axes, axis_index_groups=groups)
    error = error_NC.at[place].set(error_C).reshape(-1)
    return wire.decode(rows, length, x_L.dtype).reshape(-1), error


def _scatter(x_L, axes, level: Level, groups) -> jax.Array:
    """Returns this member's part of the sum over its group: (L / size,)."""
    if not level.is_ring:
        return lax.psum_scatter(x_L, axes, axis_index_groups=groups, tiled=True)
    rows_NC, place = x_L.reshape(level.size, -1), level.place(axes)

    def row(number):
        return lax.dynamic_index_in_dim(rows_NC, number % level.size, keepdims=False)

    def step(part_C, number):
        return lax.ppermute(part_C, axes, _to_next(groups)) + row(place - 2 - number), None

    return lax.scan(step, row(place - 1), jnp.arange(level.size - 1))[0]


def _gather(x_C, axes, level: Level, groups) -> jax.Array:
    """Returns the parts of all members of the group: (size x C,)."""
    if not level.is_ring:
        return lax.all_gather(x_C, axes, axis_index_groups=groups, tiled=True)
    place = level.place(axes)

    def step(carry, number):
        part_C, rows_NC = carry
        part_C = lax.ppermute(part_C, axes, _to_next(groups))
        whose = (place - 1 - number) % level.size
        return (part_C, lax.dynamic_update_index_in_dim(rows_NC, part_C, whose, 0)), None

    rows_NC = _at(x_C, place, level.size).reshape(level.size, -1)
    return lax.scan(step, (x_C, rows_NC), jnp.arange(level.size - 1))[0][1].reshape(-1)


def _at(x_C, place, size: int) -> jax.Array:
    """Returns (size x C,) with `x` at its place, and zeros elsewhere."""
    rows_NC = jnp.zeros((size, len(x_C)), x_C.dtype)
    return lax.dynamic_update_index_in_dim(rows_NC, x_C, place, 0).reshape(-1)


def _to_next(groups: list[list[int]]) -> list[tuple[int, int]]:
    return [(a, b) for group in groups for a, b in zip(group, [*group[1:], group[0]], strict=True)]


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


# Elements of a device that are sent together; a larger parameter is sent alone.
BUCKET = 2**25

SCOPE = "synchronise"  # name of the collectives of `Sync` in compiled programs, for the audit

# N batch shards


@dataclass(frozen=True)
class Sync:
    """How the sums of N batch shards, along the mesh axes `axes`, meet.

    A residual is what the gradients of the steps so far lack, per unit of the batch's weight: for each parameter that
    is compressed (N, ...), of each shard its own. It is added to the shard's sums of the next step.
    """

    axes: tuple[str, ...]
    levels: tuple[Level, ...]
    wire: Wire | None
    exact: tuple[str, ...]  # names in the paths of parameters whose gradients are not compressed
    feedback: bool  # whether there is a residual

    @property
    def num_shards(self) -> int:
        return math.prod(level.size for level in self.levels)

    def is_compressed(self, name: str) -> bool:
        """Returns whether the gradient of a parameter, such as layers.mlp.up.kernel, is sent as the wire says."""
        return self.wire is not None and not {*name.split(".")} & {*self.exact}

    def bytes_per_element(self, itemsize: int, *, compressed: bool) -> float:
        """Returns the bytes that a device sends for each element of a gradient that it holds."""
        return bytes_sent(self.levels, self.wire if compressed else None, itemsize)

    def start_residual(self, params: Any) -> dict[str, jax.Array] | None:
        """Returns the residual before the first step, by the name of the parameter; None without feedback."""
        residual = {
            name: jnp.zeros(
                (self.num_shards, *leaf.shape), jnp.promote_types(leaf.dtype, jnp.float32)
            )
            for name, leaf in _leaves_by_name(params)
            if self.is_compressed(name)
        }
        return residual if self.feedback else None

    def residual_shardings(self, grad_shardings: Any) -> dict[str, jax.NamedSharding] | None:
        """Returns the shardings of `start_residual`."""
        shardings = {
            name: jax.NamedSharding(one.mesh, jax.P(self.axes, *self.spec_of_sums(one)))
            for name, one in _leaves_by_name(grad_shardings)
            if self.is_compressed(name)
        }
        return shardings if self.feedback else None

    def spec_of_sums(self, of_total: jax.NamedSharding) -> jax.P:
        """Returns how the partial sums of a gradient with this sharding are sharded."""
        return sharding.without_axes(of_total, self.axes).spec


def _leaves_by_name(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves, each with its name, such as layers.mlp.up.kernel."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def synchronise(
    sums: tuple[Any, Metrics],
    grad_shardings: Any,
    residual: Any = None,
    how: Sync | None = None,
    key: jax.Array | None = None,
) -> tuple[Any, Metrics, Any]:
    """Sums gradients and Metrics over their leading dim of batch shards: the only collective over `data`.

    Returns the gradients, the Metrics and the new residual of `how`. `key` is that of the step.
    """
    grads, metrics = sums
    metrics = jax.tree.map(lambda leaf: leaf.sum(0), metrics)
    if how is None:
        grads = jax.tree.map(lambda leaf: leaf.sum(0), grads)
    else:
        unit = jnp.where(metrics.weight == 0, 1, metrics.weight)
        with jax.named_scope(SCOPE):
            grads, residual = _by_devices(grads, grad_shardings, residual, how, key, unit)
    return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics, residual


def _by_devices(sums, grad_shardings, residual, how: Sync, key, unit):
    """Returns the gradients and the new residual, each device working on its shards of the parameters."""
    names, leaves = zip(*_leaves_by_name(sums), strict=True)
    specs = [how.spec_of_sums(one) for one in jax.tree.leaves(grad_shardings)]
    held = residual or {}
    of_sums = {name: jax.P(how.axes, *spec) for name, spec in zip(names, specs, strict=True)}
    of_held = {name: of_sums[name] for name in held}
    in_specs = [*of_sums.values()], of_held, jax.P(), jax.P()

    def member(leaves, held, key, unit):
        own = [leaf[0] for leaf in leaves]
        own = [
            leaf + unit * held[name][0] if name in held else leaf
            for name, leaf in zip(names, own, strict=True)
        ]
        grads, errors = [None] * len(own), {}
        for number, bucket in enumerate(_buckets(how, names, specs, own)):
            wire = how.wire if how.is_compressed(names[bucket[0]]) else None
            together = jnp.concatenate([own[i].reshape(-1) for i in bucket])
            bucket_key = jax.random.fold_in(key, number)
            total, error = all_reduce(together, how.axes, how.levels, wire, bucket_key)
            ends = np.cumsum([own[i].size for i in bucket])[:-1]
            for i, part in zip(bucket, jnp.split(total, ends), strict=True):
                grads[i] = part.reshape(own[i].shape)
            if held and wire:
                for i, part in zip(bucket, jnp.split(error, ends), strict=True):
                    errors[names[i]] = (part.reshape(own[i].shape) / unit)[None]
        return grads, errors

    # Not differentiated, so the check of what varies over which axes may be off: it does not know that an exchange
    # in groups leaves the same sum on all members.
    run = jax.shard_map(member, in_specs=in_specs, out_specs=(specs, of_held), check_vma=False)
    key = jax.random.key(0) if key is None else key
    grads, errors = run(list(leaves), held, key, unit)
    return jax.tree.unflatten(jax.tree.structure(sums), grads), errors if residual else residual


def _buckets(how: Sync, names, specs, leaves) -> Iterator[list[int]]:
    """Yields the numbers of parameters that are sent together.

    They are sharded over the same axes: what is equal on some devices must not share blocks with what differs there.
    """

    def kind(i: int) -> tuple:
        axes = {axis for entry in specs[i] for axis in sharding.axes_of(entry)}
        axes = sorted(axis for axis in axes if sharding.num_devices([axis]) > 1)
        return how.is_compressed(names[i]), axes, leaves[i].dtype.name

    numbers = sorted(range(len(leaves)), key=kind)
    for _, group in itertools.groupby(numbers, key=kind):
        bucket, size = [], 0
        for i in group:
            if bucket and size + leaves[i].size > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += leaves[i].size
        yield bucket
