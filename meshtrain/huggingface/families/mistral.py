"""Mistral: Llama with a window in all layers; Ministral; the language models of Mistral 3."""

import dataclasses
from typing import Any

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Multimodal, Section

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    names=base.NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "hidden_act": "silu",
        "sliding_window": 4096,
    },
    supported_values=base.SILU_ONLY,
    default_layers=base.all_local,
    uses_layer_types=False,
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    # The head belongs to the multimodal model.
    multimodal=Multimodal(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        ignored_keys=("tie_word_embeddings",),
        defaults={"tie_word_embeddings": True},
    ),
)

# The window may be that of some layers.
MINISTRAL = dataclasses.replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    uses_layer_types=True,
    prefixes=(),
    ignored_prefixes=(),
    multimodal=None,
)

# ---- Ministral 3: queries that grow with their position ----

GROWTH = "llama_4_scaling_beta"
ORIGINAL_LENGTH = "original_max_position_embeddings"

# What transformers takes if config.json has no rope.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    ORIGINAL_LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    GROWTH: 0.1,
}


def _with_rope(config: Config) -> Config:
    has_rope = config.get("rope_parameters") is not None or config.get("rope_scaling")
    return config if has_rope else config | {"rope_parameters": DEFAULT_ROPE}


def _growth(config: Config) -> dict[str, Any]:
    """Returns the factor of the logarithm of the position, and the length that positions count."""
    rope = base.json_object(config, "rope_scaling") or base.json_object(config, "rope_parameters")
    length = rope.get(ORIGINAL_LENGTH)
    if rope.get("rope_type", rope.get("type")) in ("llama3", "yarn", "longrope"):
        default = rope.get(ORIGINAL_LENGTH, config.get("max_position_embeddings"))
        length = config.get(ORIGINAL_LENGTH, default)
    return {GROWTH: rope.get(GROWTH), ORIGINAL_LENGTH: length}


def _growth_faults(config: Config) -> list[str]:
    growth = _growth(config)
    length = growth[ORIGINAL_LENGTH]
    if base.is_positive(length) and int(length) != length:
        return [f"{ORIGINAL_LENGTH}={length}: is not an integer"]
    faults = base.weight_faults(growth, GROWTH)
    if not base.is_positive(length):
        faults.append(f"{ORIGINAL_LENGTH}={length!r}: is not a number above 0")
    return [f"{fault}; in the rope of this model" for fault in faults]


def _growth_to_section(config: Config) -> Section:
    growth = _growth(config)
    return {
        "query_growth": float(growth[GROWTH]),
        "query_growth_length": int(growth[ORIGINAL_LENGTH]),
    }


def _growth_to_rope_config(section: Section) -> Config:
    rope = {GROWTH: float(section["query_growth"])}
    kind, *numbers = section["rope_scaling"] or ("default",)
    if kind == "yarn" and numbers[4] == 1:
        # As the published models write an attention factor of 1.
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    # These have the same length for the frequencies, in models of this family.
    has_length = kind in ("llama3", "yarn", "longrope")
    return rope if has_length else rope | {ORIGINAL_LENGTH: section["query_growth_length"]}


MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    defaults=MISTRAL.defaults
    | {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "sliding_window": None,
    },
    standardize=_with_rope,
    faults=_growth_faults,
    to_section=_growth_to_section,
    to_rope_config=_growth_to_rope_config,
)
