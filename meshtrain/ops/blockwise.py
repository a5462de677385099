"""Blockwise causal attention (FlashAttention-2, arXiv 2307.08691): memory linear in the length.

Scores are computed for one block of queries and one block of keys at a time, and recomputed in the
backward pass. Blocks of keys that no query sees (in the future, or before the window) are skipped.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), G key/value heads, R query heads per key/value head,
# K head dim, V of values, N blocks, s and t positions within a block; ... dims that queries and
# keys share, such as B

BLOCK = 256

# (probabilities, positions of queries, positions of keys) -> probabilities:
# ops.dropout.OfAttention, a pytree
Dropout = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Visibility(NamedTuple):
    """The keys that a query sees: at most window - 1 positions before it, in its segment."""

    # Position of query 0, if key 0 has position 0: (), or an array of the dims after B in "...".
    start: jax.Array
    start_range: tuple[jax.Array, jax.Array]  # (), the smallest and the largest start
    window: jax.Array  # () int32, in positions, the query's own included
    segments_s: jax.Array  # (N, B or 1, ..., s) int32
    segments_t: jax.Array  # (N, B or 1, ..., t) int32
    # Dropout of probabilities, and for its masks the position in the row of query 0, like `start`.
    dropout: Dropout | None = None
    query_start: jax.Array | None = None


# A softmax over the keys seen so far, of all queries: the largest score (N, ..., R s), the sum of
# exponentials (N, ..., R s), and the output that is not yet divided by the sum (N, ..., R s, V).
Softmax = tuple[jax.Array, jax.Array, jax.Array]


def attention(
    q_BSHK,
    k_BTGK,
    v_BTGV,
    segments_BS,
    segments_BT,
    *,
    start,
    scale,
    softcap,
    window,
    block=0,
    dropout=None,
    sinks_H=None,
) -> jax.Array:
    """Returns the attention (B, S, H, V) of `ops.attention.attention`; `scale` has no default."""
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    if segments_BS is None:
        segments_BS, segments_BT = jnp.zeros((1, S), jnp.int32), jnp.zeros((1, T), jnp.int32)
    s, t = (min(block or BLOCK, length) for length in (S, T))
    window = T if window is None else window
    R = H // G
    q = _blocks(q_BSHK.reshape(B, S, G, R, K), s, "bnsgrk->nbgrsk").reshape(-1, B, G, R * s, K)
    k, v = (_blocks(x, t, "bntgk->nbgtk") for x in (k_BTGK, v_BTGV))
    segments_s = _blocks(segments_BS, s, "bns->nbs")
    segments_t = _blocks(segments_BT, t, "bnt->nbt")
    start = jnp.int32(start)
    visibility = Visibility(
        start=start,
        start_range=(start, start),
        window=jnp.int32(window),
        segments_s=segments_s,
        segments_t=segments_t,
        dropout=dropout,
        query_start=start,
    )
    sinks = None if sinks_H is None else sinks_of_queries(sinks_H, q, s)
    out = _attention(scale, softcap, q, k, v, visibility, sinks)
    out = out.reshape(-1, B, G, R, s, out.shape[-1])
    return jnp.einsum("nbgrsv->bnsgrv", out).reshape(B, -1, H, out.shape[-1])[:, :S]


def _blocks(x: jax.Array, size: int, order: str) -> jax.Array:
    """Splits dim 1 into blocks, the last padded with zeros; transposes by the einsum `order`."""
    padding = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    return jnp.einsum(order, x.reshape(x.shape[0], -1, size, *x.shape[2:]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, softcap, q, k, v, visibility, sinks):
    return _forward(scale, softcap, q, k, v, visibility, sinks)[0]


def _forward(scale, softcap, q, k, v, visibility, sinks):
    """q is (N, B, G, R s, K), k (N, B, G, t, K), v (N, B, G, t, V), sinks (N, B, G, R s)."""
    softmax = add_keys(scale, softcap, no_keys(q, v.shape[-1], sinks), q, k, v, visibility)
    out, log_z = finish(softmax, q.dtype)
    return out, (q, k, v, visibility, sinks, out, log_z)


def _backward(scale, softcap, residuals, grad_out):
    q, k, v, visibility, sinks, out, log_z = residuals
    zeros = jnp.zeros(k.shape, log_z.dtype), jnp.zeros(v.shape, log_z.dtype)
    row_dots = row_dot(out, grad_out, log_z.dtype)
    seen = log_z, row_dots, grad_out
    grad_q, grad_k, grad_v = gradients(scale, softcap, q, k, v, visibility, seen, zeros)
    grad_sinks = None if sinks is None else gradient_of_sinks(sinks, log_z, row_dots)
    grads = grad_q.astype(q.dtype), grad_k.astype(k.dtype), grad_v.astype(v.dtype)
    return *grads, None, grad_sinks


_attention.defvjp(_forward, _backward)


def no_keys(q: jax.Array, value_size: int, sinks: jax.Array | None = None) -> Softmax:
    """Returns the softmax of queries (N, ..., R s, K) before any key, for values of these dims.

    With `sinks` (N, ..., R s), the softmax of a key that has them as scores, and the value 0.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    no_values = jnp.zeros((*q.shape[:-1], value_size), dtype)
    if sinks is not None:
        return sinks.astype(dtype), jnp.ones(q.shape[:-1], dtype), no_values
    return jnp.full(q.shape[:-1], jnp.finfo(dtype).min), jnp.zeros(q.shape[:-1], dtype), no_values


