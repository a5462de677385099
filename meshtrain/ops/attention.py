"""Causal attention behind one signature."""

import jax

# B batch, S sequence, H heads, G key/value heads, K head dim


def attention(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array | None
) -> jax.Array:
    """Returns softmax(q k / sqrt(K)) v over the earlier positions of the same segment, (B, S, H, K).

    H is a multiple of G: each key/value head serves H / G query heads (grouped-query attention,
    arXiv 2305.13245). `segments_BS` None means that each row is one segment.
    """
    mask_B1SS = (
        None
        if segments_BS is None
        else segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
    )
    return jax.nn.dot_product_attention(q_BSHK, k_BSGK, v_BSGK, mask=mask_B1SS, is_causal=True)
