"""The layers of a decoder block: Flax modules whose parameters carry logical axis names.

Plain single-device maths. Each layer computes in the dtype of its parameters and input; norms, rope
and softmax compute in float32 or wider.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.data.source import Batch
from meshtrain.models.base import CacheState
from meshtrain.models.rope import rope
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import kernels
from meshtrain.ops.feed_forward import add_bias, clamped_swiglu, gated_product, gelu
from meshtrain.ops.norms import normalise, normalise_and_pass
from meshtrain.parallel.remat import MLP_GATE, MLP_UP, recomputed
from meshtrain.parallel.sharding import (
    constrain,
    gather_sequence,
    gathered,
    num_shards,
    with_active_rules,
)

# B batch, S sequence, T positions of the cache, D model, H heads, G key/value heads, K head dim,
# F feed-forward

# Numbers of the masks of dropout in a layer, see ops/dropout.py.
OF_PROBABILITIES, AFTER_ATTENTION, AFTER_MLP = range(3)

# (q_BSHK, k_BSGK, v_BSGV, scale=, softcap=, window=, is_local=) -> out_BSHV. The caller of the
# layers chooses it: attention within a row in training, over the key/value cache in generation.
Attend = Callable[..., jax.Array]


class AttentionMetadata(NamedTuple):
    """The tokens and the layer that a call of attention is about."""

    positions_BS: jax.Array
    row_length: int | jax.Array  # tokens of a row; with a key/value cache, of those so far
    is_local: jax.Array | bool
    has_rope: jax.Array | bool


class Block(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With post_norm, the output of each branch is also normalised before it is added (Gemma 2);
    without pre_norm, only its output is (OLMo 2).
    `make_mlp` returns an MLP, or a layer that is also called with the batch, and also returns what
    it adds to the loss of a token (B, S).
    """

    def __init__(
        self, c: TransformerConfig, rngs: nnx.Rngs, make_attention: Callable, make_mlp: Callable
    ):
        def make_norm():
            return norm(rngs, c.norm, c.d_model, epsilon=c.norm_epsilon, bias=c.has_norm_bias)

        self.branch_scale = c.branch_scale
        # The order of these calls decides which random numbers each layer gets.
        self.attention_norm = make_norm() if c.pre_norm else None
        self.attention = make_attention(rngs)
        self.attention_post_norm = make_norm() if c.post_norm else None
        self.mlp_norm = make_norm() if c.pre_norm else None
        self.mlp = make_mlp(rngs)
        self.mlp_post_norm = make_norm() if c.post_norm else None

    def __call__(
        self,
        x_BSD: jax.Array,
        metadata: AttentionMetadata,
        attend: Attend,
        drop: Callable[..., jax.Array],
        batch: Batch,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the activations (B, S, D), and what the layer adds to the loss, None with an MLP.

        `drop` is (x_BSD, site=) -> x_BSD: dropout with the keys of this layer.
        """
        norm, input_BSD, x_BSD = _forked(self.attention_norm, x_BSD)
        branch_BSD = self.attention(norm, input_BSD, metadata, attend)
        add = partial(self._add, self.attention_post_norm, partial(drop, site=AFTER_ATTENTION))
        x_BSD = recomputed(add, x_BSD, branch_BSD)

        loss_BS = None
        norm, input_BSD, x_BSD = _forked(self.mlp_norm, x_BSD)
        if isinstance(self.mlp, MLP):
            branch_BSD = self.mlp(norm, input_BSD)
        else:
            branch_BSD, loss_BS = self.mlp(norm, input_BSD, batch)
        add = partial(self._add, self.mlp_post_norm, partial(drop, site=AFTER_MLP))
        return recomputed(add, x_BSD, branch_BSD), loss_BS

    def _add(self, post_norm: nnx.Module | None, drop: Callable, x_BSD, branch_BSD) -> jax.Array:
        branch_BSD = branch_BSD if post_norm is None else post_norm(branch_BSD)
        if self.branch_scale != 1:
            branch_BSD *= jnp.asarray(self.branch_scale, branch_BSD.dtype)
        return constrain(x_BSD + drop(branch_BSD), "batch", "residual_seq", "residual")


def _forked(norm: nnx.Module | None, x_BSD: jax.Array) -> tuple[Callable, jax.Array, jax.Array]:
    """Returns the norm and the input of a branch, and the residual x that passes it by.

    With the kernel of the backward pass the norm is already applied, as that kernel adds the
    gradients of branch and residual. Then the branch keeps its normalised input.
    """
    if norm is None:
        return lambda x_BSD: x_BSD, x_BSD, x_BSD
    if kernels.uses_norm_kernel(x_BSD):
        y_BSD, x_BSD = norm.computed_by(normalise_and_pass, x_BSD)
        return lambda y_BSD: y_BSD, y_BSD, x_BSD
    return norm, x_BSD, x_BSD


# ---- attention ----


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.c = c
        D, H, G = c.d_model, (c.num_heads, c.head_size), (c.num_kv_heads, c.head_size)
        into_heads, out_of_heads = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
        into_kv_heads = ("embed", "kv_heads", "head_dim")
        bias = c.bias or c.qkv_bias
        self.query = dense(rngs, D, H, axes=into_heads, bias=bias)
        self.key = dense(rngs, D, G, axes=into_kv_heads, bias=bias)
        self.value = dense(rngs, D, G, axes=into_kv_heads, bias=bias)
        self.out = dense(
            rngs, H, D, axes=out_of_heads, bias=c.bias or c.out_bias, scale=c.residual_scale
        )
        self.sinks = Sinks(c.num_heads) if c.attention_sinks else None
        self.query_norm = _head_norm(c, rngs, H, "heads") if c.qk_norm else None
        self.key_norm = _head_norm(c, rngs, G, "kv_heads") if c.qk_norm else None

    def __call__(
        self,
        norm: Callable[[jax.Array], jax.Array],
        x_BSD: jax.Array,
        metadata: AttentionMetadata,
        attend: Attend,
    ) -> jax.Array:
        """Returns the attention of `norm(x)`."""
        q_BSHK, k_BSGK, v_BSGK = recomputed(lambda x_BSD: self._project(norm(x_BSD)), x_BSD)
        q_BSHK, k_BSGK = recomputed(partial(self._rotate, metadata), q_BSHK, k_BSGK)
        attend = with_scores(attend, self.c, metadata.is_local)
        if self.sinks is not None:
            attend = partial(attend, sinks_H=self.sinks())
        return recomputed(self._combine, attend(q_BSHK, k_BSGK, v_BSGK))

    def _project(self, x_BSD):
        x_BSD = gather_sequence(x_BSD)
        q_BSHK = constrain(self.query(x_BSD), "batch", "seq", "heads", "head_dim")
        k_BSGK = constrain(self.key(x_BSD), "batch", "seq", "kv_heads", "head_dim")
        v_BSGK = constrain(self.value(x_BSD), "batch", "seq", "kv_heads", "head_dim")
        return q_BSHK, k_BSGK, v_BSGK

    def _rotate(self, metadata, q_BSHK, k_BSGK):
        if self.c.qk_norm:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if metadata.has_rope is not False:
            frequency_k, factor = self.c.rotation(
                metadata.row_length, metadata.is_local, metadata.has_rope
            )
            rotate = partial(
                rope,
                positions_BS=metadata.positions_BS,
                frequency_k=frequency_k,
                factor=factor,
                interleaved=self.c.rope_interleaved,
            )
            q_BSHK, k_BSGK = rotate(q_BSHK), rotate(k_BSGK)
        if self.c.query_growth:
            q_BSHK = query_growth(self.c, q_BSHK, metadata.positions_BS)
        return q_BSHK, k_BSGK

    def _combine(self, out_BSHK):
        return self.out(constrain(out_BSHK, "batch", "seq", "heads", "head_dim"))


def query_growth(c: TransformerConfig, q_BSHK: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Returns queries that grow with the logarithm of their positions (B or 1, S) (Ministral 3).

    Those before `query_growth_length` stay as they are.
    """
    dtype = jnp.promote_types(q_BSHK.dtype, jnp.float32)
    num_lengths_BS = (positions_BS // c.query_growth_length).astype(dtype)
    factor_BS = 1 + c.query_growth * jnp.log1p(num_lengths_BS)
    return q_BSHK * factor_BS[:, :, None, None].astype(q_BSHK.dtype)


class Sinks(nnx.Module):
    """A logit for each head, which only enlarges the denominator of its softmax (gpt-oss).

    It is a key with this score and the value 0: arXiv 2309.17453, section 3.3.
    """

    def __init__(self, num_heads: int):
        self.bias = nnx.Param(jnp.zeros(num_heads), out_sharding=("heads",))

    def __call__(self) -> jax.Array:
        sinks_H = gathered(self.bias[...], ("heads",), ("heads",))
        # In float32, because the gradient is a sum over all queries.
        return sinks_H.astype(jnp.promote_types(sinks_H.dtype, jnp.float32))


def _head_norm(
    c: TransformerConfig, rngs: nnx.Rngs, shape: tuple[int, int], heads: str
) -> nnx.Module:
    if c.qk_norm_heads == "all":
        names = (heads, "head_dim")
        return NormOfAllHeads(c.norm, shape, epsilon=c.norm_epsilon, names=names)
    return norm(rngs, c.norm, c.head_size, epsilon=c.norm_epsilon, name="head_dim")


def with_scores(attend: Attend, c: TransformerConfig, is_local: jax.Array | bool) -> Attend:
    """Returns `attend` with the scale, the soft cap and the window of a layer's scores."""
    return partial(
        attend,
        scale=c.score_scale,
        softcap=c.attention_softcap,
        window=c.window or None,
        is_local=is_local,
    )


class CachedAttention:
    """Attention over a cache: keys and values, each (B, T, G, K), to which a call adds its own.

    A cache of one array holds latent keys, which are the values as well. `attend` is as
    `ops.attention.attention`.
    """

    def __init__(
        self, attend: Callable[..., jax.Array], cache: Any, batch: Batch, past: CacheState
    ):
        self.attend, self.cache, self.batch, self.past = attend, cache, batch, past

    def __call__(self, q_BSHK: jax.Array, *new: jax.Array, **options: Any) -> jax.Array:
        """Adds the keys and values `new` to the cache; returns the attention of queries to it."""
        start = self.past.start
        cache = []
        for old, x in zip(self.cache, new, strict=True):
            updated = jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), start, 1)
            cache.append(constrain(updated, "batch", None, "kv_heads", "head_dim"))
        self.cache = tuple(cache)
        return self.attend(
            q_BSHK,
            self.cache[0],
            self.cache[-1],
            self.batch.segments,
            self.past.segments_BT,
            start=start,
            **options,
        )


