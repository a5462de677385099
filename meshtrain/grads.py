"""From a model to gradients: the loss of a stack of blocks, and its sum over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding

LossFn = Callable[
    [Params, Any, jax.Array | None], Metrics
]  # (params, batch, key); no key: evaluation
# The hinge of the trainer: what a step needs, however the work is split. (params, batch, key, scale=1.0)
# -> gradients of `scale` times the summed loss, in float32 or wider, and Metrics without it.
GradFn = Callable[..., tuple[Params, Metrics]]


def make_loss(model: Model, *, remat: str = "none", unroll: int = 1) -> LossFn:
    """Returns the model's loss, computed in the dtype of the parameters that it is given.

    `remat` says what the backward pass keeps of each block: "none" recomputes nothing, "full" all
    but the block's input, "dots" keeps results of matrix products, "names:a,b" those that the model
    marked with `checkpoint_name`. A model that is no stack counts as one block.
    At most `unroll` layers make one turn of the loop over the stack, where nothing is recomputed:
    without a loop between them XLA merges what is recomputed with what was computed, and keeps it.
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


def cast(params: Params, dtype: str) -> Params:
    """Returns the parameters in the dtype to compute in; integers stay."""
    return jax.tree.map(
        lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params
    )


def run_blocks(
    block: Callable, layers: Params, x: jax.Array, batch: Any, unroll: int = 1
) -> jax.Array:
    """Returns what the stack makes of `x`: each of the stacked `layers` in turn."""
    num_layers = len(jax.tree.leaves(layers)[0])
    # The largest divisor: a remainder would be compiled as a second, slower piece.
    unroll = max(n for n in range(1, unroll + 1) if num_layers % n == 0)
    return jax.lax.scan(lambda x, layer: (block(layer, x, batch), None), x, layers, unroll=unroll)[
        0
    ]


def rematerialised(function: Callable, remat: str) -> Callable:
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        policy = policies.save_only_these_names(*remat.removeprefix("names:").split(","))
    return jax.checkpoint(function, policy=policy)


def accumulate(
    loss: LossFn,
    *,
    dtype: str,
    num_microbatches: int,
    grad_shardings: Any,
    partial_over: Sequence[str] = (),
) -> GradFn:
    """Returns the GradFn that runs micro-batches one after the other and adds up their gradients.

    Parameters are cast to `dtype` first, once for all layers and micro-batches.

    Left alone, XLA would sum every micro-batch's gradients over all devices that share the batch.
    So each slice of the batch along the mesh axes `partial_over` keeps its own sums, and
    `synchronise` adds them once, after the last micro-batch.
    """

    def grads_of(params, batch, key, scale):
        def total(params):
            metrics = loss(params, batch, key)
            return metrics.loss * scale, metrics

        grads, metrics = jax.grad(total, has_aux=True)(params)
        # Before they are added up: sums of many micro-batches are lost in bfloat16.
        return jax.tree.map(
            lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads
        ), metrics

    def grad_fn(params, batch, key, scale=1.0):
        params = cast(params, dtype)
        axes, num_slices = sharding.batch_slices(partial_over)
        if num_microbatches == num_slices == 1:
            grads, metrics = grads_of(params, batch, jax.random.fold_in(key, 0), scale)
            return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics
        places = jax.tree.map(lambda place: sharding.without_axes(place, axes), grad_shardings)

        def of_slice(params, part, key):
            with sharding.partial_axes(axes):
                grads, metrics = grads_of(params, part, key, scale)
            return jax.lax.with_sharding_constraint(grads, places), metrics

        def of_part(number, part):
            keys = jax.random.split(jax.random.fold_in(key, number), num_slices)
            slices = jax.vmap(of_slice, in_axes=(None, 0, 0), spmd_axis_name=axes or None)
            return slices(params, part, keys)

        def add(sums, numbered):
            return jax.tree.map(jnp.add, sums, of_part(*numbered)), None

        slices = jax.tree.map(lambda leaf: leaf.reshape(num_slices, -1, *leaf.shape[1:]), batch)
        parts = jax.vmap(split, in_axes=(0, None), out_axes=1)(slices, num_microbatches)
        shapes = jax.eval_shape(of_part, 0, jax.tree.map(lambda leaf: leaf[0], parts))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        sums, _ = jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), parts))
        return synchronise(sums, grad_shardings)

    return grad_fn


def synchronise(sums: tuple[Params, Metrics], grad_shardings: Any) -> tuple[Params, Metrics]:
    """Adds up what the slices of the batch hold on their leading dim: the one collective over `data`."""
    grads, metrics = jax.tree.map(lambda leaf: leaf.sum(0), sums)
    return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics


def evaluate(
    loss: LossFn, *, dtype: str, num_microbatches: int
) -> Callable[[Params, Any], Metrics]:
    """Returns the Metrics of a batch without gradients, micro-batch by micro-batch."""

    def metrics_of(params, batch):
        params = cast(params, dtype)
        sums = jax.lax.map(lambda part: loss(params, part, None), split(batch, num_microbatches))
        return jax.tree.map(lambda values: values.sum(0), sums)

    return metrics_of


def split(batch: Any, num_microbatches: int) -> Any:
    """Returns the batch with a leading dim of micro-batches; rows m, m + M, m + 2 M, ... form the m-th.

    Every M-th row, so that each device cuts up the rows it has: no row moves.
    """

    def cut(leaf):
        parts = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(parts, 1, 0)

    return jax.tree.map(cut, batch)
