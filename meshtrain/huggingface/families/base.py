"""A family of models in transformers: one architecture; and what several families share.

Each family has a file here with all that is known of it; `__init__.py` lists them.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from meshtrain.errors import ConfigError
from meshtrain.huggingface.tensor_rows import FIRST_LAYERS

Config = dict[str, Any]  # a config.json
Section = dict[str, Any]  # the `model` section of a config

BUILD = "meshtrain.models.transformer:build"

CONFIG_KEYS = {  # key of a `model` section: key of config.json
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}

MAX_LAYERS = 10_000  # a list with an entry for each layer is made from the number

LAYER_LETTERS = {"full_attention": "g", "sliding_attention": "l"}
LAYER_TYPES = {letter: name for name, letter in LAYER_LETTERS.items()}


@dataclass(frozen=True)
class Multimodal:
    """A multimodal architecture; only its language model, under `text_config`, is converted."""

    architecture: str
    model_type: str
    # Keys of the language model that transformers ignores here.
    ignored_keys: tuple[str, ...] = ()
    # The values in transformers of keys at the top level that config.json may omit.
    defaults: Config = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers, with one config class: one model_type.

    Functions of a config.json get it with all defaults, those of a section get it with all keys.
    """

    architecture: str
    model_type: str
    # Tensor names and dims by the path of the parameter, see tensor_rows.py.
    names: Mapping[str, str]
    # Values in the `model` section of all models of the family.
    section: Section
    # The values in transformers of keys that config.json may omit.
    defaults: Config
    # By key of config.json; other values are rejected.
    supported_values: dict[str, tuple]
    # The key of config.json by the key of a section, where both have the same value.
    keys: Mapping[str, str] = field(default_factory=lambda: CONFIG_KEYS)
    # Other names of keys, which have priority in transformers.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # The minimum of an integer, by key of config.json.
    minimums: Mapping[str, int] = field(default_factory=dict)
    # transformers rejects a hidden size that is not a multiple of the number of heads, even with a
    # head_dim.
    heads_divide_hidden_size: bool = False
    # The letter of each layer (see LAYER_LETTERS) if config.json has no layer_types.
    default_layers: Callable[[Config], str] = lambda config: "g"
    # False: transformers ignores layer_types.
    uses_layer_types: bool = True
    # The partial_rotary_factor of transformers if config.json has none; None: it supports only 1.
    rope_fraction: float | None = None
    # Returns a config.json with what transformers derives from keys that are missing.
    standardize: Callable[[Config], Config] = lambda config: config
    # The architecture of files with this model_type that were written for code of their own, which
    # transformers does not need.
    own_architecture: str | None = None
    # Returns an error for each fault in the keys that only this family has.
    faults: Callable[[Config], list[str]] = lambda config: []
    # Returns the keys of a section that `keys` does not convert.
    to_section: Callable[[Config], Section] = lambda config: {}
    # Returns the keys of a config.json that `keys` does not convert.
    to_config: Callable[[Section], Config] = lambda section: {}
    # Returns the keys of rope_scaling that only this family has.
    to_rope_config: Callable[[Section], Config] = lambda section: {}
    # Whether files have empty tensors of shared experts if there are none.
    has_empty_shared_experts: bool = False
    # (prefix in some files, prefix in `names`): the first that matches is replaced.
    prefixes: tuple[tuple[str, str], ...] = ()
    # Of tensors outside the language model.
    ignored_prefixes: tuple[str, ...] = ()
    # Returns the prefixes of tensors of the language model that an import leaves out, and counts.
    left_out_prefixes: Callable[[Config], tuple[str, ...]] = lambda config: ()
    # The end of the name of a tensor that holds those of all experts: the names of its parts, one
    # after the other, for each expert. transformers 5 has such tensors in memory, and writes them
    # with save_original_format=False.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether files may hold the kernels of experts in MXFP4.
    reads_mxfp4: bool = False
    # The architecture that contains a model of this family.
    multimodal: Multimodal | None = None

    @property
    def is_mixture(self) -> bool:
        """Returns whether its models are mixtures of experts."""
        return "num_experts" in self.keys

    @property
    def architectures(self) -> set[str]:
        """Returns the names by which a config.json can name the family."""
        names = {self.architecture}
        if self.multimodal:
            names.add(self.multimodal.architecture)
        return names


