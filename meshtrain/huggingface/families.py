"""The models of transformers that are known here: what their config.json says, and leaves out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshtrain.huggingface import names

BUILD = "meshtrain.models.transformer:build"

# A `model` section, but for its sizes; a family says what differs.
PLAIN = {
    "build": BUILD,
    "norm": "rms",
    "positions": "rope",
    "rope_theta": 10000.0,
    "rope_scaling": (),
    "rope_theta_local": 0.0,
    "mlp": "swiglu",
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
    "loss_chunk_mib": 256,
}

KEYS = {  # of a section, and in config.json
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
CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
KINDS = {"norm_epsilon": float, "tie_embeddings": bool} | dict.fromkeys(CAPS, float)  # others: int
OF_TEXT = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
OF_TEXT += (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)  # beside the text_config of a model of more

SCALINGS = {  # of rope: what follows the kind, in a section's tuple
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
LEAST = {"sliding_window_pattern": 1, "query_pre_attn_scalar": 1, "max_window_layers": 0}
LETTERS = {"full_attention": "g", "sliding_attention": "l"}
EVERYWHERE = {  # see Family.only
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
}


def _neither(config: Mapping) -> str:
    return "g"


def _all_local(config: Mapping) -> str:
    return "l" if config["sliding_window"] else "g"


def _last_local(config: Mapping) -> str:
    used = config["use_sliding_window"] and config["sliding_window"]
    first = config["max_window_layers"] if used else math.inf
    return "".join("l" if i >= first else "g" for i in range(config["num_hidden_layers"]))


def _by_turns(config: Mapping) -> str:
    by = config["sliding_window_pattern"]
    return "".join("l" if (i + 1) % by else "g" for i in range(config["num_hidden_layers"]))


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    architecture: str
    model_type: str
    names: Mapping[str, str]  # of parameters, see names.py
    section: Mapping[str, Any]  # what all its models have in common here
    defaults: Mapping[str, Any]  # of what config.json may leave out, as in transformers
    only: Mapping[
        str, tuple
    ]  # keys of config.json, and the values that this transformer can follow
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    letters: Callable[[Mapping], str] = _neither  # where config.json has no layer_types
    by_layer: bool = True  # False: transformers lets layer_types change nothing
    prefixes: tuple[tuple[str, str], ...] = ()  # of tensors, in some files, and what they stand for
    others: tuple[str, ...] = ()  # prefixes of tensors that are no part of a language model


SILU = {"hidden_act": ("silu", "swish")}
SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
SMALL = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": None,
    "tie_word_embeddings": False,
}
GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False, None)}
GEMMA = {"norm": "rms_1p", "mlp": "geglu", "post_norm": True}
GEMMA_SIZES = {
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
        defaults=SMALL
        | {
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        only=SILU,
        by_layer=False,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        names.LLAMA,
        section={},
        defaults=SMALL
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "hidden_act": "silu",
            "sliding_window": 4096,
        },
        only=SILU,
        letters=_all_local,
        by_layer=False,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        names.LLAMA,
        section={"qkv_bias": True},
        defaults=SMALL
        | SLIDING
        | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "hidden_act": "silu"},
        only=SILU,
        letters=_last_local,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        names.LLAMA,
        section={"qk_norm": True},
        defaults=SMALL
        | SLIDING
        | {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "attention_bias": False,
        },
        only=SILU | {"attention_bias": (False, None)},
        letters=_last_local,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        names.GEMMA,
        section=GEMMA,
        defaults=GEMMA_SIZES
        | {
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "sliding_window_pattern": 2,
        },
        only=GELU,
        keys=KEYS | CAPS,
        letters=_by_turns,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names.GEMMA,
        section=GEMMA | {"qk_norm": True},
        defaults=GEMMA_SIZES
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        only=GELU,
        keys=KEYS | CAPS,
        letters=_by_turns,
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        others=("vision_tower.", "multi_modal_projector.", "model.vision_tower.")
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
        only={
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
    ),
)
ALSO = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}  # with a text_config