def sinks_of_queries(sinks_H: jax.Array, q: jax.Array, s: int) -> jax.Array:
    """Returns the sink of each query (N, ..., G, R s, K): (N, ..., G, R s)."""
    G = q.shape[-3]
    sinks = jnp.repeat(sinks_H.reshape(G, -1), s, axis=1)
    return jnp.broadcast_to(sinks[(None,) * (q.ndim - 3)], q.shape[:-1])


def gradient_of_sinks(sinks: jax.Array, log_z: jax.Array, row_dots: jax.Array) -> jax.Array:
    """Returns the gradient of the sink of each query; arguments as in `gradients`."""
    return (-jnp.exp(sinks - log_z) * row_dots).astype(sinks.dtype)


def add_keys(
    scale: float,
    softcap: float,
    softmax: Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
) -> Softmax:
    """Returns the softmax of queries q (N, ..., R s, K) with the keys k (N, ..., t, K) added."""

    def query_block(block):
        i, softmax = block

        def add_key_block(j, carry):
            old_max, total, out = carry
            scores, _ = _scores(scale, softcap, q[i], k[j], visibility, i, j)
            new_max = jnp.maximum(old_max, scores.max(-1))
            rescale, exp = jnp.exp(old_max - new_max), jnp.exp(scores - new_max[..., None])
            kept = _dropped(visibility, exp, i, j).astype(v.dtype)
            exp_v = _dot("...qt,...tk->...qk", kept, v[j], out.dtype)
            return new_max, total * rescale + exp.sum(-1), out * rescale[..., None] + exp_v

        low, high = _visible_key_blocks(i, q, k, visibility)
        return jax.lax.fori_loop(low, high, add_key_block, softmax)

    return jax.lax.map(query_block, (jnp.arange(len(q)), softmax))


