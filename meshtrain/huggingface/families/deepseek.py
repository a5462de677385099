"""DeepSeek-V2 and V3: latent attention, groups of experts, and dense first layers."""

import dataclasses
import math

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

# ---- experts, which Dots1 has too ----

EXPERT_NAMES = {
    **base.MOE_NAMES,
    **base.DENSE_FIRST_NAMES,
    "layers/mlp/shared/gate/kernel": "model.layers.*.mlp.shared_experts.gate_proj.weight U D",
    "layers/mlp/shared/up/kernel": "model.layers.*.mlp.shared_experts.up_proj.weight U D",
    "layers/mlp/shared/down/kernel": "model.layers.*.mlp.shared_experts.down_proj.weight D U",
    "layers/mlp/measured/bias": "model.layers.*.mlp.gate.e_score_correction_bias E",
}

EXPERT_KEYS = base.CONFIG_KEYS | {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "d_expert": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "router_scale": "routed_scaling_factor",
}

FIRST_DENSE = "first_k_dense_replace"

EXPERT_DEFAULTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    FIRST_DENSE: 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

BIAS_STEP = 0.001  # of a router that is balanced by a bias, as in DeepSeek-V3


def router_faults(config: Config) -> list[str]:
    return _count_faults(config) or _group_faults(config)


def _count_faults(config: Config) -> list[str]:
    minimums = {"n_group": 1, "topk_group": 1, FIRST_DENSE: 0}
    return base.minimum_faults(config | _groups(config), minimums)


def _group_faults(config: Config) -> list[str]:
    """Returns an error if the groups do not have the same number of experts, of at least 2."""
    num_experts = config.get(EXPERT_KEYS["num_experts"])
    num_groups = _groups(config)["n_group"]
    if not base.is_count(num_experts):
        return []
    if num_experts % num_groups == 0 and num_experts >= 2 * num_groups:
        return []
    return [f"n_group={num_groups}: are not groups of 2 or more of {num_experts} experts"]


def _groups(config: Config) -> Config:
    """Returns the keys of the groups of experts; "greedy" of DeepSeek-V2 has one group."""
    if config.get("topk_method") == "greedy":
        return {"n_group": 1, "topk_group": 1}
    return {"n_group": config["n_group"], "topk_group": config["topk_group"]}


def router_to_section(config: Config) -> Section:
    groups = _groups(config)
    has_groups = groups["n_group"] > 1
    return {
        "balance": "bias",
        "balance_weight": BIAS_STEP,
        "expert_groups": (groups["n_group"], groups["topk_group"]) if has_groups else (),
        "first_dense_layers": config[FIRST_DENSE],
    }


def router_to_config(section: Section) -> Config:
    return _groups_to_config(section) | {FIRST_DENSE: section["first_dense_layers"]}


def _groups_to_config(section: Section) -> Config:
    num_groups, groups_per_token = section["expert_groups"] or (1, 1)
    return {"n_group": num_groups, "topk_group": groups_per_token}


# ---- latent attention ----

V3_NAMES = EXPERT_NAMES | {
    "layers/attention/query_down/kernel": "model.layers.*.self_attn.q_a_proj.weight Q D",
    "layers/attention/query_down_norm/scale": "model.layers.*.self_attn.q_a_layernorm.weight Q",
    "layers/attention/query_up/kernel": "model.layers.*.self_attn.q_b_proj.weight HK Q",
    "layers/attention/kv_down/kernel": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight J D",
    "layers/attention/kv_down_norm/scale": "model.layers.*.self_attn.kv_a_layernorm.weight C",
    "layers/attention/kv_up/kernel": "model.layers.*.self_attn.kv_b_proj.weight HM C",
}

V2_NAMES = {path: name for path, name in V3_NAMES.items() if "measured" not in path}

LATENT_KEYS = {
    "head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
}

KEYS = EXPERT_KEYS | LATENT_KEYS

DEFAULTS = {key: value for key, value in base.COMMON_DEFAULTS.items() if key != "head_dim"} | {
    **EXPERT_DEFAULTS,
    "num_key_value_heads": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}

SUPPORTED_VALUES = base.SILU_ONLY | {"attention_bias": (False,), "moe_layer_freq": (1,)}


def attention_to_section(config: Config) -> Section:
    """Returns the scale of the queries; 0.0, the default, if YaRN does not change it."""
    sizes = (config["qk_nope_head_dim"], config["qk_rope_head_dim"])
    m = _query_factor(config)
    if m == 1 or not all(map(base.is_positive, sizes)):  # to_section reports other values
        return {"query_scale": 0.0}
    return {"query_scale": sum(sizes) ** -0.5 * m * m}


def _query_factor(config: Config) -> float:
    """Returns the m by whose square DeepSeek multiplies the scores of attention.

    It is 0.1 mscale_all_dim ln(factor) + 1.
    """
    rope = base.json_object(config, "rope_scaling") or base.json_object(config, "rope_parameters")
    all_dim = rope.get("mscale_all_dim")
    factor = rope.get("factor")
    has_scaling = rope.get("rope_type", rope.get("type", "default")) != "default"
    if not (has_scaling and base.is_positive(all_dim) and base.is_positive(factor) and factor > 1):
        return 1.0
    return 0.1 * all_dim * math.log(factor) + 1


