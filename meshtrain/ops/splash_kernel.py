"""The splash attention kernels of jax (Pallas, Mosaic) on the rows and heads of one device.

On CPUs they are interpreted, and float64, in which they cannot compute, has a plain twin.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from meshtrain.ops import blockwise
from meshtrain.parallel import accelerator

# B batch, S sequence, H heads = G key/value heads x R, K head dim, V of values

LANES = 128
MAX_BLOCK = 512  # queries, or keys, whose scores are computed at once
# Keys and values of a block, twice each, and their gradients in float32 share the 16 MiB of vector
# memory that a kernel has.
MAX_NUMBERS_OF_BLOCK = 2048 * 256
# The fused backward kernel writes the gradient of the queries once for each block of keys, and XLA
# adds these. Of more blocks, two kernels compute the scores twice.
MAX_FUSED_BLOCKS = 4


def forward(
    q_BHSK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSV: jax.Array,
    segments_BS: jax.Array | None,
    *,
    softcap: float,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output (B, H, S, V), and log(sum of exp(scores)) in float32, (B, H, S).

    S is a multiple of LANES; queries are scaled. `window` 0: no window.
    """
    if q_BHSK.dtype == jnp.float64:
        return _plain_forward(q_BHSK, k_BGSK, v_BGSV, segments_BS, softcap=softcap, window=window)
    kernel = _kernel(q_BHSK, v_BGSV, softcap=softcap, window=window)

    def of_row(q_HSK, k_GSK, v_GSV, segments_S):
        out_HSV, (log_z_HS,) = kernel(q_HSK, k_GSK, v_GSV, _segment_ids(segments_S))
        return out_HSV, log_z_HS

    return jax.vmap(of_row)(q_BHSK, k_BGSK, v_BGSV, segments_BS)


