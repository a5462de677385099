"""The `model` section of a transformer: its checks and the sizes derived from it."""

from dataclasses import dataclass

import jax
import numpy as np

from meshtrain.errors import ConfigError, choice_faults, minimum_faults
from meshtrain.models import rope
from meshtrain.ops import implementations

VOCAB_MULTIPLE = 128  # every usual mesh.tensor divides a multiple of it

LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The `model` section of a config; configs/default.py documents each key."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int
    q_lora_rank: int
    rope_head_dim: int
    v_head_dim: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    norm: str
    norm_epsilon: float
    positions: str
    rope_theta: float
    rope_theta_local: float
    rope_scaling: tuple
    mlp: str
    num_experts: int
    experts_per_token: int
    d_expert: int
    num_shared_experts: int
    first_dense_layers: int
    router: str
    router_scale: float
    expert_groups: tuple
    capacity_factor: float
    balance: str
    balance_weight: float
    router_z_loss: float
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    qk_norm_heads: str
    post_norm: bool
    attention: str
    window: int
    query_scale: float
    dropout: float
    attention_softcap: float
    logit_softcap: float
    embed_scale: float
    tie_embeddings: bool
    z_loss: float
    attention_impl: str
    loss_chunk_mib: float

    def __post_init__(self):
        if faults := _value_faults(self) or _combination_faults(self):
            raise ConfigError(*faults)

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of a query or key of a head."""
        return self.head_size + self.rope_head_dim

    @property
    def value_size(self) -> int:
        return self.v_head_dim or self.head_size

    @property
    def rope_size(self) -> int:
        """Number of dims of a head that rope rotates."""
        return self.rope_head_dim or self.head_size

    @property
    def cached_dims(self) -> list[tuple[int, int]]:
        """Dims of what generation caches of a token: its key and value, or the latent key that all heads share."""
        if self.kv_lora_rank:
            return [(1, self.kv_lora_rank + self.rope_head_dim)]
        return [(self.num_kv_heads, self.head_size)] * 2

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate projection next to the up projection."""
        return self.mlp != "gelu"

    @property
    def expert_size(self) -> int:
        """Width of the feed-forward of an expert."""
        return self.d_expert or self.d_ff

    @property
    def is_local(self) -> np.ndarray:
        """Whether each layer is local: (num_layers,) bool."""
        return np.resize([kind == "l" for kind in self.attention], self.num_layers)

    def frequencies(self, row_length: int | jax.Array) -> np.ndarray | jax.Array:
        """Rope frequencies of the global layers: (rope_size / 2,)."""
        return rope.frequencies(self.rope_size, self.rope_theta, self.rope_scaling, row_length)

    def local_frequencies(self, row_length: int | jax.Array) -> np.ndarray | jax.Array:
        theta = self.rope_theta_local
        return rope.frequencies(self.rope_size, theta) if theta else self.frequencies(row_length)

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin in the global layers."""
        return rope.attention_factor(self.rope_scaling)

    @property
    def local_attention_factor(self) -> float:
        return 1.0 if self.rope_theta_local else self.attention_factor

    @property
    def padded_vocab(self) -> int:
        """Size of V in the embedding and the output head; equal on every mesh, so that checkpoints fit."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def residual_scale(self) -> float:
        """1/sqrt(2 L): the variance of the sum of the 2 L branches does not grow with depth (GPT-2)."""
        return (2 * self.num_layers) ** -0.5


