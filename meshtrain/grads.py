"""From a model to gradients: the loss of a stack of blocks, and its sum over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params

LossFn = Callable[
    [Params, Any, jax.Array | None], Metrics
]  # (params, batch, key); no key: evaluation
# The hinge of the trainer: what a step needs, however the work is split. Gradients are of sums.
GradFn = Callable[[Params, Any, jax.Array], tuple[Params, Metrics]]


def make_loss(model: Model, *, dtype: str, remat: str = "none", unroll: int = 1) -> LossFn:
    """Returns the model's loss, computed with parameters cast to `dtype`.

    `remat` says what the backward pass keeps of each block: "none" recomputes nothing, "full" all
    but the block's input, "dots" keeps results of matrix products, "names:a,b" those that the model
    marked with `checkpoint_name`. A model that is no stack counts as one block.
    At most `unroll` layers make one turn of the loop over the stack.
    """

    def loss(params, batch, key):
        params = jax.tree.map(
            lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params
        )
        if model.block is None:
            metrics = _remat(model.loss, remat)(params, batch, key)
            if not isinstance(metrics, Metrics):
                kind = type(metrics).__name__
                raise ConfigError(
                    f"model: its loss returned {kind}; return meshtrain.weighted(loss of each example)"
                )
            return metrics
        x = run_blocks(
            _remat(model.block, remat), params["layers"], model.embed(params, batch), batch, unroll
        )
        return model.head(params, x, batch)

    return loss


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


def _remat(function: Callable, remat: str) -> Callable:
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


def accumulate(loss: LossFn, *, num_microbatches: int, grad_shardings: Any) -> GradFn:
    """Returns the GradFn that runs micro-batches one after the other and adds up their gradients."""

    def grads_of(params, batch, key):
        def total(params):
            metrics = loss(params, batch, key)
            return metrics.loss, metrics

        grads, metrics = jax.grad(total, has_aux=True)(params)
        return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics

    def grad_fn(params, batch, key):
        parts = split(batch, num_microbatches)

        def add(sums, numbered):
            number, part = numbered
            return jax.tree.map(
                jnp.add, sums, grads_of(params, part, jax.random.fold_in(key, number))
            ), None

        shapes = jax.eval_shape(grads_of, params, jax.tree.map(lambda leaf: leaf[0], parts), key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), parts))[0]

    def single(params, batch, key):
        return grads_of(params, batch, jax.random.fold_in(key, 0))

    return single if num_microbatches == 1 else grad_fn


def evaluate(loss: LossFn, *, num_microbatches: int) -> Callable[[Params, Any], Metrics]:
    """Returns the Metrics of a batch without gradients, micro-batch by micro-batch."""

    def metrics_of(params, batch):
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
