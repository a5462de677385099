"""Mistral: Llama with a window in all layers; the language model of Mistral 3; Ministral."""

import dataclasses

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Family, Multimodal

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
