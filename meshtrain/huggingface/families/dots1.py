"""dots.llm1: the experts and the router of DeepSeek-V3, and the attention of Qwen 3."""

from meshtrain.huggingface.families import base, deepseek
from meshtrain.huggingface.families.base import Config, Family, Section


def _to_section(config: Config) -> Section:
    return deepseek.router_to_section(config) | base.attention_bias_to_section(config)


def _to_config(section: Section) -> Config:
    return deepseek.router_to_config(section) | base.attention_bias_to_config(section)


DOTS1 = Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    names=deepseek.EXPERT_NAMES,
    section={"qk_norm": True, "router": "sigmoid"},
    defaults=base.COMMON_DEFAULTS
    | deepseek.EXPERT_DEFAULTS
    | {
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    supported_values=base.SILU_ONLY | {"attention_bias": (False, True), "norm_topk_prob": (True,)},
    keys=deepseek.EXPERT_KEYS,
    aliases={"num_local_experts": "n_routed_experts"},
    minimums={"max_window_layers": 0},
    default_layers=base.last_layers_local,
    faults=deepseek.router_faults,
    to_section=_to_section,
    to_config=_to_config,
    has_empty_shared_experts=True,
    fused=base.MOE_FUSED,
)
