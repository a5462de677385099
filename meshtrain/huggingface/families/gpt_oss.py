"""gpt-oss: attention sinks, a clamped gate, and biases of experts and router."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

EXPERTS = "model.layers.*.mlp.experts"

# Experts are stored as [in, out], in tensors of all experts; those of gate and up alternate.
NAMES = base.NAMES | {
    "layers/attention/sinks/bias": "model.layers.*.self_attn.sinks H",
    "layers/mlp/router/kernel": "model.layers.*.mlp.router.weight E D",
    "layers/mlp/router/bias": "model.layers.*.mlp.router.bias E",
    "layers/mlp/gate/kernel": f"{EXPERTS}.gate_up_proj E D Fa",
    "layers/mlp/gate/bias": f"{EXPERTS}.gate_up_proj_bias E Fa",
    "layers/mlp/up/kernel": f"{EXPERTS}.gate_up_proj E D Fb",
    "layers/mlp/up/bias": f"{EXPERTS}.gate_up_proj_bias E Fb",
    "layers/mlp/down/kernel": f"{EXPERTS}.down_proj E F D",
    "layers/mlp/down/bias": f"{EXPERTS}.down_proj_bias E D",
}

# What transformers takes if config.json has no rope.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _with_rope(config: Config) -> Config:
    has_rope = config.get("rope_parameters") is not None or config.get("rope_scaling")
    return config if has_rope else config | {"rope_parameters": DEFAULT_ROPE}


def _to_section(config: Config) -> Section:
    return base.balance_loss_to_section(config) | base.attention_bias_to_section(config)


def _to_config(section: Section) -> Config:
    return base.balance_loss_to_config(section) | base.attention_bias_to_config(section)


def _every_second_local(config: Config) -> str:
    return "lg"


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    names=NAMES,
    section={
        "attention_sinks": True,
        "mlp": "clamped_swiglu",
        "expert_bias": True,
        "router": "topk_softmax",
    },
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        base.BALANCE_WEIGHT: 0.001,
    },
    supported_values=base.SILU_ONLY,
    keys=base.EXPERT_KEYS
    | {
        "num_experts": "num_local_experts",
        "glu_slope": "swiglu_alpha",
        "glu_limit": "swiglu_limit",
    },
    aliases={"num_experts": "num_local_experts"},
    default_layers=_every_second_local,
    standardize=_with_rope,
    faults=base.balance_loss_faults,
    to_section=_to_section,
    to_config=_to_config,
    reads_mxfp4=True,
)
