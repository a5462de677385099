"""Attention of sharded sequences with a fused kernel: one call for the keys of each device.

The methods "ring" and "gather" of parallel/context.py, as in context_attention.py, but the kernel
computes the pairs of chunks. At home, in round 0, one causal call has the early and the late chunk
as a row of 2 L tokens. In round r a device i has the keys of device i - r, and one call without a
mask has two pairs of chunks as rows of its batch, with no key that is not seen:

  the late queries, and the early keys
  the early queries and the early keys if i >= r, otherwise the late queries and the late keys

Outputs merge by their log-sum-exp. In auto sharding: the dim c of the devices is merged with the
batch of a call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.ops import chunk_kernels, cudnn
from meshtrain.parallel import context, sharding
from meshtrain.parallel.remat import ATTENTION

# B batch, S sequence, H heads = G key/value heads x R, K head dim, V of values; c devices, each
# with an early and a late chunk of L tokens: (c, B, 2, L, H, K). Of queries the log-sum-exp is
# (c, B, 2, H, L).

HALVES = 2  # the dim of early and late chunks


class Options(NamedTuple):
    kernel: str
    scale: float
    num_devices: int
    gathers: bool  # whether keys and values are gathered, or travel
    # Mesh axes. Not looked up when they are used: a pipeline traces the backward pass where other
    # rules are active.
    seq_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]


def attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGV: jax.Array,
    segments_BS: jax.Array | None,
    *,
    method: str,
    scale: float,
    kernel: str,
) -> jax.Array:
    """Returns the attention (B, S, H, V) of sequences in zigzag order, by "ring" or "gather".

    `kernel` as for chunk_kernels.of. What the kernel returns has the name ATTENTION for
    `train.remat`: output and log-sum-exp, merged.
    """
    S, H = q_BSHK.shape[1:3]
    V = v_BSGV.shape[-1]
    spec = sharding.active_spec(q_BSHK.shape, "batch", "seq", "heads", "head_dim")
    batch_axes, seq_axes, head_axes, _ = map(sharding.axes_of, spec)
    options = Options(
        kernel=kernel,
        scale=scale,
        num_devices=sharding.num_shards("seq", S),
        gathers=method == "gather",
        seq_axes=seq_axes,
        batch_axes=batch_axes,
        head_axes=head_axes,
    )
    # cuDNN needs equal sharding of all inputs.
    repeats = context.kv_repeats(H, k_BSGK.shape[2], sharding.num_devices(head_axes))
    if repeats > 1:
        k_BSGK, v_BSGV = (jnp.repeat(x, repeats, axis=2) for x in (k_BSGK, v_BSGV))
    q, k, v = cudnn.with_one_head_dim(q_BSHK, k_BSGK, v_BSGV)
    if segments_BS is not None:
        # An int32 for each token: sorted by each device for itself.
        segments_BS = sharding.constrain(segments_BS, "batch", None)
        q, k, v = cudnn.append_segment_dims(q, k, v, segments_BS, scale)
    return _attention(options, q, k, v)[..., :V]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q_BSHK, k_BSGK, v_BSGK):
    return _forward(options, q_BSHK, k_BSGK, v_BSGK)[0]


def _forward(options, q_BSHK, k_BSGK, v_BSGK):
    forward = partial(chunk_kernels.of(options.kernel).forward, scale=options.scale)
    q, k, v = (_split(options, x) for x in (q_BSHK, k_BSGK, v_BSGK))
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    def visit(softmaxes, keys, number):
        early, late = softmaxes
        is_before = _is_before(options, number)
        inputs = _queries_of_pairs(is_before, q), *(_keys_of_pairs(is_before, x) for x in keys)
        out, log_z = forward(*(_as_rows(options, x) for x in inputs), causal=False)
        out, log_z = _from_rows(options, q, out).astype(dtype), _from_rows(options, q, log_z)
        first, second = zip(_halves(out), _halves(log_z), strict=True)
        late = _merge(late, first)
        merged = _merge(_choose(is_before, early, late), second)
        return _choose(is_before, merged, early), _choose(is_before, late, merged)

    out, log_z = forward(*(_as_long_rows(options, x) for x in (q, k, v)), causal=True)
    out = _from_rows(options, q, out).astype(dtype)
    log_z = _log_z_from_long_rows(options, q, log_z)
    softmaxes = tuple(zip(_halves(out), _halves(log_z), strict=True))
    (out_early, log_z_early), (out_late, log_z_late) = _rounds(options, visit, softmaxes, (k, v))
    out = jnp.stack([out_early, out_late], HALVES).astype(q.dtype)
    log_z = jnp.stack([log_z_early, log_z_late], HALVES)
    # Without both names the results of each call would be kept, c times as much (`name_of`).
    out_BSHK = checkpoint_name(_join(options, out), ATTENTION)
    log_z = checkpoint_name(log_z, ATTENTION)
    return out_BSHK, (q_BSHK, k_BSGK, v_BSGK, out_BSHK, log_z)


def _backward(options, residuals, grad_BSHK):
    # Without a barrier XLA would keep what the forward pass fetched, instead of fetching it again.
    residuals, grad_BSHK = jax.lax.optimization_barrier((residuals, grad_BSHK))
    *arrays, log_z = residuals
    backward = partial(chunk_kernels.of(options.kernel).backward, scale=options.scale)
    q, k, v, out, grad = (_split(options, x) for x in (*arrays, grad_BSHK))
    dtype = log_z.dtype

    def visit(grads, keys, number):
        grad_q, sums = grads
        is_before = _is_before(options, number)
        k_pairs, v_pairs = (_as_rows(options, _keys_of_pairs(is_before, x)) for x in keys)
        q_pairs, out_pairs, log_z_pairs, grad_pairs = (
            _as_rows(options, _queries_of_pairs(is_before, x)) for x in (q, out, log_z, grad)
        )
        new_q, *new = backward(
            q_pairs, k_pairs, v_pairs, out_pairs, log_z_pairs, grad_pairs, causal=False
        )
        first, second = _halves(_from_rows(options, q, new_q).astype(dtype))
        to_early, to_late = _to_half(is_before, second)
        grad_q += jnp.stack([to_early, first + to_late], HALVES)
        new_sums = []
        for x in new:
            first, second = _halves(_from_rows(options, k, x).astype(dtype))
            to_early, to_late = _to_half(is_before, second)
            new_sums.append(jnp.stack([first + to_early, to_late], HALVES))
        if sums is None:
            return grad_q, new_sums
        # They arrive while this round computes.
        return grad_q, jax.tree.map(jnp.add, _to_next_device(options, sums), new_sums)

    q_rows, k_rows, v_rows, out_rows, grad_rows = (
        _as_long_rows(options, x) for x in (q, k, v, out, grad)
    )
    log_z_rows = _log_z_to_long_rows(options, log_z)
    grad_q, *at_home = backward(
        q_rows, k_rows, v_rows, out_rows, log_z_rows, grad_rows, causal=True
    )
    grad_q = _from_rows(options, q, grad_q).astype(dtype)
    grad_q, sums = _rounds(options, visit, (grad_q, None), (k, v))
    grad_k, grad_v = (
        _from_rows(options, k, x).astype(dtype) + arrived
        for x, arrived in zip(at_home, _to_next_device(options, sums), strict=True)
    )
    inputs = zip((grad_q, grad_k, grad_v), arrays, strict=False)
    return tuple(_join(options, grad.astype(x.dtype)) for grad, x in inputs)


_attention.defvjp(_forward, _backward)


# ---- rounds 1 to c - 1: the keys of one other device at a time ----


def _rounds(options: Options, visit: Callable, carry: Any, keys: Any) -> Any:
    """Returns `carry` after c - 1 visits: in round r device i has the keys of device i - r.

    The first visit is outside of the loop, since the sums of the gradients of keys start with it.
    Keys are fetched before a visit that does not need them, so that they can arrive while it
    computes.
    """
    c = options.num_devices
    if options.gathers:
        keys_of_all = [_shard(options, x, gathered=True) for x in keys]

        def with_gathered(carry, number):
            home = (jnp.arange(c) - number) % c
            fetched = [jnp.take(x, home, axis=0, mode="clip") for x in keys_of_all]
            return visit(carry, [_shard(options, x) for x in fetched], number), None

        carry, _ = with_gathered(carry, 1)
        return jax.lax.scan(with_gathered, carry, jnp.arange(2, c))[0]

    def with_travelling(carry, number):
        results, keys = carry
        following = _to_next_device(options, keys)
        return (visit(results, keys, number), following), None

    first = _to_next_device(options, keys)
    if c == 2:
        return visit(carry, first, 1)
    start, _ = with_travelling((carry, first), 1)
    (carry, keys), _ = jax.lax.scan(with_travelling, start, jnp.arange(2, c - 1))
    return visit(carry, keys, c - 1)


def _to_next_device(options: Options, tree: Any) -> Any:
    return [_shard(options, jnp.roll(x, 1, axis=0)) for x in tree]  # collective-permutes


# ---- the pairs of chunks of a round ----


def _is_before(options: Options, number: jax.Array | int) -> jax.Array:
    """Returns for each device whether the keys of round `number` are of a device before, (c,)."""
    return jnp.arange(options.num_devices) >= number


def _choose(is_true: jax.Array, if_true: Any, if_false: Any) -> Any:
    """Returns, on each device, one of two trees of arrays (c, ...)."""

    def pick(a, b):
        return jnp.where(is_true.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, if_true, if_false)


def _to_half(is_before: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the second pair adds to the early and to the late chunk."""
    zeros = jnp.zeros_like(x)
    return _choose(is_before, x, zeros), _choose(is_before, zeros, x)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[:, :, 0], x[:, :, 1]


