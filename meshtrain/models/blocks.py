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


def run_blocks(block: Callable, layers: Params, x: Any, batch: Any, unroll: int = 1) -> Any:
    """Applies the stacked `layers` to `x`, one after the other."""
    num_layers = len(jax.tree.leaves(layers)[0])
    # The largest divisor: a remainder would be compiled as a second loop.
    unroll = max(n for n in range(1, min(unroll, num_layers) + 1) if num_layers % n == 0)
    # On accelerators a partly unrolled loop costs memory: XLA holds what it keeps of a group of
    # layers twice.
    if unroll < num_layers and accelerator.platform() != "cpu":
        unroll = 1
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x, batch), None), x, layers, unroll=unroll)
    return x
