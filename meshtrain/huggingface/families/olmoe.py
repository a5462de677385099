"""OLMoE, whose experts are stored as those of Qwen 3."""

from meshtrain.huggingface.families import base, qwen
from meshtrain.huggingface.families.base import Config, Family, Section

# The norms of queries and keys are over all heads.
QK_NORMS = {
    "layers/attention/query_norm/scale": "model.layers.*.self_attn.q_norm.weight HK",
    "layers/attention/key_norm/scale": "model.layers.*.self_attn.k_norm.weight GK",
}

NAMES = base.MOE_NAMES | QK_NORMS


def _to_section(config: Config) -> Section:
    return qwen.router_to_section(config) | base.attention_bias_to_section(config)


def _to_config(section: Section) -> Config:
    return qwen.router_to_config(section) | base.attention_bias_to_config(section)


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    names=NAMES,
    section={"qk_norm": True, "qk_norm_heads": "all"},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        qwen.NORMALIZED: False,
        base.BALANCE_WEIGHT: 0.01,
    },
    supported_values=base.SILU_ONLY
    | {
        qwen.NORMALIZED: (True, False),
        "attention_bias": (False, True),
        "clip_qkv": (None,),
        # transformers ignores it in some implementations of attention only.
        "sliding_window": (None,),
    },
    # The norms of queries and keys have the size hidden_size, which leaves no choice of head_dim.
    keys={key: hf_key for key, hf_key in base.EXPERT_KEYS.items() if key != "head_dim"},
    aliases={"num_local_experts": "num_experts"},
    heads_divide_hidden_size=True,
    uses_layer_types=False,
    faults=base.balance_loss_faults,
    to_section=_to_section,
    to_config=_to_config,
    fused=base.MOE_FUSED,
)
