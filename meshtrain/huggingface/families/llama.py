"""Llama, whose tensor names and layout most other families have taken over."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section


def _faults(config: Config) -> list[str]:
    if bool(config["attention_bias"]) == bool(config["mlp_bias"]):
        return []
    return [
        f"attention_bias={config['attention_bias']}, mlp_bias={config['mlp_bias']}: "
        f"only the same value for both is supported"
    ]


def _to_section(config: Config) -> Section:
    return {"bias": bool(config["mlp_bias"])}


def _to_config(section: Section) -> Config:
    return {"attention_bias": section["bias"], "mlp_bias": section["bias"]}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    names=base.NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    supported_values=base.SILU_ONLY,
    heads_divide_hidden_size=True,
    uses_layer_types=False,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