# ---- feed-forward ----


class MLP(nnx.Module):
    """Feed-forward: SwiGLU, GeGLU (arXiv 2002.05202), or GELU as in GPT-2, by tanh."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs, size: int):
        D, F, up, down = c.d_model, size, ("embed", "mlp"), ("mlp", "embed")
        self.gate = dense(rngs, D, F, axes=up, bias=c.bias) if c.gated else None
        self.gated = gated_activation(c)
        self.up = dense(rngs, D, F, axes=up, bias=c.bias)
        self.down = dense(rngs, F, D, axes=down, bias=c.bias, scale=c.residual_scale)

    def __call__(self, norm: Callable[[jax.Array], jax.Array], x_BSD: jax.Array) -> jax.Array:
        """Returns the feed-forward of `norm(x)`."""
        if kernels.are_fused():
            # One region: the gradient of the bias is added in the pass that computes the gradient
            # of the activation. What is kept has names: KEPT in parallel/remat.py.
            return recomputed(lambda x_BSD: self._combine(*self._project(norm(x_BSD))), x_BSD)
        projected = recomputed(lambda x_BSD: self._project(norm(x_BSD)), x_BSD)
        return recomputed(self._combine, *projected)

    def _project(self, x_BSD):
        x_BSD = gather_sequence(x_BSD)
        if self.gate is None:
            return (self.up(x_BSD),)
        return self.up(x_BSD), self.gate(x_BSD)

    def _combine(self, up_BSF, gate_BSF=None):
        if gate_BSF is not None and kernels.are_fused() and not self.down.is_adapted:
            return self._gated_product(up_BSF, gate_BSF)
        hidden_BSF = self._hidden(up_BSF, gate_BSF)
        hidden_BSF = checkpoint_name(constrain(hidden_BSF, "batch", "seq", "mlp"), "mlp")
        return self.down(hidden_BSF)

    def _hidden(self, up_BSF, gate_BSF):
        if gate_BSF is None:
            return gelu(up_BSF) if kernels.are_fused() else jax.nn.gelu(up_BSF)
        if kernels.are_fused():  # then the region would compute both products again
            up_BSF, gate_BSF = checkpoint_name(up_BSF, MLP_UP), checkpoint_name(gate_BSF, MLP_GATE)
        return self.gated(up_BSF, gate_BSF)

    def _gated_product(self, up_BSF, gate_BSF):
        kernel_FD = self.down.kernel[...].astype(up_BSF.dtype)
        product = with_active_rules(_product_of_hidden)
        out_BSD = gated_product(product, self.gated, up_BSF, gate_BSF, kernel_FD)
        return self.down.with_bias(out_BSD)


def gated_activation(c: TransformerConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the hidden activations of a feed-forward as a function of (up, gate)."""
    if c.mlp == "clamped_swiglu":
        return partial(clamped_swiglu, limit=c.glu_limit, slope=c.glu_slope)
    activation = jax.nn.silu if c.mlp == "swiglu" else jax.nn.gelu
    return lambda up, gate: activation(gate) * up


