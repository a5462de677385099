"""Qwen2-MoE: the attention of Qwen 2, and a shared expert with a gate."""

from meshtrain.huggingface.families import base, qwen
from meshtrain.huggingface.families.base import Config, Family, Section

NAMES = {
    **base.MOE_NAMES,
    **base.DENSE_FIRST_NAMES,
    "layers/mlp/shared/gate/kernel": "model.layers.*.mlp.shared_expert.gate_proj.weight U D",
    "layers/mlp/shared/up/kernel": "model.layers.*.mlp.shared_expert.up_proj.weight U D",
    "layers/mlp/shared/down/kernel": "model.layers.*.mlp.shared_expert.down_proj.weight D U",
    "layers/mlp/shared_gate/kernel": "model.layers.*.mlp.shared_expert_gate.weight I D",
}

SHARED_WIDTH = "shared_expert_intermediate_size"


def _without_unused_window(config: Config) -> Config:
    """Returns a config.json without a window that is not used: transformers writes 0."""
    is_used = config.get("use_sliding_window", qwen.DEFAULTS["use_sliding_window"])
    return config if is_used else config | {"sliding_window": None}


def _to_section(config: Config) -> Section:
    return qwen.moe_to_section(config) | {"num_shared_experts": 1}


def _to_config(section: Section) -> Config:
    width = section["d_expert"] or section["d_ff"]
    shared = section["d_shared"] or section["num_shared_experts"] * width
    return qwen.moe_to_config(section) | {SHARED_WIDTH: shared}


def _every_second_local(config: Config) -> str:
    """Returns the layers of transformers' default, which differ from those of Qwen 2."""
    is_used = config["use_sliding_window"]
    first_global = config["max_window_layers"] if is_used else 0
    num_layers = config["num_hidden_layers"]
    return "".join("l" if n % 2 == 0 and n < first_global else "g" for n in range(num_layers))


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    names=NAMES,
    section={"shared_gate": True},
    defaults=qwen.DEFAULTS
    | base.SPARSE_DEFAULTS
    | {
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "moe_intermediate_size": 1408,
        SHARED_WIDTH: 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
        qwen.NORMALIZED: False,
        base.BALANCE_WEIGHT: 0.001,
    },
    supported_values=qwen.SUPPORTED_VALUES
    | {
        qwen.NORMALIZED: (True, False),
    },
    keys=base.EXPERT_KEYS
    | {"d_expert": "moe_intermediate_size", "d_shared": SHARED_WIDTH, "qkv_bias": "qkv_bias"},
    minimums={"max_window_layers": 0},
    default_layers=_every_second_local,
    standardize=_without_unused_window,
    faults=qwen.moe_faults,
    to_section=_to_section,
    to_config=_to_config,
    fused=base.MOE_FUSED,
)
