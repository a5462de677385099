"""Youtu: latent attention as in DeepSeek-V3, without experts."""

from meshtrain.huggingface.families import base, deepseek
from meshtrain.huggingface.families.base import Family

YOUTU = Family(
    architecture="YoutuForCausalLM",
    model_type="youtu",
    names={path: name for path, name in deepseek.V3_NAMES.items() if "/mlp/" not in path}
    | {path: name for path, name in base.NAMES.items() if "/mlp/" in path},
    section={},
    defaults={
        key: value
        for key, value in deepseek.DEFAULTS.items()
        if key not in deepseek.EXPERT_DEFAULTS
    }
    | {
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    },
    supported_values=base.SILU_ONLY
    | {"attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
    keys=base.CONFIG_KEYS | deepseek.LATENT_KEYS,
    uses_layer_types=False,
    to_section=deepseek.attention_to_section,
    to_config=deepseek.attention_to_config,
    to_rope_config=deepseek.to_rope_config,
)
