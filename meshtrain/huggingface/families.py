"""The supported model families of transformers: the keys of their config.json, and its defaults."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshtrain.huggingface import names

BUILD = "meshtrain.models.transformer:build"

# A `model` section without its sizes; Family.section overrides these.
SECTION_DEFAULTS = {
    "build": BUILD,
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
    "post_norm": False,
    "attention": "g",
    "window": 0,
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
VALUE_TYPES = {"norm_epsilon": float, "tie_embeddings": bool} | dict.fromkeys(SOFTCAP_KEYS, float)
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


def _all_global(config: Mapping) -> str:
    return "g"


def _all_local(config: Mapping) -> str:
    return "g" if config["sliding_window"] is None else "l"


def _last_layers_local(config: Mapping) -> str:
    used = config["use_sliding_window"] and config["sliding_window"] is not None
    first_local = config["max_window_layers"] if used else math.inf
    return "".join("l" if i >= first_local else "g" for i in range(config["num_hidden_layers"]))


def _every_second_global(config: Mapping) -> str:
    return "lg"


def _every_nth_global(config: Mapping) -> str:
    n = config["sliding_window_pattern"]
    return "".join("l" if (i + 1) % n else "g" for i in range(config["num_hidden_layers"]))


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
    default_layers: Callable[[Mapping], str] = _all_global
    uses_layer_types: bool = True  # False: transformers ignores layer_types
    # (prefix in some files, prefix in names.py): the first that matches is replaced.
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()  # of tensors outside the language model
    # Other names of keys, which have priority in transformers.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # transformers rejects a hidden size that is not a multiple of the number of heads, even with head_dim.
    heads_divide_hidden_size: bool = False


SILU_ONLY = {"hidden_act": ("silu", "swish")}
QWEN_SUPPORTED = SILU_ONLY | {"use_sliding_window": (True, False)}
QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": None,
    "tie_word_embeddings": False,
}
GEMMA_SUPPORTED = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False, None)}
GEMMA_SECTION = {"norm": "rms_1p", "mlp": "geglu", "post_norm": True}
GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        names.LLAMA,
        section={},
        defaults=COMMON_DEFAULTS
        | {
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        supported_values=SILU_ONLY,
        uses_layer_types=False,
        heads_divide_hidden_size=True,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        names.LLAMA,
        section={},
        defaults=COMMON_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "hidden_act": "silu",
            "sliding_window": 4096,
        },
        supported_values=SILU_ONLY,
        default_layers=_all_local,
        uses_layer_types=False,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        names.LLAMA,
        section={"qkv_bias": True},
        defaults=COMMON_DEFAULTS
        | QWEN_DEFAULTS
        | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "hidden_act": "silu"},
        supported_values=QWEN_SUPPORTED,
        default_layers=_last_layers_local,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        names.LLAMA,
        section={"qk_norm": True},
        defaults=COMMON_DEFAULTS
        | QWEN_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "attention_bias": False,
        },
        supported_values=QWEN_SUPPORTED | {"attention_bias": (False, None)},
        default_layers=_last_layers_local,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        names.GEMMA,
        section=GEMMA_SECTION,
        defaults=GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        supported_values=GEMMA_SUPPORTED,
        keys=CONFIG_KEYS | SOFTCAP_KEYS,
        default_layers=_every_second_global,
        heads_divide_hidden_size=True,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names.GEMMA,
        section=GEMMA_SECTION | {"qk_norm": True},
        defaults=GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        supported_values=GEMMA_SUPPORTED,
        # transformers ignores attn_logit_softcapping.
        keys=CONFIG_KEYS | {"logit_softcap": SOFTCAP_KEYS["logit_softcap"]},
        default_layers=_every_nth_global,
        heads_divide_hidden_size=True,
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.")
        + ("model.multi_modal_projector.",),
    ),
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        names.GPT2,
        section={"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        supported_values={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        keys={
            "num_layers": "n_layer",
            "d_model": "n_embd",
            "num_heads": "n_head",
            "d_ff": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_epsilon": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
        },
        prefixes=(("transformer.", "transformer."), ("lm_head.", "lm_head."), ("", "transformer.")),
        aliases={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
)
# Multimodal architectures: only the language model, under `text_config`, is converted.
TEXT_ARCHITECTURES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
TEXT_MODEL_TYPES = {"gemma3": "gemma3_text"}
# transformers ignores these keys in the language model of a multimodal architecture.
IGNORED_TEXT_KEYS = ("final_logit_softcapping",)
