"""The tensors of each parameter in the files of transformers.

The table of a family (Family.names) maps the path of a parameter to "TENSOR DIM DIM ...": the name
of the tensor, and its dims in the file. "HK" is one dim in the file and two dims, H and K, in this
package. A digit is an index into a fused tensor: 0 query, 1 key, 2 value; and so is a letter of two
parts: "Fa" is gate, and "Fb" up, where both alternate. "1@HK+GK+GK" is part 1 of a dim that holds
parts of different sizes one after the other. In the name, the first * stands for the index of the
layer, and the second for that of the expert; E is a dim of a tensor of all experts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshtrain.models import base

# V vocabulary, P positions, D model, H heads, G key/value heads, K head dim, W that of values,
# F feed-forward, L layers, E experts, U feed-forward of the shared experts. Of latent attention:
# Q latent of the queries, C of keys and values, J = C + rope key, M = K without rope + W. I is 1. A
# dim in the files alone: A of size 1

# Dims in this package; the parameters under layers/ also have a leading dim L, those of the first
# layers do not. Dims that the tensor of a family lacks do not apply: E if it has one tensor per
# expert or no experts, H and G if heads are normalized one by one.
DIMS = {
    "tokens/embedding": "VD",
    "positions/embedding": "PD",
    "final_norm/scale": "D",
    "final_norm/bias": "D",
    "output/kernel": "DV",
    "layers/attention_norm/scale": "D",
    "layers/attention_norm/bias": "D",
    "layers/attention/query/kernel": "DHK",
    "layers/attention/query/bias": "HK",
    "layers/attention/key/kernel": "DGK",
    "layers/attention/key/bias": "GK",
    "layers/attention/value/kernel": "DGK",
    "layers/attention/value/bias": "GK",
    "layers/attention/out/kernel": "HWD",
    "layers/attention/out/bias": "D",
    "layers/attention/sinks/bias": "H",
    "layers/attention/query_norm/scale": "HK",
    "layers/attention/key_norm/scale": "GK",
    "layers/attention/query_down/kernel": "DQ",
    "layers/attention/query_down_norm/scale": "Q",
    "layers/attention/query_up/kernel": "QHK",
    "layers/attention/kv_down/kernel": "DJ",
    "layers/attention/kv_down_norm/scale": "C",
    "layers/attention/kv_up/kernel": "CHM",
    "layers/attention_post_norm/scale": "D",
    "layers/mlp_norm/scale": "D",
    "layers/mlp_norm/bias": "D",
    "layers/mlp/router/kernel": "DE",
    "layers/mlp/router/bias": "E",
    "layers/mlp/gate/kernel": "DF",
    "layers/mlp/gate/bias": "F",
    "layers/mlp/up/kernel": "DF",
    "layers/mlp/up/bias": "F",
    "layers/mlp/down/kernel": "FD",
    "layers/mlp/down/bias": "D",
    "layers/mlp/shared/gate/kernel": "DU",
    "layers/mlp/shared/up/kernel": "DU",
    "layers/mlp/shared/down/kernel": "UD",
    "layers/mlp/shared_gate/kernel": "DI",
    "layers/mlp/measured/bias": "E",
    "layers/mlp_post_norm/scale": "D",
}

# The index and the number of parts that a letter stands for.
PARTS = {"0": (0, 3), "1": (1, 3), "2": (2, 3), "a": (0, 2), "b": (1, 2), "A": (0, 1)}

# Then the number of the layer; the tables of the families leave it out.
FIRST_LAYERS = f"{base.FIRST_LAYERS_KEY}/"


@dataclass(frozen=True)
class Row:
    """A parameter and its tensors in the files: one, one per layer, or one per layer and expert."""

    # Of the parameter.
    path: str
    # Of the tensor; * stands for the index of the layer, the next * for that of the expert.
    name: str
    # Of the tensor.
    dims: tuple[str, ...]
    # By letter of a dim.
    sizes: Mapping[str, int]
    # Index of the first layer of the stack.
    first: int = 0

    @property
    def stack(self) -> tuple[int, ...]:
        """Returns the leading dims of the parameter that are indices in the tensors' names."""
        return tuple(self.sizes[letter] for letter in "LE"[: self.name.count("*")])

    @property
    def tensors(self) -> list[str]:
        """Returns their names, in the order of the layers, and of the experts of a layer."""
        pattern = self.name.replace("*", "{}")
        # The indices of layers start at `first`, those of experts at 0.
        start = (self.first, 0)[: len(self.stack)]
        return [pattern.format(*np.add(index, start)) for index in np.ndindex(*self.stack)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of each tensor in the file."""
        return tuple(sum(map(self._dim_size, _parts(dim)[1])) for dim in self.dims)

    @property
    def has_inputs_first(self) -> bool:
        """Returns whether the tensors of a linear layer are (inputs, outputs), as GPT-2's are."""
        first_letter = DIMS[in_stack(self.path)][0]
        return self._linear_dims[0].startswith(first_letter)

    @property
    def outputs(self) -> "Row":
        """Returns the row of the dim of outputs of a linear layer, alone."""
        first, last = self._linear_dims
        return replace(self, dims=(last if self.has_inputs_first else first,))

    @property
    def _linear_dims(self) -> tuple[str, ...]:
        """Returns the dims of a linear layer in the files, without that of all experts."""
        return tuple(dim for dim in self.dims if dim != "E" or not self.is_of_experts)

    @property
    def is_of_experts(self) -> bool:
        """Returns whether each expert has a parameter of its own, unlike a router's."""
        return "E" in self.sizes and "E" not in DIMS[in_stack(self.path)]

    @property
    def layers_and_experts(self) -> tuple[int, int]:
        """Returns the numbers of layers and experts in the leading dims, 1 without such a dim."""
        num_experts = self.sizes["E"] if self.is_of_experts else 1
        return self.sizes.get("L", 1), num_experts

    def parameter_view(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of a tensor with the dims of the parameter, of one layer and expert."""
        letters = ""
        for axis, dim in enumerate(self.dims):
            number, parts = _parts(dim)
            start = sum(map(self._dim_size, parts[:number]))
            part = slice(start, start + self._dim_size(parts[number]))
            tensor = tensor[(slice(None),) * axis + (part,)]
            letters += parts[number]
        split = tensor.reshape([self._size(letter) for letter in letters])
        # Select a part of a fused tensor, such as the query, key or value.
        values = split[tuple(_index(letter) for letter in letters)]
        file_order = [letter for letter in letters if letter not in PARTS]
        order = [letter for letter in _letters(self.path, self.sizes) if letter in file_order]
        return values.transpose([file_order.index(letter) for letter in order])

    def box(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the slices of the tensor that hold `parameter_view(tensor)[index]`."""
        slices = []
        for axis, size in enumerate(self.shape):
            numbers = np.arange(size).reshape(
                [-1 if n == axis else 1 for n in range(len(self.dims))]
            )
            used = self.parameter_view(np.broadcast_to(numbers, self.shape))[index]
            # The number is the same along the dims without a stride.
            is_varying = tuple(slice(None if stride else 1) for stride in used.strides)
            distinct = np.unique(used[is_varying])
            steps = {*np.diff(distinct).tolist()}
            step = steps.pop() if len(steps) == 1 else 1
            slices.append(slice(int(distinct[0]), int(distinct[-1]) + 1, step))
        return tuple(slices)

    def _size(self, letter: str) -> int:
        return PARTS[letter][1] if letter in PARTS else self.sizes[letter]

    def _dim_size(self, letters: str) -> int:
        return math.prod(map(self._size, letters))


def _parts(dim: str) -> tuple[int, list[str]]:
    """Returns the number of a parameter's part of a dim, and all parts: (0, [dim]) of most."""
    number, _, parts = dim.rpartition("@")
    return int(number or 0), parts.split("+")


def _index(letter: str) -> int | slice:
    return PARTS[letter][0] if letter in PARTS else slice(None)


def rows(
    table: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], section: Mapping[str, Any]
) -> list[Row]:
    """Returns the row of each parameter of a model, from its shape in this package, by path.

    Raises KeyError for a path that is not in the table.
    """
    rows = []
    for path, shape in shapes.items():
        if path.startswith(FIRST_LAYERS):
            number, _, rest = path.removeprefix(FIRST_LAYERS).partition("/")
            key = FIRST_LAYERS + rest
            name, *dims = table[key if key in table else in_stack(path)].split()
            name = name.replace("*", number)
            first = 0
        else:
            name, *dims = table[path].split()
            first = section["first_dense_layers"]
        # The heads of the other parts of a fused tensor.
        heads = {"H": section["num_heads"], "G": section["num_kv_heads"]}
        sizes = heads | _sizes(path, shape)
        if "V" in sizes:
            sizes["V"] = section["vocab_size"]  # without the padding of this package
        rows.append(Row(path, name, tuple(dims), sizes, first))
    return rows


def _sizes(path: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Returns the size of each dim of a parameter, by its letter."""
    letters = DIMS[in_stack(path)]
    lead = "L" if path.startswith("layers/") else ""
    num_own = len(shape) - len(lead)
    if num_own > len(letters):
        letters = "E" + letters  # of all experts
    return dict(zip(lead + letters[-num_own:], shape, strict=True))


def _letters(path: str, sizes: Mapping[str, int]) -> str:
    """Returns the dims of a parameter, those of all experts included."""
    letters = DIMS[in_stack(path)]
    return letters if "E" in letters or "E" not in sizes else "E" + letters


def in_stack(path: str) -> str:
    """Returns the path of the parameter of the stacked layers with the same dims."""
    return re.sub(rf"^{FIRST_LAYERS}\d+/", "layers/", path)
