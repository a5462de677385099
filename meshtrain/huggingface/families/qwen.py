"""Qwen 2 and 3, and the mixtures of experts of Qwen 3."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

# ---- dense models ----

SUPPORTED_VALUES = base.SILU_ONLY | {"use_sliding_window": (True, False)}

DEFAULTS = base.COMMON_DEFAULTS | {
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
}

DENSE_DEFAULTS = DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28}

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    names=base.NAMES,
    section={"qkv_bias": True},
    defaults=DENSE_DEFAULTS,
    supported_values=SUPPORTED_VALUES,
    minimums={"max_window_layers": 0},
    default_layers=base.last_layers_local,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    names=base.NAMES,
    section={"qk_norm": True},
    defaults=DENSE_DEFAULTS | {"head_dim": 128, "attention_bias": False},
    supported_values=SUPPORTED_VALUES | {"attention_bias": (False, True, None)},
    minimums={"max_window_layers": 0},
    default_layers=base.last_layers_local,
    to_section=base.attention_bias_to_section,
    to_config=base.attention_bias_to_config,
)

# ---- mixtures of experts ----

# Whether the weights of the experts of a token are divided by their sum.
NORMALIZED = "norm_topk_prob"


def router_to_section(config: Config) -> Section:
    router = "topk_softmax" if config[NORMALIZED] else "softmax"
    return base.balance_loss_to_section(config) | {"router": router}


def router_to_config(section: Section) -> Config:
    is_normalized = section["router"] == "topk_softmax"
    return base.balance_loss_to_config(section) | {NORMALIZED: is_normalized}


def moe_faults(config: Config) -> list[str]:
    return base.balance_loss_faults(config) + base.sparse_step_faults(config)


def moe_to_section(config: Config) -> Section:
    """Returns the keys of the router, and of the layers that have one."""
    return router_to_section(config) | base.sparse_step_to_section(config)


def moe_to_config(section: Section) -> Config:
    return router_to_config(section) | base.sparse_step_to_config(section)


def _qwen3_to_section(config: Config) -> Section:
    return moe_to_section(config) | base.attention_bias_to_section(config)


def _qwen3_to_config(section: Section) -> Config:
    return moe_to_config(section) | base.attention_bias_to_config(section)


def _all_local_if_used(config: Config) -> str:
    return base.all_local(config) if config["use_sliding_window"] else "g"


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    names=base.MOE_NAMES | base.DENSE_FIRST_NAMES,
    section={"qk_norm": True},
    defaults=DEFAULTS
    | base.SPARSE_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        NORMALIZED: False,
        base.BALANCE_WEIGHT: 0.001,
    },
    supported_values=SUPPORTED_VALUES
    | {
        NORMALIZED: (True, False),
        "attention_bias": (False, True, None),
    },
    keys=base.EXPERT_KEYS | {"d_expert": "moe_intermediate_size"},
    aliases={"num_local_experts": "num_experts"},
    default_layers=_all_local_if_used,
    uses_layer_types=False,
    faults=moe_faults,
    to_section=_qwen3_to_section,
    to_config=_qwen3_to_config,
    fused=base.MOE_FUSED,
)
