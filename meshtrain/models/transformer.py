"""Decoder-only transformers: Llama by default; GPT-2, Mistral, Mixtral, Qwen, Gemma by config."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics, weighted
from meshtrain.models import base, mixture
from meshtrain.models.base import FIRST_LAYERS_KEY, LAYER_NUMBER_KEY
from meshtrain.models.flops import WeightCount, count_weights, flops_per_token
from meshtrain.models.latent_attention import LatentAttention
from meshtrain.models.layers import (
    MLP,
    OF_PROBABILITIES,
    Attention,
    AttentionMetadata,
    Block,
    CachedAttention,
    dense,
    embedding,
    flat_dot_general,
    norm,
)
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import kernels
from meshtrain.ops.attention import (
    attention,
    choose_for_context,
    choose_for_generation,
    choose_implementation,
)
from meshtrain.ops.dropout import OfAttention, at_layer, dropout
from meshtrain.ops.embedding import lookup
from meshtrain.ops.losses import chunked_cross_entropy, cross_entropy, fused_cross_entropy
from meshtrain.parallel import context
from meshtrain.parallel.remat import rematerialised
from meshtrain.parallel.sharding import constrain, gathered, num_shards

# B batch, S sequence, T positions of the cache, D model, V padded vocabulary

# Linear layers that patterns such as layers/* leave without an adapter: see Model.named_linears.
ADAPTED_BY_NAME = ("/kv_up", "/router", "/shared_gate")


class EmbeddingAndHead(nnx.Module):
    """All layers outside the blocks: token (and position) embedding, final norm, output head."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.c = c
        self.tokens = embedding(rngs, c.padded_vocab, c.d_model, axes=("vocab", "embed"))
        if c.positions == "learned":
            self.positions = embedding(rngs, c.max_seq_len, c.d_model, axes=(None, "embed"))
        else:
            self.positions = None
        self.final_norm = norm(
            rngs, c.norm, c.d_model, epsilon=c.norm_epsilon, bias=c.has_norm_bias
        )
        if c.tie_embeddings:
            self.output = None
        else:
            head = ("embed", "vocab")
            self.output = dense(rngs, c.d_model, c.padded_vocab, axes=head, bias=False)

    def embed(self, batch: Batch) -> Any:
        """Returns the activations (B, S, D).

        Of a mixture of experts also the loss of its layers (B, S), which is still 0.
        """
        # The lookup is unsharded in S: otherwise XLA would all-gather a table sharded in V.
        x_BSD = look_up(self.tokens, "vocab", batch.tokens)
        x_BSD = constrain(x_BSD, "batch", "seq", "residual")
        if self.c.embed_scale != 1:
            x_BSD *= jnp.asarray(self.c.embed_scale, x_BSD.dtype)
        if self.positions is not None:
            x_BSD += look_up(self.positions, None, positions_of(batch))
        x_BSD = dropout(x_BSD, batch, rate=self.c.dropout, site=0)
        x_BSD = constrain(x_BSD, "batch", "residual_seq", "residual")
        if not self.c.num_experts:
            return x_BSD
        loss_BS = jnp.zeros(batch.tokens.shape, jnp.promote_types(x_BSD.dtype, jnp.float32))
        return x_BSD, constrain(loss_BS, "batch", "seq")

    def logits(self, x: Any) -> jax.Array:
        x_BSD = x[0] if self.c.num_experts else x
        return self.project(self.kernel(), self._head_input(x_BSD))

    def _head_input(self, x_BSD: jax.Array) -> jax.Array:
        """Returns what the kernel of the head multiplies: it has fewer numbers than the logits."""
        x_BSD = self.final_norm(x_BSD)
        if self.c.logit_scale != 1:
            x_BSD *= jnp.asarray(self.c.logit_scale, x_BSD.dtype)
        return x_BSD

    def kernel(self) -> jax.Array:
        """Returns the kernel of the output head (D, V), unsharded in D."""
        if self.output is None:
            table = self.tokens.embedding[...]
            return gathered(table, ("vocab", "embed"), ("vocab", "residual")).T
        return gathered(self.output.kernel[...], ("embed", "vocab"), ("residual", "vocab"))

    def project(self, kernel_DV: jax.Array, x_BSD: jax.Array) -> jax.Array:
        """Returns the logits (B, S, V) of activations that are normalised and scaled."""
        c = self.c
        logits_BSV = self.raw_logits(kernel_DV, x_BSD)
        if c.logit_softcap:
            # The loss needs float32: a tanh in bfloat16 rounds the logits three times more.
            logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
            logits_BSV = c.logit_softcap * jnp.tanh(logits_BSV / c.logit_softcap)
        if logits_BSV.shape[-1] == c.vocab_size:
            return logits_BSV
        is_token_V = jnp.arange(logits_BSV.shape[-1]) < c.vocab_size  # the rest is padding
        return jnp.where(is_token_V[None, None], logits_BSV, jnp.finfo(logits_BSV.dtype).min)

    def raw_logits(self, kernel_DV: jax.Array, x_BSD: jax.Array) -> jax.Array:
        """Returns the logits (B, S, V) without the soft cap; the padding has any finite numbers."""
        logits_BSV = flat_dot_general(x_BSD, kernel_DV, (((2,), (0,)), ((), ())))
        return constrain(logits_BSV, "batch", "seq", "vocab")

    def loss(self, x: Any, batch: Batch) -> Metrics:
        """Returns the sums of the loss, including that of the layers of a mixture of experts."""
        c = self.c
        x_BSD, loss_BS = x if c.num_experts else (x, None)
        x_BSD = constrain(self._head_input(x_BSD), "batch", "seq", "residual")
        project = self.project
        loss_of = partial(cross_entropy, z_loss=c.z_loss)
        if kernels.are_fused():
            project = self.raw_logits
            loss_of = partial(
                fused_cross_entropy,
                z_loss=c.z_loss,
                vocab_size=c.vocab_size,
                softcap=c.logit_softcap,
            )
        metrics = chunked_cross_entropy(
            project,
            self.kernel(),
            x_BSD,
            batch.targets,
            batch.weights,
            loss_of=loss_of,
            mib=c.loss_chunk_mib,
        )
        if loss_BS is None:
            return metrics
        extra = {"cross_entropy": metrics.loss} | metrics.extra
        layer_loss = weighted(loss_BS, batch.weights).loss
        return dataclasses.replace(metrics, loss=metrics.loss + layer_loss, extra=extra)


