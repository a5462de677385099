"""Blockwise causal attention: memory linear in the sequence length (FlashAttention-2, arXiv 2307.08691).

Scores are computed for one block of queries and one block of keys at a time, and recomputed in the
backward pass. Blocks of keys that no query sees (in the future, or before the window) are skipped.
"""

from functools import partial

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), G key/value heads, R query heads per key/value head,
# K head dim, N blocks, s and t positions within a block

BLOCK = 256


def attention(
    q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BT, *, start, scale, softcap, window, block=0
) -> jax.Array:
    """Returns the attention (B, S, H, K) that `ops.attention.attention` defines; `scale` has no default."""
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
    visibility = jnp.int32(start), jnp.int32(window), *segments
    out = _attention(scale, softcap, q, k, v, visibility)
    out = out.reshape(-1, B, G, R, s, K)
    return jnp.einsum("nbgrsk->bnsgrk", out).reshape(B, -1, H, K)[:, :S]


def _blocks(x: jax.Array, size: int, order: str) -> jax.Array:
    """Splits dim 1 into blocks, the last padded with zeros, and transposes by the einsum `order`."""
    padding = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    return jnp.einsum(order, x.reshape(x.shape[0], -1, size, *x.shape[2:]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, softcap, q, k, v, visibility):
    return _forward(scale, softcap, q, k, v, visibility)[0]


def _forward(scale, softcap, q, k, v, visibility):
    """q is (N, B, G, R s, K), k and v (N, B, G, t, K); `visibility` has start, window and blocks of segments."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=dtype)

    def query_block(i):
        def add_key_block(j, carry):
            old_max, total, out = carry
            scores, _ = _scores(scale, softcap, q[i], k[j], visibility, i, j)
            new_max = jnp.maximum(old_max, scores.max(-1))
            rescale, exp = jnp.exp(old_max - new_max), jnp.exp(scores - new_max[..., None])
            exp_v = dot("bgqt,bgtk->bgqk", exp.astype(v.dtype), v[j])
            return new_max, total * rescale + exp.sum(-1), out * rescale[..., None] + exp_v

        shape = q.shape[1:]
        zeros = jnp.zeros(shape[:-1], dtype), jnp.zeros(shape, dtype)
        start = jnp.full(shape[:-1], jnp.finfo(dtype).min), *zeros
        low, high = _visible_key_blocks(i, q, k, visibility)
        max_score, total, out = jax.lax.fori_loop(low, high, add_key_block, start)
        return (out / total[..., None]).astype(q.dtype), max_score + jnp.log(total)

    out, log_z = jax.lax.map(query_block, jnp.arange(len(q)))
    return out, (q, k, v, visibility, out, log_z)


def _backward(scale, softcap, residuals, grad_out):
    q, k, v, visibility, out, log_z = residuals
    dtype = log_z.dtype
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    row_dot = dot("nbgqk,nbgqk->nbgq", out, grad_out)

    def query_block(grads, i):
        def add_key_block(j, grads):
            grad_q, grad_k, grad_v = grads
            scores, softcap_slope = _scores(scale, softcap, q[i], k[j], visibility, i, j)
            probs = jnp.exp(scores - log_z[i][..., None])
            new_v = dot("bgqt,bgqk->bgtk", probs.astype(v.dtype), grad_out[i])
            grad_probs = dot("bgqk,bgtk->bgqt", grad_out[i], v[j])
            grad_scores = probs * (grad_probs - row_dot[i][..., None]) * softcap_slope * scale
            grad_scores = grad_scores.astype(q.dtype)
            grad_q += dot("bgqt,bgtk->bgqk", grad_scores, k[j])
            new_k = dot("bgqt,bgqk->bgtk", grad_scores, q[i])
            return grad_q, grad_k.at[j].add(new_k), grad_v.at[j].add(new_v)

        start = (jnp.zeros(q.shape[1:], dtype), *grads)
        low, high = _visible_key_blocks(i, q, k, visibility)
        grad_q, *grads = jax.lax.fori_loop(low, high, add_key_block, start)
        return tuple(grads), grad_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    (grad_k, grad_v), grad_q = jax.lax.scan(query_block, zeros, jnp.arange(len(q)))
    return grad_q, grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _visible_key_blocks(i, q, k, visibility) -> tuple[jax.Array, jax.Array]:
    """Returns the range (first, last + 1) of the key blocks that query block `i` sees."""
    start, window, segments, _ = visibility
    s, t = segments.shape[-1], k.shape[-2]
    first, last = start + i * s - window + 1, start + (i + 1) * s - 1
    return jnp.maximum(0, first // t), jnp.clip(last // t + 1, 0, len(k))


def _scores(scale, softcap, q, k, visibility, i, j) -> tuple[jax.Array, jax.Array | float]:
    """Returns the masked scores of a block (B, G, R s, t), and the derivative of the soft cap."""
    start, window, segments_s, segments_t = visibility
    s, t = segments_s.shape[-1], segments_t.shape[-1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("bgqk,bgtk->bgqt", q, k, preferred_element_type=dtype)
    softcap_slope = 1.0
    if softcap:
        tanh = jnp.tanh(scores / softcap)
        scores, softcap_slope = softcap * tanh, 1 - tanh**2
    distance = start + i * s + jnp.arange(s)[:, None] - j * t - jnp.arange(t)[None, :]
    mask = ((distance >= 0) & (distance < window))[None]
    mask = mask & (segments_s[i][:, :, None] == segments_t[j][:, None, :])
    # exp(masked - max) is 0 once the query has seen a key. Before that it is 1, and `rescale` cancels it
    # when the query sees its first key.
    scores_BGRst = scores.reshape(*scores.shape[:2], -1, s, t)
    scores_BGRst = jnp.where(mask[:, None, None], scores_BGRst, jnp.finfo(dtype).min / 2)
    return scores_BGRst.reshape(scores.shape), softcap_slope