def _product_of_hidden(hidden_BSF: jax.Array, kernel_FD: jax.Array) -> jax.Array:
    hidden_BSF = constrain(hidden_BSF, "batch", "seq", "mlp")
    return flat_dot_general(hidden_BSF, kernel_FD, (((2,), (0,)), ((), ())))


# ---- parts: norms, linear maps, embeddings, initial values ----


def norm(
    rngs: nnx.Rngs, kind: str, dim: int, *, epsilon: float, bias: bool = False, name: str = "embed"
) -> nnx.Module:
    """Returns RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dim.

    `name` is the logical name of that dim.
    """
    names = {"out_sharding": (name,)}

    def promote(arrays, **options):
        # Otherwise XLA on CPU gathers the vectors once for each of their uses.
        x, *vectors = nnx.nn.dtypes.promote_dtype(arrays, **options)
        return x, *(v if v is None else gathered(v, (name,), (None,)) for v in vectors)

    options = dict(promote_dtype=promote, rngs=rngs)
    if kind == "rms":
        return RMSNorm(dim, epsilon=epsilon, scale_metadata=names, **options)
    if kind == "rms_1p":
        return RMSNorm1p(dim, epsilon=epsilon, scale_metadata=names)
    return LayerNorm(
        dim,
        epsilon=epsilon,
        use_bias=bias,
        use_fast_variance=False,
        scale_metadata=names,
        bias_metadata=names if bias else {},
        **options,
    )