def to_rope_config(section: Section) -> Config:
    """Returns the keys of YaRN for the scale of the queries; `_query_factor` inverts it."""
    rope_type, *numbers = section["rope_scaling"] or ("default",)
    is_yarn = rope_type == "yarn" and numbers[0] > 1
    if not (is_yarn and section["kv_lora_rank"] and section["query_scale"]):
        return {}
    log = 0.1 * math.log(numbers[0])
    attention_factor = numbers[4]
    size = section["head_dim"] + section["rope_head_dim"]
    m = (section["query_scale"] * size**0.5) ** 0.5
    mscales = {"mscale_all_dim": round((m - 1) / log, 6)}
    if attention_factor:
        mscales["mscale"] = round((attention_factor * m - 1) / log, 6)
    return mscales


def attention_to_config(section: Section) -> Config:
    return {"v_head_dim": section["v_head_dim"] or section["head_dim"]}


# ---- DeepSeek-V2: experts balanced by a loss ----

BALANCE_WEIGHT = "aux_loss_alpha"


def _v2_faults(config: Config) -> list[str]:
    faults = base.weight_faults(config, BALANCE_WEIGHT) + _count_faults(config)
    return faults or _group_faults(config)


def _v2_to_section(config: Config) -> Section:
    balance = {"balance": "sequence", "balance_weight": float(config[BALANCE_WEIGHT])}
    return router_to_section(config) | balance | attention_to_section(config)


def _v2_to_config(section: Section) -> Config:
    groups = _groups_to_config(section)
    has_groups = groups["n_group"] > 1
    return {
        **groups,
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
        BALANCE_WEIGHT: base.balance_loss_weight(section),
        FIRST_DENSE: section["first_dense_layers"],
        **attention_to_config(section),
    }


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    names=V2_NAMES,
    section={"router": "softmax"},
    defaults=DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "topk_method": "greedy",
        BALANCE_WEIGHT: 0.001,
    },
    supported_values=SUPPORTED_VALUES
    | {
        "mlp_bias": (False,),
        # transformers ignores it, which DeepSeek's own code does not.
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    keys=KEYS,
    aliases={"num_experts": "n_routed_experts"},
    heads_divide_hidden_size=True,
    uses_layer_types=False,
    faults=_v2_faults,
    to_section=_v2_to_section,
    to_config=_v2_to_config,
    to_rope_config=to_rope_config,
    has_empty_shared_experts=True,
    fused=base.MOE_FUSED,
)

# ---- DeepSeek-V3: experts balanced by a bias, and layers that predict further tokens ----

MTP_LAYERS = "num_nextn_predict_layers"  # layers after the last one, which predict further tokens


def _v3_to_section(config: Config) -> Section:
    return router_to_section(config) | attention_to_section(config)


def _v3_to_config(section: Section) -> Config:
    # A run does not have the layers after the last one.
    return router_to_config(section) | attention_to_config(section) | {MTP_LAYERS: 0}


def mtp_prefixes(config: Config) -> tuple[str, ...]:
    """Returns the prefixes of the layers after the last one."""
    num_layers = config.get("num_hidden_layers")
    num_further = config[MTP_LAYERS]
    if not (base.is_count(num_layers) and base.is_count(num_further)):
        return ()
    return tuple(f"model.layers.{num_layers + number}." for number in range(num_further))


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    names=V3_NAMES,
    section={"router": "sigmoid"},
    defaults=DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        FIRST_DENSE: 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        MTP_LAYERS: 1,
    },
    supported_values=SUPPORTED_VALUES
    | {
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (True,),
    },
    keys=KEYS,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": MTP_LAYERS},
    uses_layer_types=False,
    faults=router_faults,
    to_section=_v3_to_section,
    to_config=_v3_to_config,
    to_rope_config=to_rope_config,
    left_out_prefixes=mtp_prefixes,
    has_empty_shared_experts=True,
    fused=base.MOE_FUSED,
)

# ---- Sarvam: the model of DeepSeek-V3, with another config class ----


def _sarvam_standardize(config: Config) -> Config:
    """Returns a config.json of Sarvam's own code in DeepSeek-V3's form."""
    config = {key: value for key, value in config.items() if key != "head_dim"}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "deepseek_yarn" in (
        scaling.get("type"),
        scaling.get("rope_type"),
    ):
        config["rope_scaling"] = scaling | {"rope_type": "yarn"}
    return config


SARVAM_MLA = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    own_architecture="SarvamMLAForCausalLM",
    defaults=DEEPSEEK_V3.defaults
    | {
        "n_routed_experts": 128,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        FIRST_DENSE: 1,
        MTP_LAYERS: 0,
    },
    aliases=DEEPSEEK_V3.aliases
    | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    standardize=_sarvam_standardize,
)
