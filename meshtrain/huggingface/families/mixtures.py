"""The supported mixtures of experts: the keys of their config.json, and its defaults."""

from collections.abc import Mapping

from meshtrain.huggingface import names
from meshtrain.huggingface.families.base import (
    COMMON_DEFAULTS,
    CONFIG_KEYS,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_KEYS,
    QWEN_SUPPORTED,
    SILU_ONLY,
    Family,
    all_local,
    last_layers_local,
)

EXPERT_KEYS = CONFIG_KEYS | {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}

NORM_TOPK_PROB = {"norm_topk_prob": (True, False)}

DEEPSEEK_SUPPORTED = SILU_ONLY | {"attention_bias": (False,), "norm_topk_prob": (True,)}


def _all_local_if_used(config: Mapping) -> str:
    return all_local(config) if config["use_sliding_window"] else "g"


FAMILIES = (
    Family(
        "MixtralForCausalLM",
        "mixtral",
        names.MIXTRAL,
        section={"router": "topk_softmax"},
        defaults=COMMON_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096 * 32,
            "hidden_act": "silu",
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
        },
        # transformers adds the noise to the input of the router in training.
        supported_values=SILU_ONLY | {"router_jitter_noise": (0.0,)},
        keys=EXPERT_KEYS | {"num_experts": "num_local_experts"},
        default_layers=all_local,
        uses_layer_types=False,
        aliases={"num_experts": "num_local_experts"},
        fused=names.MIXTRAL_FUSED,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        names.QWEN3_MOE,
        section={"qk_norm": True},
        defaults=COMMON_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        supported_values=QWEN_SUPPORTED
        | NORM_TOPK_PROB
        | {
            "attention_bias": (False, None),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        keys=EXPERT_KEYS | {"d_expert": "moe_intermediate_size"},
        default_layers=_all_local_if_used,
        uses_layer_types=False,
        aliases={"num_local_experts": "num_experts"},
        fused=names.QWEN3_MOE_FUSED,
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        names.OLMOE,
        section={"qk_norm": True, "qk_norm_heads": "all"},
        defaults=COMMON_DEFAULTS
        | {
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        # transformers ignores sliding_window in some implementations of attention only.
        supported_values=SILU_ONLY
        | NORM_TOPK_PROB
        | {"attention_bias": (False,), "clip_qkv": (None,), "sliding_window": (None,)},
        # The norms of queries and keys have the size of hidden_size, which leaves no choice of head_dim.
        keys={key: hf_key for key, hf_key in EXPERT_KEYS.items() if key != "head_dim"},
        uses_layer_types=False,
        aliases={"num_local_experts": "num_experts"},
        heads_divide_hidden_size=True,
        fused=names.QWEN3_MOE_FUSED,
    ),
    Family(
        "Dots1ForCausalLM",
        "dots1",
        names.DEEPSEEK,
        section={"qk_norm": True, "router": "sigmoid"},
        defaults=COMMON_DEFAULTS
        | DEEPSEEK_DEFAULTS
        | {
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        supported_values=DEEPSEEK_SUPPORTED,
        keys=DEEPSEEK_KEYS,
        default_layers=last_layers_local,
        aliases={"num_local_experts": "n_routed_experts"},
        fused=names.QWEN3_MOE_FUSED,
    ),
)