class LayerNorm(nnx.LayerNorm):
    """LayerNorm with a scale and, if it has one, a bias."""

    def __call__(self, x: jax.Array) -> jax.Array:
        if not kernels.are_fused():
            return super().__call__(x)
        return self.computed_by(normalise, x)

    def computed_by(self, function: Callable, x: jax.Array) -> Any:
        """Returns the result of a function of ops/norms.py."""
        vectors = (self.scale[...], None if self.bias is None else self.bias[...])
        x, scale, bias = self.promote_dtype((x, *vectors))
        return function(x, scale, bias, True, self.epsilon)


class RMSNorm(nnx.RMSNorm):
    """RMSNorm with a scale."""

    def __call__(self, x: jax.Array) -> jax.Array:
        if not kernels.are_fused():
            return super().__call__(x)
        return self.computed_by(normalise, x)

    def computed_by(self, function: Callable, x: jax.Array) -> Any:
        """Returns the result of a function of ops/norms.py."""
        x, scale = self.promote_dtype((x, self.scale[...]))
        return function(x, scale, None, False, self.epsilon)


class RMSNorm1p(nnx.Module):
    """RMSNorm that multiplies by 1 + scale, as in Gemma; the scale starts at zero."""

    def __init__(self, dim: int, *, epsilon: float, scale_metadata: dict):
        self.scale = nnx.Param(jnp.zeros(dim), **scale_metadata)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        if kernels.are_fused():
            return self.computed_by(normalise, x)
        dtype, x = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normalized = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + self.epsilon)
        scale = 1 + self.scale[...].astype(x.dtype)
        return (normalized * scale[(None,) * (x.ndim - 1)]).astype(dtype)

    def computed_by(self, function: Callable, x: jax.Array) -> Any:
        """Returns the result of a function of ops/norms.py."""
        wide = self.scale[...].astype(jnp.promote_types(x.dtype, jnp.float32))
        return function(x, 1 + wide, None, False, self.epsilon)


