"""What a model family of transformers consists of, and the keys of a config.json that are common to families."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BUILD = "meshtrain.models.transformer:build"

# A `model` section without its sizes; Family.section overrides these.
SECTION_DEFAULTS = {
    "build": BUILD,
    "kv_lora_rank": 0,
    "q_lora_rank": 0,
    "rope_head_dim": 0,
    "v_head_dim": 0,
    "norm": "rms",
    "positions": "rope",
    "rope_theta": 10000.0,
    "rope_scaling": (),
    "rope_theta_local": 0.0,
    "mlp": "swiglu",
    "num_experts": 0,
    "experts_per_token": 2,
    "d_expert": 0,
    "num_shared_experts": 0,
    "first_dense_layers": 0,
    "router": "topk_softmax",
    "router_scale": 1.0,
    "expert_groups": (),
    "capacity_factor": 0.0,
    "balance": "none",
    "balance_weight": 0.0,
    "router_z_loss": 0.0,
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "qk_norm_heads": "each",
    "post_norm": False,
    "attention": "g",
    "window": 0,
    "dropout": 0.0,
    "query_scale": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "embed_scale": 1.0,
    "z_loss": 0.0,
    "attention_impl": "auto",
    "loss_chunk_mib": 2048.0,
}

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

SOFTCAP_KEYS = {
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}

# Types of values in a `model` section; keys that are not listed are int.
VALUE_TYPES = {"norm_epsilon": float, "tie_embeddings": bool, "router_scale": float}

VALUE_TYPES |= dict.fromkeys(SOFTCAP_KEYS, float)

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
