"""From a model to gradients: its loss, and the gradients summed over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.metrics import GradFn, Metrics
from meshtrain.models import trees
from meshtrain.models.base import Model, Params, check_metrics
from meshtrain.models.blocks import run_blocks, to_compute_dtype
from meshtrain.parallel import sharding
from meshtrain.parallel.grad_sync import Sync, synchronise
from meshtrain.parallel.remat import rematerialised

# (params, batch, key) -> Metrics; in evaluation the key is None.
LossFn = Callable[[Params, Any, jax.Array | None], Metrics]


def make_loss(model: Model, *, remat: str = "none", unroll: int = 1) -> LossFn:
    """Returns the model's loss, computed in the dtype of the parameters.

    `remat` selects what is saved of each block for the backward pass: "none" what its gradient
    needs, "full" only the block's input, "dots" the results of matrix products, "names:a,b" the
    values that the model marked with `checkpoint_name`. A model that is not a stack counts as one
    block.
    `unroll` is the largest number of layers per iteration of the loop over the stack; on
    accelerators all layers are unrolled, or none. With remat it is always 1: in unrolled layers XLA
    would merge the recomputation with the forward pass, and save its results.
    """
    if remat != "none":
        unroll = 1

    def loss_of_function(params, batch, key):
        metrics = rematerialised(model.loss, remat)(params, batch, key)
        check_metrics(metrics, "model: its loss")
        return metrics

    def loss_of_stack(params, batch, _):
        # Blocks get their random keys with the rows of the batch, not from the key.
        block = rematerialised(model.block, remat, in_loop=True)
        layers = model.stack(params["layers"])
        x = model.embed(params, batch)
        all_trained = model.is_trained is None
        x = run_blocks(block, layers, x, batch, unroll, sum_in_order=all_trained)
        return model.head(params, x, batch)

    return loss_of_function if model.block is None else loss_of_stack


def accumulate(
    loss: LossFn,
    *,
    dtype: str,
    num_microbatches: int,
    grad_shardings: Any,
    unreduced_axes: Sequence[str] = (),
    grad_sync: Sync | None = None,
) -> GradFn:
    """Returns the GradFn that runs micro-batches one after the other and adds up their gradients.

    The gradients are those of the parameters in `grad_shardings`; others are constants. Parameters
    are cast to `dtype` once, for all layers and micro-batches.

    By itself XLA would all-reduce the gradients of every micro-batch. So the shards of the batch
    along the mesh axes `unreduced_axes` keep partial sums, and `synchronise` adds them once, after
    the last micro-batch: with `grad_sync`, or if it is None, by XLA.
    """

    def compute_grads(params, batch, key, scale):
        """Returns the gradients and the Metrics of these rows."""

        def scaled_loss(trained):
            metrics = loss(trees.merge(params, trained), batch, key)
            return metrics.loss * scale, metrics

        trained = trees.intersect(params, grad_shardings)
        grads, metrics = jax.grad(scaled_loss, has_aux=True)(trained)
        # Cast before the sum over micro-batches: bfloat16 would lose small terms.
        grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        return grads, metrics

    def grad_fn(params, batch, key, scale=1.0, residual=None):
        params = to_compute_dtype(params, dtype)
        axes, num_shards = sharding.batch_slices(unreduced_axes)

        # Without micro-batches and partial sums there is nothing to add up.
        if num_microbatches == num_shards == 1:
            grads, metrics = compute_grads(params, batch, jax.random.fold_in(key, 0), scale)
            grads = jax.lax.with_sharding_constraint(grads, grad_shardings)
            return grads, metrics, residual

        # Each shard of the batch has its own partial sums, so they are not sharded over these axes.
        shardings_of_shard = jax.tree.map(
            lambda grad_sharding: sharding.without_axes(grad_sharding, axes), grad_shardings
        )

        def compute_grads_of_shard(params, batch, key):
            with sharding.partial_axes(axes):
                grads, metrics = compute_grads(params, batch, key, scale)
            return jax.lax.with_sharding_constraint(grads, shardings_of_shard), metrics

        def compute_grads_of_microbatch(number, microbatch):
            keys = jax.random.split(jax.random.fold_in(key, number), num_shards)
            on_shards = jax.vmap(
                compute_grads_of_shard, in_axes=(None, 0, 0), spmd_axis_name=axes or None
            )
            return on_shards(params, microbatch, keys)

        def add_microbatch(sums, numbered_microbatch):
            number, microbatch = numbered_microbatch
            grads_and_metrics = compute_grads_of_microbatch(number, microbatch)
            return jax.tree.map(jnp.add, sums, grads_and_metrics), None

        # (rows, ...) -> (shards, rows of a shard, ...) -> (micro-batches, shards, rows, ...)
        shards = jax.tree.map(lambda leaf: leaf.reshape(num_shards, -1, *leaf.shape[1:]), batch)
        microbatches = jax.vmap(split, in_axes=(0, None), out_axes=1)(shards, num_microbatches)

        first_microbatch = jax.tree.map(lambda leaf: leaf[0], microbatches)
        # A loop has to be traced twice, the first time for the shapes of its sums.
        if num_microbatches == 1:
            grads, metrics = compute_grads_of_microbatch(0, first_microbatch)
        else:
            shapes = jax.eval_shape(compute_grads_of_microbatch, 0, first_microbatch)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            numbered_microbatches = (jnp.arange(num_microbatches), microbatches)
            (grads, metrics), _ = jax.lax.scan(add_microbatch, zeros, numbered_microbatches)

        # The only reduction over the shards, once per step.
        return synchronise(
            grads,
            metrics,
            grad_shardings,
            grad_sync=grad_sync,
            residual=residual,
            key=key,
        )

    return grad_fn


def make_eval_step(
    loss: LossFn, *, dtype: str, num_microbatches: int
) -> Callable[[Params, Any], Metrics]:
    """Returns the function (params, batch) -> Metrics, computed micro-batch by micro-batch."""

    def eval_step(params, batch):
        params = to_compute_dtype(params, dtype)
        microbatches = split(batch, num_microbatches)
        sums = jax.lax.map(lambda microbatch: loss(params, microbatch, None), microbatches)
        return jax.tree.map(lambda values: values.sum(0), sums)

    return eval_step


def split(batch: Any, num_microbatches: int) -> Any:
    """Returns the batch with a leading dim of M micro-batches; rows m, m + M, ... form the m-th.

    With a stride of M each device splits the rows that it holds: no row moves between devices.
    """

    def split_leaf(leaf):
        rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(rows, 1, 0)

    return jax.tree.map(split_leaf, batch)