class NormOfAllHeads(nnx.Module):
    """A norm over dims H and K of (B, S, H, K) together, as in OLMoE (arXiv 2409.02060)."""

    def __init__(self, kind: str, shape: tuple[int, int], *, epsilon: float, names: tuple):
        initial = jnp.zeros if kind == "rms_1p" else jnp.ones
        self.scale = nnx.Param(initial(shape), out_sharding=names)
        self.kind, self.epsilon, self.names = kind, epsilon, names

    def __call__(self, x_BSHK: jax.Array) -> jax.Array:
        dtype, x = x_BSHK.dtype, x_BSHK.astype(jnp.promote_types(x_BSHK.dtype, jnp.float32))
        scale_HK = gathered(self.scale[...], self.names, (self.names[0], None)).astype(x.dtype)
        scale_HK += self.kind == "rms_1p"
        if kernels.are_fused():
            return normalise(x_BSHK, scale_HK, None, self.kind == "layer", self.epsilon)
        if self.kind == "layer":
            x -= x.mean((-2, -1), keepdims=True)
        x *= jax.lax.rsqrt((x**2).mean((-2, -1), keepdims=True) + self.epsilon)
        return (x * scale_HK[None, None]).astype(dtype)


def dense(
    rngs: nnx.Rngs, dims_in, dims_out, *, axes, bias: bool, scale: float = 1.0
) -> nnx.LinearGeneral:
    """Returns a linear map from the trailing `dims_in` to `dims_out`.

    Initialised so that the variance of the output is `scale`^2 times the variance of the input.
    """
    num_in = len(dims_in) if isinstance(dims_in, tuple) else 1
    return Linear(
        dims_in,
        dims_out,
        axis=tuple(range(-num_in, 0)),
        use_bias=bias,
        dot_general=flat_dot_general,
        kernel_init=normal_initializer(
            scale * math.prod(dims_in if num_in > 1 else (dims_in,)) ** -0.5
        ),
        kernel_metadata={"out_sharding": axes},
        bias_metadata={"out_sharding": axes[num_in:]},
        promote_dtype=_with_wide_bias,
        rngs=rngs,
    )


