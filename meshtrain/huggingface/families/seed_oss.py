"""Seed-OSS: Llama with biases of queries, keys and values."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section


def _faults(config: Config) -> list[str]:
    keys = ("attention_bias", "attention_out_bias", "mlp_bias")
    biases = [bool(config[key]) for key in keys]
    if biases in ([False] * 3, [True, False, False], [True] * 3):
        return []
    values = ", ".join(f"{key}={config[key]}" for key in keys)
    return [f"{values}: only all of them, none, or attention_bias alone is supported"]


def _to_section(config: Config) -> Section:
    return {"qkv_bias": bool(config["attention_bias"]), "bias": bool(config["mlp_bias"])}


def _to_config(section: Section) -> Config:
    return {
        "attention_bias": section["qkv_bias"] or section["bias"],
        "attention_out_bias": section["bias"],
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