def look_up(embedding: nnx.Embed, rows: str | None, index_BS: jax.Array) -> jax.Array:
    """Returns rows (B, S, D) of a table.

    `rows` is the logical name of its first dim. The table is unsharded in D: if both dims are
    sharded, XLA replicates the lookup. (`nnx.Embed` would look up in the dtype of its init.)
    """
    return lookup(embedding.embedding[...], index_BS, names=(rows, "residual"))


def describe_attention(c: TransformerConfig, seq_len: int, dtype: str, packed: bool) -> str:
    """Returns the attention implementation as text to log; raises ConfigError if unsupported."""
    choose = choose_implementation
    if num_shards("seq", seq_len) > 1:
        choose = partial(
            choose_for_context,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            window=c.local_window,
        )
    _, text = choose(
        c.attention_impl,
        seq_len=seq_len,
        head_dim=max(c.query_size, c.value_size),
        dtype=dtype,
        softcap=c.attention_softcap,
        sinks=c.attention_sinks,
        packed=packed,
        dropout=c.dropout > 0,
    )
    return text


def positions_of(batch: Batch) -> jax.Array:
    """Returns positions (B or 1, S): those of the batch if rows are packed, else in the row."""
    if batch.positions is not None:
        return batch.positions
    return context.positions(batch.tokens.shape[1])[None, :]


def check_batch(c: TransformerConfig, batch: Batch) -> None:
    """Raises ConfigError for tokens, targets or positions outside the model's tables.

    jax would clamp them to the last row. A target of weight 0 may be any number. Raises ConfigError
    for a batch of another type too.
    """
    if not isinstance(batch, Batch):
        names = f" of {', '.join(map(repr, batch))}" if isinstance(batch, dict) else ""
        raise ConfigError(
            f"data: a batch is a {type(batch).__name__}{names}, and the transformer reads a "
            f"meshtrain.Batch (tokens, targets, weights); make one of each row or batch: "
            f".map(lambda row: meshtrain.Batch(**row))"
        )
    vocab_size = f"model.vocab_size={c.vocab_size}; set it above the largest token"
    _check_range("token", batch.tokens, c.vocab_size, vocab_size)
    targets = np.where(np.asarray(batch.weights) != 0, batch.targets, 0)
    _check_range("target", targets, c.vocab_size, f"{vocab_size}, or give the target weight 0")
    if c.positions == "learned":
        positions = batch.positions
        if positions is None:
            positions = np.arange(np.shape(batch.tokens)[1])[None]
        length = f"model.max_seq_len={c.max_seq_len}; use shorter rows, or model.positions='rope'"
        _check_range("position", positions, c.max_seq_len, length)


def _check_range(name: str, numbers: Any, size: int, what: str) -> None:
    """Raises ConfigError unless all numbers (B, S) are from 0 to below `size`."""
    numbers = np.asarray(numbers)
    is_outside = (numbers < 0) | (numbers >= size)
    if is_outside.any():
        row, place = np.argwhere(is_outside)[0]
        raise ConfigError(
            f"data: a batch holds {name} {numbers[row, place]} (in row {row}, at {place}), outside "
            f"{what}"
        )


