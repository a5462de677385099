"""StableLM 2: LayerNorm with biases, SwiGLU, and rope in a quarter of the dims of a head."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import CONFIG_KEYS, Config, Family, Section

NAMES = base.NAMES | {
    "final_norm/bias": "model.norm.bias D",
    "layers/attention_norm/bias": "model.layers.*.input_layernorm.bias D",
    "layers/mlp_norm/bias": "model.layers.*.post_attention_layernorm.bias D",
}


def _to_section(config: Config) -> Section:
    return {"qkv_bias": bool(config["use_qkv_bias"])}


def _to_config(section: Section) -> Config:
    return {"use_qkv_bias": section["qkv_bias"]}


STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    names=NAMES,
    section={"norm": "layer", "norm_bias": True},
    defaults={
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    supported_values=base.SILU_ONLY
    | {
        "use_qkv_bias": (True, False),
        # Norms with other scales in each head.
        "qk_layernorm": (False,),
        "use_parallel_residual": (False,),
    },
    keys={key: hf_key for key, hf_key in CONFIG_KEYS.items() if key != "head_dim"}
    | {"norm_epsilon": "layer_norm_eps"},
    heads_divide_hidden_size=True,
    uses_layer_types=False,
    rope_fraction=0.25,
    to_section=_to_section,
    to_config=_to_config,
)