def finish(softmax: Softmax, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the output and log(sum of exponentials of the scores) of each query."""
    max_score, total, out = softmax
    return (out / total[..., None]).astype(dtype), max_score + jnp.log(total)


def row_dot(out: jax.Array, grad_out: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the sum over keys of probability times its gradient, for each query."""
    return _dot("...qk,...qk->...q", out, grad_out, dtype)


def gradients(
    scale: float,
    softcap: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    seen: tuple[jax.Array, jax.Array, jax.Array],
    sums: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of q from these keys alone, and `sums` plus the gradients of k and v.

    `seen` has log_z and row_dot over all keys that the queries see, and the gradient of their
    output.
    """
    log_z, row_dots, grad_out = seen
    dtype = log_z.dtype

    def query_block(grads, i):
        def add_key_block(j, grads):
            grad_q, grad_k, grad_v = grads
            scores, softcap_slope = _scores(scale, softcap, q[i], k[j], visibility, i, j)
            probs = jnp.exp(scores - log_z[i][..., None])
            kept = _dropped(visibility, probs, i, j).astype(v.dtype)
            new_v = _dot("...qt,...qk->...tk", kept, grad_out[i], dtype)
            grad_probs = _dot("...qk,...tk->...qt", grad_out[i], v[j], dtype)
            grad_probs = _dropped(visibility, grad_probs, i, j)
            grad_scores = probs * (grad_probs - row_dots[i][..., None]) * softcap_slope * scale
            grad_scores = grad_scores.astype(q.dtype)
            grad_q += _dot("...qt,...tk->...qk", grad_scores, k[j], dtype)
            new_k = _dot("...qt,...qk->...tk", grad_scores, q[i], dtype)
            return grad_q, grad_k.at[j].add(new_k), grad_v.at[j].add(new_v)

        start = (jnp.zeros(q.shape[1:], dtype), *grads)
        low, high = _visible_key_blocks(i, q, k, visibility)
        grad_q, *grads = jax.lax.fori_loop(low, high, add_key_block, start)
        return tuple(grads), grad_q

    (grad_k, grad_v), grad_q = jax.lax.scan(query_block, sums, jnp.arange(len(q)))
    return grad_q, grad_k, grad_v


def _dot(equation: str, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _visible_key_blocks(i, q, k, visibility) -> tuple[jax.Array, jax.Array]:
    """Returns the key blocks (first, last + 1) that query block `i` sees, for any start."""
    (smallest, largest), window = visibility.start_range, visibility.window
    s, t = visibility.segments_s.shape[-1], k.shape[-2]
    first, last = smallest + i * s - window + 1, largest + (i + 1) * s - 1
    return jnp.maximum(0, first // t), jnp.clip(last // t + 1, 0, len(k))


def _dropped(visibility: Visibility, probs: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the probabilities (..., R s, t) of a block after dropout."""
    if visibility.dropout is None:
        return probs
    s, t = visibility.segments_s.shape[-1], visibility.segments_t.shape[-1]
    query_s = visibility.query_start[..., None] + _offsets(visibility, i, s)
    key_t = (visibility.query_start - visibility.start)[..., None] + _offsets(visibility, j, t)
    of_heads = probs.reshape(*probs.shape[:-2], -1, s, t)
    return visibility.dropout(of_heads, query_s, key_t).reshape(probs.shape)


def _offsets(visibility: Visibility, block: jax.Array, size: int) -> jax.Array:
    return (block * size + jnp.arange(size)).reshape(*[1] * visibility.start.ndim, size)


def _scores(scale, softcap, q, k, visibility, i, j) -> tuple[jax.Array, jax.Array | float]:
    """Returns the masked scores of a block (..., R s, t), and the derivative of the soft cap."""
    start, _, window, segments_s, segments_t, *_ = visibility
    s, t = segments_s.shape[-1], segments_t.shape[-1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * _dot("...qk,...tk->...qt", q, k, dtype)
    softcap_slope = 1.0
    if softcap:
        tanh = jnp.tanh(scores / softcap)
        scores, softcap_slope = softcap * tanh, 1 - tanh**2
    distance = i * s + jnp.arange(s)[:, None] - j * t - jnp.arange(t)[None, :]
    distance = start[..., None, None] + distance.reshape(*[1] * start.ndim, s, t)
    mask = ((distance >= 0) & (distance < window))[None]
    mask = mask & (segments_s[i][..., :, None] == segments_t[j][..., None, :])
    # exp(masked - max) is 0 once the query has seen a key. Before that it is 1, and `rescale`
    # cancels it when the query sees its first key.
    of_heads = scores.reshape(*scores.shape[:-2], -1, s, t)
    of_heads = jnp.where(mask[..., None, None, :, :], of_heads, jnp.finfo(dtype).min / 2)
    return of_heads.reshape(scores.shape), softcap_slope
