"""Solar Open: the router of DeepSeek-V3 in all layers, and attention as in Llama."""

from meshtrain.huggingface.families import base, deepseek
from meshtrain.huggingface.families.base import Config, Family, Section


def _to_section(config: Config) -> Section:
    return {
        **deepseek.router_to_section(config),
        # The output projection has no bias.
        "qkv_bias": config["attention_bias"],
        "d_ff": config["moe_intermediate_size"],
    }


def _to_config(section: Section) -> Config:
    return {**deepseek.router_to_config(section), "attention_bias": section["qkv_bias"]}


SOLAR_OPEN = Family(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    names=deepseek.EXPERT_NAMES,
    section={"router": "sigmoid"},
    defaults=base.COMMON_DEFAULTS
    | deepseek.EXPERT_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    supported_values=base.SILU_ONLY | {"attention_bias": (True, False), "norm_topk_prob": (True,)},
    # No layer is dense, so config.json has no width of one.
    keys={key: hf_key for key, hf_key in deepseek.EXPERT_KEYS.items() if key != "d_ff"},
    aliases={"num_local_experts": "n_routed_experts"},
    uses_layer_types=False,
    standardize=lambda config: config | {deepseek.FIRST_DENSE: 0},
    faults=deepseek.router_faults,
    to_section=_to_section,
    to_config=_to_config,
    has_empty_shared_experts=True,
    fused=base.MOE_FUSED,
)
