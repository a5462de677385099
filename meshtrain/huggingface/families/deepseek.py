"""DeepSeek-V2 and V3, which have latent attention: the keys of their config.json, and its defaults."""

from typing import Any

from meshtrain.huggingface import names, rope
from meshtrain.huggingface.families import base as families
from meshtrain.huggingface.families.base import (
    COMMON_DEFAULTS,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_KEYS,
    SILU_ONLY,
    Family,
)

Config = dict[str, Any]  # a config.json

Section = dict[str, Any]  # the `model` section of a config

V3 = "deepseek_v3"

MTP_LAYERS = "num_nextn_predict_layers"  # layers after the last one, which predict further tokens

LATENT_KEYS = DEEPSEEK_KEYS | {
    "head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
}

LATENT_DEFAULTS = {key: one for key, one in COMMON_DEFAULTS.items() if key != "head_dim"} | {
    **DEEPSEEK_DEFAULTS,
    "num_key_value_heads": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}

LATENT_SUPPORTED = SILU_ONLY | {"attention_bias": (False,), "moe_layer_freq": (1,)}

FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        names.DEEPSEEK_V2,
        section={"router": "softmax"},
        defaults=LATENT_DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "topk_method": "greedy",
            "aux_loss_alpha": 0.001,
        },
        # transformers ignores norm_topk_prob, which DeepSeek's own code does not.
        supported_values=LATENT_SUPPORTED
        | {
            "mlp_bias": (False,),
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        keys=LATENT_KEYS,
        uses_layer_types=False,
        aliases={"num_experts": "n_routed_experts"},
        fused=names.QWEN3_MOE_FUSED,
        heads_divide_hidden_size=True,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        V3,
        names.DEEPSEEK_V3,
        section={"router": "sigmoid"},
        defaults=LATENT_DEFAULTS
        | {
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            MTP_LAYERS: 1,
        },
        supported_values=LATENT_SUPPORTED
        | {
            "norm_topk_prob": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
        },
        keys=LATENT_KEYS,
        uses_layer_types=False,
        aliases={"num_local_experts": "n_routed_experts"},
        fused=names.QWEN3_MOE_FUSED,
    ),
)


def to_section(config: Config, family: Family) -> Section:
    """Returns the keys of latent attention whose values differ from those in config.json."""
    if "kv_lora_rank" not in family.keys:
        return {}
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    m = rope.query_factor(config)
    return {
        "q_lora_rank": config["q_lora_rank"] or 0,
        "query_scale": size**-0.5 * m * m if m != 1 else 0.0,
    }


def to_config(s: Section, family: Family) -> Config:
    """Returns the keys of a config.json that `Family.keys` does not convert."""
    if "kv_lora_rank" not in family.keys:
        return {}
    config = {
        "q_lora_rank": s["q_lora_rank"] or None,
        "v_head_dim": s["v_head_dim"] or s["head_dim"],
    }
    # The layers after the last one are not in a run.
    return config | ({MTP_LAYERS: 0} if MTP_LAYERS in family.defaults else {})


def mtp_prefixes(config: Config) -> tuple[str, ...]:
    """Returns the prefixes of the tensors of layers after the last one, which an import leaves out."""
    if config.get("model_type") != V3:
        return ()
    number, first = config.get(MTP_LAYERS, 1), config.get("num_hidden_layers")
    if not (families.is_count(number) and families.is_count(first)):
        return ()
    return tuple(f"model.layers.{first + n}." for n in range(number))
