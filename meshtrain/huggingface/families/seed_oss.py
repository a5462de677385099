"""Seed-OSS: Llama with biases of queries, keys and values, and others by choice."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section


def _faults(config: Config) -> list[str]:
    has_all_of_attention = config["attention_bias"] and config["attention_out_bias"]
    if has_all_of_attention or not config["mlp_bias"]:
        return []
    keys = ("attention_bias", "attention_out_bias", "mlp_bias")
    values = ", ".join(f"{key}={config[key]}" for key in keys)
    return [f"{values}: mlp_bias is supported only with biases of all of the attention"]


def _to_section(config: Config) -> Section:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "out_bias": bool(config["attention_out_bias"]),
        "bias": bool(config["mlp_bias"]),
    }


def _to_config(section: Section) -> Config:
    return {
        "attention_bias": section["qkv_bias"] or section["bias"],
        "attention_out_bias": section["out_bias"] or section["bias"],
        "mlp_bias": section["bias"],
    }


SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    names=base.NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    supported_values=base.SILU_ONLY,
    uses_layer_types=False,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
