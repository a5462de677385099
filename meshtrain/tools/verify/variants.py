"""Varies the `model` section of a transformer, for the comparison with the reference model.

Some of the sections also have an adapter, or other formulas, which are no keys of `model`.
"""

from collections.abc import Mapping
from typing import Any

from meshtrain.models import rope
from meshtrain.tools.verify.pairwise import Row, pairwise
from meshtrain.tools.verify.reference.adapter import Adapter

LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 8)

# Heads of 6 or 8 dims have frequencies that are kept, divided, and in between.
YARN = ("yarn", 8.0, 2.0, 0.01, 8, 0.0, True)
DYNAMIC = ("dynamic", 4.0, 8)
LONGROPE = ("longrope", 8, 1.2, 1.5, 4.0)  # `_compatible` gives it as many factors as it needs

# 6 of 8 dims, or 4 of 6; of fewer dims, all.
ROPE_FRACTION, SMALLEST_PARTIAL_HEAD = 0.75, 6

ADAPTER = "adapter"  # key of the adapter in a section; None without one
ADAPTERS = (
    Adapter(2, 7.0, ("layers/attention/*",), rslora=True),
    Adapter(3, 5.0, ("*",), dropout=0.3),
    Adapter(2, 6.0, ("layers/mlp/*",), experts=True),
)

FORMULAS = "kernels"  # `train.kernels` of a section; "plain" without it
NOT_OF_MODEL = (ADAPTER, FORMULAS)

# Implementations of attention with several blocks, and what `--quick` tries together with each of
# them.
BLOCKS = {
    "xla:5": {
        "positions": "rope",
        "rope_scaling": LLAMA3,
        "dropout": 0.0,
        ADAPTER: ADAPTERS[0],
        FORMULAS: "fused",
    },
    "blockwise:5": {
        "positions": "learned",
        "rope_scaling": (),
        "embed_scale": 2.0,
        "dropout": 0.2,
        ADAPTER: ADAPTERS[1],
        FORMULAS: "fused",
    },
}
NUM_QUICK = 1 + len(BLOCKS)
SOFTCAP = 3.0
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 9, "rope_head_dim": 6, "v_head_dim": 5}


