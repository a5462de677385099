"""StarCoder 2: LayerNorm and biases, rope, grouped key/value heads."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import CONFIG_KEYS, Config, Family, Section

NAMES = {
    **{path: name for path, name in base.NAMES.items() if "/mlp/" not in path},
    "final_norm/bias": "model.norm.bias D",
    "layers/attention_norm/bias": "model.layers.*.input_layernorm.bias D",
    "layers/mlp_norm/bias": "model.layers.*.post_attention_layernorm.bias D",
    "layers/mlp/up/kernel": "model.layers.*.mlp.c_fc.weight F D",
    "layers/mlp/up/bias": "model.layers.*.mlp.c_fc.bias F",
    "layers/mlp/down/kernel": "model.layers.*.mlp.c_proj.weight D F",
    "layers/mlp/down/bias": "model.layers.*.mlp.c_proj.bias D",
}


def _to_section(config: Config) -> Section:
    return {"bias": bool(config["use_bias"])}


def _to_config(section: Section) -> Config:
    return {"use_bias": section["bias"]}


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    names=NAMES,
    # The norms have biases, also without use_bias.
    section={"norm": "layer", "norm_bias": True, "mlp": "gelu"},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": None,
        "norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": None,
        "use_bias": True,
    },
    supported_values={
        "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
        "use_bias": (True, False),
    },
    keys=CONFIG_KEYS | {"norm_epsilon": "norm_epsilon"},
    default_layers=base.all_local,
    uses_layer_types=False,
    to_section=_to_section,
    to_config=_to_config,
)