class Linear(nnx.LinearGeneral):
    """A linear map that adds its bias in float32 or wider: y = (x W + b), rounded once.

    The gradient of the bias, a sum over all tokens, then is in float32 as well. The fused formula
    leaves the addition to the product's kernel, see `add_bias`.
    """

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        dtype = jnp.promote_types(x.dtype, self.kernel.dtype)
        if self.bias is None or self.is_adapted or not kernels.are_fused():
            return super().__call__(x, out_sharding).astype(dtype)
        # A product of two dims, and a bias of one: as an epilogue cuBLAS takes no other.
        num_in = len(self.axis)
        kernel = self.kernel[...].astype(dtype)
        kernel = kernel.reshape(*kernel.shape[:num_in], -1)
        dims = tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in))
        out = self.dot_general(x.astype(dtype), kernel, (dims, ((), ())))
        return self.with_bias(out)

    @property
    def is_adapted(self) -> bool:
        """Whether the layer has an update of low rank, see lora_layer.py."""
        return self.dot_general is not flat_dot_general

    def with_bias(self, out: jax.Array) -> jax.Array:
        """Returns the layer's output from a product (..., output), whose dims are one."""
        if self.bias is None:
            return out
        out = add_bias(out, self.bias[...].reshape(-1))
        return out.reshape(*out.shape[:-1], *self.out_features)


def _with_wide_bias(arrays, **options):
    x, kernel, bias = nnx.nn.dtypes.promote_dtype(arrays, **options)
    if bias is not None:
        bias = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return x, kernel, bias


def flat_dot_general(x, kernel, dimension_numbers, **options):
    """Returns `lax.dot_general(x, kernel)`, computed with the batch dims of `x` flattened into one.

    The gradient of the kernel then contracts one dim. With two, XLA transposes both operands first,
    which on CPU made the backward pass of a feed-forward layer 2.5 times slower. A sequence that is
    sharded, here or between blocks, stays a dim of its own: no sharding describes it once it is
    merged with the batch, so XLA would gather it, or all-reduce instead of reduce-scatter.
    """
    ((contracted, kernel_contracted), no_batch) = dimension_numbers
    if contracted[0] > 1 and num_shards("residual_seq", x.shape[1]) > 1:
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
    lead = x.shape[: contracted[0]]
    flat = x.reshape(-1, *x.shape[contracted[0] :])
    numbers = ((tuple(range(1, flat.ndim)), kernel_contracted), no_batch)
    out = jax.lax.dot_general(flat, kernel, numbers, **options)
    return out.reshape(*lead, *out.shape[1:])


def embedding(rngs: nnx.Rngs, num: int, dim: int, *, axes) -> nnx.Embed:
    """Returns an embedding of `num` vectors with standard deviation 0.02, as in GPT-2."""
    init = normal_initializer(0.02)
    return nnx.Embed(
        num, dim, embedding_init=init, embedding_metadata={"out_sharding": axes}, rngs=rngs
    )


def normal_initializer(std: float) -> nnx.Initializer:
    """Returns an initializer of an approximate normal distribution, bounded at 3.46 `std`.

    It adds four 16-bit uniform integers and multiplies once. No rounding depends on how XLA
    compiles this, so the same key gives the same bits on every mesh. (`jax.random.normal` differs
    in the last bit between shards of different shapes, jax 0.12.)
    """
    # The variance of the sum is four times (2^32 - 1) / 12.
    sum_std = ((2**32 - 1) / 3) ** 0.5

    def init(key, shape, dtype=jnp.float32):
        bits = jax.random.bits(key, (2, *shape), jnp.uint32)
        total = ((bits >> 16) + (bits & 0xFFFF)).astype(jnp.int32).sum(0) - 2 * 65535
        return (total.astype(jnp.float32) * jnp.float32(std / sum_std)).astype(dtype)

    return init