def select(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns sections in which every pair of two choices occurs.

    The first NUM_QUICK are those that `--quick` tries: the given section, and one for each of
    BLOCKS, with local and global layers and a soft cap. The last two have latent attention, as all
    of them do if the given one has it.
    """
    rows = pairwise([{}], _choices(section))
    hard = {"attention": "lg", "window": _window(section), "attention_softcap": SOFTCAP}
    quick = []
    for name, choices in BLOCKS.items():
        row = next(row for row in rows if row["attention_impl"] == name)
        quick.append(row | hard | choices)
    latent = [quick[0] | LATENT, quick[1] | LATENT | {"q_lora_rank": 0}]
    sections = []
    for row in [{}, *quick, *rows, *latent]:
        c = _compatible({**section, **row})
        # One layer more than the pattern has, so that it repeats, and the first ones.
        pattern = max(len(c["attention"]), len(c["rope_layers"]))
        c["num_layers"] = c["first_dense_layers"] + pattern + 1
        sections.append(c)
    return sections


def _compatible(c: dict[str, Any]) -> dict[str, Any]:
    """Returns the section without what its attention does not support."""
    head_dim = c["head_dim"] or c["d_model"] // c["num_heads"]
    if c["kv_lora_rank"]:
        c = {
            **c,
            "qk_norm": False,
            "qkv_bias": False,
            "out_bias": False,
            "attention_sinks": False,
            "query_growth": 0.0,
            "num_kv_heads": c["num_heads"],
            "positions": "rope",
            "rope_interleaved": False,
            "rope_fraction": 1.0,
        }
    elif head_dim < SMALLEST_PARTIAL_HEAD:
        c = {**c, "rope_fraction": 1.0}
    num_rotated = c["rope_head_dim"] or int(head_dim * c["rope_fraction"])
    return {**c, "rope_scaling": rope.with_num_factors(c["rope_scaling"], num_rotated)}


def _window(c: Mapping[str, Any]) -> int:
    return max(1, c["window"] or 5)


def _choices(c: Mapping[str, Any]) -> list[list[Row]]:
    """Returns the choices: for each, a row of each of its values.

    All combinations are valid models.
    """

    def choice(key: str, *values: Any) -> list[Row]:
        return [{key: value} for value in values]

    local = {"window": _window(c)}
    return [
        choice("norm", "rms", "layer", "rms_1p"),
        [
            {"positions": "rope", "rope_scaling": ()},
            {"positions": "rope", "rope_scaling": ("linear", 2.0)},
            {"positions": "rope", "rope_scaling": LLAMA3},
            {"positions": "rope", "rope_scaling": YARN},
            {"positions": "rope", "rope_scaling": DYNAMIC},
            {"positions": "rope", "rope_scaling": LONGROPE},
            {"positions": "learned", "rope_scaling": ()},
        ],
        choice("mlp", "swiglu", "gelu", "geglu", "clamped_swiglu"),
        choice("glu_limit", 0.4),
        [
            {"bias": False, "qkv_bias": False, "out_bias": False, "norm_bias": False},
            {"bias": False, "qkv_bias": True, "out_bias": False, "norm_bias": True},
            {"bias": False, "qkv_bias": True, "out_bias": True, "norm_bias": False},
            {"bias": True, "qkv_bias": False, "out_bias": False, "norm_bias": False},
        ],
        choice("attention_sinks", False, True),
        _experts(c),
        [
            {"qk_norm": False, "qk_norm_heads": "each"},
            *({"qk_norm": True, "qk_norm_heads": heads} for heads in ("each", "all")),
        ],
        [
            {"pre_norm": True, "post_norm": False},
            {"pre_norm": True, "post_norm": True},
            {"pre_norm": False, "post_norm": True},
        ],
        choice("rope_layers", "r", "rn"),
        choice("branch_scale", 1.0, 0.4),
        choice("logit_scale", 1.0, 0.6),
        choice("tie_embeddings", False, True),
        [{"attention": "g", "window": 0}, *({"attention": kind, **local} for kind in ("l", "lg"))],
        choice("rope_theta_local", 0.0, 100.0),
        choice("rope_fraction", 1.0, ROPE_FRACTION),
        choice("rope_interleaved", False, True),
        choice("attention_softcap", 0.0, SOFTCAP),
        choice("logit_softcap", 0.0, 3.0),
        choice("embed_scale", 1.0, 2.0),
        choice("query_scale", 0.0, 0.3),
        [{"query_growth": 0.0}, {"query_growth": 0.8, "query_growth_length": 3}],
        choice("z_loss", 0.0, 1e-3),
        choice("dropout", 0.0, 0.2),
        [{"num_heads": 4, "num_kv_heads": number} for number in (4, 2, 1)],
        choice("head_dim", 0, 6),
        choice("attention_impl", "xla", *BLOCKS),
        choice("loss_chunk_mib", 0.0, _mib(tokens=30)),
        choice(ADAPTER, None, *ADAPTERS),
        choice(FORMULAS, "plain", "fused"),
    ]


def _experts(c: Mapping[str, Any]) -> list[Row]:
    """Returns no experts, and mixtures that differ in what router, balance and capacity can do."""
    if c["num_experts"]:
        sizes = {key: c[key] for key in ("num_experts", "experts_per_token", "d_expert")}
    else:
        sizes = {"num_experts": 4, "experts_per_token": 2, "d_expert": 12}
    # Two groups, of which a token uses one, if they have enough experts.
    num_experts = sizes["num_experts"]
    can_group = num_experts % 2 == 0 and 2 * sizes["experts_per_token"] <= num_experts
    groups = (2, 1) if can_group else ()
    base = {
        "num_shared_experts": 0,
        "d_shared": 0,
        "shared_gate": False,
        "expert_bias": False,
        "router_scale": 1.0,
        "capacity_factor": 0.0,
        "balance": "none",
        "balance_weight": 0.3,
        "router_z_loss": 0.0,
        "router": "topk_softmax",
        "first_dense_layers": 0,
        **sizes,
        "expert_groups": (),
    }
    return [
        {**base, "num_experts": 0},
        {**base, "balance": "batch", "router_z_loss": 0.1},
        {
            **base,
            "router": "softmax",
            "balance": "sequence",
            "num_shared_experts": 2,
            "first_dense_layers": 1,
        },
        {**base, "num_shared_experts": 1, "d_shared": 20, "shared_gate": True},
        {**base, "expert_bias": True, "balance": "batch"},
        {**base, "router": "sigmoid", "router_scale": 2.5, "expert_groups": groups},
        {**base, "capacity_factor": 0.75, "expert_groups": groups},
    ]


def _mib(*, tokens: int) -> float:
    """Returns the MiB of the logits of this number of tokens, for a vocabulary of up to 128."""
    return tokens * 128 * 4 / 2**20


def describe(c: Mapping[str, Any]) -> str:
    """Returns the choices of a section, for a message."""
    keys = {key for factor in _choices(c) for row in factor for key in row}
    if c["kv_lora_rank"]:
        keys |= LATENT.keys()
    return ", ".join(f"{key}={c.get(key)}" for key in sorted(keys))
