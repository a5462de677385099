"""What a model family of transformers consists of, and the keys of a config.json that are common to families."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshtrain.configs import default
from meshtrain.models.transformer_config import TransformerConfig

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

# A `model` section without the keys above; Family.section overrides these. A balance loss is not
# assumed: a config.json says it, if its model has experts.
SECTION_DEFAULTS = {
    key: value
    for key, value in default.get_config().model.to_dict().items()
    if key not in CONFIG_KEYS
} | {"balance": "none", "balance_weight": 0.0}

SOFTCAP_KEYS = {
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}

# Types of the values in a `model` section.
VALUE_TYPES = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}

# Keys next to `text_config` in a multimodal config.json that apply to the language model.
TOP_LEVEL_KEYS = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")

TOP_LEVEL_KEYS += ("bos_token_id", "eos_token_id", "pad_token_id")

MINIMUMS = {"sliding_window_pattern": 1, "query_pre_attn_scalar": 1, "max_window_layers": 0}  # int

LAYER_LETTERS = {"full_attention": "g", "sliding_attention": "l"}

LAYER_TYPES = {letter: name for name, letter in LAYER_LETTERS.items()}

SUPPORTED_VALUES = {  # of keys that any config.json may have; see Family.supported_values
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),  # null is bidirectional
    "per_layer_config": (None,),
    "text_config": (None,),  # of a multimodal architecture; see config_json.read
}


def is_number(value: Any) -> bool:
    """Returns True for a number that a float can represent."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max


def is_count(value: Any, minimum: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    architecture: str
    model_type: str
    names: Mapping[str, str]  # tensor names and dims, see names.py
    section: Mapping[str, Any]  # values in the `model` section of all models of the family
    defaults: Mapping[str, Any]  # the values in transformers of keys that config.json may omit
    supported_values: Mapping[str, tuple]  # by key of config.json; other values are rejected
    keys: Mapping[str, str] = field(default_factory=lambda: CONFIG_KEYS)
    # The letter of each layer (see LAYER_LETTERS) if config.json has no layer_types.
    default_layers: Callable[[Mapping], str] = lambda config: "g"
    uses_layer_types: bool = True  # False: transformers ignores layer_types
    # (prefix in some files, prefix in names.py): the first that matches is replaced.
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()  # of tensors outside the language model
    # Other names of keys, which have priority in transformers.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # The end of the name of a tensor that holds those of all experts, and its parts, see experts.unfuse.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # transformers rejects a hidden size that is not a multiple of the number of heads, even with head_dim.
    heads_divide_hidden_size: bool = False

    @property
    def is_mixture(self) -> bool:
        """Whether its models are mixtures of experts."""
        return "num_experts" in self.keys


# ---- what several families share ----

SILU_ONLY = {"hidden_act": ("silu", "swish")}

QWEN_SUPPORTED = SILU_ONLY | {"use_sliding_window": (True, False)}

COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": None,
    "tie_word_embeddings": False,
}

DEEPSEEK_KEYS = CONFIG_KEYS | {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "d_expert": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "router_scale": "routed_scaling_factor",
}

DEEPSEEK_DEFAULTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def all_local(config: Mapping) -> str:
    return "g" if config["sliding_window"] is None else "l"


def last_layers_local(config: Mapping) -> str:
    used = config.get("use_sliding_window", True) and config["sliding_window"] is not None
    first_local = config["max_window_layers"] if used else math.inf
    return "".join("l" if i >= first_local else "g" for i in range(config["num_hidden_layers"]))
