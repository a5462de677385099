"""Reduces the partial sums of the batch shards to the gradients of the global batch.

By default XLA does. `Sync` does it where the network between hosts or slices is slow: in another pattern of messages
(`patterns.py`), and with fewer bytes per element (`wire.py`).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.metrics import Metrics
from meshtrain.parallel import patterns, sharding
from meshtrain.parallel.wire import Wire

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
    levels: tuple[patterns.Level, ...]
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
        return patterns.bytes_sent(self.levels, self.wire if compressed else None, itemsize)

    def start_residual(self, params: Any) -> dict[str, jax.Array] | None:
        """Returns the residual before the first step, by the name of the parameter; None without feedback."""
        residual = {
            name: jnp.zeros(
                (self.num_shards, *leaf.shape), jnp.promote_types(leaf.dtype, jnp.float32)
            )
            for name, leaf in _named(params)
            if self.is_compressed(name)
        }
        return residual if self.feedback else None

    def residual_shardings(self, grad_shardings: Any) -> dict[str, jax.NamedSharding] | None:
        """Returns the shardings of `start_residual`."""
        shardings = {
            name: jax.NamedSharding(one.mesh, jax.P(self.axes, *self.spec_of_sums(one)))
            for name, one in _named(grad_shardings)
            if self.is_compressed(name)
        }
        return shardings if self.feedback else None

    def spec_of_sums(self, of_total: jax.NamedSharding) -> jax.P:
        """Returns how the partial sums of a gradient with this sharding are sharded."""
        return sharding.without_axes(of_total, self.axes).spec


def _named(tree: Any) -> list[tuple[str, Any]]:
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
    names, leaves = zip(*_named(sums), strict=True)
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
            total, error = patterns.all_reduce(together, how.axes, how.levels, wire, bucket_key)
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