class Decoder:
    """The functions of a `Model`: embedding and head, the stack, and dense layers before it.

    Only the stack is split into pipeline stages. The first layers of a mixture, which may be dense,
    belong to the embedding.
    """

    def __init__(self, c: TransformerConfig):
        self.c = c
        self.outer = base.functional(lambda rngs: EmbeddingAndHead(c, rngs))
        # Dense layers are all layers, those before a stack with experts, or none.
        self.num_first = c.first_dense_layers
        if self.num_first or not c.num_experts:
            self.dense = _block(c, lambda rngs: MLP(c, rngs, c.d_ff))
        self.block = _block(c, partial(mixture.Mixture, c)) if c.num_experts else self.dense
        self.is_local_first, self.is_local = np.split(c.is_local, [self.num_first])
        self.has_rope_first, self.has_rope = np.split(c.has_rope, [self.num_first])
        # What differs between the layers of the stack is a constant per layer; else it is static.
        self.constants = {
            name: values
            for name, values in {"is_local": self.is_local, "has_rope": self.has_rope}.items()
            if values.any() and not values.all()
        }
        self.init_layers, layer_axes = base.stack(self.block, len(self.is_local))
        self.axes = {**self.outer.axes, "layers": layer_axes}
        if self.num_first:
            self.axes[FIRST_LAYERS_KEY] = {str(n): self.dense.axes for n in range(self.num_first)}

    def linears(self) -> dict[str, int]:
        """Returns `Model.linears`."""
        layers = {"layers": self.block}
        for n in range(self.num_first):
            layers[f"{FIRST_LAYERS_KEY}/{n}"] = self.dense
        linears = {}
        for prefix, layer in layers.items():
            for path, num_in in layer.linears.items():
                linears[f"{prefix}/{path}"] = num_in
        return linears

    def named_linears(self) -> tuple[str, ...]:
        """Returns `Model.named_linears`."""
        return tuple(path for path in self.linears() if path.endswith(ADAPTED_BY_NAME))

    def expert_linears(self) -> tuple[str, ...]:
        """Returns `Model.expert_linears`."""
        if not self.c.num_experts:
            return ()
        names = ("gate", "up", "down") if self.c.gated else ("up", "down")
        return tuple(f"layers/mlp/{name}" for name in names)

    def count_weights(self) -> WeightCount:
        """Returns the number of weights in the matrix products of all layers."""
        used, unused = (len(self.is_local) * num for num in count_weights(self.c, self.block))
        if self.num_first:
            used += self.num_first * count_weights(self.c, self.dense).used
        return WeightCount(used, unused)

    def init(self, key: jax.Array) -> base.Params:
        outer_key, layers_key = jax.random.split(key)
        params = {**self.outer.init(outer_key), "layers": self.init_layers(layers_key)}
        if self.num_first:
            keys = [jax.random.fold_in(outer_key, n) for n in range(self.num_first)]
            params[FIRST_LAYERS_KEY] = {str(n): self.dense.init(key) for n, key in enumerate(keys)}
        return params

    def embed(self, params: base.Params, batch: Batch) -> Any:
        """Returns the activations after the embedding and the dense layers."""
        x = self.outer.bind(params).embed(batch)
        for number in range(self.num_first):

            def run(layer, x, number=number):
                layer_batch = at_layer(batch, number)
                attend = self._attend_within(layer_batch)
                return self._run_dense_layer(number, layer, x, layer_batch, attend)

            # A few layers: to compute them again costs little, whatever train.remat is.
            x = rematerialised(run, "full")(params[FIRST_LAYERS_KEY][str(number)], x)
        return x

    def cached_embed(
        self, params: base.Params, batch: Batch, caches: Any, past: base.CacheState
    ) -> tuple[Any, Any]:
        """Returns what `embed` does, and the updated caches of the dense layers, one by one."""
        x, updated = self.outer.bind(params).embed(batch), []
        for number, cache in enumerate(caches):
            attend = CachedAttention(self._attend_over_cache, cache, batch, past)
            layer = params[FIRST_LAYERS_KEY][str(number)]
            x = self._run_dense_layer(number, layer, x, batch, attend, start=past.start)
            updated.append(attend.cache)
        return x, updated

    def run_block(self, layer: base.Params, x: Any, batch: Batch) -> Any:
        if self.c.dropout:
            batch = at_layer(batch, layer[LAYER_NUMBER_KEY])
        return self._run_stack_layer(layer, x, batch, self._attend_within(batch))

    def cached_block(
        self, layer: base.Params, x: Any, batch: Batch, cache: Any, past: base.CacheState
    ) -> tuple[Any, Any]:
        """Returns what `run_block` does, and the updated cache of the layer."""
        attend = CachedAttention(self._attend_over_cache, cache, batch, past)
        return self._run_stack_layer(layer, x, batch, attend, start=past.start), attend.cache

    def empty_cache(self, rows: int, length: int, dtype: Any) -> tuple[Any, Any]:
        """Returns the caches of the first layers, one by one, and that of the stack."""

        def zeros(*lead: int) -> tuple[jax.Array, ...]:
            shapes = [(*lead, rows, length, *dims) for dims in self.c.cached_dims]
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        return [zeros() for _ in range(self.num_first)], zeros(len(self.is_local))

    def _attend_within(self, batch: Batch) -> Callable:
        """Returns the attention of training: within the rows of the batch."""
        c = self.c
        masks = None
        if c.dropout and batch.row_keys is not None:
            masks = OfAttention(batch.row_keys, c.dropout, OF_PROBABILITIES)
        return partial(
            attention,
            segments_BS=batch.segments,
            implementation=c.attention_impl,
            dropout=masks,
        )

    def _attend_over_cache(self, q_BSHK, k_BTGK, *args, **options):
        name = choose_for_generation(self.c.attention_impl, q_BSHK.shape[1], k_BTGK.shape[1])
        return attention(q_BSHK, k_BTGK, *args, implementation=name, **options)

    def _run_stack_layer(self, layer, x, batch, attend, *, start=0):
        """Runs a layer of the stack; `start` is the number of tokens before those of x."""
        x_BSD, loss_BS = x if self.c.num_experts else (x, None)
        kinds = {"is_local": bool(self.is_local.all()), "has_rope": bool(self.has_rope.all())}
        kinds |= {name: layer[name] for name in self.constants}
        metadata = AttentionMetadata(positions_of(batch), start + x_BSD.shape[1], **kinds)
        block = self.block.bind(layer)
        x_BSD, added_BS = block(x_BSD, metadata, attend, self._drop(batch), batch)
        return (x_BSD, loss_BS + added_BS) if self.c.num_experts else x_BSD

    def _run_dense_layer(self, number, layer, x, batch, attend, *, start=0):
        """Runs one of the dense layers before a stack with experts."""
        x_BSD, loss_BS = x
        metadata = AttentionMetadata(
            positions_of(batch),
            start + x_BSD.shape[1],
            is_local=bool(self.is_local_first[number]),
            has_rope=bool(self.has_rope_first[number]),
        )
        block = self.dense.bind(layer)
        x_BSD, _ = block(x_BSD, metadata, attend, self._drop(batch), batch)
        return x_BSD, loss_BS

    def _drop(self, batch: Batch) -> Callable:
        """Returns dropout with the keys of a layer's batch: (x_BSD, site=) -> x_BSD."""
        return partial(dropout, batch=batch, rate=self.c.dropout)


