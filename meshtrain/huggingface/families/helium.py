"""Helium: Llama whose rope rotates adjacent dims."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section


def _faults(config: Config) -> list[str]:
    """Returns an error unless the heads together are as wide as the residual stream."""
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads")]
    if not all(map(base.is_count, sizes)) or not base.is_count(config["head_dim"]):
        return []
    if sizes[0] == sizes[1] * config["head_dim"]:
        return []
    return [
        f"head_dim={config['head_dim']}: the output projection of transformers needs "
        f"hidden_size / num_attention_heads"
    ]


def _to_section(config: Config) -> Section:
    # The output projection has no bias.
    return {"qkv_bias": config["attention_bias"]}


def _to_config(section: Section) -> Config:
    return {"attention_bias": section["qkv_bias"]}


HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    names=base.NAMES,
    section={"rope_interleaved": True},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    supported_values=base.SILU_ONLY | {"attention_bias": (True, False), "mlp_bias": (False,)},
    uses_layer_types=False,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
