"""Granite: Llama with factors of embedding, branches, attention scores and logits."""

import math

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

EMBEDDING, RESIDUAL = "embedding_multiplier", "residual_multiplier"
ATTENTION, LOGITS = "attention_multiplier", "logits_scaling"

MULTIPLIERS = dict.fromkeys((EMBEDDING, RESIDUAL, ATTENTION, LOGITS), 1.0)


def multiplier_faults(config: Config) -> list[str]:
    faults = []
    for key in MULTIPLIERS:
        if not base.is_positive(config[key]):
            faults.append(f"{key}={config[key]!r}: is not a number above 0")
        elif not math.isfinite(1 / config[key]):
            faults.append(f"{key}={config[key]!r}: is too small for a float")
    return faults


def multipliers_to_section(config: Config) -> Section:
    return {
        "embed_scale": float(config[EMBEDDING]),
        "branch_scale": float(config[RESIDUAL]),
        "query_scale": float(config[ATTENTION]),
        "logit_scale": 1 / config[LOGITS],  # transformers divides by it
    }


def multipliers_to_config(section: Section) -> Config:
    return {
        EMBEDDING: section["embed_scale"],
        RESIDUAL: section["branch_scale"],
        ATTENTION: section["query_scale"] or section["head_dim"] ** -0.5,
        LOGITS: _inverse(section["logit_scale"]),
    }


def _inverse(scale: float) -> float:
    """Returns the number whose inverse is `scale`, with few digits if there is such a number."""
    inverse = 1 / scale
    for candidate in (float(round(inverse)), round(inverse, 6), inverse):
        if candidate and 1 / candidate == scale:
            return candidate
    return inverse


def _faults(config: Config) -> list[str]:
    return multiplier_faults(config) + base.bias_faults(config)


def _to_section(config: Config) -> Section:
    return multipliers_to_section(config) | base.biases_to_section(config)


def _to_config(section: Section) -> Config:
    return multipliers_to_config(section) | base.biases_to_config(section)


DEFAULTS = base.COMMON_DEFAULTS | {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    **MULTIPLIERS,
}

# The cache of transformers drops keys beyond a sliding_window, its attention does not.
SUPPORTED_VALUES = base.SILU_ONLY | {"sliding_window": (None,)}

GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    names=base.NAMES,
    section={},
    defaults=DEFAULTS | {"mlp_bias": False},
    supported_values=SUPPORTED_VALUES,
    uses_layer_types=False,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)

# ---- with experts, which are stored in tensors of all experts ----

MOE = "model.layers.*.block_sparse_moe"

MOE_NAMES = base.NAMES | {
    "layers/mlp/router/kernel": f"{MOE}.router.layer.weight E D",
    "layers/mlp/gate/kernel": f"{MOE}.input_linear.weight E 0@F+F D",
    "layers/mlp/up/kernel": f"{MOE}.input_linear.weight E 1@F+F D",
    "layers/mlp/down/kernel": f"{MOE}.output_linear.weight E D F",
}


def _moe_faults(config: Config) -> list[str]:
    return multiplier_faults(config) + base.balance_loss_faults(config)


def _moe_to_section(config: Config) -> Section:
    section = multipliers_to_section(config) | base.attention_bias_to_section(config)
    return section | base.balance_loss_to_section(config)


def _moe_to_config(section: Section) -> Config:
    config = multipliers_to_config(section) | base.attention_bias_to_config(section)
    return config | base.balance_loss_to_config(section)


GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    names=MOE_NAMES,
    section={"router": "topk_softmax"},
    defaults=DEFAULTS
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        base.BALANCE_WEIGHT: 0.001,
    },
    supported_values=SUPPORTED_VALUES,
    keys=base.EXPERT_KEYS | {"num_experts": "num_local_experts"},
    uses_layer_types=False,
    faults=_moe_faults,
    to_section=_moe_to_section,
    to_config=_moe_to_config,
    # Names of the same tensors in transformers 5.
    fused={
        "block_sparse_moe.experts.gate_up_proj": ("block_sparse_moe.input_linear.weight",),
        "block_sparse_moe.experts.down_proj": ("block_sparse_moe.output_linear.weight",),
        "block_sparse_moe.router.weight": ("block_sparse_moe.router.layer.weight",),
    },
)
