"""Causal attention behind one signature."""

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), H heads = G key/value heads x R, K head dim


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BS: jax.Array | None,
    segments_BT: jax.Array | None = None,
    *,
    start: jax.Array | int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    window: jax.Array | int | None = None,
) -> jax.Array:
    """Returns softmax(q k scale) v over the earlier positions of the same segment, (B, S, H, K).

    H is a multiple of G: each key/value head serves R = H / G query heads (grouped-query attention,
    arXiv 2305.13245). `segments_BS` None means that each row is one segment. Where keys were computed
    before, query s stands at key `start` + s, and `segments_BT` are those of the keys.
    `scale` 0: 1/sqrt(K). `softcap` c > 0: scores become c tanh(score / c) (Gemma 2, arXiv 2408.00118).
    `window`: only so many positions are seen, the query's own included (Mistral, arXiv 2310.06825).
    The softmax is computed in float32 or wider; `jax.nn.dot_product_attention` narrows float64, so
    nothing could be proven with it.
    """
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K) * (scale or K**-0.5)
    wide = jnp.promote_types(q_BSHK.dtype, jnp.float32)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, preferred_element_type=wide)
    if softcap:
        scores_BGRST = softcap * jnp.tanh(scores_BGRST / softcap)
    back_ST = start + jnp.arange(S)[:, None] - jnp.arange(T)[None, :]
    seen = (back_ST >= 0 if window is None else (back_ST >= 0) & (back_ST < window))[
        None, None, None
    ]
    if segments_BS is not None:
        segments_BT = segments_BS if segments_BT is None else segments_BT
        seen = seen & (segments_BS[:, :, None] == segments_BT[:, None, :])[:, None, None]
    # Not -inf: a finite number keeps the gradient of a masked score at 0 instead of nan.
    probs_BGRST = jax.nn.softmax(jnp.where(seen, scores_BGRST, jnp.finfo(wide).min), axis=-1)
    out_BSGRK = jnp.einsum("bgrst,btgk->bsgrk", probs_BGRST.astype(v_BTGK.dtype), v_BTGK)
    return out_BSGRK.reshape(B, S, H, K)
