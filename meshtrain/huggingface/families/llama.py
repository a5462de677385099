"""Llama, whose tensor names and layout most other families have taken over."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, OtherType, Section


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


# Models that transformers computes as Llama, with a config class of their own.
OTHER_TYPES = {
    "exaone": OtherType(
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
        },
        aliases={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        architecture="ExaoneForCausalLM",
    ),
    "internlm3": OtherType(
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
        },
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        architecture="InternLM3ForCausalLM",
    ),
    "iquestcoder": OtherType(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        architecture="IQuestCoderForCausalLM",
    ),
}

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
    other_types=OTHER_TYPES,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
