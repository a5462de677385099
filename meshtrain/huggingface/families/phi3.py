"""Phi-3, 3.5 and 4: queries, keys and values in one tensor, gate and up projection in another."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

GATE_UP_NAMES = {
    "layers/mlp/gate/kernel": "model.layers.*.mlp.gate_up_proj.weight 0@F+F D",
    "layers/mlp/up/kernel": "model.layers.*.mlp.gate_up_proj.weight 1@F+F D",
}

NAMES = {path: name for path, name in base.NAMES.items() if not path.endswith("/bias")} | {
    "layers/attention/query/kernel": "model.layers.*.self_attn.qkv_proj.weight 0@HK+GK+GK D",
    "layers/attention/key/kernel": "model.layers.*.self_attn.qkv_proj.weight 1@HK+GK+GK D",
    "layers/attention/value/kernel": "model.layers.*.self_attn.qkv_proj.weight 2@HK+GK+GK D",
    **GATE_UP_NAMES,
}

ORIGINAL_LENGTH = "original_max_position_embeddings"

# Names that earlier versions gave to longrope.
LONGROPE_NAMES = ("su", "yarn")


def _standardize(config: Config) -> Config:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if not isinstance(scaling, dict):
            continue
        rope_type = scaling.get("rope_type", scaling.get("type"))
        if rope_type in LONGROPE_NAMES:
            config = config | {key: scaling | {"rope_type": "longrope"}}
    return config


def _faults(config: Config) -> list[str]:
    faults = []
    for key in ("rope_scaling", "rope_parameters"):
        scaling = base.json_object(config, key)
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in ("default", "longrope"):
            faults.append(f"{key}: rope_type={rope_type!r}: transformers rejects it for phi3")
    return faults


def _to_config(section: Section) -> Config:
    kind, *numbers = section["rope_scaling"] or ("default",)
    # Outside of rope_parameters it has priority, and a default of 4096.
    return {ORIGINAL_LENGTH: int(numbers[0])} if kind == "longrope" else {}


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    names=NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        ORIGINAL_LENGTH: 4096,
        "hidden_act": "silu",
        "sliding_window": None,
    },
    supported_values=base.SILU_ONLY,
    default_layers=base.all_local,
    uses_layer_types=False,
    rope_fraction=1.0,
    standardize=_standardize,
    faults=_faults,
    to_config=_to_config,
)
