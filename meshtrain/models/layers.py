"""The pieces of a decoder block: Flax layers whose parameters carry logical axis names.

Plain single-device maths. Each layer computes in the dtype of its parameters and input; norms and
softmax widen to float32 by themselves.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.parallel.sharding import constrain

# B batch, S sequence, D model, H heads, G key/value heads, K head dim, F feed-forward


def normal_initializer(std: float) -> nnx.Initializer:
    """Draws from nearly a normal distribution of this standard deviation, cut off at 3.46 times it.

    The sum of four 16-bit uniform integers, then one multiplication: no rounding depends on how XLA
    compiles it, so the same key gives the same bits on every mesh. (Those of `jax.random.normal`
    differ in the last place between shards of different shapes, jax 0.12.)
    """
    sigma = ((2**32 - 1) / 3) ** 0.5  # of the sum: four times the variance (2^32 - 1) / 12

    def init(key, shape, dtype=jnp.float32):
        bits = jax.random.bits(key, (2, *shape), jnp.uint32)
        total = ((bits >> 16) + (bits & 0xFFFF)).astype(jnp.int32).sum(0) - 2 * 65535
        return (total.astype(jnp.float32) * jnp.float32(std / sigma)).astype(dtype)

    return init


def dense(
    rngs: nnx.Rngs, dims_in, dims_out, *, axes, bias: bool, scale: float = 1.0
) -> nnx.LinearGeneral:
    """A linear map from the trailing `dims_in` to `dims_out`, initialised to keep variance x `scale`^2."""
    num_in = len(dims_in) if isinstance(dims_in, tuple) else 1
    return nnx.LinearGeneral(
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
        rngs=rngs,
    )


def flat_dot_general(x, kernel, dimension_numbers, **options):
    """`lax.dot_general` with the batch dims of `x` made one.

    The gradient of the kernel then contracts one dim; over two, XLA transposes both operands first,
    which on CPU made the backward pass of a feed-forward layer 2.5 times slower.
    """
    ((contracted, kernel_contracted), no_batch) = dimension_numbers
    lead = x.shape[: contracted[0]]
    flat = x.reshape(-1, *x.shape[contracted[0] :])
    numbers = ((tuple(range(1, flat.ndim)), kernel_contracted), no_batch)
    out = jax.lax.dot_general(flat, kernel, numbers, **options)
    return out.reshape(*lead, *out.shape[1:])


def embedding(rngs: nnx.Rngs, num: int, dim: int, *, axes) -> nnx.Embed:
    """A table of `num` vectors, standard deviation 0.02 as in GPT-2."""
    init = normal_initializer(0.02)
    return nnx.Embed(
        num, dim, embedding_init=init, embedding_metadata={"out_sharding": axes}, rngs=rngs
    )


class RMSNorm1p(nnx.Module):
    """RMSNorm that multiplies by 1 + scale, as Gemma's: its scale starts at zero."""

    def __init__(self, dim: int, *, epsilon: float, scale_metadata: dict):
        self.scale = nnx.Param(jnp.zeros(dim), **scale_metadata)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        unit = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + self.epsilon)
        scale = 1 + self.scale[...].astype(wide.dtype)
        return (unit * scale[(None,) * (x.ndim - 1)]).astype(x.dtype)


