"""Reduces the partial sums of the batch shards to the gradients of the global batch.

By default XLA does. `Sync` does it where the network between hosts or slices is slow: in another pattern of messages
(`patterns.py`), and with fewer bytes per element (`wire.py`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config.sync import SyncConfig
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models.base import Params, is_measured
from meshtrain.parallel import patterns, sharding
from meshtrain.parallel.mesh import Network
from meshtrain.parallel.wire import BITS, Wire

# Elements of a device that are sent together; a larger parameter is sent alone.
BUCKET = 2**25

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
    exact: tuple[str, ...]  # last names of parameters whose gradients are not compressed
    feedback: bool  # whether there is a residual

    def is_compressed(self, path: tuple) -> bool:
        """Returns whether the gradient of the parameter at this path is sent in the format of the wire."""
        return self.wire is not None and not is_measured(path) and path[-1].key not in self.exact

    def start_residual(self, params: Params) -> dict[str, jax.Array] | None:
        """Returns the residual before the first step, by the path of the parameter; None without feedback."""
        if not self.feedback:
            return None
        num = math.prod(level.size for level in self.levels)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): jnp.zeros(
                (num, *leaf.shape), jnp.promote_types(leaf.dtype, jnp.float32)
            )
            for path, leaf in jax.tree.leaves_with_path(params)
            if self.is_compressed(path)
        }

    def residual_shardings(self, grad_shardings: Any) -> dict[str, jax.NamedSharding] | None:
        """Returns the shardings of `start_residual`."""
        if not self.feedback:
            return None
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): jax.NamedSharding(
                one.mesh, jax.P(self.axes, *sharding.without_axes(one, self.axes).spec)
            )
            for path, one in jax.tree.leaves_with_path(grad_shardings)
            if self.is_compressed(path)
        }


def choose(settings: SyncConfig, network: Network, partial_over: Sequence[str]) -> Sync | None:
    """Returns how the sums over the mesh axes `partial_over` meet; None: XLA adds them.

    Call it with the rules active. Raises ConfigError for settings that the model or the mesh does not support.
    """
    if settings.is_default:
        return None
    if not partial_over:
        raise ConfigError(
            f"{settings.changed}: this model's loss may mix rows, so that no sum per shard exists; use "
            f"train.num_microbatches=2 or more, or a model that is a stack of blocks"
        )
    axes, num_shards = sharding.batch_slices(partial_over)
    if num_shards == 1:
        return None
    parts = network.num_parts(*axes)
    if settings.pattern == "hierarchical" and parts == 1:
        if (link := network.link_along(*axes)) == "host":
            return None  # nothing leaves a host
        raise ConfigError(
            f"sync.pattern=hierarchical: {link} do not hold equal, contiguous parts of {' x '.join(axes)}; "
            f"use another mesh, or sync.pattern=xla"
        )
    wire = None
    if settings.wire != "float32":
        is_random = settings.wire == "int4" and not settings.has_feedback
        wire = Wire(BITS[settings.wire], settings.block, stochastic=is_random)
    levels = patterns.levels_of(settings.pattern, num_shards, parts)
    exact = tuple(settings.exact)
    return Sync(axes, levels, wire, exact, feedback=wire is not None and settings.has_feedback)


def synchronise(
    sums: tuple[Params, Metrics],
    grad_shardings: Any,
    residual: Any = None,
    how: Sync | None = None,
    key: jax.Array | None = None,
) -> tuple[Params, Metrics, Any]:
    """Sums gradients and Metrics over their leading dim of batch shards: the only collective over `data`.

    Returns the gradients, the Metrics and the new residual of `how`. `key` is that of the step.
    """
    grads, metrics = sums
    metrics = jax.tree.map(lambda leaf: leaf.sum(0), metrics)
    if how is None:
        grads = jax.tree.map(lambda leaf: leaf.sum(0), grads)
    else:
        unit = jnp.where(metrics.weight == 0, 1, metrics.weight)
        grads, residual = _by_devices(grads, grad_shardings, residual, how, key, unit)
    return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics, residual


def _by_devices(sums, grad_shardings, residual, how: Sync, key, unit):
    """Returns the gradients and the new residual, each device working on its shards of the parameters."""
    paths, leaves = zip(*jax.tree.leaves_with_path(sums), strict=True)
    specs = [sharding.without_axes(one, how.axes).spec for one in jax.tree.leaves(grad_shardings)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    held = residual or {}
    in_specs = ([jax.P(how.axes, *spec) for spec in specs], {}, jax.P(), jax.P())
    for name, spec in zip(names, specs, strict=True):
        if name in held:
            in_specs[1][name] = jax.P(how.axes, *spec)

    def member(leaves, held, key, unit):
        leaves = [leaf[0] for leaf in leaves]
        added = [
            leaf + unit * held[n][0] if n in held else leaf
            for n, leaf in zip(names, leaves, strict=True)
        ]
        grads, errors = [None] * len(leaves), {}
        for number, bucket in enumerate(_buckets(how, paths, specs, leaves)):
            wire = how.wire if how.is_compressed(paths[bucket[0]]) else None
            flat = jnp.concatenate([added[i].reshape(-1) for i in bucket])
            key_of = jax.random.fold_in(key, number)
            total, error = patterns.all_reduce(flat, how.axes, how.levels, wire, key_of)
            ends = np.cumsum([leaves[i].size for i in bucket])[:-1]
            for i, one in zip(bucket, jnp.split(total, ends), strict=True):
                grads[i] = one.reshape(leaves[i].shape)
            if held and wire:
                for i, one in zip(bucket, jnp.split(error, ends), strict=True):
                    errors[names[i]] = (one.reshape(leaves[i].shape) / unit)[None]
        return grads, errors

    # Not differentiated, so the check of what varies over which axes may be off: it does not know that an exchange
    # in groups leaves the same sum on all members.
    run = jax.shard_map(member, in_specs=in_specs, out_specs=(specs, in_specs[1]), check_vma=False)
    key = jax.random.key(0) if key is None else key
    grads, new = run(list(leaves), held, key, unit)
    return jax.tree.unflatten(jax.tree.structure(sums), grads), new if residual else residual


def _buckets(how: Sync, paths, specs, leaves) -> Iterator[list[int]]:
    """Yields the numbers of parameters that are sent together.

    They are sharded over the same axes: what is equal on some devices must not share blocks with what differs there.
    """

    def kind(i: int) -> tuple:
        axes = sorted(axis for entry in specs[i] for axis in sharding.axes_of(entry))
        return how.is_compressed(paths[i]), axes, leaves[i].dtype.name

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
