"""cuDNN's fused attention on NVIDIA GPUs: the inputs that it supports, and the call.

Of packed rows, queries and keys get extra dims that encode their document, so that cuDNN separates
documents without a mask of S x S scores.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from meshtrain import hardware
from meshtrain.parallel import accelerator, sharding

# B batch, S sequence, H query heads, G key/value heads, K head dim, V of values, N digits of a
# document's number, C = 2 N dims that encode it

AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0  # compute capability

NUM_DIGITS = 4
SEGMENT_DIMS = 2 * NUM_DIGITS
SEGMENT_CODE = "segment_code"  # the scope in which the code is rounded to the dtype of the queries


def why_not(
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    softcap: float,
    packed: bool,
    dropout: bool = False,
    sinks: bool = False,
) -> str:
    """Returns why cuDNN's fused attention does not support these inputs; "" if it does."""
    platform, capability = accelerator.platform(), capability_of_target()
    if platform not in ("gpu", "cuda") or capability.startswith("gfx"):
        return f"it runs on NVIDIA GPUs only, and this is {capability or platform}"
    version = float(capability or HOPPER)
    if version < AMPERE:
        return f"it needs compute capability {AMPERE} or later, and this GPU has {capability}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and train.dtype is {jnp.dtype(dtype)}"
    if dropout:
        return "its masks differ between layouts, and model.dropout is more than 0"
    if sinks:
        return "it does not support model.attention_sinks"
    if softcap:
        return f"it does not support a soft cap, and model.attention_softcap is {softcap}"
    # Of the backward pass: docs.nvidia.com/deeplearning/cudnn/frontend, operations, attention.
    max_head_dim = 256 if HOPPER <= version < BLACKWELL else 128
    extra = SEGMENT_DIMS if packed else 0
    if head_dim % 8 or head_dim + extra > max_head_dim:
        limit = f"it supports head dims up to {max_head_dim} on this GPU, in multiples of 8"
        more = f", and packed rows need {extra} more" if packed else ""
        return f"{limit}, and the head dim is {head_dim}{more}"
    return ""