def norm(
    rngs: nnx.Rngs, kind: str, dim: int, *, epsilon: float, bias: bool = False, over: str = "embed"
) -> nnx.Module:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dim, called `over`."""
    names = {"out_sharding": (over,)}
    if kind == "rms":
        return nnx.RMSNorm(dim, epsilon=epsilon, scale_metadata=names, rngs=rngs)
    if kind == "rms_1p":
        return RMSNorm1p(dim, epsilon=epsilon, scale_metadata=names)
    return nnx.LayerNorm(
        dim,
        epsilon=epsilon,
        use_bias=bias,
        use_fast_variance=False,
        scale_metadata=names,
        bias_metadata=names if bias else {},
        rngs=rngs,
    )


def frequencies(head_dim: int, theta: float, scaling: tuple = ()) -> np.ndarray:
    """Returns rope's angles per position, theta^(-2k/K) for each pair k of K = `head_dim` (arXiv 2104.09864).

    `scaling` stretches them for longer sequences: ("linear", factor) all alike (arXiv 2306.15595), or
    ("llama3", factor, low, high, length) those with fewer than `low` turns in `length` positions, none
    with more than `high`, and in between by degrees (Llama 3.1, arXiv 2407.21783).
    """
    frequency_k = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if not scaling:
        return frequency_k
    kind, factor, *rest = scaling
    if kind == "linear":
        return frequency_k / factor
    low, high, length = rest
    turns_k = length * frequency_k / (2 * np.pi)
    kept_k = np.clip((turns_k - low) / (high - low), 0, 1)
    return frequency_k * (kept_k + (1 - kept_k) / factor)


def rope(x_BSHK: jax.Array, positions_BS: jax.Array, frequency_k: jax.Array) -> jax.Array:
    """Rotates each pair (k, k + K/2) by position * frequency (RoFormer, arXiv 2104.09864)."""
    half = x_BSHK.shape[-1] // 2
    wide = jnp.promote_types(x_BSHK.dtype, jnp.float32)
    frequency_k = jnp.asarray(frequency_k, wide)
    angle_BS1k = positions_BS[:, :, None, None].astype(wide) * frequency_k[None, None, None, :]
    sin_BS1k, cos_BS1k = jnp.sin(angle_BS1k), jnp.cos(angle_BS1k)
    a_BSHk, b_BSHk = x_BSHK[..., :half], x_BSHK[..., half:]
    rotated = jnp.concatenate(
        [a_BSHk * cos_BS1k - b_BSHk * sin_BS1k, b_BSHk * cos_BS1k + a_BSHk * sin_BS1k], axis=-1
    )
    return rotated.astype(x_BSHK.dtype)


# Of queries, keys and values: (q_BSHK, k_BSGK, v_BSGK, scale=, softcap=, window=) -> out_BSHK. Who calls
# the layers says what is attended to: the same row while training, what is cached while generating.
Attend = Callable[..., jax.Array]
EVERYTHING = 2**30  # positions; more than any window


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, c, rngs: nnx.Rngs):
        self.c = c
        H, G = (c.num_heads, c.head_size), (c.num_kv_heads, c.head_size)
        inward = dict(bias=c.bias or c.qkv_bias)
        self.query = dense(rngs, c.d_model, H, axes=("embed", "heads", "head_dim"), **inward)
        self.key = dense(rngs, c.d_model, G, axes=("embed", "kv_heads", "head_dim"), **inward)
        self.value = dense(rngs, c.d_model, G, axes=("embed", "kv_heads", "head_dim"), **inward)
        out = ("heads", "head_dim", "embed")
        self.out = dense(rngs, H, c.d_model, axes=out, bias=c.bias, scale=c.residual_scale)
        of_heads = dict(epsilon=c.norm_epsilon, over="head_dim")
        self.query_norm = norm(rngs, c.norm, c.head_size, **of_heads) if c.qk_norm else None
        self.key_norm = norm(rngs, c.norm, c.head_size, **of_heads) if c.qk_norm else None

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, is_local: jax.Array | bool, attend: Attend
    ) -> jax.Array:
        c = self.c
        q_BSHK = constrain(self.query(x_BSD), "batch", "seq", "heads", "head_dim")
        k_BSGK = constrain(self.key(x_BSD), "batch", "seq", "kv_heads", "head_dim")
        v_BSGK = constrain(self.value(x_BSD), "batch", "seq", "kv_heads", "head_dim")
        if c.qk_norm:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if c.positions == "rope":
            frequency_k = _either(is_local, c.local_frequencies, c.frequencies)
            q_BSHK = rope(q_BSHK, positions_BS, frequency_k)
            k_BSGK = rope(k_BSGK, positions_BS, frequency_k)
        window = None if is_local is False else _either(is_local, c.window, EVERYTHING)
        options = dict(scale=c.query_scale, softcap=c.attention_softcap, window=window)
        out_BSHK = checkpoint_name(attend(q_BSHK, k_BSGK, v_BSGK, **options), "attention")
        return self.out(constrain(out_BSHK, "batch", "seq", "heads", "head_dim"))


def _either(choice: jax.Array | bool, first, second):
    if isinstance(choice, bool):
        return first if choice else second
    return jnp.where(choice, first, second)


class MLP(nnx.Module):
    """Feed-forward: SwiGLU or GeGLU (arXiv 2002.05202), or, for GPT-2, GELU; GELU in its tanh form."""

    def __init__(self, c, rngs: nnx.Rngs):
        inward = ("embed", "mlp")
        self.gate = dense(rngs, c.d_model, c.d_ff, axes=inward, bias=c.bias) if c.gated else None
        self.gate_by = jax.nn.silu if c.mlp == "swiglu" else jax.nn.gelu
        self.up = dense(rngs, c.d_model, c.d_ff, axes=inward, bias=c.bias)
        self.down = dense(
            rngs, c.d_ff, c.d_model, axes=("mlp", "embed"), bias=c.bias, scale=c.residual_scale
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        up_BSF = self.up(x_BSD)
        hidden_BSF = (
            jax.nn.gelu(up_BSF) if self.gate is None else self.gate_by(self.gate(x_BSD)) * up_BSF
        )
        hidden_BSF = checkpoint_name(constrain(hidden_BSF, "batch", "seq", "mlp"), "mlp")
        return self.down(hidden_BSF)


class Block(nnx.Module):
    """One pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With post_norm each branch's result passes through a norm too before it is added (Gemma 2).
    """

    def __init__(self, c, rngs: nnx.Rngs):
        def make():
            return norm(rngs, c.norm, c.d_model, epsilon=c.norm_epsilon, bias=c.bias)

        self.attention_norm = make()
        self.attention = Attention(c, rngs)
        self.attention_post_norm = make() if c.post_norm else None
        self.mlp_norm = make()
        self.mlp = MLP(c, rngs)
        self.mlp_post_norm = make() if c.post_norm else None

    def __call__(
        self, x_BSD: jax.Array, positions_BS: jax.Array, is_local: jax.Array | bool, attend: Attend
    ) -> jax.Array:
        residual = ("batch", "residual_seq", "residual")
        new_BSD = self.attention(self.attention_norm(x_BSD), positions_BS, is_local, attend)
        if self.attention_post_norm is not None:
            new_BSD = self.attention_post_norm(new_BSD)
        x_BSD = constrain(x_BSD + new_BSD, *residual)
        new_BSD = self.mlp(self.mlp_norm(x_BSD))
        if self.mlp_post_norm is not None:
            new_BSD = self.mlp_post_norm(new_BSD)
        return constrain(x_BSD + new_BSD, *residual)
