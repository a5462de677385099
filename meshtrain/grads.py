"""From a model to gradients: the loss of a stack of blocks, and its gradients summed over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.metrics import GradFn, Metrics
from meshtrain.models import trees
from meshtrain.models.base import Model, Params
from meshtrain.models.blocks import run_blocks, to_compute_dtype
from meshtrain.parallel import grad_sync, sharding
from meshtrain.parallel.remat import rematerialised

# (params, batch, key) -> Metrics; in evaluation the key is None.
LossFn = Callable[[Params, Any, jax.Array | None], Metrics]


def make_loss(model: Model, *, remat: str = "none", unroll: int = 1) -> LossFn:
    """Returns the model's loss, computed in the dtype of the parameters.

    `remat` selects what is saved of each block for the backward pass: "none" what its gradient needs, "full"
    only the block's input, "dots" the results of matrix products, "names:a,b" the values that the model
    marked with `checkpoint_name`. A model that is not a stack counts as one block.
    `unroll` is the largest number of layers per iteration of the loop over the stack; on accelerators all
    layers are unrolled, or none. With remat it is always 1: in unrolled layers XLA would merge the
    recomputation with the forward pass, and save its results.
    """
    unroll = unroll if remat == "none" else 1

    def loss(params, batch, key):
        if model.block is None:
            metrics = rematerialised(model.loss, remat)(params, batch, key)
            if not isinstance(metrics, Metrics):
                kind = type(metrics).__name__
                raise ConfigError(
                    f"model: its loss returned {kind}; return meshtrain.weighted(loss of each example)"
                )
            return metrics
        x = run_blocks(
            rematerialised(model.block, remat),
            model.stack(params["layers"]),
            model.embed(params, batch),
            batch,
            unroll,
        )
        return model.head(params, x, batch)

    return loss


def accumulate(
    loss: LossFn,
    *,
    dtype: str,
    num_microbatches: int,
    grad_shardings: Any,
    partial_over: Sequence[str] = (),
    how: grad_sync.Sync | None = None,
) -> GradFn:
    """Returns the GradFn that runs micro-batches one after the other and adds up their gradients.

    The gradients are those of the parameters in `grad_shardings`; others are constants.
    Parameters are cast to `dtype` once, for all layers and micro-batches.

    Without partial sums XLA would all-reduce the gradients of every micro-batch. So each batch shard along
    the mesh axes `partial_over` keeps partial sums, and `synchronise` adds them once, after the last
    micro-batch, as `how` says.
    """

    def grads_of(params, batch, key, scale):
        def total(trained):
            metrics = loss(trees.merge(params, trained), batch, key)
            return metrics.loss * scale, metrics

        grads, metrics = jax.grad(total, has_aux=True)(trees.intersect(params, grad_shardings))
        # Cast before the sum over micro-batches: bfloat16 would lose small terms.
        return jax.tree.map(
            lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads
        ), metrics

    def grad_fn(params, batch, key, scale=1.0, residual=None):
        params = to_compute_dtype(params, dtype)
        axes, num_shards = sharding.batch_slices(partial_over)
        if num_microbatches == num_shards == 1:
            grads, metrics = grads_of(params, batch, jax.random.fold_in(key, 0), scale)
            return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics, residual
        shardings = jax.tree.map(lambda one: sharding.without_axes(one, axes), grad_shardings)

        def grads_of_shard(params, batch, key):
            with sharding.partial_axes(axes):
                grads, metrics = grads_of(params, batch, key, scale)
            return jax.lax.with_sharding_constraint(grads, shardings), metrics

        def grads_of_microbatch(number, microbatch):
            keys = jax.random.split(jax.random.fold_in(key, number), num_shards)
            of_shards = jax.vmap(grads_of_shard, in_axes=(None, 0, 0), spmd_axis_name=axes or None)
            return of_shards(params, microbatch, keys)

        def add(sums, numbered):
            return jax.tree.map(jnp.add, sums, grads_of_microbatch(*numbered)), None

        shards = jax.tree.map(lambda leaf: leaf.reshape(num_shards, -1, *leaf.shape[1:]), batch)
        microbatches = jax.vmap(split, in_axes=(0, None), out_axes=1)(shards, num_microbatches)
        first = jax.tree.map(lambda leaf: leaf[0], microbatches)
        shapes = jax.eval_shape(grads_of_microbatch, 0, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        sums, _ = jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), microbatches))
        return grad_sync.synchronise(sums, grad_shardings, residual, how, key)

    return grad_fn


def make_eval_step(
    loss: LossFn, *, dtype: str, num_microbatches: int
) -> Callable[[Params, Any], Metrics]:
    """Returns the function (params, batch) -> Metrics, computed micro-batch by micro-batch."""

    def metrics_of(params, batch):
        params = to_compute_dtype(params, dtype)
        microbatches = split(batch, num_microbatches)
        sums = jax.lax.map(lambda microbatch: loss(params, microbatch, None), microbatches)
        return jax.tree.map(lambda values: values.sum(0), sums)

    return metrics_of


def split(batch: Any, num_microbatches: int) -> Any:
    """Returns the batch with a leading dim of M micro-batches; rows m, m + M, m + 2 M, ... form the m-th.

    With a stride of M each device splits the rows that it holds: no row moves between devices.
    """

    def split_leaf(leaf):
        rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(rows, 1, 0)

    return jax.tree.map(split_leaf, batch)
