"""The `model` section of a transformer: its keys, their valid values, and all sizes that follow.

The one description of the decoder. Layers, caches, FLOPs, the planner, the audit, conversion and
the reference model read sizes here, or from the parameters that the layers have.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain.errors import ConfigError, choice_faults, minimum_faults
from meshtrain.models import rope
from meshtrain.ops import implementations

# The vocabulary is padded to a multiple of it, which every usual mesh.tensor divides.
VOCAB_MULTIPLE = 128
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim")


def _key(
    *,
    minimum: int | None = None,
    above: int | None = None,
    choices: tuple[str, ...] = (),
    needs: str | tuple[str, str] | None = None,
    changes_logits: bool = True,
) -> Any:
    """Returns the field of a key with the rule of its values.

    A value is valid from `minimum` on, or above `above`, or if it is one of `choices`. `needs` is
    the key that switches this one on: while that is 0 or False, or is not the given value, this
    one has no effect. With `changes_logits=False`, models that differ in this key alone compute
    the same logits.
    """
    return dataclasses.field(
        metadata={
            "minimum": minimum,
            "above": above,
            "choices": choices,
            "needs": needs,
            "changes_logits": changes_logits,
        }
    )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The `model` section of a config; configs/default.py has the default of each key."""

    num_layers: int = _key(minimum=1)
    d_model: int = _key(minimum=1)
    num_heads: int = _key(minimum=1)
    num_kv_heads: int = _key(minimum=1)
    head_dim: int = _key(minimum=0)
    kv_lora_rank: int = _key(minimum=0)
    q_lora_rank: int = _key(minimum=0)
    rope_head_dim: int = _key(minimum=0)
    v_head_dim: int = _key(minimum=0)
    d_ff: int = _key(minimum=1)
    vocab_size: int = _key(minimum=1)
    max_seq_len: int = _key(minimum=1)
    norm: str = _key(choices=("rms", "layer", "rms_1p"))
    norm_epsilon: float = _key(above=0)
    positions: str = _key(choices=("rope", "learned"))
    rope_layers: str = _key(needs=("positions", "rope"))
    rope_theta: float = _key(above=0)
    rope_theta_local: float = _key(minimum=0)
    rope_scaling: tuple = _key()
    rope_fraction: float = _key(above=0)
    rope_interleaved: bool = _key()
    mlp: str = _key(choices=("swiglu", "gelu", "geglu", "clamped_swiglu"))
    glu_limit: float = _key(above=0, needs=("mlp", "clamped_swiglu"))
    glu_slope: float = _key(above=0, needs=("mlp", "clamped_swiglu"))
    num_experts: int = _key(minimum=0)
    experts_per_token: int = _key(needs="num_experts")
    d_expert: int = _key(minimum=0, needs="num_experts")
    num_shared_experts: int = _key(minimum=0, needs="num_experts")
    d_shared: int = _key(minimum=0, needs="num_shared_experts")
    shared_gate: bool = _key(needs="num_shared_experts")
    first_dense_layers: int = _key(minimum=0)
    router: str = _key(choices=("topk_softmax", "softmax", "sigmoid"), needs="num_experts")
    router_scale: float = _key(above=0, needs="num_experts")
    expert_groups: tuple = _key(needs="num_experts")
    capacity_factor: float = _key(minimum=0, needs="num_experts")
    balance: str = _key(choices=("none", "batch", "sequence", "bias"), changes_logits=False)
    balance_weight: float = _key(minimum=0, changes_logits=False)
    router_z_loss: float = _key(minimum=0, changes_logits=False)
    bias: bool = _key()
    norm_bias: bool = _key()
    qkv_bias: bool = _key()
    out_bias: bool = _key()
    expert_bias: bool = _key(needs="num_experts")
    qk_norm: bool = _key()
    qk_norm_heads: str = _key(choices=("each", "all"), needs="qk_norm")
    pre_norm: bool = _key()
    post_norm: bool = _key()
    attention: str = _key()
    window: int = _key(minimum=0)
    query_scale: float = _key(minimum=0)
    query_growth: float = _key(minimum=0)
    query_growth_length: int = _key(minimum=1, needs="query_growth")
    dropout: float = _key(changes_logits=False)
    attention_softcap: float = _key(minimum=0)
    attention_sinks: bool = _key()
    logit_softcap: float = _key(minimum=0)
    logit_scale: float = _key(above=0)
    embed_scale: float = _key(above=0)
    branch_scale: float = _key(above=0)
    tie_embeddings: bool = _key()
    z_loss: float = _key(minimum=0, changes_logits=False)
    attention_impl: str = _key(changes_logits=False)
    loss_chunk_mib: float = _key(minimum=0, changes_logits=False)

    def __post_init__(self):
        if faults := _value_faults(self) or _combination_faults(self):
            raise ConfigError(*faults)

    # ---- attention ----

    @property
    def head_size(self) -> int:
        """Dims of a head; of latent attention, those of queries and keys without rope."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def query_size(self) -> int:
        """Dims of a query or key of a head."""
        return self.head_size + self.rope_head_dim

    @property
    def score_scale(self) -> float:
        """The factor of q k in the attention scores."""
        return self.query_scale or self.query_size**-0.5

    @property
    def value_size(self) -> int:
        """Dims of a value of a head."""
        return self.v_head_dim or self.head_size

    @property
    def latent_size(self) -> int:
        """Dims of what all heads share in latent attention: the latent, and the key with rope."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def cached_dims(self) -> list[tuple[int, int]]:
        """Shapes cached per token: key and value, or the shared latent of latent attention."""
        if self.kv_lora_rank:
            return [(1, self.latent_size)]
        return [(self.num_kv_heads, self.head_size)] * 2

    @property
    def is_local(self) -> np.ndarray:
        """Returns whether each layer is local: (num_layers,) bool."""
        return np.resize([kind == "l" for kind in self.attention], self.num_layers)

    @property
    def local_window(self) -> int | None:
        """Positions that a query of a local layer sees; None if no layer is local."""
        return self.window if self.is_local.any() else None

    def visible_positions(self, seq_len: int) -> np.ndarray:
        """Returns the positions that the last token of a row sees in each layer: (num_layers,)."""
        return np.where(self.is_local, min(self.window, seq_len), seq_len)

    # ---- feed-forward ----

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward has a gate projection next to the up projection."""
        return self.mlp != "gelu"

    @property
    def expert_size(self) -> int:
        """Width of the feed-forward of an expert."""
        return self.d_expert or self.d_ff

    @property
    def shared_size(self) -> int:
        """Width of the feed-forward of all shared experts together."""
        return self.num_shared_experts and (
            self.d_shared or self.num_shared_experts * self.expert_size
        )

    @property
    def used_mlp_size(self) -> int:
        """Width of all feed-forward layers that a token uses in a layer of the stack."""
        if not self.num_experts:
            return self.d_ff
        return self.experts_per_token * self.expert_size + self.shared_size

    # ---- rope ----

    @property
    def rope_size(self) -> int:
        """Number of dims of a head that rope rotates: the first ones, in pairs."""
        return self.rope_head_dim or 2 * (int(self.head_size * self.rope_fraction) // 2)

    @property
    def has_norm_bias(self) -> bool:
        """Returns whether the norms before the sublayers, and the last one, have biases."""
        return self.bias or self.norm_bias

    @property
    def has_rope(self) -> np.ndarray:
        """Returns whether each layer has rope: (num_layers,) bool."""
        has_rope = np.resize([kind == "r" for kind in self.rope_layers], self.num_layers)
        return has_rope & (self.positions == "rope")

    def rotation(
        self,
        row_length: int | jax.Array,
        is_local: jax.Array | bool,
        has_rope: jax.Array | bool = True,
    ) -> tuple[np.ndarray | jax.Array, float | jax.Array]:
        """Returns a layer's rope frequencies (rope_size / 2,), and the factor of cos and sin.

        Those of a layer without rope rotate by the angle 0, which changes nothing.
        """
        global_rope = local_rope = self.rope_theta, self.rope_scaling
        if self.rope_theta_local:
            local_rope = self.rope_theta_local, ()
        frequencies = [
            rope.frequencies(self.rope_size, theta, scaling, row_length)
            for theta, scaling in (local_rope, global_rope)
        ]
        factors = [rope.attention_factor(scaling) for _, scaling in (local_rope, global_rope)]
        frequency_k = rope.select(is_local, *frequencies)
        factor = rope.select(is_local, *factors)
        no_frequencies = np.zeros(self.rope_size // 2)
        return (
            rope.select(has_rope, frequency_k, no_frequencies),
            rope.select(has_rope, factor, 1.0),
        )

    # ---- others ----

    @property
    def padded_vocab(self) -> int:
        """Size of V in embedding and output head; equal on every mesh, so that checkpoints fit."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def residual_scale(self) -> float:
        """1/sqrt(2 L): the variance of the sum of 2 L branches does not grow with depth (GPT-2)."""
        return (2 * self.num_layers) ** -0.5


