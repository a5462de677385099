"""Adds the product of a low-rank adapter to the kernels of the layers that it adapts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshtrain.models import trees
from meshtrain.models.lora_layer import A, B

KERNEL = "/kernel"  # of a linear layer


def merged(kernel: Any, a: Any, b: Any, *, scale: float) -> Any:
    """Returns the numpy array W + scale A B."""
    lead, rank = kernel.shape[: num_lead(kernel, a, b)], a.shape[-1]
    product = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
    return kernel + scale * product.reshape(kernel.shape)


def add_updates(
    params: Any, factors: Mapping[str, jax.Array], layers: Sequence[str], *, scale: float
) -> Any:
    """Returns the parameters, whose kernels W of `layers` are W + scale A B, sharded as W.

    `factors` has A and B by their paths.
    """
    kernels = {layer: trees.leaf(params, layer + KERNEL) for layer in layers}
    shardings = {layer: kernel.sharding for layer, kernel in kernels.items()}

    def add(kernels, factors):
        merged = {}
        for layer, kernel in kernels.items():
            wide = jax.numpy.promote_types(kernel.dtype, jax.numpy.float32)
            a = factors[f"{layer}/{A}"]
            b = factors[f"{layer}/{B}"]
            stacked = tuple(range(num_lead(kernel, a, b)))
            # No dims are merged: each device computes its shard of the product.
            product = jax.lax.dot_general(
                a,
                b,
                (((a.ndim - 1,), (len(stacked),)), (stacked, stacked)),
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=wide,
            )
            merged[layer] = (kernel.astype(wide) + scale * product).astype(kernel.dtype)
        return merged

    compute = jax.jit(add, out_shardings=shardings, donate_argnums=0)
    # Waits, because on CPU the collectives of two programs in flight mix their messages.
    merged = jax.block_until_ready(compute(kernels, dict(factors)))
    for layer, kernel in merged.items():
        params = trees.merge(params, trees.nested(layer + KERNEL, kernel))
    return params


def num_lead(kernel: Any, a: Any, b: Any) -> int:
    """Returns the number of leading dims, those of stacked layers, that W, A and B have in common.

    A has the dims of the input besides and the rank, B the rank and the dims of the output.
    """
    return a.ndim + b.ndim - 2 - kernel.ndim
