"""Llama, whose tensor names and layout most other families have taken over."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

NAMES = {
    "tokens/embedding": "model.embed_tokens.weight V D",
    "final_norm/scale": "model.norm.weight D",
    "output/kernel": "lm_head.weight V D",
    "layers/attention_norm/scale": "model.layers.*.input_layernorm.weight D",
    "layers/attention/query/kernel": "model.layers.*.self_attn.q_proj.weight HK D",
    "layers/attention/query/bias": "model.layers.*.self_attn.q_proj.bias HK",
    "layers/attention/key/kernel": "model.layers.*.self_attn.k_proj.weight GK D",
    "layers/attention/key/bias": "model.layers.*.self_attn.k_proj.bias GK",
    "layers/attention/value/kernel": "model.layers.*.self_attn.v_proj.weight GK D",
    "layers/attention/value/bias": "model.layers.*.self_attn.v_proj.bias GK",
    "layers/attention/out/kernel": "model.layers.*.self_attn.o_proj.weight D HW",
    "layers/attention/out/bias": "model.layers.*.self_attn.o_proj.bias D",
    "layers/attention/query_norm/scale": "model.layers.*.self_attn.q_norm.weight K",
    "layers/attention/key_norm/scale": "model.layers.*.self_attn.k_norm.weight K",
    "layers/mlp_norm/scale": "model.layers.*.post_attention_layernorm.weight D",
    "layers/mlp/gate/kernel": "model.layers.*.mlp.gate_proj.weight F D",
    "layers/mlp/gate/bias": "model.layers.*.mlp.gate_proj.bias F",
    "layers/mlp/up/kernel": "model.layers.*.mlp.up_proj.weight F D",
    "layers/mlp/up/bias": "model.layers.*.mlp.up_proj.bias F",
    "layers/mlp/down/kernel": "model.layers.*.mlp.down_proj.weight D F",
    "layers/mlp/down/bias": "model.layers.*.mlp.down_proj.bias D",
}


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


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    names=NAMES,
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
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