def _block(c: TransformerConfig, make_mlp: Callable) -> base.Functional:
    make_attention = partial(LatentAttention if c.kv_lora_rank else Attention, c)
    return base.functional(lambda rngs: Block(c, rngs, make_attention, make_mlp))


def build(**config) -> base.Model:
    """Returns the model of a `model` section; raises ConfigError if its values are invalid."""
    c = TransformerConfig(**config)
    decoder = Decoder(c)
    weights = decoder.count_weights()
    constants: dict[str, np.ndarray] = {**decoder.constants}
    if c.dropout:
        constants[LAYER_NUMBER_KEY] = np.arange(c.first_dense_layers, c.num_layers, dtype=np.int32)
    return base.Model(
        init=decoder.init,
        axes=decoder.axes,
        embed=decoder.embed,
        block=decoder.run_block,
        head=lambda params, x, batch: decoder.outer.bind(params).loss(x, batch),
        constants=constants,
        empty_cache=decoder.empty_cache,
        cached_embed=decoder.cached_embed,
        cached_block=decoder.cached_block,
        logits=lambda params, x: decoder.outer.bind(params).logits(x),
        flops_per_token=partial(flops_per_token, c, weights.used),
        attention=partial(describe_attention, c),
        saved_names=("attention", "mlp"),
        shards_sequences=True,
        measure=partial(mixture.measure, c) if c.num_experts else None,
        check_batch=partial(check_batch, c),
        num_inactive=weights.unused,
        linears=decoder.linears(),
        named_linears=decoder.named_linears(),
        expert_linears=decoder.expert_linears(),
        row_keys=c.dropout > 0,
    )


# This signature lets the config check the names and types of its keys before the build.
build.__dict__["__signature__"] = inspect.signature(TransformerConfig)
