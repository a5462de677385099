"""Llama, whose tensor names and layout most other families have taken over.

And models that transformers computes as Llama, with config classes of their own.
"""

import dataclasses

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    names=base.NAMES,
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
    faults=base.bias_faults,
    to_section=base.biases_to_section,
    to_config=base.biases_to_config,
)

INTERNLM3 = dataclasses.replace(
    LLAMA,
    model_type="internlm3",
    own_architecture="InternLM3ForCausalLM",
    defaults=LLAMA.defaults
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)

IQUESTCODER = dataclasses.replace(
    LLAMA,
    model_type="iquestcoder",
    own_architecture="IQuestCoderForCausalLM",
    defaults=LLAMA.defaults
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    # transformers rejects other values.
    supported_values=base.SILU_ONLY | {"clip_qkv": (None,), "use_sliding_window": (False, None)},
)

# Names in the files of EXAONE 3, of the tensors of Llama.
EXAONE_NAMES = {
    "tokens/embedding": "transformer.wte.weight V D",
    "final_norm/scale": "transformer.ln_f.weight D",
    "output/kernel": "lm_head.weight V D",
    "layers/attention_norm/scale": "transformer.h.*.ln_1.weight D",
    "layers/attention/query/kernel": "transformer.h.*.attn.attention.q_proj.weight HK D",
    "layers/attention/query/bias": "transformer.h.*.attn.attention.q_proj.bias HK",
    "layers/attention/key/kernel": "transformer.h.*.attn.attention.k_proj.weight GK D",
    "layers/attention/key/bias": "transformer.h.*.attn.attention.k_proj.bias GK",
    "layers/attention/value/kernel": "transformer.h.*.attn.attention.v_proj.weight GK D",
    "layers/attention/value/bias": "transformer.h.*.attn.attention.v_proj.bias GK",
    "layers/attention/out/kernel": "transformer.h.*.attn.attention.out_proj.weight D HW",
    "layers/attention/out/bias": "transformer.h.*.attn.attention.out_proj.bias D",
    "layers/mlp_norm/scale": "transformer.h.*.ln_2.weight D",
    "layers/mlp/gate/kernel": "transformer.h.*.mlp.c_fc_0.weight F D",
    "layers/mlp/gate/bias": "transformer.h.*.mlp.c_fc_0.bias F",
    "layers/mlp/up/kernel": "transformer.h.*.mlp.c_fc_1.weight F D",
    "layers/mlp/up/bias": "transformer.h.*.mlp.c_fc_1.bias F",
    "layers/mlp/down/kernel": "transformer.h.*.mlp.c_proj.weight D F",
    "layers/mlp/down/bias": "transformer.h.*.mlp.c_proj.bias D",
}

EXAONE = dataclasses.replace(
    LLAMA,
    model_type="exaone",
    own_architecture="ExaoneForCausalLM",
    names=EXAONE_NAMES,
    defaults=LLAMA.defaults
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
)
