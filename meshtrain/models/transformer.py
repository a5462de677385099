"""Decoder-only transformers: the Llama family by default, GPT-2 by config."""

import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models import base
from meshtrain.models.layers import Block, dense, embedding, norm
from meshtrain.ops.losses import cross_entropy
from meshtrain.sharding import constrain

# B batch, S sequence, D model, V vocabulary, padded

VOCAB_MULTIPLE = 128  # so that any usual mesh.tensor divides it, whatever the tokenizer made


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The `model` section of a config; configs/default.py says what each key means."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    norm: str
    norm_epsilon: float
    positions: str
    rope_theta: float
    mlp: str
    bias: bool
    tie_embeddings: bool
    z_loss: float

    def __post_init__(self):
        faults = [
            f"model.{key}={getattr(self, key)!r}: use one of {', '.join(choices)}"
            for key, choices in {
                "norm": ("rms", "layer"),
                "positions": ("rope", "learned"),
                "mlp": ("swiglu", "gelu"),
            }.items()
            if getattr(self, key) not in choices
        ]
        sizes = (
            "num_layers",
            "d_model",
            "num_heads",
            "num_kv_heads",
            "d_ff",
            "vocab_size",
            "max_seq_len",
        )
        faults += [
            f"model.{key}={getattr(self, key)}: use 1 or more"
            for key in sizes
            if getattr(self, key) < 1
        ]
        faults += [
            f"model.{key}={getattr(self, key)}: use more than 0"
            for key in ("norm_epsilon", "rope_theta")
            if not getattr(self, key) > 0
        ]
        if not self.z_loss >= 0:
            faults.append(f"model.z_loss={self.z_loss}: use 0 or more")
        if faults:
            raise ConfigError(*faults)
        if self.d_model % self.num_heads:
            faults.append(
                f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}"
            )
        elif self.positions == "rope" and self.d_model // self.num_heads % 2:
            faults.append(
                f"model.d_model={self.d_model} / model.num_heads={self.num_heads} is odd, and rope turns pairs; "
                f"use an even head dim, or model.positions='learned'"
            )
        if self.num_heads % self.num_kv_heads:
            faults.append(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}; "
                f"use a divisor, or num_kv_heads=num_heads for plain multi-head attention"
            )
        if faults:
            raise ConfigError(*faults)

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: the same on every mesh, for checkpoints to fit."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def residual_scale(self) -> float:
        """Two residual branches a layer: each starts at 1/sqrt(2 L), so that the sum keeps its variance (GPT-2)."""
        return (2 * self.num_layers) ** -0.5


class Outer(nnx.Module):
    """What surrounds the blocks: token (and position) embedding, final norm, output head."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.vocab_size = c.vocab_size
        self.tokens = embedding(rngs, c.padded_vocab, c.d_model, axes=("vocab", "embed"))
        self.positions = (
            embedding(rngs, c.max_seq_len, c.d_model, axes=(None, "embed"))
            if c.positions == "learned"
            else None
        )
        self.final_norm = norm(rngs, c.norm, c.d_model, epsilon=c.norm_epsilon, bias=c.bias)
        head = ("embed", "vocab")
        self.output = (
            None
            if c.tie_embeddings
            else dense(rngs, c.d_model, c.padded_vocab, axes=head, bias=False)
        )

    def embed(self, batch: Batch) -> jax.Array:
        # Whole sequences first: asked for slices, XLA would gather a table cut along V for them.
        x_BSD = constrain(table(self.tokens, "vocab")[batch.tokens], "batch", "seq", "residual")
        if self.positions is not None:
            x_BSD += table(self.positions, None)[positions_of(batch)]
        return constrain(x_BSD, "batch", "residual_seq", "residual")

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        x_BSD = self.final_norm(x_BSD)
        logits_BSV = (
            x_BSD @ table(self.tokens, "vocab").T if self.output is None else self.output(x_BSD)
        )
        logits_BSV = constrain(logits_BSV, "batch", "seq", "vocab")
        is_token_V = jnp.arange(logits_BSV.shape[-1]) < self.vocab_size  # the rest only pads
        return jnp.where(is_token_V[None, None], logits_BSV, jnp.finfo(logits_BSV.dtype).min)


def table(embedding: nnx.Embed, rows: str | None) -> jax.Array:
    """Returns the vectors of an embedding, whole along D: XLA replicates a lookup in a table cut both ways.

    (`nnx.Embed` itself would compute in the dtype that it was made with.)
    """
    return constrain(embedding.embedding[...], rows, "residual")


def positions_of(batch: Batch) -> jax.Array:
    """Returns (B or 1, S) positions: the batch's own where rows are packed, else 0, 1, 2, ..."""
    if batch.positions is not None:
        return batch.positions
    return jnp.arange(batch.tokens.shape[1])[None, :]


def build(**config) -> base.Model:
    """Returns the model of a `model` section; raises ConfigError where its sizes do not fit together."""
    c = TransformerConfig(**config)
    outer = base.functional(lambda rngs: Outer(c, rngs))
    block = base.functional(lambda rngs: Block(c, rngs))
    init_layers, layer_axes = base.stack(block, c.num_layers)

    def init(key):
        outer_key, layers_key = jax.random.split(key)
        return {**outer.init(outer_key), "layers": init_layers(layers_key)}

    def head(params, x_BSD, batch: Batch) -> Metrics:
        return cross_entropy(
            outer.bind(params).logits(x_BSD), batch.targets, batch.weights, z_loss=c.z_loss
        )

    return base.Model(
        init=init,
        axes={**outer.axes, "layers": layer_axes},
        embed=lambda params, batch: outer.bind(params).embed(batch),
        block=lambda layer, x_BSD, batch: block.bind(layer)(
            x_BSD, positions_of(batch), batch.segments
        ),
        head=head,
        logits=lambda params, x_BSD: outer.bind(params).logits(x_BSD),
        flops_per_token=lambda seq_len: flops_per_token(c, seq_len),
    )


# So that the keys of a config are checked by name and type before anything is built.
build.__signature__ = inspect.signature(TransformerConfig)


def flops_per_token(c: TransformerConfig, seq_len: int) -> float:
    """Returns 6 N + 12 L d S, forward and backward (PaLM, arXiv 2204.02311, appendix B).

    N counts the weights that multiply activations: all but embedding tables and vectors, the output
    head included. Attention counts in full, not halved for causality.
    """
    head_dim = c.d_model // c.num_heads
    attention = c.d_model * head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = (3 if c.mlp == "swiglu" else 2) * c.d_model * c.d_ff
    weights = c.num_layers * (attention + mlp) + c.d_model * c.vocab_size
    return 6.0 * weights + 12.0 * c.num_layers * c.d_model * seq_len
