"""Reference implementation of adapters: kernels W + alpha / rank A B (LoRA, arXiv 2106.09685).

The gradients of A and B follow from that of W by the chain rule, so the model itself needs no
adapter.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.models.base import Params
from meshtrain.tools.verify.reference.dropout import dropped

# I inputs, R rank, O outputs

A, B = "lora_a", "lora_b"
FIRST_SITE = 2**16  # of the masks of adapters

# Layers that patterns such as layers/* do not adapt.
BY_NAME = ("router", "kv_up", "shared_gate")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The section `adapter` and `train.trainable` of a config."""

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("layers/*",)
    dropout: float = 0.0
    trainable: str = "*"
    rslora: bool = False
    experts: bool = False

    @property
    def scale(self) -> float:
        """Returns the factor of A B; that of rsLoRA (arXiv 2312.03732) has a root."""
        if not self.rank:
            return 0.0
        return self.alpha / math.sqrt(self.rank) if self.rslora else self.alpha / self.rank

    def trains(self, path: str) -> bool:
        """Returns whether the parameter at `path` changes: by its gradient, or by what it measures.

        With a rank, train.trainable="*" means that only A and B are trained.
        """
        *folders, name = path.split("/")
        if name in (A, B) or ("measured" in folders and name != "bias"):
            return True
        if self.rank and self.trainable == "*":
            return False
        patterns = self.trainable.split(",")
        return any(fnmatch.fnmatchcase(path, pattern.strip()) for pattern in patterns)

    def has_gradient(self, path: str) -> bool:
        """Returns whether `path` is in the gradients: what is trained, and all that is measured."""
        return "measured" in path.split("/") or self.trains(path)


def merged(params: Params, scale: float) -> Params:
    """Returns the parameters without A and B; the kernels of their layers are W + scale A B."""
    plain = {}
    for name, value in params.items():
        if name not in (A, B):
            plain[name] = merged(value, scale) if isinstance(value, Mapping) else value
    if A in params:
        kernel, a, b = (np.array(params[name]) for name in ("kernel", A, B))
        for index in _stacked(kernel, a, b):
            product = _matrix(a[index], -1, a.shape[-1]) @ _matrix(b[index], a.shape[-1], -1)
            kernel[index] += scale * product.reshape(kernel[index].shape)
        plain["kernel"] = kernel
    return plain


def gradients(grads: Params, params: Params, scale: float) -> Params:
    """Returns the gradients of all `params`, from those of the merged ones.

    With G = dL/dW, that of A is scale G B^T, and that of B is scale A^T G.
    """
    tree = {}
    for name, value in grads.items():
        tree[name] = gradients(value, params[name], scale) if isinstance(value, Mapping) else value
    if A in params:
        kernel, a, b = (np.array(params[name]) for name in ("kernel", A, B))
        tree[A], tree[B] = np.empty_like(a), np.empty_like(b)
        for index in _stacked(kernel, a, b):
            a_IR = _matrix(a[index], -1, a.shape[-1])
            b_RO = _matrix(b[index], a.shape[-1], -1)
            grad_IO = _matrix(grads["kernel"][index], len(a_IR), -1)
            tree[A][index] = (scale * grad_IO @ b_RO.T).reshape(a[index].shape)
            tree[B][index] = (scale * a_IR.T @ grad_IO).reshape(b[index].shape)
    return tree


def attached(
    tree: Params, path: str, layers: Sequence[str], adapter: Adapter, keys_BW: np.ndarray | None
) -> Params:
    """Returns the parameters at `path`, with the update of each adapted layer as a function.

    `update(x, num_in)` is alpha / rank (drop(x) A) B over the last `num_in` dims of x; `layers` are
    the paths of all adapted layers, by which their masks are numbered.
    """
    found: Params = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = attached(value, f"{path}/{name}", layers, adapter, keys_BW)
        else:
            found[name] = value
    if A in tree and tree[A].ndim + tree[B].ndim - 2 > tree["kernel"].ndim:
        # Of experts, whose kernels (E, I, O) get the product.
        product_EIO = jnp.einsum("eir,ero->eio", found.pop(A), found.pop(B))
        return {**found, "kernel": tree["kernel"] + adapter.scale * product_EIO}
    if A in tree:
        site = FIRST_SITE + layers.index(path)

        def update(x: jax.Array, num_in: int) -> jax.Array:
            x = dropped(x, keys_BW, adapter.dropout, site)
            inner = jnp.tensordot(x, tree[A], axes=num_in)
            return adapter.scale * jnp.tensordot(inner, tree[B], axes=1)

        found["update"] = update
    return found


def adapted_layers(params: Params) -> list[str]:
    """Returns the paths of the adapted layers, in the order in which their masks are numbered."""
    leaves = jax.tree.leaves_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return sorted(path.removesuffix(f"/{A}") for path in paths if path.endswith(f"/{A}"))


def initial_stddevs(
    stddevs: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]], adapter: Adapter
) -> dict[str, float]:
    """Returns the standard deviation of the initial values of A, as PEFT draws it, and of B: 0.

    `stddevs` are those of all other parameters of the transformer, and `shapes` those of all.
    """
    found = {}
    for path in stddevs:
        layer, _, name = path.rpartition("/")
        is_in_layer = layer.startswith(("layers/", "first_layers/"))
        # The kernels of experts are no linear layers.
        is_of_expert = _is_of_expert(layer, stddevs)
        is_linear = adapter.experts or not is_of_expert
        is_target = any(_names(pattern, layer) for pattern in adapter.targets)
        if name == "kernel" and is_in_layer and is_linear and is_target:
            num_stacked = int(layer.startswith("layers/")) + int(is_of_expert)
            inputs = shapes.get(f"{layer}/{A}", (1, 1, 1))[num_stacked:-1]
            found |= {f"{layer}/{A}": (3 * math.prod(inputs)) ** -0.5, f"{layer}/{B}": 0.0}
    return found


def _is_of_expert(layer: str, stddevs: Mapping[str, float]) -> bool:
    """Returns whether each expert has a kernel of its own in this layer."""
    parent, _, name = layer.rpartition("/")
    return name not in BY_NAME and f"{parent}/router/kernel" in stddevs


def _names(pattern: str, layer: str) -> bool:
    """Returns whether a pattern matches a layer; some only match it by their own name."""
    name = layer.rpartition("/")[2]
    is_allowed = name not in BY_NAME or pattern.rpartition("/")[2] == name
    return is_allowed and fnmatch.fnmatchcase(layer, pattern)


def _stacked(kernel: np.ndarray, a: np.ndarray, b: np.ndarray) -> Any:
    """Returns the indices of the layers whose kernels are stacked: one, (), if they are not."""
    num_dims = a.ndim + b.ndim - 2 - kernel.ndim
    return np.ndindex(kernel.shape[:num_dims])


def _matrix(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return x.reshape(rows, columns)


def trained_part(tree: Params, adapter: Adapter, prefix: str = "") -> Params:
    """Returns the leaves that have gradients; no dict is empty."""
    part = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inner = trained_part(value, adapter, f"{path}/")
            if inner:
                part[name] = inner
        elif adapter.has_gradient(path):
            part[name] = value
    return part