def effective(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a `model` section that decide its logits.

    It leaves out keys that are switched off, and those that matter in training alone.
    """
    kept = dict(section)
    for field in dataclasses.fields(TransformerConfig):
        switch = field.metadata["needs"]
        if isinstance(switch, tuple):
            key, value = switch
            is_off = section[key] != value
        else:
            is_off = switch is not None and not section[switch]
        if is_off or not field.metadata["changes_logits"]:
            del kept[field.name]
    return kept


def _value_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each value that is invalid in any model."""
    faults = []
    for field in dataclasses.fields(c):
        name, value, rule = f"model.{field.name}", getattr(c, field.name), field.metadata
        if rule["choices"]:
            faults += choice_faults(name, value, rule["choices"])
        if rule["minimum"] is not None:
            faults += minimum_faults(rule["minimum"], {name: value})
        if rule["above"] is not None and not value > rule["above"]:
            faults.append(f"{name}={value}: use more than {rule['above']}")
    faults += implementations.faults("model.attention_impl", c.attention_impl)
    if c.rope_fraction > 1:
        faults.append(f"model.rope_fraction={c.rope_fraction}: use more than 0, and at most 1")
    if not 0 <= c.dropout < 1:
        faults.append(
            f"model.dropout={c.dropout}: is a probability; use 0 or more, and less than 1"
        )
    if not c.attention or set(c.attention) - {"g", "l"}:
        faults.append(
            f"model.attention={c.attention!r}: use letters g (global) and l (local), such as 'g' "
            f"or 'lllllg'"
        )
    if not c.rope_layers or set(c.rope_layers) - {"r", "n"}:
        faults.append(
            f"model.rope_layers={c.rope_layers!r}: use letters r (rope) and n (no positions), such "
            f"as 'r' or 'rrrn'"
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
    elif c.positions == "rope" and c.rope_fraction == 1 and not c.rope_head_dim and c.head_size % 2:
        faults.append(
            f"model.head_dim={c.head_size} (0: model.d_model / model.num_heads) is odd, but rope "
            "rotates pairs of dims; use an even head dim, or model.positions='learned'"
        )
    elif c.positions == "rope" and not c.rope_size:
        faults.append(
            f"model.rope_fraction={c.rope_fraction}: is less than 2 of {c.head_size} dims of a "
            "head; use more, or model.positions='learned'"
        )
    if c.num_heads % c.num_kv_heads:
        faults.append(
            f"model.num_heads={c.num_heads} is not divisible by "
            f"model.num_kv_heads={c.num_kv_heads}; use a divisor, or num_kv_heads=num_heads for "
            "multi-head attention"
        )
    if "l" in c.attention and c.window == 0:
        faults.append(
            f"model.window=0, but model.attention={c.attention!r} has local layers; "
            f"set the number of tokens that they see, or use attention='g'"
        )
    if not c.pre_norm and not c.post_norm:
        faults.append(
            "model.pre_norm=False: leaves layers without norms; use True, or model.post_norm=True"
        )
    kind = c.rope_scaling[0] if c.rope_scaling else None
    if kind == "yarn" and c.rope_theta <= 1:
        faults.append(
            f"model.rope_theta={c.rope_theta}: yarn needs frequencies that decrease; use more "
            "than 1"
        )
    faults += _longrope_faults(c)
    if kind == "dynamic" and 0 < c.rope_size < 4:
        key = "rope_head_dim" if c.rope_head_dim else "head_dim"
        faults.append(
            f"model.{key}={c.rope_size}: dynamic rope needs two frequencies or more; use 4 or more"
        )
    return faults + _latent_faults(c) + _expert_faults(c)


def _longrope_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault unless longrope has two factors for each frequency."""
    if not c.rope_scaling or c.rope_scaling[0] != "longrope" or c.positions != "rope":
        return []
    num_factors = len(c.rope_scaling) - 3
    if num_factors == c.rope_size:
        return []
    return [
        f"model.rope_scaling={tuple(c.rope_scaling)}: longrope has {num_factors} factors; use "
        f"{c.rope_size // 2} short ones, then {c.rope_size // 2} long ones, for the {c.rope_size} "
        "dims of a head that rope rotates"
    ]


def _latent_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each combination that multi-head latent attention does not support."""
    if not c.kv_lora_rank:
        return [
            f"model.{key}={getattr(c, key)}: is a size of latent attention; set "
            "model.kv_lora_rank, or use 0"
            for key in LATENT_KEYS
            if getattr(c, key)
        ]
    name = f"model.kv_lora_rank={c.kv_lora_rank}"
    faults = []
    if c.num_kv_heads != c.num_heads:
        faults.append(
            f"model.num_kv_heads={c.num_kv_heads}: with {name} each head has keys and values of "
            f"its own; use num_kv_heads={c.num_heads}"
        )
    if c.positions != "rope":
        faults.append(f"model.positions={c.positions!r}: {name} needs 'rope'")
    if not c.rope_head_dim or c.rope_head_dim % 2:
        faults.append(
            f"model.rope_head_dim={c.rope_head_dim}: with {name} rope rotates pairs of these "
            "dims; use an even number above 0"
        )
    for key in ("qk_norm", "qkv_bias", "out_bias", "attention_sinks"):
        if getattr(c, key):
            faults.append(f"model.{key}=True: is not supported with {name}; use False")
    if c.query_growth:
        faults.append(f"model.query_growth={c.query_growth}: is not supported with {name}; use 0")
    if c.rope_interleaved:
        faults.append(
            f"model.rope_interleaved=True: with {name} rope always rotates adjacent dims; use False"
        )
    if c.rope_fraction != 1:
        faults.append(
            f"model.rope_fraction={c.rope_fraction}: with {name} rope rotates "
            "model.rope_head_dim dims; use 1.0"
        )
    return faults


def _expert_faults(c: TransformerConfig) -> list[str]:
    """Returns a fault for each combination of values of a mixture of experts that is invalid."""
    if c.first_dense_layers and not c.num_experts:
        return [
            f"model.first_dense_layers={c.first_dense_layers}: without model.num_experts all "
            "layers are dense; use 0"
        ]
    if not c.num_experts:
        return []
    faults = []
    for key in ("d_shared", "shared_gate"):
        if getattr(c, key) and not c.num_shared_experts:
            faults.append(
                f"model.{key}={getattr(c, key)}: there is no shared expert; set "
                "model.num_shared_experts"
            )
    if c.first_dense_layers >= c.num_layers:
        faults.append(
            f"model.first_dense_layers={c.first_dense_layers}: leaves none of "
            f"model.num_layers={c.num_layers} layers with experts; use fewer"
        )
    if not 1 <= c.experts_per_token <= c.num_experts:
        faults.append(
            f"model.experts_per_token={c.experts_per_token}: use 1 to "
            f"model.num_experts={c.num_experts}"
        )
    if not c.expert_groups:
        return faults
    groups = c.expert_groups
    if len(groups) != 2 or not all(isinstance(n, int) and n > 0 for n in groups):
        return [*faults, f"model.expert_groups={groups}: use () or (GROUPS, GROUPS_PER_TOKEN)"]
    if c.num_experts % groups[0]:
        faults.append(
            f"model.expert_groups={groups}: model.num_experts={c.num_experts} is not divisible by "
            "the number of groups; use a divisor"
        )
    elif (
        not c.experts_per_token * groups[0]
        <= groups[1] * c.num_experts
        <= groups[0] * c.num_experts
    ):
        faults.append(
            f"model.expert_groups={groups}: a token chooses "
            f"model.experts_per_token={c.experts_per_token} experts from {groups[1]} groups of "
            f"{c.num_experts // groups[0]}; use groups that have as many"
        )
    return faults