def capability_of_target() -> str:
    """Returns the compute capability of the target GPU ("9.0"; on AMD "gfx..."), or ""."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    row = device and hardware.device_of(device.device_kind)
    if row and row.chip:
        return row.chip.capability
    return getattr(jax.local_devices()[0], "compute_capability", "")


def attention(q_BSHK, k_BSGK, v_BSGK, *segments, start, scale, softcap, window) -> jax.Array:
    """Calls cuDNN's flash attention, without a mask of all scores; `window` is static."""
    # Only generation sets another start, and choose_for_generation never returns "cudnn".
    assert not softcap and isinstance(start, int) and start == 0
    S, H, (G, V) = *q_BSHK.shape[1:3], v_BSGK.shape[2:]
    q_BSHK, k_BSGK, v_BSGK = with_one_head_dim(q_BSHK, k_BSGK, v_BSGK)
    if sharding.num_shards("heads", H) != sharding.num_shards("kv_heads", G):
        # cuDNN needs equal sharding of all inputs, so keys and values are repeated for each query
        # head.
        k_BSGK, v_BSGK = (
            sharding.constrain(jnp.repeat(x, H // G, 2), "batch", "seq", "heads", "head_dim")
            for x in (k_BSGK, v_BSGK)
        )
    inputs = q_BSHK, k_BSGK, v_BSGK
    if segments[0] is not None:
        inputs = append_segment_dims(*inputs, segments[0], scale)
    padding = S % 2  # cuDNN's backward pass supports only even lengths
    inputs = (jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]) for x in inputs)
    out_BSHK = jax.nn.dot_product_attention(
        *inputs,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
    return out_BSHK[:, :S, :, :V]


def with_one_head_dim(q_BSHK, k_BSGK, v_BSGV) -> tuple[jax.Array, ...]:
    """Returns the inputs with zeros that fill up the values, or the queries and keys.

    jax supports only one head dim.
    """
    K = max(q_BSHK.shape[-1], v_BSGV.shape[-1])
    return tuple(
        jnp.pad(x, [(0, 0)] * 3 + [(0, K - x.shape[-1])]) if x.shape[-1] < K else x
        for x in (q_BSHK, k_BSGK, v_BSGV)
    )


# The scores of other documents are lower by this or more. exp(-104) is 0 in float32: a key of
# another document has no weight unless its score is 400 higher than the best of the query's own.
SEGMENT_GAP = 512.0


def append_segment_dims(q_BSHK, k_BSGK, v_BSGK, segments_BS, scale: float) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values with SEGMENT_DIMS more: the code of the document, and zeros.

    Each document of a row has a number, and each digit of the number is a point on a circle. The
    score of a query and a key of its own document grows by the same constant for all keys, which
    the softmax cancels; each digit that differs lowers the score by SEGMENT_GAP or more. The
    constant is 7,000 for rows of 4,096 tokens, where float32 has a resolution of 0.0005, less than
    that of weights in bfloat16.
    """
    base = 2
    while base**NUM_DIGITS < segments_BS.shape[1]:
        base += 1
    numbers_BS = _segment_numbers(segments_BS)
    places_N = jnp.array([base**n for n in range(NUM_DIGITS)])
    digits_BSN = numbers_BS[:, :, None] // places_N[None, None] % base
    angles_BSN = digits_BSN * (2 * math.pi / base)
    radius = math.sqrt(SEGMENT_GAP / (1 - math.cos(2 * math.pi / base)) / scale)
    code_BSC = radius * jnp.concatenate([jnp.cos(angles_BSN), jnp.sin(angles_BSN)], -1)

    def with_code(x):
        with jax.named_scope(SEGMENT_CODE):
            rounded_BSC = code_BSC.astype(x.dtype)
        code = jnp.broadcast_to(rounded_BSC[:, :, None], (*x.shape[:3], SEGMENT_DIMS))
        return jnp.concatenate([x, code], -1)

    return with_code(q_BSHK), with_code(k_BSGK), jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, SEGMENT_DIMS)])


def _segment_numbers(segments_BS) -> jax.Array:
    """Returns numbers below S, (B, S) int32, that are equal where the segments of a row are equal.

    Two sorts: gathers and scatters would be replicated where the batch is sharded.
    """
    position_BS = jax.lax.broadcasted_iota(jnp.int32, segments_BS.shape, 1)
    by_segment = jax.lax.sort((segments_BS, position_BS), dimension=1, num_keys=1)
    is_new = jnp.pad(by_segment[0][:, 1:] != by_segment[0][:, :-1], [(0, 0), (1, 0)])
    numbers = jnp.cumsum(is_new, 1, dtype=jnp.int32)
    numbers_BS = jax.lax.sort((by_segment[1], numbers), dimension=1, num_keys=1)[1]
    # By each device for its rows: XLA would shard the sorted positions as the queries are.
    return sharding.constrain(numbers_BS, "batch", None)


# ---- layers of which some are local ----


def either(
    predicate: jax.Array,
    if_true: Callable[..., jax.Array],
    if_false: Callable[..., jax.Array],
    *operands: jax.Array,
    constrain: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`lax.cond` that keeps the sharding of residuals, which have the same shapes in both branches.

    `constrain` shards an operand, result or residual. With `lax.cond` alone, XLA replicates the
    residuals: it does not propagate shardings out of and into the branches.
    """
    vjp_trees = {}

    def cond(predicate, branch, *args):
        return jax.lax.cond(predicate, partial(branch, if_true), partial(branch, if_false), *args)

    def forward(predicate, *operands):
        def branch(compute, *operands):
            out, vjp = jax.vjp(compute, *map(constrain, operands))
            residuals, vjp_trees[compute] = jax.tree.flatten(vjp)
            return constrain(out), [*map(constrain, residuals)]

        out, residuals = cond(predicate, branch, *operands)
        return out, (predicate, residuals)

    def backward(kept, grad):
        def branch(compute, residuals, grad):
            vjp = jax.tree.unflatten(vjp_trees[compute], [*map(constrain, residuals)])
            return [*map(constrain, vjp(constrain(grad)))]

        predicate, residuals = kept
        return None, *cond(predicate, branch, residuals, grad)

    chosen = jax.custom_vjp(lambda *args: forward(*args)[0])
    chosen.defvjp(forward, backward)
    return chosen(predicate, *operands)


def constrain(x: jax.Array, *, num_heads: int) -> jax.Array:
    """Shards an input, result or residual of cuDNN's attention.

    Residuals of rank 3 are (B, H, S).
    """
    if x.ndim == 3:
        return sharding.constrain(x, "batch", "heads", "seq")
    if x.ndim == 4:
        heads = "heads" if x.shape[2] == num_heads else "kv_heads"
        return sharding.constrain(x, "batch", "seq", heads, "head_dim")
    return x
