"""Linear layers with an update of low rank (LoRA, arXiv 2106.09685): y = x W + (x A) B.

A and B are parameters next to the kernel W. The layer itself applies them, so no gradient of W is
computed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

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


# ---- the layers of NNX modules ----


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


def attach(module: nnx.Module, adapters: Mapping[tuple, Factors]) -> None:
    """Makes the linear layers of a module, by path, add (x A) B; kernels of experts add A B."""
    if not adapters:
        return
    for path, layer in nnx.iter_modules(module):
        factors = adapters.get(tuple(map(str, path)))
        if factors is None:
            continue
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            plain = layer.dot_general or jax.lax.dot_general
            layer.dot_general = functools.partial(_dot_general, plain, factors)
            layer.add_update = functools.partial(_add_product, factors)
        else:  # the kernels of experts
            layer.add_update = functools.partial(_add_update, factors)


def _dot_general(plain: Callable, factors: Factors, x, kernel, dimension_numbers, **options):
    """Returns what `plain`, a function like `lax.dot_general`, returns for x W + (drop(x) A) B."""
    a, b, drop = factors
    a, b = a.astype(kernel.dtype), b.astype(kernel.dtype)  # of a router they may be narrower
    _, batch_dims = dimension_numbers
    inner = plain(drop(x), a, dimension_numbers, **options)
    over_rank = ((inner.ndim - 1,), (0,)), batch_dims
    return plain(x, kernel, dimension_numbers, **options) + plain(inner, b, over_rank, **options)


def _add_product(factors: Factors, kernel: jax.Array) -> jax.Array:
    """Returns W + A B of a linear layer."""
    a, b, _ = factors
    return kernel + jax.numpy.tensordot(a, b, axes=1).astype(kernel.dtype)


def with_update(layer: nnx.Module, kernel: jax.Array) -> jax.Array:
    """Returns the kernel of a linear layer, for what does not call the layer, with its update."""
    add_update = getattr(layer, "add_update", None)
    return kernel if add_update is None else add_update(kernel)


def _add_update(factors: Factors, kernel_EIO: jax.Array) -> jax.Array:
    """Returns W + A B of each expert: A is (E, I, R), B (E, R, O).

    The products of experts run in groups of kernels of their own, which know nothing of A and B.
    """
    a_EIR, b_ERO, _ = factors
    return kernel_EIO + jax.numpy.einsum("eir,ero->eio", a_EIR, b_ERO)


# ---- the layers of Linen modules ----


def finding_linen_layers(found: dict[str, tuple[int, int]]) -> contextlib.AbstractContextManager:
    """Returns the context in which Linen's linear layers are added to `found` when they are called.

    `found` has the numbers of dims of their input and output, by path.
    """

    def find(run: Callable, args: tuple, options: dict, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, linen.Dense):
            found["/".join(layer.path)] = 1, 1
        elif isinstance(layer, linen.DenseGeneral) and not np.size(layer.batch_dims):
            found["/".join(layer.path)] = np.size(layer.axis), np.size(layer.features)
        return run(*args, **options)

    return linen.intercept_methods(find)


def attached_to_linen(adapters: Mapping[tuple, Factors]) -> contextlib.AbstractContextManager:
    """Returns the context in which Linen's linear layers, by path, add (x A) B."""
    if not adapters:
        return contextlib.nullcontext()

    def add_update(run: Callable, args: tuple, options: dict, context: Any) -> Any:
        y = run(*args, **options)
        layer = context.module
        factors = adapters.get(layer.path)
        if factors is None or context.method_name != "__call__":
            return y
        (x,) = args
        a, b, drop = factors
        axes = getattr(layer, "axis", -1)
        dims = tuple(axis % x.ndim for axis in (axes if isinstance(axes, tuple) else (axes,)))
        x, a, b = (leaf.astype(y.dtype) for leaf in (drop(x), a, b))
        over_input = (dims, tuple(range(len(dims)))), ((), ())
        inner = jax.lax.dot_general(x, a, over_input, precision=layer.precision)
        over_rank = ((inner.ndim - 1,), (0,)), ((), ())
        return y + jax.lax.dot_general(inner, b, over_rank, precision=layer.precision)

    return linen.intercept_methods(add_update)
