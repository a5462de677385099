"""Linear layers with an update of low rank (LoRA, arXiv 2106.09685): y = x W + (x A) B.

A and B are parameters next to the kernel W. The layer itself applies them, so no gradient of W is
computed.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

# Names of the parameters: A (*dims of the input, rank), B (rank, *dims of the output).
A, B = "lora_a", "lora_b"

# Next to A and B in training with dropout: the function of the input whose result A multiplies. It
# is no parameter.
DROP = "lora_drop"
Factors = tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]


def is_low_rank(path: str) -> bool:
    """Returns whether a parameter with this path belongs to an update of low rank."""
    return path.rpartition("/")[2] in (A, B)


def adapted_layers(paths: Iterable[str]) -> list[str]:
    """Returns the paths of the layers with an update of low rank, from the paths of parameters."""
    end = f"/{A}"
    return [path.removesuffix(end) for path in paths if path.endswith(end)]


def linears(module: nnx.Module) -> dict[str, int]:
    """Returns the paths of a module's linear layers, each with the number of dims of its input.

    Layers with a batch dim in their kernel, such as those that `nnx.vmap` stacked, are left out.
    """
    linears = {}
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            num_in = np.size(layer.in_features)
            if layer.kernel.ndim == num_in + np.size(layer.out_features):
                linears["/".join(map(str, path))] = num_in
    return linears


def take(values: Any) -> tuple[Any, dict[tuple, Factors]]:
    """Splits the parameters into those without A and B, and A, B and A's dropout by layer."""
    if not isinstance(values, Mapping):
        return values, {}
    rest, adapters = {}, {}
    for key, value in values.items():
        if key in (A, B, DROP):
            continue
        rest[key], inner = take(value)
        adapters |= {(key, *path): factors for path, factors in inner.items()}
    if A in values:
        adapters[()] = values[A], values[B], values.get(DROP, lambda x: x)
    return rest, adapters


def attach(module: nnx.Module, adapters: Mapping[tuple, Factors]) -> None:
    """Makes the linear layers of a module, by path, add (x A) B."""
    if not adapters:
        return
    for path, layer in nnx.iter_modules(module):
        if path in adapters:
            plain = layer.dot_general or jax.lax.dot_general
            layer.dot_general = functools.partial(_dot_general, plain, adapters[path])


def _dot_general(plain: Callable, factors: Factors, x, kernel, dimension_numbers, **options):
    """Returns what `plain`, a function like `lax.dot_general`, returns for x W + (drop(x) A) B."""
    a, b, drop = factors
    _, batch_dims = dimension_numbers
    inner = plain(drop(x), a, dimension_numbers, **options)
    over_rank = ((inner.ndim - 1,), (0,)), batch_dims
    return plain(x, kernel, dimension_numbers, **options) + plain(inner, b, over_rank, **options)
