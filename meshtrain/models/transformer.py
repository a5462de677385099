"""Decoder-only transformers: Llama by default; by config GPT-2, Mistral, Qwen and Gemma."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.data.source import Batch
from meshtrain.metrics import Metrics
from meshtrain.models import base
from meshtrain.models.layers import Block, dense, embedding, flat_dot_general, norm
from meshtrain.models.transformer_config import TransformerConfig, flops_per_token
from meshtrain.ops.attention import attention, choose, while_generating
from meshtrain.ops.losses import in_chunks
from meshtrain.parallel.sharding import constrain

# B batch, S sequence, T positions of a cache, D model, G key/value heads, K head dim, V vocabulary, padded


class Outer(nnx.Module):
    """What surrounds the blocks: token (and position) embedding, final norm, output head."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.c = c
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
        if self.c.embed_scale != 1:
            x_BSD *= jnp.asarray(self.c.embed_scale, x_BSD.dtype)
        if self.positions is not None:
            x_BSD += table(self.positions, None)[positions_of(batch)]
        return constrain(x_BSD, "batch", "residual_seq", "residual")

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        return self.project(self.kernel(), self.final_norm(x_BSD))

    def kernel(self) -> jax.Array:
        """Returns that of the output head (D, V), whole along D."""
        if self.output is None:
            return table(self.tokens, "vocab").T
        return constrain(self.output.kernel[...], "residual", "vocab")

    def project(self, kernel_DV: jax.Array, x_BSD: jax.Array) -> jax.Array:
        c = self.c
        logits_BSV = flat_dot_general(x_BSD, kernel_DV, (((2,), (0,)), ((), ())))
        logits_BSV = constrain(logits_BSV, "batch", "seq", "vocab")
        if c.logit_softcap:
            logits_BSV = c.logit_softcap * jnp.tanh(logits_BSV / c.logit_softcap)
        if logits_BSV.shape[-1] == c.vocab_size:
            return logits_BSV
        is_token_V = jnp.arange(logits_BSV.shape[-1]) < c.vocab_size  # the rest only pads
        return jnp.where(is_token_V[None, None], logits_BSV, jnp.finfo(logits_BSV.dtype).min)

    def loss(self, x_BSD: jax.Array, batch: Batch) -> Metrics:
        c, x_BSD = self.c, constrain(self.final_norm(x_BSD), "batch", "seq", "residual")
        what = self.kernel(), x_BSD, batch.targets, batch.weights
        return in_chunks(self.project, *what, z_loss=c.z_loss, mib=c.loss_chunk_mib)


def table(embedding: nnx.Embed, rows: str | None) -> jax.Array:
    """Returns the vectors of an embedding, whole along D: XLA replicates a lookup in a table cut both ways.

    (`nnx.Embed` itself would compute in the dtype that it was made with.)
    """
    return constrain(embedding.embedding[...], rows, "residual")


def attention_of(c: TransformerConfig, seq_len: int, dtype: str) -> str:
    """Returns which implementation of attention is taken, or raises ConfigError if it cannot serve."""
    shapes = dict(seq_len=seq_len, head_dim=c.head_size, dtype=dtype)
    return choose(c.attention_impl, **shapes, softcap=c.attention_softcap)[1]


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

    # Where all layers are of one kind, it is known while tracing.
    kinds = c.is_local
    mixed = bool(kinds.any() and not kinds.all())

    def run(layer, x_BSD, batch, attend):
        is_local = layer["is_local"] if mixed else bool(kinds.all())
        return block.bind(layer)(x_BSD, positions_of(batch), is_local, attend)

    def plain(layer, x_BSD, batch):
        how = dict(segments_BS=batch.segments, implementation=c.attention_impl)
        return run(layer, x_BSD, batch, partial(attention, **how))

    def cached(layer, x_BSD, batch, cache, past):
        """`cache` holds keys and values of this layer, (B, T, G, K) each."""

        def attend(q_BSHK, *new, **options):
            nonlocal cache
            cache = tuple(
                constrain(
                    jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), past.start, 1),
                    *("batch", None, "kv_heads", "head_dim"),
                )
                for old, x in zip(cache, new, strict=True)
            )
            segments = batch.segments, past.segments_BT
            name = while_generating(c.attention_impl, q_BSHK.shape[1], cache[0].shape[1])
            how = dict(start=past.start, implementation=name)
            return attention(q_BSHK, *cache, *segments, **how, **options)

        return run(layer, x_BSD, batch, attend), cache

    def empty_cache(rows, length, dtype):
        shape = (c.num_layers, rows, length, c.num_kv_heads, c.head_size)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def init(key):
        outer_key, layers_key = jax.random.split(key)
        return {**outer.init(outer_key), "layers": init_layers(layers_key)}

    return base.Model(
        init=init,
        axes={**outer.axes, "layers": layer_axes},
        embed=lambda params, batch: outer.bind(params).embed(batch),
        block=plain,
        head=lambda params, x_BSD, batch: outer.bind(params).loss(x_BSD, batch),
        constants={"is_local": kinds} if mixed else {},
        empty_cache=empty_cache,
        cached_block=cached,
        logits=lambda params, x_BSD: outer.bind(params).logits(x_BSD),
        flops_per_token=lambda seq_len: flops_per_token(c, seq_len),
        attention=partial(attention_of, c),
    )


# So that the keys of a config are checked by name and type before anything is built.
build.__signature__ = inspect.signature(TransformerConfig)
