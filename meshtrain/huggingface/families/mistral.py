"""Mistral: Llama with a window in all layers."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Family

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
)
