"""A code of the document in queries and keys: fused attention separates documents without a mask of all scores."""

import math

import jax
import jax.numpy as jnp

# B batch, S sequence, H query heads, G key/value heads, K head dim, N digits of a number, C = 2 N dims of the code

NUM_DIGITS = 4
DIMS = 2 * NUM_DIGITS
# By this, at least, the code lowers the scores of other documents. exp(-104) is 0 in float32: a key of another
# document has no weight unless its score is 400 higher than the best of the query's own document.
GAP = 512.0


def append(q_BSHK, k_BSGK, v_BSGK, segments_BS, scale: float) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values with DIMS more dims: the code of their document, and zeros.

    Each document of a row has a number, and each digit of the number is a point on a circle. The score of a
    query and a key of its own document grows by the same constant for all keys, which the softmax cancels; each
    digit that differs lowers the score by GAP or more. The constant is 7,000 for rows of 4,096 tokens, where
    float32 has a resolution of 0.0005, less than that of weights in bfloat16.
    """
    base = 2
    while base**NUM_DIGITS < segments_BS.shape[1]:
        base += 1
    digits_BSN = (
        _numbers(segments_BS)[:, :, None]
        // jnp.array([base**n for n in range(NUM_DIGITS)])[None, None]
        % base
    )
    angles_BSN = digits_BSN * (2 * math.pi / base)
    radius = math.sqrt(GAP / (1 - math.cos(2 * math.pi / base)) / scale)
    code_BSC = radius * jnp.concatenate([jnp.cos(angles_BSN), jnp.sin(angles_BSN)], -1)

    def with_code(x):
        code = jnp.broadcast_to(code_BSC.astype(x.dtype)[:, :, None], (*x.shape[:3], DIMS))
        return jnp.concatenate([x, code], -1)

    return with_code(q_BSHK), with_code(k_BSGK), jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, DIMS)])


def _numbers(segments_BS) -> jax.Array:
    """Returns numbers below S, (B, S) int32, that are equal where the segments of a row are equal.

    Two sorts: gathers and scatters would be replicated where the batch is sharded.
    """
    position_BS = jax.lax.broadcasted_iota(jnp.int32, segments_BS.shape, 1)
    by_segment = jax.lax.sort((segments_BS, position_BS), dimension=1, num_keys=1)
    is_new = jnp.pad(by_segment[0][:, 1:] != by_segment[0][:, :-1], [(0, 0), (1, 0)])
    numbers = jnp.cumsum(is_new, 1, dtype=jnp.int32)
    return jax.lax.sort((by_segment[1], numbers), dimension=1, num_keys=1)[1]
