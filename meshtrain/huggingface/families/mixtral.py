"""Mixtral: Mistral with experts."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Family

NAMES = base.NAMES | {
    "layers/mlp/router/kernel": "model.layers.*.block_sparse_moe.gate.weight E D",
    "layers/mlp/gate/kernel": "model.layers.*.block_sparse_moe.experts.*.w1.weight F D",
    "layers/mlp/up/kernel": "model.layers.*.block_sparse_moe.experts.*.w3.weight F D",
    "layers/mlp/down/kernel": "model.layers.*.block_sparse_moe.experts.*.w2.weight D F",
}

FUSED = {
    "mlp.experts.gate_up_proj": (
        "block_sparse_moe.experts.*.w1.weight",
        "block_sparse_moe.experts.*.w3.weight",
    ),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
    "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
}

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    names=NAMES,
    section={"router": "topk_softmax"},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096 * 32,
        "hidden_act": "silu",
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        base.BALANCE_WEIGHT: 0.001,
        "router_jitter_noise": 0.0,
    },
    # transformers adds the noise to the input of the router in training.
    supported_values=base.SILU_ONLY | {"router_jitter_noise": (0.0,)},
    keys=base.EXPERT_KEYS | {"num_experts": "num_local_experts"},
    aliases={"num_experts": "num_local_experts"},
    default_layers=base.all_local,
    uses_layer_types=False,
    faults=base.balance_loss_faults,
    to_section=base.balance_loss_to_section,
    to_config=base.balance_loss_to_config,
    fused=FUSED,
)
