"""OLMo 2 and 3, which normalise the outputs of attention and feed-forward, and not their inputs."""

from meshtrain.huggingface.families import base, olmoe
from meshtrain.huggingface.families.base import Config, Family

# post_attention_layernorm is not the norm that Llama calls so.
NAMES = {
    path: name
    for path, name in (base.NAMES | olmoe.QK_NORMS).items()
    if path not in ("layers/attention_norm/scale", "layers/mlp_norm/scale")
} | {
    "layers/attention_post_norm/scale": "model.layers.*.post_attention_layernorm.weight D",
    "layers/mlp_post_norm/scale": "model.layers.*.post_feedforward_layernorm.weight D",
}

SECTION = {"qk_norm": True, "qk_norm_heads": "all", "pre_norm": False, "post_norm": True}

DEFAULTS = base.COMMON_DEFAULTS | {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
}

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    names=NAMES,
    section=SECTION,
    defaults=DEFAULTS,
    # The cache of transformers drops keys beyond a sliding_window, its attention does not.
    supported_values=base.SILU_ONLY | {"sliding_window": (None,)},
    uses_layer_types=False,
    to_section=base.attention_bias_to_section,
    to_config=base.attention_bias_to_config,
)

# ---- OLMo 3: local layers, and rope scaling in the others alone ----

LOCAL_THETA = "rope_local_base_freq"


def _without_local_theta(config: Config) -> Config:
    """Returns a config.json without the local theta of Gemma 3, which OLMo 3 does not read.

    In transformers the top-level rope_theta is that of global layers alone, too.
    """
    return {key: value for key, value in config.items() if key != LOCAL_THETA}


def _every_fourth_global(config: Config) -> str:
    return "lllg"


OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    names=NAMES,
    section=SECTION,
    defaults=DEFAULTS | {"rope_theta": 500000.0, LOCAL_THETA: 500000.0, "sliding_window": 4096},
    supported_values=base.SILU_ONLY,
    default_layers=_every_fourth_global,
    standardize=_without_local_theta,
    to_section=base.attention_bias_to_section,
    to_config=base.attention_bias_to_config,
)
