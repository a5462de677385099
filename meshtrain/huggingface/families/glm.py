"""GLM-4 (glm and glm4), and GLM-4.5 (glm4_moe): rope in half of the dims of a head."""

import dataclasses

from meshtrain.huggingface.families import base, deepseek, phi3
from meshtrain.huggingface.families.base import Config, Family, Section

# ---- dense models: rope rotates adjacent dims ----

NAMES = base.NAMES | phi3.GATE_UP_NAMES

# post_attention_layernorm is the norm before the feed-forward, as in Llama.
GLM4_NAMES = NAMES | {
    "layers/attention_post_norm/scale": "model.layers.*.post_self_attn_layernorm.weight D",
    "layers/mlp_post_norm/scale": "model.layers.*.post_mlp_layernorm.weight D",
}

DENSE_DEFAULTS = base.COMMON_DEFAULTS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "attention_bias": True,
}

SUPPORTED_VALUES = base.SILU_ONLY | {"attention_bias": (True, False)}


def _to_section(config: Config) -> Section:
    # The output projection has no bias.
    return {"qkv_bias": config["attention_bias"]}


def _to_config(section: Section) -> Config:
    return {"attention_bias": section["qkv_bias"]}


GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    names=NAMES,
    section={"rope_interleaved": True},
    defaults=DENSE_DEFAULTS,
    supported_values=SUPPORTED_VALUES,
    uses_layer_types=False,
    rope_fraction=0.5,
    to_section=_to_section,
    to_config=_to_config,
)

GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    names=GLM4_NAMES,
    section={"rope_interleaved": True, "post_norm": True},
    defaults=DENSE_DEFAULTS,
    supported_values=SUPPORTED_VALUES,
    uses_layer_types=False,
    rope_fraction=0.5,
    to_section=_to_section,
    to_config=_to_config,
)

# ---- mixtures of experts: rope rotates halves ----


def _moe_to_section(config: Config) -> Section:
    return {
        **deepseek.router_to_section(config),
        **_to_section(config),
        "qk_norm": config["use_qk_norm"],
    }


def _moe_to_config(section: Section) -> Config:
    return {
        **deepseek.router_to_config(section),
        **_to_config(section),
        "use_qk_norm": section["qk_norm"],
        deepseek.MTP_LAYERS: 0,
    }


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    names=deepseek.EXPERT_NAMES,
    section={"router": "sigmoid"},
    defaults=base.COMMON_DEFAULTS
    | deepseek.EXPERT_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        deepseek.FIRST_DENSE: 1,
        "use_qk_norm": False,
        deepseek.MTP_LAYERS: 1,
    },
    supported_values=SUPPORTED_VALUES
    | {"use_qk_norm": (True, False), "norm_topk_prob": (True,), "scoring_func": ("sigmoid",)},
    keys=deepseek.EXPERT_KEYS,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": deepseek.MTP_LAYERS},
    uses_layer_types=False,
    rope_fraction=0.5,
    faults=deepseek.router_faults,
    to_section=_moe_to_section,
    to_config=_moe_to_config,
    left_out_prefixes=deepseek.mtp_prefixes,
    has_empty_shared_experts=True,
    fused=base.MOE_FUSED,
)

# ---- Sarvam: the model of GLM-4.5, with another config class and other names in its files ----

SARVAM_NAMES = deepseek.EXPERT_NAMES | {
    "tokens/embedding": "model.word_embeddings.weight V D",
    "layers/attention/query/kernel": "model.layers.*.attention.query_key_value.weight 0@HK+GK+GK D",
    "layers/attention/query/bias": "model.layers.*.attention.query_key_value.bias 0@HK+GK+GK",
    "layers/attention/key/kernel": "model.layers.*.attention.query_key_value.weight 1@HK+GK+GK D",
    "layers/attention/key/bias": "model.layers.*.attention.query_key_value.bias 1@HK+GK+GK",
    "layers/attention/value/kernel": "model.layers.*.attention.query_key_value.weight 2@HK+GK+GK D",
    "layers/attention/value/bias": "model.layers.*.attention.query_key_value.bias 2@HK+GK+GK",
    "layers/attention/out/kernel": "model.layers.*.attention.dense.weight D HW",
    "layers/attention/query_norm/scale": "model.layers.*.attention.query_layernorm.weight K",
    "layers/attention/key_norm/scale": "model.layers.*.attention.key_layernorm.weight K",
    "layers/mlp/measured/bias": "model.layers.*.mlp.gate.expert_bias E",
}


def _sarvam_standardize(config: Config) -> Config:
    return {"partial_rotary_factor": 1.0} | config


SARVAM_MOE = dataclasses.replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    own_architecture="SarvamMoEForCausalLM",
    names=SARVAM_NAMES,
    defaults=GLM4_MOE.defaults
    | {
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 8e6,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        deepseek.MTP_LAYERS: 0,
    },
    aliases=GLM4_MOE.aliases
    | {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    standardize=_sarvam_standardize,
)

# ---- GLM-4.7-Flash: latent attention ----


def _lite_to_section(config: Config) -> Section:
    return {
        **deepseek.router_to_section(config),
        **deepseek.attention_to_section(config),
        "first_dense_layers": base.num_dense(config),
    }


def _lite_to_config(section: Section) -> Config:
    return {
        **deepseek.router_to_config(section),
        **deepseek.attention_to_config(section),
        **base.mlp_types_to_config(section),
        deepseek.MTP_LAYERS: 0,
    }


GLM4_MOE_LITE = dataclasses.replace(
    deepseek.DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    defaults=deepseek.DEEPSEEK_V3.defaults
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "num_key_value_heads": 20,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "q_lora_rank": 768,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    standardize=base.with_mlp_types,
    faults=lambda config: base.mlp_type_faults(config) or deepseek.router_faults(config),
    to_section=_lite_to_section,
    to_config=_lite_to_config,
)