# ---- keys of many families ----

# Tensors of Llama, whose names and layout most other families have taken over.
NAMES = {
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

# Of experts, in the files of most mixtures.
MOE_NAMES = NAMES | {
    "layers/mlp/router/kernel": "model.layers.*.mlp.gate.weight E D",
    "layers/mlp/gate/kernel": "model.layers.*.mlp.experts.*.gate_proj.weight F D",
    "layers/mlp/up/kernel": "model.layers.*.mlp.experts.*.up_proj.weight F D",
    "layers/mlp/down/kernel": "model.layers.*.mlp.experts.*.down_proj.weight D F",
}

# Of dense layers before those with experts; they have priority in the first layers.
DENSE_FIRST_NAMES = {
    FIRST_LAYERS + path.removeprefix("layers/"): NAMES[path]
    for path in ("layers/mlp/gate/kernel", "layers/mlp/up/kernel", "layers/mlp/down/kernel")
}

MOE_FUSED = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.*.gate_proj.weight",
        "mlp.experts.*.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": None,
    "tie_word_embeddings": False,
}

SILU_ONLY = {"hidden_act": ("silu", "swish")}


def all_local(config: Config) -> str:
    return "g" if config["sliding_window"] is None else "l"


def last_layers_local(config: Config) -> str:
    is_used = config.get("use_sliding_window", True) and config["sliding_window"] is not None
    first_local = config["max_window_layers"] if is_used else math.inf
    return "".join("l" if i >= first_local else "g" for i in range(config["num_hidden_layers"]))


def shortest_pattern(letters: str) -> str:
    """Returns the shortest pattern that gives the letters of all layers if it is repeated."""
    patterns = (letters[:period] for period in range(1, len(letters) + 1))
    return next(pattern for pattern in patterns if repeat_to(len(letters), pattern) == letters)


