"""MiniMax-M2: the router of DeepSeek-V3, norms of all heads, and rope in half of the dims."""

from meshtrain.huggingface.families import base, deepseek, mixtral
from meshtrain.huggingface.families.base import Config, Family, Section

# The norms of queries and keys are over all heads.
NAMES = mixtral.NAMES | {
    "layers/attention/query_norm/scale": "model.layers.*.self_attn.q_norm.weight HK",
    "layers/attention/key_norm/scale": "model.layers.*.self_attn.k_norm.weight GK",
    "layers/mlp/measured/bias": "model.layers.*.block_sparse_moe.e_score_correction_bias E",
}


def _standardize(config: Config) -> Config:
    """Returns a config.json with partial_rotary_factor, which rotary_dim was in earlier ones."""
    rotated, head_dim = config.get("rotary_dim"), config.get("head_dim", 128)
    if base.is_positive(rotated) and base.is_count(head_dim):
        return {"partial_rotary_factor": rotated / head_dim} | config
    return config


def _faults(config: Config) -> list[str]:
    rotated = config.get("rotary_dim")
    if rotated is None or base.is_count(rotated):
        return []
    return [f"rotary_dim={rotated!r}: is not an integer of at least 1"]


def _to_section(config: Config) -> Section:
    return {"balance": "bias", "balance_weight": deepseek.BIAS_STEP}


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    names=NAMES,
    section={"router": "sigmoid", "qk_norm": True, "qk_norm_heads": "all"},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
        "hidden_act": "silu",
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "router_jitter_noise": 0.0,
    },
    supported_values=base.SILU_ONLY | {"router_jitter_noise": (0.0,)},
    keys=base.EXPERT_KEYS | {"num_experts": "num_local_experts"},
    aliases={"num_experts": "num_local_experts"},
    uses_layer_types=False,
    rope_fraction=1.0,
    standardize=_standardize,
    faults=_faults,
    to_section=_to_section,
    fused=mixtral.FUSED
    | {"mlp.e_score_correction_bias": ("block_sparse_moe.e_score_correction_bias",)},
)