def _value_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each value that is invalid in any model."""
    choices = {
        "norm": ("rms", "layer", "rms_1p"),
        "positions": ("rope", "learned"),
        "mlp": ("swiglu", "gelu", "geglu"),
        "router": ("topk_softmax", "softmax", "sigmoid"),
        "qk_norm_heads": ("each", "all"),
        "balance": ("none", "batch", "sequence", "bias"),
    }
    counts = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")
    non_negative = ("z_loss", "head_dim", "window", "rope_theta_local", "query_scale")
    non_negative += ("attention_softcap", "logit_softcap", "loss_chunk_mib")
    non_negative += ("num_experts", "d_expert", "num_shared_experts", "capacity_factor")
    non_negative += ("first_dense_layers",)
    non_negative += ("balance_weight", "router_z_loss")
    non_negative += LATENT_KEYS
    faults = []
    for key, names in choices.items():
        faults += choice_faults(f"model.{key}", getattr(c, key), names)
    faults += implementations.faults("model.attention_impl", c.attention_impl)
    faults += minimum_faults(
        1, {f"model.{key}": getattr(c, key) for key in (*counts, "max_seq_len")}
    )
    faults += minimum_faults(0, {f"model.{key}": getattr(c, key) for key in non_negative})
    faults += [
        f"model.{key}={getattr(c, key)}: use more than 0"
        for key in ("norm_epsilon", "rope_theta", "embed_scale", "router_scale")
        if not getattr(c, key) > 0
    ]
    if not 0 <= c.dropout < 1:
        faults.append(
            f"model.dropout={c.dropout}: is a probability; use 0 or more, and less than 1"
        )
    if not c.attention or set(c.attention) - {"g", "l"}:
        faults.append(
            f"model.attention={c.attention!r}: use letters g (global) and l (local), such as 'g' or 'lllllg'"
        )
    return faults + rope.scaling_faults(c.rope_scaling)


def _combination_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each combination of values that is invalid."""
    faults = []
    if c.head_dim == 0 and c.d_model % c.num_heads:
        faults.append(
            f"model.d_model={c.d_model} is not divisible by model.num_heads={c.num_heads}; "
            f"use a multiple, or set model.head_dim"
        )
    elif c.positions == "rope" and c.rope_size == c.head_size and c.head_size % 2:
        faults.append(
            f"model.head_dim={c.head_size} (0: model.d_model / model.num_heads) is odd, but rope rotates pairs "
            f"of dims; use an even head dim, or model.positions='learned'"
        )
    if c.num_heads % c.num_kv_heads:
        faults.append(
            f"model.num_heads={c.num_heads} is not divisible by model.num_kv_heads={c.num_kv_heads}; "
            f"use a divisor, or num_kv_heads=num_heads for multi-head attention"
        )
    if "l" in c.attention and c.window == 0:
        faults.append(
            f"model.window=0, but model.attention={c.attention!r} has local layers; "
            f"set the number of tokens that they see, or use attention='g'"
        )
    kind = c.rope_scaling[0] if c.rope_scaling else None
    if kind == "yarn" and c.rope_theta <= 1:
        faults.append(
            f"model.rope_theta={c.rope_theta}: yarn needs frequencies that decrease; use more than 1"
        )
    if kind == "dynamic" and c.rope_size < 4:
        key = "rope_head_dim" if c.rope_head_dim else "head_dim"
        faults.append(
            f"model.{key}={c.rope_size}: dynamic rope needs two frequencies or more; use 4 or more"
        )
    return faults + _latent_faults(c) + _expert_faults(c)


def _latent_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each combination of values that multi-head latent attention does not support."""
    if not c.kv_lora_rank:
        return [
            f"model.{key}={getattr(c, key)}: is a size of latent attention; set model.kv_lora_rank, or use 0"
            for key in LATENT_KEYS
            if getattr(c, key)
        ]
    name = f"model.kv_lora_rank={c.kv_lora_rank}"
    faults = []
    if c.num_kv_heads != c.num_heads:
        faults.append(
            f"model.num_kv_heads={c.num_kv_heads}: with {name} each head has keys and values of its own; use "
            f"num_kv_heads={c.num_heads}"
        )
    if c.positions != "rope":
        faults.append(f"model.positions={c.positions!r}: {name} needs 'rope'")
    if not c.rope_head_dim or c.rope_head_dim % 2:
        faults.append(
            f"model.rope_head_dim={c.rope_head_dim}: with {name} rope rotates pairs of these dims; use an even "
            f"number above 0"
        )
    for key in ("qk_norm", "qkv_bias"):
        if getattr(c, key):
            faults.append(f"model.{key}=True: is not supported with {name}; use False")
    return faults


def _expert_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each combination of values of a mixture of experts that is invalid."""
    if c.first_dense_layers and not c.num_experts:
        return [
            f"model.first_dense_layers={c.first_dense_layers}: without model.num_experts all layers are dense; use 0"
        ]
    if not c.num_experts:
        return []
    faults = []
    if c.first_dense_layers >= c.num_layers:
        faults.append(
            f"model.first_dense_layers={c.first_dense_layers}: leaves none of model.num_layers={c.num_layers} layers "
            f"with experts; use fewer"
        )
    if not 1 <= c.experts_per_token <= c.num_experts:
        faults.append(
            f"model.experts_per_token={c.experts_per_token}: use 1 to model.num_experts={c.num_experts}"
        )
    if not c.expert_groups:
        return faults
    groups = c.expert_groups
    if len(groups) != 2 or not all(isinstance(n, int) and n > 0 for n in groups):
        return [*faults, f"model.expert_groups={groups}: use () or (GROUPS, GROUPS_PER_TOKEN)"]
    if c.num_experts % groups[0]:
        faults.append(
            f"model.expert_groups={groups}: model.num_experts={c.num_experts} is not divisible by the number of "
            f"groups; use a divisor"
        )
    elif (
        not c.experts_per_token * groups[0]
        <= groups[1] * c.num_experts
        <= groups[0] * c.num_experts
    ):
        faults.append(
            f"model.expert_groups={groups}: a token chooses model.experts_per_token={c.experts_per_token} experts from "
            f"{groups[1]} groups of {c.num_experts // groups[0]}; use groups that have as many"
        )
    return faults