def backward(
    q_BHSK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSV: jax.Array,
    segments_BS: jax.Array | None,
    out_BHSV: jax.Array,
    log_z_BHS: jax.Array,
    grad_BHSV: jax.Array,
    *,
    softcap: float,
    window: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v, from what `forward` returned.

    The kernels' derivative has no public name. `jax.vjp` of a call would run the forward kernel
    again, also where `train.remat` keeps its results.
    """
    arrays = q_BHSK, k_BGSK, v_BGSV, segments_BS, out_BHSV, log_z_BHS, grad_BHSV
    if q_BHSK.dtype == jnp.float64:
        return _plain_backward(*arrays, softcap=softcap, window=window)
    kernel = _kernel(q_BHSK, v_BGSV, softcap=softcap, window=window)

    def of_row(q_HSK, k_GSK, v_GSV, segments_S, out_HSV, log_z_HS, grad_HSV):
        sinks = None
        inputs = q_HSK, k_GSK, v_GSV, _segment_ids(segments_S), sinks
        residuals = *inputs, out_HSV, log_z_HS, kernel.dq_mask_info, kernel.dkv_mask_info
        grads = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=grad_HSV)
        _, _, _, grad_q, grad_k, grad_v, _, _ = grads
        return grad_q, grad_k, grad_v

    return jax.vmap(of_row)(*arrays)


def _segment_ids(segments_S: jax.Array | None) -> splash.SegmentIds | None:
    return None if segments_S is None else splash.SegmentIds(segments_S, segments_S)


def _kernel(q_BHSK: jax.Array, v_BGSV: jax.Array, *, softcap: float, window: int) -> Any:
    """Returns the kernel for these shapes; call it where it is used.

    Its arrays, the numbers of the blocks that it visits, belong to the trace that makes them.
    """
    _, H, S, K = q_BHSK.shape
    block = _largest_block(S, MAX_BLOCK, LANES)
    max_keys = max(block, MAX_NUMBERS_OF_BLOCK // (K + v_BGSV.shape[-1]))
    key_block = _largest_block(S, max_keys, block)
    is_fused = S // key_block <= MAX_FUSED_BLOCKS
    block_sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=block,
        block_q_dq=None if is_fused else block,
        block_kv_dq=None if is_fused else block,
        use_fused_bwd_kernel=is_fused,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([Band(S, window or S)] * H),
        block_sizes=block_sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        attn_logits_soft_cap=softcap or None,
        interpret=accelerator.platform() == "cpu",
    )


def _largest_block(length: int, limit: int, unit: int) -> int:
    """Returns the largest multiple of `unit` up to `limit` that divides `length`."""
    return max(size for size in range(unit, limit + 1, unit) if length % size == 0)


class Band(masks.Mask):
    """The mask of causal attention within a window: query s sees the keys s - window + 1 to s.

    The kernels compute it from positions. jax's own `CausalMask` and `LocalMask` build every block
    of the S x S mask on the host, which takes minutes for 131,072 tokens, only to see whether it is
    empty or full.
    """

    def __init__(self, length: int, window: int):
        self.window = window
        self.q_sequence = np.arange(length, dtype=np.int32)

        def sees(query_s, key_t):
            distance = query_s - key_t
            return (distance >= 0) & (distance < window)

        self.mask_function = sees

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q_sequence), len(self.q_sequence)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Returns whether any, and whether all, of a block's queries see its keys.

        Of a block jax calls any() and all() alone.
        """
        queries, keys = index
        nearest, farthest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        sees_any = farthest >= 0 and nearest < self.window
        sees_all = nearest >= 0 and farthest < self.window
        return np.array([sees_any, sees_all])

    def __eq__(self, other: object) -> bool:
        is_same_kind = isinstance(other, Band)
        return is_same_kind and (self.shape, self.window) == (other.shape, other.window)

    def __hash__(self) -> int:
        return hash((self.shape, self.window))


# ---- float64: the same results from the formulas of blockwise attention, with one block ----


def _plain_forward(q_BHSK, k_BGSK, v_BGSV, segments_BS, *, softcap, window):
    B, H, S, _ = q_BHSK.shape
    q, k, v, visibility = _one_block(q_BHSK, k_BGSK, v_BGSV, segments_BS, window)
    softmax = blockwise.no_keys(q, v.shape[-1])
    softmax = blockwise.add_keys(1.0, softcap, softmax, q, k, v, visibility)
    out, log_z = blockwise.finish(softmax, q.dtype)
    return out.reshape(B, H, S, -1), log_z.reshape(B, H, S)


def _plain_backward(
    q_BHSK, k_BGSK, v_BGSV, segments_BS, out_BHSV, log_z_BHS, grad_BHSV, *, softcap, window
):
    q, k, v, visibility = _one_block(q_BHSK, k_BGSK, v_BGSV, segments_BS, window)
    row_dot_BHS = blockwise.row_dot(out_BHSV, grad_BHSV, log_z_BHS.dtype)
    seen = (
        log_z_BHS.reshape(q.shape[:-1]),
        row_dot_BHS.reshape(q.shape[:-1]),
        grad_BHSV.reshape(*q.shape[:-1], -1),
    )
    zeros = jnp.zeros_like(k), jnp.zeros_like(v)
    grads = blockwise.gradients(1.0, softcap, q, k, v, visibility, seen, zeros)
    return tuple(
        grad.reshape(x.shape) for grad, x in zip(grads, (q_BHSK, k_BGSK, v_BGSV), strict=True)
    )


def _one_block(q_BHSK, k_BGSK, v_BGSV, segments_BS, window):
    """Returns queries (1, B, G, R S, K), keys and values (1, B, G, S, ...), and who sees whom."""
    B, H, S, K = q_BHSK.shape
    if segments_BS is None:
        segments_BS = jnp.zeros((1, S), jnp.int32)
    start = jnp.int32(0)
    visibility = blockwise.Visibility(
        start=start,
        start_range=(start, start),
        window=jnp.int32(window or S),
        segments_s=segments_BS[None],
        segments_t=segments_BS[None],
    )
    return q_BHSK.reshape(1, B, k_BGSK.shape[1], -1, K), k_BGSK[None], v_BGSV[None], visibility
