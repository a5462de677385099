"""Runs the blocks of a stack, with the parameters in the compute dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.models.base import Params, is_measured
from meshtrain.parallel import accelerator


def to_compute_dtype(params: Params, dtype: str) -> Params:
    """Returns the parameters in the compute dtype.

    Integers and router statistics are unchanged.
    """

    def cast_leaf(path, leaf):
        is_cast = jnp.issubdtype(leaf.dtype, jnp.floating) and not is_measured(path)
        return leaf.astype(dtype) if is_cast else leaf

    return jax.tree.map_with_path(cast_leaf, params)


def run_blocks(
    block: Callable,
    layers: Params,
    x: Any,
    batch: Any,
    unroll: int = 1,
    *,
    sum_in_order: bool = False,
) -> Any:
    """Applies the stacked `layers` to `x`, one after the other.

    `sum_in_order`: on GPUs, gradients of unrolled layers are summed over devices layer by layer.
    They are then computed for all parameters, also if some are not trained.
    """
    num_layers = len(jax.tree.leaves(layers)[0])
    # The largest divisor: a remainder would be compiled as a second loop.
    unroll = max(n for n in range(1, min(unroll, num_layers) + 1) if num_layers % n == 0)
    # On accelerators a partly unrolled loop costs memory: XLA holds what it keeps of a group of
    # layers twice.
    if unroll < num_layers and accelerator.platform() != "cpu":
        unroll = 1
    if sum_in_order and unroll == num_layers and accelerator.platform() == "gpu":
        return _run_unrolled(block, _unstacked(layers), x, batch)
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x, batch), None), x, layers, unroll=unroll)
    return x


def _run_unrolled(block: Callable, layers: list[Params], x: Any, batch: Any) -> Any:
    for number, layer in enumerate(layers):
        if number + 1 < len(layers):
            x, layers[number + 1] = _before_gradients_of(x, layers[number + 1])
        x = block(layer, x, batch)
    return x


@jax.custom_vjp
def _unstacked(layers: Params) -> list[Params]:
    """Returns the parameters of each layer; their gradients are stacked in one operation."""
    num_layers = len(jax.tree.leaves(layers)[0])
    leaves, structure = jax.tree.flatten(layers)
    return [structure.unflatten([leaf[number] for leaf in leaves]) for number in range(num_layers)]


_unstacked.defvjp(
    lambda layers: (_unstacked(layers), None),
    lambda _, grads: (jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *grads),),
)


@jax.custom_vjp
def _before_gradients_of(x: Any, next_layer: Params) -> tuple[Any, Params]:
    """Returns both; backward, the next layer's gradients are summed when this layer's are computed.

    So they are reduce-scattered while the gradients of this layer are computed. XLA would leave
    most of that to the end of the step, and keep the unsummed gradients of many layers until then.
    """
    return x, next_layer


_before_gradients_of.defvjp(
    lambda x, layer: ((x, layer), None),
    lambda _, grads: jax.lax.optimization_barrier(grads),
)
