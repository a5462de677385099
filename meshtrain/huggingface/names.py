"""Names and dim order of each parameter in the files of transformers.

A table maps the path of a parameter to "TENSOR DIM DIM ...": the name of the tensor, and its dims in
the file. "HK" is one dim in the file and two dims, H and K, in this package. A digit is an index into a
fused tensor: 0 query, 1 key, 2 value. In the name, the first * stands for the index of the layer, and the
second for that of the expert.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshtrain.models import base

# V vocabulary, P positions, D model, H heads, G key/value heads, K head dim, W that of values, F feed-forward,
# L layers, E experts, U feed-forward of the shared experts. Of latent attention: Q latent of the queries, C of keys
# and values, J = C + rope key, M = K without rope + W

# Dims in this package; the parameters under layers/ also have a leading dim L, those of the first layers do not. Dims
# that the tensor of a family lacks do not apply: E if it has one tensor per expert or no experts, H and G if heads
# are normalized one by one.
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
    "layers/mlp/gate/kernel": "DF",
    "layers/mlp/gate/bias": "F",
    "layers/mlp/up/kernel": "DF",
    "layers/mlp/up/bias": "F",
    "layers/mlp/down/kernel": "FD",
    "layers/mlp/down/bias": "D",
    "layers/mlp/shared/gate/kernel": "DU",
    "layers/mlp/shared/up/kernel": "DU",
    "layers/mlp/shared/down/kernel": "UD",
    "layers/mlp/measured/bias": "E",
    "layers/mlp_post_norm/scale": "D",
}

FIRST = f"{base.FIRST_LAYERS_KEY}/"  # then the number of the layer; without it in the tables below

LLAMA = {
    "tokens/embedding": "model.embed_tokens.weight V D",
    "final_norm/scale": "model.norm.weight D",
    "output/kernel": "lm_head.weight V D",
    "layers/attention_norm/scale": "model.layers.*.input_layernorm.weight D",
    "layers/attention/query/kernel": "model.layers.*.self_attn.q_proj.weight HK D",
    "layers/attention/query/bias": "model.layers.*.self_attn.q_proj.bias HK",
    "layers/attention/key/kernel": "model.layers.*.self_attn.k_proj.weight GK D",
    "layers/attention/key/bias": "model.layers.*.self_attn.k_proj.bias GK",
    "layers/attention/value/kernel": "model.layers.*.self_attn.v_proj.weight GK D",
    "layers/attention/value/bias": "model.layers.*.self_attn.v_proj.bias GK",
    "layers/attention/out/kernel": "model.layers.*.self_attn.o_proj.weight D HW",
    "layers/attention/out/bias": "model.layers.*.self_attn.o_proj.bias D",
    "layers/attention/query_norm/scale": "model.layers.*.self_attn.q_norm.weight K",
    "layers/attention/key_norm/scale": "model.layers.*.self_attn.k_norm.weight K",
    "layers/mlp_norm/scale": "model.layers.*.post_attention_layernorm.weight D",
    "layers/mlp/gate/kernel": "model.layers.*.mlp.gate_proj.weight F D",
    "layers/mlp/gate/bias": "model.layers.*.mlp.gate_proj.bias F",
    "layers/mlp/up/kernel": "model.layers.*.mlp.up_proj.weight F D",
    "layers/mlp/up/bias": "model.layers.*.mlp.up_proj.bias F",
    "layers/mlp/down/kernel": "model.layers.*.mlp.down_proj.weight D F",
    "layers/mlp/down/bias": "model.layers.*.mlp.down_proj.bias D",
}

QWEN3_MOE = LLAMA | {
    "layers/mlp/router/kernel": "model.layers.*.mlp.gate.weight E D",
    "layers/mlp/gate/kernel": "model.layers.*.mlp.experts.*.gate_proj.weight F D",
    "layers/mlp/up/kernel": "model.layers.*.mlp.experts.*.up_proj.weight F D",
    "layers/mlp/down/kernel": "model.layers.*.mlp.experts.*.down_proj.weight D F",
}

OLMOE = QWEN3_MOE | {
    "layers/attention/query_norm/scale": "model.layers.*.self_attn.q_norm.weight HK",
    "layers/attention/key_norm/scale": "model.layers.*.self_attn.k_norm.weight GK",
}

MIXTRAL = LLAMA | {
    "layers/mlp/router/kernel": "model.layers.*.block_sparse_moe.gate.weight E D",
    "layers/mlp/gate/kernel": "model.layers.*.block_sparse_moe.experts.*.w1.weight F D",
    "layers/mlp/up/kernel": "model.layers.*.block_sparse_moe.experts.*.w3.weight F D",
    "layers/mlp/down/kernel": "model.layers.*.block_sparse_moe.experts.*.w2.weight D F",
}

# The names of a dense layer have priority in the first layers.
DEEPSEEK = QWEN3_MOE | {
    **{FIRST + name: LLAMA[f"layers/{name}"] for name in ("mlp/gate/kernel", "mlp/up/kernel")},
    FIRST + "mlp/down/kernel": LLAMA["layers/mlp/down/kernel"],
    "layers/mlp/shared/gate/kernel": "model.layers.*.mlp.shared_experts.gate_proj.weight U D",
    "layers/mlp/shared/up/kernel": "model.layers.*.mlp.shared_experts.up_proj.weight U D",
    "layers/mlp/shared/down/kernel": "model.layers.*.mlp.shared_experts.down_proj.weight D U",
    "layers/mlp/measured/bias": "model.layers.*.mlp.gate.e_score_correction_bias E",
}

DEEPSEEK_V3 = DEEPSEEK | {
    "layers/attention/query_down/kernel": "model.layers.*.self_attn.q_a_proj.weight Q D",
    "layers/attention/query_down_norm/scale": "model.layers.*.self_attn.q_a_layernorm.weight Q",
    "layers/attention/query_up/kernel": "model.layers.*.self_attn.q_b_proj.weight HK Q",
    "layers/attention/kv_down/kernel": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight J D",
    "layers/attention/kv_down_norm/scale": "model.layers.*.self_attn.kv_a_layernorm.weight C",
    "layers/attention/kv_up/kernel": "model.layers.*.self_attn.kv_b_proj.weight HM C",
}

DEEPSEEK_V2 = {name: row for name, row in DEEPSEEK_V3.items() if "measured" not in name}

# The tensors of all experts that transformers 5 has in memory, and writes with save_original_format=False: by the
# end of their name, the names of their parts, one after the other, for each expert.
QWEN3_MOE_FUSED = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.*.gate_proj.weight",
        "mlp.experts.*.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

MIXTRAL_FUSED = {
    "mlp.experts.gate_up_proj": (
        "block_sparse_moe.experts.*.w1.weight",
        "block_sparse_moe.experts.*.w3.weight",
    ),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
    "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
}

# Two more norms; post_attention_layernorm is not the norm that Llama calls so.
GEMMA = LLAMA | {
    "layers/attention_post_norm/scale": "model.layers.*.post_attention_layernorm.weight D",
    "layers/mlp_norm/scale": "model.layers.*.pre_feedforward_layernorm.weight D",
    "layers/mlp_post_norm/scale": "model.layers.*.post_feedforward_layernorm.weight D",
}

# GPT-2 stores linear layers as [in, out].
GPT2 = {
    "tokens/embedding": "transformer.wte.weight V D",
    "positions/embedding": "transformer.wpe.weight P D",
    "final_norm/scale": "transformer.ln_f.weight D",
    "final_norm/bias": "transformer.ln_f.bias D",
    "output/kernel": "lm_head.weight V D",
    "layers/attention_norm/scale": "transformer.h.*.ln_1.weight D",
    "layers/attention_norm/bias": "transformer.h.*.ln_1.bias D",
    "layers/attention/query/kernel": "transformer.h.*.attn.c_attn.weight D 0HK",
    "layers/attention/query/bias": "transformer.h.*.attn.c_attn.bias 0HK",
    "layers/attention/key/kernel": "transformer.h.*.attn.c_attn.weight D 1GK",
    "layers/attention/key/bias": "transformer.h.*.attn.c_attn.bias 1GK",
    "layers/attention/value/kernel": "transformer.h.*.attn.c_attn.weight D 2GK",
    "layers/attention/value/bias": "transformer.h.*.attn.c_attn.bias 2GK",
    "layers/attention/out/kernel": "transformer.h.*.attn.c_proj.weight HW D",
    "layers/attention/out/bias": "transformer.h.*.attn.c_proj.bias D",
    "layers/mlp_norm/scale": "transformer.h.*.ln_2.weight D",
    "layers/mlp_norm/bias": "transformer.h.*.ln_2.bias D",
    "layers/mlp/up/kernel": "transformer.h.*.mlp.c_fc.weight D F",
    "layers/mlp/up/bias": "transformer.h.*.mlp.c_fc.bias F",
    "layers/mlp/down/kernel": "transformer.h.*.mlp.c_proj.weight F D",
    "layers/mlp/down/bias": "transformer.h.*.mlp.c_proj.bias D",
}


@dataclass(frozen=True)
class Row:
    """A parameter, and its tensors in the files: one, one per layer, or one per layer and expert."""

    path: str  # of the parameter
    name: (
        str  # of the tensor; * stands for the index of the layer, the next * for that of the expert
    )
    dims: tuple[str, ...]  # of the tensor
    sizes: Mapping[str, int]  # by letter of a dim
    first: int = 0  # index of the first layer of the stack

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading dims of the parameter that are indices in the names of the tensors."""
        return tuple(self.sizes[letter] for letter in "LE"[: self.name.count("*")])

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors, in the order of the layers, and of the experts of a layer."""
        pattern = self.name.replace("*", "{}")
        start = (self.first, 0)[: len(self.stack)]  # of the indices of layers and of experts
        return [pattern.format(*np.add(index, start)) for index in np.ndindex(*self.stack)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the file."""
        return tuple(math.prod(map(self._size, dim)) for dim in self.dims)

    def parameter_view(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of a tensor as the parameter (of one layer and expert), with the dims of DIMS."""
        letters = "".join(self.dims)
        split = tensor.reshape([self._size(letter) for letter in letters])
        values = split[
            tuple(int(letter) if letter.isdigit() else slice(None) for letter in letters)
        ]
        order = [letter for letter in letters if letter.isalpha()]
        return values.transpose(
            [order.index(letter) for letter in DIMS[in_stack(self.path)] if letter in order]
        )

    def _size(self, letter: str) -> int:
        return self.sizes.get(letter, 3)  # a digit: the dim of query, key and value


def rows(
    table: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], section: Mapping[str, Any]
) -> list[Row]:
    """Returns the row of each parameter of a model, from its shape in this package, by path.

    Raises KeyError for a path that is not in the table.
    """
    rows = []
    for path, shape in shapes.items():
        number, _, rest = path.removeprefix(FIRST).partition("/")
        if path.startswith(FIRST):
            key, first = FIRST + rest, 0
            name, *dims = table[key if key in table else in_stack(path)].split()
            name = name.replace("*", number)
        else:
            first = section["first_dense_layers"]
            name, *dims = table[path].split()
        sizes = _sizes(path, shape)
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


def in_stack(path: str) -> str:
    """Returns the path of the parameter of the stacked layers with the same dims."""
    return re.sub(rf"^{FIRST}\d+/", "layers/", path)
