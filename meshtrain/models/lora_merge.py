"""Adds the product of a low-rank adapter to the kernels of the layers that it adapts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshtrain.models import trees
from meshtrain.models.lora_layer import A, B

KERNEL = "/kernel"  # of a linear layer


def merged(kernel: Any, a: Any, b: Any, *, scale: float, num_lead: int) -> Any:
    """Returns the numpy array W + scale A B.

    W, A and B have `num_lead` leading dims of layers in common.
    """
    lead, rank = kernel.shape[:num_lead], b.shape[num_lead]
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
            stacked = tuple(range(num_lead(layer)))
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


def num_lead(path: str) -> int:
    """Returns the number of leading dims of a linear layer's parameters: 1 in the stack, else 0."""
    return 1 if path.startswith("layers/") else 0
