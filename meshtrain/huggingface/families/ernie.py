"""ERNIE 4.5: Llama whose rope rotates adjacent dims, and its mixtures of experts."""

from meshtrain.huggingface.families import base, deepseek
from meshtrain.huggingface.families.base import CONFIG_KEYS, Config, Family, Section


def _to_section(config: Config) -> Section:
    return {"bias": bool(config["use_bias"])}


def _to_config(section: Section) -> Config:
    return {"use_bias": section["bias"]}


DEFAULTS = base.COMMON_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_bias": False,
}

ERNIE = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    names=base.NAMES,
    section={"rope_interleaved": True},
    defaults=DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
    supported_values=base.SILU_ONLY | {"use_bias": (True, False, None)},
    uses_layer_types=False,
    to_section=_to_section,
    to_config=_to_config,
)

# ---- mixtures of experts ----

MOE_NAMES = deepseek.EXPERT_NAMES | {
    "layers/mlp/measured/bias": "model.layers.*.mlp.moe_statics.e_score_correction_bias A E",
}

FIRST_SPARSE = "moe_layer_start_index"


def _moe_faults(config: Config) -> list[str]:
    """Returns an error unless all layers from the first one with experts have them."""
    faults = base.minimum_faults(config, {FIRST_SPARSE: 0})
    last = config["moe_layer_end_index"]
    num_layers = config.get("num_hidden_layers")
    if base.is_count(num_layers) and last != -1 and not base.is_count(last, num_layers - 1):
        faults.append(
            f"moe_layer_end_index={last!r}: dense layers after layers with experts are not "
            f"supported; use -1"
        )
    return faults


def _moe_to_section(config: Config) -> Section:
    return {
        "balance": "bias",
        "balance_weight": deepseek.BIAS_STEP,
        "first_dense_layers": config[FIRST_SPARSE],
    }


def _moe_to_config(section: Section) -> Config:
    return {
        FIRST_SPARSE: section["first_dense_layers"],
        "moe_layer_end_index": section["num_layers"] - 1,
    }


ERNIE_MOE = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    names=MOE_NAMES,
    section={"router": "topk_softmax", "rope_interleaved": True},
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        FIRST_SPARSE: 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    supported_values=base.SILU_ONLY
    | {"use_bias": (False, None), "moe_layer_interval": (1,), "moe_norm_min": (1e-12,)},
    keys=CONFIG_KEYS
    | {
        "num_experts": "moe_num_experts",
        "experts_per_token": "moe_k",
        "d_expert": "moe_intermediate_size",
        "num_shared_experts": "moe_num_shared_experts",
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    uses_layer_types=False,
    faults=_moe_faults,
    to_section=_moe_to_section,
    to_config=_moe_to_config,
    ignored_prefixes=("mtp", "model.mtp"),
    fused=base.MOE_FUSED
    | {
        "mlp.gate.moe_statics.e_score_correction_bias": ("mlp.moe_statics.e_score_correction_bias",)
    },
)