def _queries_of_pairs(is_before: jax.Array, x: jax.Array) -> jax.Array:
    early, late = _halves(x)
    return jnp.stack([late, _choose(is_before, early, late)], HALVES)


def _keys_of_pairs(is_before: jax.Array, x: jax.Array) -> jax.Array:
    early, late = _halves(x)
    return jnp.stack([early, _choose(is_before, early, late)], HALVES)


def _merge(a, b):
    """Returns output (..., L, H, K) and log-sum-exp (..., H, L) of two sets of keys together."""
    (out_a, log_z_a), (out_b, log_z_b) = a, b
    # The weights add up to 1 also where a code of documents makes log_z large (ops/cudnn.py).
    weight = jnp.swapaxes(jax.nn.sigmoid(log_z_a - log_z_b), -1, -2)[..., None]
    return weight * out_a + (1 - weight) * out_b, jnp.logaddexp(log_z_a, log_z_b)


# ---- layouts: chunks on their devices, and rows of a call ----


def _split(options: Options, x_BSHK: jax.Array) -> jax.Array:
    """Returns (c, B, 2, L, H, K)."""
    B, S = x_BSHK.shape[:2]
    c = options.num_devices
    x = x_BSHK.reshape(B, c, 2, S // (2 * c), *x_BSHK.shape[2:])
    return _shard(options, jnp.moveaxis(x, 1, 0))


def _join(options: Options, x: jax.Array) -> jax.Array:
    """Returns (B, S, H, K): the inverse of `_split`."""
    x = jnp.moveaxis(x, 0, 1)
    x_BSHK = x.reshape(x.shape[0], -1, *x.shape[4:])
    return sharding.shard_over(x_BSHK, options.batch_axes, options.seq_axes, options.head_axes)


def _as_long_rows(options: Options, x: jax.Array) -> jax.Array:
    """Returns (c B, 2 L, H, K): a row has the early and the late chunk of a device."""
    c, B, _, L = x.shape[:4]
    return _shard_rows(options, x.reshape(c * B, 2 * L, *x.shape[4:]), heads=2)


def _as_rows(options: Options, x: jax.Array) -> jax.Array:
    """Returns (c B 2, L, H, K), or (c B 2, H, L) of the log-sum-exp."""
    c, B = x.shape[:2]
    return _shard_rows(options, x.reshape(c * B * 2, *x.shape[3:]), heads=2 if x.ndim == 6 else 1)


def _from_rows(options: Options, like: jax.Array, x: jax.Array) -> jax.Array:
    """Returns (c, B, 2, ...) from either kind of rows; `like` is an array (c, B, 2, L, ...)."""
    c, B, _, L = like.shape[:4]
    inner = x.shape[1:] if x.ndim == 3 else (L, *x.shape[2:])
    return _shard(options, x.reshape(c, B, 2, *inner))


def _log_z_from_long_rows(options: Options, like: jax.Array, x: jax.Array) -> jax.Array:
    """Returns (c, B, 2, H, L) from (c B, H, 2 L)."""
    c, B, _, L, H = like.shape[:5]
    return _shard(options, jnp.swapaxes(x.reshape(c, B, H, 2, L), 2, 3))


def _log_z_to_long_rows(options: Options, x: jax.Array) -> jax.Array:
    c, B, _, H, L = x.shape
    return _shard_rows(options, jnp.swapaxes(x, 2, 3).reshape(c * B, H, 2 * L), heads=1)


def _shard(options: Options, x: jax.Array, *, gathered: bool = False) -> jax.Array:
    """Shards (c, B, 2, L, H, K), or the log-sum-exp (c, B, 2, H, L); or gathers it over c."""
    seq_axes = () if gathered else options.seq_axes
    before_heads = [()] * (2 if x.ndim == 6 else 1)
    return sharding.shard_over(x, seq_axes, options.batch_axes, *before_heads, options.head_axes)


def _shard_rows(options: Options, x: jax.Array, *, heads: int) -> jax.Array:
    """Shards the rows of a call, and its dim `heads`."""
    rows = *options.seq_axes, *options.batch_axes
    return sharding.shard_over(x, rows, *[()] * (heads - 1), options.head_axes)
