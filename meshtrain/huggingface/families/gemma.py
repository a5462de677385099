"""Gemma 1, 2 and 3, the language model of the multimodal Gemma 3, and VaultGemma."""

import dataclasses

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import CONFIG_KEYS, Config, Family, Multimodal, Section

# Two more norms; post_attention_layernorm is not the norm that Llama calls so.
NAMES = base.NAMES | {
    "layers/attention_post_norm/scale": "model.layers.*.post_attention_layernorm.weight D",
    "layers/mlp_norm/scale": "model.layers.*.pre_feedforward_layernorm.weight D",
    "layers/mlp_post_norm/scale": "model.layers.*.post_feedforward_layernorm.weight D",
}

SECTION = {"norm": "rms_1p", "mlp": "geglu", "post_norm": True}
DEFAULTS = {
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

SUPPORTED_VALUES = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, True, None),
}

ATTENTION_SOFTCAP = {"attention_softcap": "attn_logit_softcapping"}

LOGIT_SOFTCAP = {"logit_softcap": "final_logit_softcapping"}


def _to_section(config: Config) -> Section:
    return {
        "embed_scale": config["hidden_size"] ** 0.5,
        "query_scale": config["query_pre_attn_scalar"] ** -0.5,
        **base.attention_bias_to_section(config),
    }


def _to_config(section: Section) -> Config:
    query_scale = section["query_scale"] or section["head_dim"] ** -0.5
    scalar = round(query_scale**-2)
    return {"query_pre_attn_scalar": scalar, **base.attention_bias_to_config(section)}


def _every_second_global(config: Config) -> str:
    return "lg"


def _every_nth_global(config: Config) -> str:
    n = config["sliding_window_pattern"]
    return "".join("l" if (i + 1) % n else "g" for i in range(config["num_hidden_layers"]))


def _gemma_to_section(config: Config) -> Section:
    embed_scale = config["hidden_size"] ** 0.5
    return {"embed_scale": embed_scale, **base.attention_bias_to_section(config)}


GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    names=base.NAMES,
    section=SECTION | {"post_norm": False},
    defaults={
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
    },
    # For transformers, "gelu" is the approximation here: so were the models trained.
    supported_values={
        "hidden_act": ("gelu_pytorch_tanh", "gelu", "gelu_new"),
        "attention_bias": (False, True, None),
    },
    uses_layer_types=False,
    to_section=_gemma_to_section,
    to_config=base.attention_bias_to_config,
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    names=NAMES,
    section=SECTION,
    defaults=DEFAULTS
    | {
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    supported_values=SUPPORTED_VALUES,
    keys=CONFIG_KEYS | ATTENTION_SOFTCAP | LOGIT_SOFTCAP,
    minimums={"query_pre_attn_scalar": 1},
    heads_divide_hidden_size=True,
    default_layers=_every_second_global,
    to_section=_to_section,
    to_config=_to_config,
)

# Gemma 2 without the norms after the sublayers.
VAULTGEMMA = dataclasses.replace(
    GEMMA2,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    names={path: name for path, name in NAMES.items() if "_post_norm" not in path},
    section=SECTION | {"post_norm": False},
)

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    names=NAMES,
    section=SECTION | {"qk_norm": True},
    defaults=DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
    },
    supported_values=SUPPORTED_VALUES,
    # transformers ignores attn_logit_softcapping.
    keys=CONFIG_KEYS | LOGIT_SOFTCAP,
    minimums={"sliding_window_pattern": 1, "query_pre_attn_scalar": 1},
    heads_divide_hidden_size=True,
    default_layers=_every_nth_global,
    to_section=_to_section,
    to_config=_to_config,
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    multimodal=Multimodal(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        ignored_keys=("final_logit_softcapping",),
    ),
)
