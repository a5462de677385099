"""A code of the document in queries and keys, for fused attention that knows no documents."""

import math

import jax
import jax.numpy as jnp

# B batch, S and T sequence (queries and keys), H query heads, G key/value heads, K head dim, C dims of the code

DIMS = 32  # bits of a segment number
# By this, at least, the code lowers the scores of other documents. exp(-104) is 0 in float32: a key of another
# document has no weight unless its score is 400 higher than the best of the query's own document. Scores grow to
# DIMS / 2 times the gap, where float32 has a resolution of 0.001, less than that of bfloat16 weights.
GAP = 512.0


def append(
    q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BT, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values with DIMS more dims, which separate documents without a mask.

    The bits of the segment number, as +x and -x, are appended to queries and keys, and zeros to values. The
    score of a query and a key of its own document grows by a constant, DIMS x^2 scale, which the softmax
    cancels; each bit that differs lowers the score by 2 x^2 scale = GAP.
    """
    size = math.sqrt(GAP / 2 / scale)

    def with_code(x, segments):
        bits_BS1C = (segments[:, :, None, None] >> jnp.arange(DIMS)[None, None, None]) & 1
        code_BS1C = jnp.where(bits_BS1C == 1, size, -size).astype(x.dtype)
        shape = (*x.shape[:3], DIMS)
        return jnp.concatenate([x, jnp.broadcast_to(code_BS1C, shape)], -1)

    values = jnp.pad(v_BTGK, [(0, 0), (0, 0), (0, 0), (0, DIMS)])
    return with_code(q_BSHK, segments_BS), with_code(k_BTGK, segments_BT), values