def repeat_to(num_layers: int, letters: str) -> str:
    """Returns the letter of every layer: the pattern `letters`, repeated."""
    return (letters * -(-num_layers // len(letters)))[:num_layers]


# ---- biases of attention, and of the feed-forward ----


def bias_faults(config: Config) -> list[str]:
    if config["mlp_bias"] and not config["attention_bias"]:
        return [
            f"mlp_bias={config['mlp_bias']}, attention_bias={config['attention_bias']}: biases of "
            "the feed-forward alone are not supported"
        ]
    return []


def attention_bias_to_section(config: Config) -> Section:
    return dict.fromkeys(("qkv_bias", "out_bias"), bool(config["attention_bias"]))


def biases_to_section(config: Config) -> Section:
    return attention_bias_to_section(config) | {"bias": bool(config["mlp_bias"])}


def attention_bias_to_config(section: Section) -> Config:
    return {"attention_bias": section["bias"] or (section["qkv_bias"] and section["out_bias"])}


def biases_to_config(section: Section) -> Config:
    return attention_bias_to_config(section) | {"mlp_bias": section["bias"]}


# ---- mixtures of experts ----

EXPERT_KEYS = CONFIG_KEYS | {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}

BALANCE_WEIGHT = "router_aux_loss_coef"


def balance_loss_faults(config: Config) -> list[str]:
    return weight_faults(config, BALANCE_WEIGHT)


def balance_loss_to_section(config: Config) -> Section:
    """Returns the balance loss of a batch, with the weight in config.json.

    It is the loss of this package, not of transformers; it does not change the logits.
    """
    return {"balance": "batch", "balance_weight": float(config[BALANCE_WEIGHT])}


def balance_loss_to_config(section: Section) -> Config:
    return {BALANCE_WEIGHT: balance_loss_weight(section)}


def balance_loss_weight(section: Section) -> float:
    """Returns the weight of the balance loss; 0.0 if the experts are balanced in another way."""
    has_loss = section["balance"] in ("batch", "sequence")
    return float(section["balance_weight"]) if has_loss else 0.0


# ---- dense layers, then layers with experts, as a list of the kinds of all ----

MLP_TYPES = "mlp_layer_types"


def with_mlp_types(config: Config) -> Config:
    """Returns a config.json with the kind of each layer: sparse, except the first one."""
    num_layers = config.get("num_hidden_layers")
    if config.get(MLP_TYPES) is None and is_count(num_layers) and num_layers <= MAX_LAYERS:
        return config | {MLP_TYPES: _mlp_types(num_layers, 1)}
    return config


def _mlp_types(num_layers: int, num_dense: int) -> list[str]:
    return ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)


def mlp_type_faults(config: Config) -> list[str]:
    """Returns an error unless dense layers, then at least one with experts, are listed."""
    types, num_layers = config.get(MLP_TYPES), config.get("num_hidden_layers")
    if not is_count(num_layers) or num_layers > MAX_LAYERS:
        return []  # reported elsewhere
    num_first = types.count("dense") if isinstance(types, list) else 0
    if types == _mlp_types(num_layers, num_first) and num_first < num_layers:
        return []
    return [
        f"{MLP_TYPES}={types!r}: not supported; only dense layers, then sparse ones, of "
        f"{num_layers}"
    ]


def num_dense(config: Config) -> int:
    return config[MLP_TYPES].count("dense")


def mlp_types_to_config(section: Section) -> Config:
    return {MLP_TYPES: _mlp_types(section["num_layers"], section["first_dense_layers"])}


# ---- the same, as a list of the dense layers, and a number n: every n-th layer is sparse ----

MLP_ONLY, SPARSE_STEP = "mlp_only_layers", "decoder_sparse_step"

SPARSE_DEFAULTS: Config = {MLP_ONLY: None, SPARSE_STEP: 1}


def sparse_step_faults(config: Config) -> list[str]:
    """Returns an error unless dense layers, then at least one with experts, are given."""
    faults = minimum_faults(config, {SPARSE_STEP: 1})
    dense, num_layers = config[MLP_ONLY], config.get("num_hidden_layers")
    is_list = isinstance(dense, list) and all(is_count(number, 0) for number in dense)
    if dense is not None and not is_list:
        faults.append(f"{MLP_ONLY}={dense!r}: is not a list of numbers of layers")
    if faults or not is_count(num_layers) or num_layers > MAX_LAYERS:
        return faults  # the latter are reported elsewhere
    is_sparse = _are_sparse(config)
    num_first = is_sparse.index(True) if any(is_sparse) else num_layers
    if num_first < num_layers and all(is_sparse[num_first:]):
        return []
    return [
        f"{MLP_ONLY}={dense!r}, {SPARSE_STEP}={config[SPARSE_STEP]}: not supported; only dense "
        f"layers, then layers with experts, of {num_layers}"
    ]


def _are_sparse(config: Config) -> list[bool]:
    dense, step = {*(config[MLP_ONLY] or [])}, config[SPARSE_STEP]
    numbers = range(config["num_hidden_layers"])
    return [number not in dense and (number + 1) % step == 0 for number in numbers]


def sparse_step_to_section(config: Config) -> Section:
    return {"first_dense_layers": _are_sparse(config).index(True)}


def sparse_step_to_config(section: Section) -> Config:
    return {MLP_ONLY: [*range(section["first_dense_layers"])], SPARSE_STEP: 1}


# ---- values in a config.json ----


def json_object(config: Config, key: str) -> Config:
    """Returns a JSON object; {} if it is missing or null, ConfigError if it is anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key}={value!r}: is not a JSON object")
    return value or {}


def weight_faults(config: Config, key: str) -> list[str]:
    weight = config[key]
    if is_number(weight) and weight >= 0:
        return []
    return [f"{key}={weight!r}: is not a number of at least 0"]


def minimum_faults(config: Config, minimums: Mapping[str, int]) -> list[str]:
    return [
        f"{key}={config[key]!r}: is not an integer of at least {minimum}"
        for key, minimum in minimums.items()
        if not is_count(config[key], minimum)
    ]


def is_count(value: Any, minimum: int = 1) -> TypeGuard[int]:
    return is_number(value) and isinstance(value, int) and value >= minimum


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for a number that a float can represent."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> TypeGuard[float]:
    return is_number(value) and value > 0
