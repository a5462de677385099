"""Causal attention behind one signature."""

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), H heads = G key/value heads x R, K head dim


def attention(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BS: jax.Array | None
) -> jax.Array:
    """Returns softmax(q k / sqrt(K)) v over the earlier positions of the same segment, (B, S, H, K).

    H is a multiple of G: each key/value head serves R = H / G query heads (grouped-query attention,
    arXiv 2305.13245). `segments_BS` None means that each row is one segment. The softmax is computed
    in float32 or wider; `jax.nn.dot_product_attention` narrows float64, so nothing could be proven with it.
    """
    B, S, H, K = q_BSHK.shape
    G = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K) * K**-0.5
    wide = jnp.promote_types(q_BSHK.dtype, jnp.float32)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, preferred_element_type=wide)
    seen = jnp.tril(jnp.ones((S, S), bool))[None, None, None]
    if segments_BS is not None:
        seen = seen & (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None, None]
    # Not -inf: a finite number keeps the gradient of a masked score at 0 instead of nan.
    probs_BGRST = jax.nn.softmax(jnp.where(seen, scores_BGRST, jnp.finfo(wide).min), axis=-1)
    out_BSGRK = jnp.einsum("bgrst,btgk->bsgrk", probs_BGRST.astype(v_BTGK.dtype), v_BTGK)
    return out_BSGRK.reshape(B, S, H, K)
