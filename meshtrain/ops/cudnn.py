"""cuDNN's fused attention on NVIDIA GPUs: which inputs it supports, and the call."""

import jax
import jax.numpy as jnp

from meshtrain.analysis import hardware
from meshtrain.ops import document_code
from meshtrain.parallel import accelerator, sharding

# B batch, S sequence, H heads, G key/value heads, K head dim

AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0  # compute capability


def why_not(
    head_dim: int, dtype: jax.typing.DTypeLike, softcap: float, packed: bool, dropout: bool = False
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
    if softcap:
        return f"it does not support a soft cap, and model.attention_softcap is {softcap}"
    # Of the backward pass: docs.nvidia.com/deeplearning/cudnn/frontend, operations, attention.
    max_head_dim = 256 if HOPPER <= version < BLACKWELL else 128
    extra = document_code.DIMS if packed else 0
    if head_dim % 8 or head_dim + extra > max_head_dim:
        limit = f"it supports head dims up to {max_head_dim} on this GPU, in multiples of 8"
        more = f", and packed rows need {extra} more" if packed else ""
        return f"{limit}, and the head dim is {head_dim}{more}"
    return ""


def capability_of_target() -> str:
    """Returns the compute capability of the GPU that is compiled for ("9.0"; on AMD "gfx..."), or ""."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    row = device and hardware.device_of(device.device_kind)
    if row and row.chip:
        return row.chip.capability
    return getattr(jax.local_devices()[0], "compute_capability", "")


def attention(q_BSHK, k_BSGK, v_BSGK, *segments, start, scale, softcap, window) -> jax.Array:
    """Calls cuDNN's flash attention, without a mask of all scores; `window` is static.

    jax supports only one head dim: zeros fill up the values, or the queries and keys.
    """
    # Only generation sets another start, and choose_for_generation never returns "cudnn".
    assert not softcap and isinstance(start, int) and start == 0
    S, H, (G, V) = *q_BSHK.shape[1:3], v_BSGK.shape[2:]
    K = max(q_BSHK.shape[-1], V)
    q_BSHK, k_BSGK, v_BSGK = (
        jnp.pad(x, [(0, 0)] * 3 + [(0, K - x.shape[-1])]) if x.shape[-1] < K else x
        for x in (q_BSHK, k_BSGK, v_BSGK)
    )
    if sharding.num_shards("heads", H) != sharding.num_shards("kv_heads", G):
        # cuDNN needs equal sharding of all inputs, so keys and values are repeated for each query head.
        k_BSGK, v_BSGK = (
            sharding.constrain(jnp.repeat(x, H // G, 2), "batch", "seq", "heads", "head_dim")
            for x in (k_BSGK, v_BSGK)
        )
    inputs = q_BSHK, k_BSGK, v_BSGK
    if segments[0] is not None:
        inputs = document_code.append(*inputs, segments[0], scale)
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


def constrain(x: jax.Array, *, num_heads: int) -> jax.Array:
    """Shards an input, result or residual of cuDNN's attention; the residuals of rank 3 are (B, H, S)."""
    if x.ndim == 3:
        return sharding.constrain(x, "batch", "heads", "seq")
    if x.ndim == 4:
        heads = "heads" if x.shape[2] == num_heads else "kv_heads"
        return sharding.constrain(x, "batch", "seq", heads, "head_dim")
    return x
