"""Causal attention block by block, in memory linear in the sequence (FlashAttention-2, arXiv 2307.08691).

Scores are made for a block of queries and a block of keys at a time, and again on the way back; blocks
that nobody sees, in the future or before the window, are passed over.
"""

from functools import partial

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), G key/value heads, R query heads of each, K head dim,
# N blocks, s and t positions of a block

BLOCK = 256


def attention(
    q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BT, *, start, scale, softcap, window, block=0
) -> jax.Array:
    """Returns what `ops.attention.attention` says, (B, S, H, K); `scale` is the number itself."""
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    if segments_BS is None:
        segments_BS, segments_BT = jnp.zeros((1, S), jnp.int32), jnp.zeros((1, T), jnp.int32)
    s, t = (min(block or BLOCK, length) for length in (S, T))
    window = T if window is None else window
    R = H // G
    q = _blocks(q_BSHK.reshape(B, S, G, R, K), s, "bnsgrk->nbgrsk").reshape(-1, B, G, R * s, K)
    k, v = (_blocks(x, t, "bntgk->nbgtk") for x in (k_BTGK, v_BTGK))
    segments = _blocks(segments_BS, s, "bns->nbs"), _blocks(segments_BT, t, "bnt->nbt")
    where = jnp.int32(start), jnp.int32(window), *segments
    out = _attention(scale, softcap, q, k, v, where)
    out = out.reshape(-1, B, G, R, s, K)
    return jnp.einsum("nbgrsk->bnsgrk", out).reshape(B, -1, H, K)[:, :S]


def _blocks(x: jax.Array, size: int, order: str) -> jax.Array:
    """Cuts dim 1 into blocks, and puts them first; what is missing of the last is zeros."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
    return jnp.einsum(order, x.reshape(x.shape[0], -1, size, *x.shape[2:]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, softcap, q, k, v, where):
    return _forward(scale, softcap, q, k, v, where)[0]


def _forward(scale, softcap, q, k, v, where):
    """q is (N, B, G, R s, K), k and v (N, B, G, t, K); `where` is start, window and the segments' blocks."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=wide)

    def of_queries(i):
        def add(j, sums):
            best, total, out = sums
            scores, _ = _scores(scale, softcap, q[i], k[j], where, i, j)
            new = jnp.maximum(best, scores.max(-1))
            shrink, probs = jnp.exp(best - new), jnp.exp(scores - new[..., None])
            mixed = dot("bgqt,bgtk->bgqk", probs.astype(v.dtype), v[j])
            return new, total * shrink + probs.sum(-1), out * shrink[..., None] + mixed

        shape = q.shape[1:]
        zeros = jnp.zeros(shape[:-1], wide), jnp.zeros(shape, wide)
        best = jnp.full(shape[:-1], jnp.finfo(wide).min)
        best, total, out = jax.lax.fori_loop(*_keys_of(i, q, k, where), add, (best, *zeros))
        return (out / total[..., None]).astype(q.dtype), best + jnp.log(total)

    out, log_z = jax.lax.map(of_queries, jnp.arange(len(q)))
    return out, (q, k, v, where, out, log_z)


def _backward(scale, softcap, kept, grad_out):
    q, k, v, where, out, log_z = kept
    wide = log_z.dtype
    dot = partial(jnp.einsum, preferred_element_type=wide)
    inner = dot("nbgqk,nbgqk->nbgq", out, grad_out)

    def of_queries(grads, i):
        def add(j, grads):
            grad_q, grad_k, grad_v = grads
            scores, slope = _scores(scale, softcap, q[i], k[j], where, i, j)
            probs = jnp.exp(scores - log_z[i][..., None])
            new_v = dot("bgqt,bgqk->bgtk", probs.astype(v.dtype), grad_out[i])
            grad_probs = dot("bgqk,bgtk->bgqt", grad_out[i], v[j])
            grad_scores = probs * (grad_probs - inner[i][..., None]) * slope * scale
            grad_scores = grad_scores.astype(q.dtype)
            grad_q += dot("bgqt,bgtk->bgqk", grad_scores, k[j])
            new_k = dot("bgqt,bgqk->bgtk", grad_scores, q[i])
            return grad_q, grad_k.at[j].add(new_k), grad_v.at[j].add(new_v)

        start = (jnp.zeros(q.shape[1:], wide), *grads)
        grad_q, *grads = jax.lax.fori_loop(*_keys_of(i, q, k, where), add, start)
        return tuple(grads), grad_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    (grad_k, grad_v), grad_q = jax.lax.scan(of_queries, zeros, jnp.arange(len(q)))
    return grad_q, grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _keys_of(i, q, k, where) -> tuple[jax.Array, jax.Array]:
    """Returns the first block of keys that a query of block `i` sees, and the one after the last."""
    start, window, segments, _ = where
    s, t = segments.shape[-1], k.shape[-2]
    first, last = start + i * s - window + 1, start + (i + 1) * s - 1
    return jnp.maximum(0, first // t), jnp.clip(last // t + 1, 0, len(k))


def _scores(scale, softcap, q, k, where, i, j) -> tuple[jax.Array, jax.Array | float]:
    """Returns the scores of a block (B, G, R s, t), and their slope in q k scale, which a soft cap bends."""
    start, window, segments_s, segments_t = where
    s, t = segments_s.shape[-1], segments_t.shape[-1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("bgqk,bgtk->bgqt", q, k, preferred_element_type=wide)
    slope = 1.0
    if softcap:
        bent = jnp.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    back = start + i * s + jnp.arange(s)[:, None] - j * t - jnp.arange(t)[None, :]
    seen = ((back >= 0) & (back < window))[None]
    seen = seen & (segments_s[i][:, :, None] == segments_t[j][:, None, :])
    # exp() of it is 0 beside any score; where a query has seen nothing yet, `shrink` undoes it later.
    by_head = scores.reshape(*scores.shape[:2], -1, s, t)
    by_head = jnp.where(seen[:, None, None], by_head, jnp.finfo(wide).min / 2)
    return by_head.reshape(scores.shape), slope
