"""Hunyuan 3 (hy_v3): the router of DeepSeek-V3, and the attention of Qwen 3."""

from meshtrain.huggingface.families import base, deepseek
from meshtrain.huggingface.families.base import Config, Family, Section

NAMES = deepseek.EXPERT_NAMES | {
    "layers/mlp/router/kernel": "model.layers.*.mlp.router.gate.weight E D",
    "layers/mlp/shared/gate/kernel": "model.layers.*.mlp.shared_mlp.gate_proj.weight U D",
    "layers/mlp/shared/up/kernel": "model.layers.*.mlp.shared_mlp.up_proj.weight U D",
    "layers/mlp/shared/down/kernel": "model.layers.*.mlp.shared_mlp.down_proj.weight D U",
    "layers/mlp/measured/bias": "model.layers.*.mlp.expert_bias E",
}

# The names in transformers 5, and those in files.
RENAMED = {
    "mlp.gate.weight": ("mlp.router.gate.weight",),
    "mlp.e_score_correction_bias": ("mlp.expert_bias",),
    "mlp.shared_experts.gate_proj.weight": ("mlp.shared_mlp.gate_proj.weight",),
    "mlp.shared_experts.up_proj.weight": ("mlp.shared_mlp.up_proj.weight",),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_mlp.down_proj.weight",),
}


def _to_section(config: Config) -> Section:
    return {
        "balance": "bias",
        "balance_weight": deepseek.BIAS_STEP,
        "first_dense_layers": base.num_dense(config),
        **base.attention_bias_to_section(config),
    }


def _to_config(section: Section) -> Config:
    return {
        **base.mlp_types_to_config(section),
        **base.attention_bias_to_config(section),
        deepseek.MTP_LAYERS: 0,
    }


HY_V3 = Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    names=NAMES,
    section={"router": "sigmoid", "qk_norm": True},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        deepseek.MTP_LAYERS: 1,
    },
    supported_values=base.SILU_ONLY | {"attention_bias": (False, True), "mlp_bias": (False,)},
    keys=base.EXPERT_KEYS
    | {
        "d_expert": "moe_intermediate_size",
        "num_shared_experts": "num_shared_experts",
        "router_scale": "router_scaling_factor",
    },
    aliases={"num_local_experts": "num_experts"},
    # Without shared experts transformers has one of another width.
    minimums={"num_shared_experts": 1},
    uses_layer_types=False,
    standardize=base.with_mlp_types,
    faults=base.mlp_type_faults,
    to_section=_to_section,
    to_config=_to_config,
    left_out_prefixes=deepseek.mtp_prefixes,
    fused=base.MOE_FUSED | RENAMED,
)
