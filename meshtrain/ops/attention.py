"""Causal attention behind one signature: plain XLA, cuDNN's fused kernels, or block by block."""

from functools import partial

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.ops import blockwise
from meshtrain.parallel import sharding

# B batch, S and T sequence (queries and keys), H heads = G key/value heads x R, Q = R x S, K head dim

NAMES = ("auto", "xla", "cudnn", "blockwise")
LONG = 2048  # tokens; scores of more are made block by block, where no fused kernel can serve
HOPPER = 9.0  # compute capability
MOST_BLOCKS, FEWEST = 4, 64  # of XLA's: blocks of queries, and queries in one


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
    implementation: str = "xla",
) -> jax.Array:
    """Returns softmax(q k scale) v over the earlier positions of the same segment, (B, S, H, K).

    H is a multiple of G: each key/value head serves R = H / G query heads (grouped-query attention,
    arXiv 2305.13245). `segments_BS` None means that each row is one segment. Where keys were computed
    before, query s stands at key `start` + s, and `segments_BT` are those of the keys.
    `scale` 0: 1/sqrt(K). `softcap` c > 0: scores become c tanh(score / c) (Gemma 2, arXiv 2408.00118).
    `window`: only so many positions are seen, the query's own included (Mistral, arXiv 2310.06825).
    The softmax is computed in float32 or wider. Raises ConfigError where `implementation` cannot serve.
    """
    dtype, (_, S, _, K) = q_BSHK.dtype, q_BSHK.shape
    name, _ = choose(implementation, seq_len=S, head_dim=K, dtype=dtype, softcap=softcap)
    segments = segments_BS, segments_BS if segments_BT is None else segments_BT
    compute = {"xla": _xla, "cudnn": _cudnn, "blockwise": blockwise.attention}[name]
    options = dict(start=start, scale=scale or K**-0.5, softcap=softcap, window=window)
    return compute(q_BSHK, k_BTGK, v_BTGK, *segments, **options)


def choose(
    name: str, *, seq_len: int, head_dim: int, dtype: jax.typing.DTypeLike, softcap: float
) -> tuple[str, str]:
    """Returns which implementation `name` means for these shapes, and what to tell of it.

    "auto" is cuDNN's on GPU; where that cannot serve, and elsewhere, XLA's up to LONG tokens, which
    holds all S x S scores, and else the blockwise one. Raises ConfigError for cuDNN where it cannot serve.
    """
    if name not in ("auto", "cudnn"):
        return name, name
    reason = _no_cudnn(head_dim, dtype, softcap)
    if name == "cudnn" and reason:
        raise ConfigError(
            f"model.attention_impl='cudnn': {reason}; use 'auto', 'xla' or 'blockwise'"
        )
    if not reason:
        return "cudnn", "cudnn"
    name = "xla" if seq_len <= LONG else "blockwise"
    return name, f"{name}; not cudnn: {reason}"


def while_generating(name: str, num_queries: int, num_keys: int) -> str:
    """Returns which one serves with a cache of keys, which cuDNN's kernels do not know."""
    is_long = name == "blockwise" or (name != "xla" and num_keys > LONG)
    return "blockwise" if is_long and num_queries > 1 else "xla"


def _no_cudnn(head_dim: int, dtype: jax.typing.DTypeLike, softcap: float) -> str:
    """Returns why cuDNN's fused attention cannot serve; "" where it can."""
    platform, capability = _platform(), _capability()
    if platform not in ("gpu", "cuda") or capability.startswith("gfx"):
        return f"it runs on NVIDIA's GPUs, and this is {capability or platform}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and train.dtype is {jnp.dtype(dtype)}"
    if softcap:
        return f"it has no soft cap, and model.attention_softcap is {softcap}"
    most = 128 if capability and float(capability) < HOPPER else 256
    if head_dim % 8 or head_dim > most:
        return f"it takes heads of up to {most} here, in eights, and theirs is {head_dim}"
    return ""


def _platform() -> str:
    """Returns what the active mesh is made of, which may be compiled for and not be here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def _capability() -> str:
    """Returns the compute capability of the GPU that is here ("9.0"; "gfx..." of AMD's), or ""."""
    return getattr(jax.local_devices()[0], "compute_capability", "")


def _xla(q_BSHK, k_BTGK, v_BTGK, *segments, start, scale, softcap, window) -> jax.Array:
    """Plain maths; `jax.nn.dot_product_attention` narrows float64, so nothing could be proven with it.

    Queries go in a few blocks, each with the keys that one of it may see: of a causal square, six parts
    in sixteen are never made. What is cut is known while tracing, a window that differs by layer is not.
    """
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    q_BGRSK = jnp.einsum("bsgrk->bgrsk", q_BSHK.reshape(B, S, G, H // G, K))
    k_BGTK, v_BGTK = (jnp.einsum("btgk->bgtk", x) for x in (k_BTGK, v_BTGK))
    aligned = isinstance(start, int) and start == 0 and S == T
    size = max(FEWEST, -(-S // MOST_BLOCKS)) if aligned else S
    blocks = []
    for low in range(0, S, size):
        queries = slice(low, min(low + size, S))
        keys = slice(0, queries.stop if aligned else T)
        if aligned and isinstance(window, int):
            keys = slice(max(0, low - window + 1), queries.stop)
        seen = _seen(queries, keys, *segments, start, window)
        # One dim of queries and heads: XLA is slow where two are contracted.
        q_BGQK = q_BGRSK[..., queries, :].reshape(B, G, -1, K)
        out_BGQK = _mixed(scale, softcap, q_BGQK, k_BGTK[:, :, keys], v_BGTK[:, :, keys], seen)
        blocks.append(out_BGQK.reshape(B, G, H // G, -1, K))
    return jnp.einsum("bgrsk->bsgrk", jnp.concatenate(blocks, 3)).reshape(B, S, H, K)


def _seen(queries: slice, keys: slice, segments_BS, segments_BT, start, window) -> jax.Array:
    """Returns which of these keys each of these queries sees, (B or 1, s, t)."""
    at_s, at_t = jnp.arange(queries.start, queries.stop), jnp.arange(keys.start, keys.stop)
    back_st = start + at_s[:, None] - at_t[None, :]
    seen = (back_st >= 0 if window is None else (back_st >= 0) & (back_st < window))[None]
    if segments_BS is not None:
        seen = seen & (segments_BS[:, queries, None] == segments_BT[:, None, keys])
    return seen


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mixed(scale, softcap, q_BGQK, k_BGTK, v_BGTK, seen_BST) -> jax.Array:
    """Returns what queries mix of the values of the keys that they see, (B, G, Q, K)."""
    return _forward(scale, softcap, q_BGQK, k_BGTK, v_BGTK, seen_BST)[0]


def _forward(scale, softcap, q_BGQK, k_BGTK, v_BGTK, seen_BST):
    """Keeps one number of each score, the exponential; autodiff would keep three."""
    wide = jnp.promote_types(q_BGQK.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=wide)
    scores_BGQT = dot("bgqk,bgtk->bgqt", q_BGQK * scale, k_BGTK)
    slope = None
    if softcap:
        bent_BGQT = jnp.tanh(scores_BGQT / softcap)
        scores_BGQT, slope = softcap * bent_BGQT, (1 - bent_BGQT**2).astype(q_BGQK.dtype)
    # Not -inf: a row that sees nothing stays finite.
    by_head = scores_BGQT.reshape(*scores_BGQT.shape[:2], -1, *seen_BST.shape[1:])
    by_head = jnp.where(seen_BST[:, None, None], by_head, jnp.finfo(wide).min)
    scores_BGQT = by_head.reshape(scores_BGQT.shape)
    exp_BGQT = jnp.exp(scores_BGQT - scores_BGQT.max(-1, keepdims=True))
    share_BGQ1 = 1 / exp_BGQT.sum(-1, keepdims=True)
    exp_BGQT = exp_BGQT.astype(v_BGTK.dtype)
    out_BGQK = (dot("bgqt,bgtk->bgqk", exp_BGQT, v_BGTK) * share_BGQ1).astype(q_BGQK.dtype)
    return out_BGQK, (q_BGQK, k_BGTK, v_BGTK, exp_BGQT, share_BGQ1, slope, out_BGQK)


def _backward(scale, softcap, kept, grad_BGQK):
    q_BGQK, k_BGTK, v_BGTK, exp_BGQT, share_BGQ1, slope, out_BGQK = kept
    wide, narrow = share_BGQ1.dtype, q_BGQK.dtype
    dot = partial(jnp.einsum, preferred_element_type=wide)
    grad_BGQK = grad_BGQK * share_BGQ1  # of the exponentials' mix
    inner_BGQ1 = (grad_BGQK * out_BGQK).sum(-1, keepdims=True)
    grad_BGQK = grad_BGQK.astype(narrow)
    grad_v = dot("bgqt,bgqk->bgtk", exp_BGQT, grad_BGQK)
    grad_scores = dot("bgqk,bgtk->bgqt", grad_BGQK, v_BGTK) - inner_BGQ1
    grad_scores *= exp_BGQT.astype(wide) * scale
    grad_scores = (grad_scores if slope is None else grad_scores * slope).astype(narrow)
    grad_q = dot("bgqt,bgtk->bgqk", grad_scores, k_BGTK)
    grad_k = dot("bgqt,bgqk->bgtk", grad_scores, q_BGQK)
    return grad_q.astype(narrow), grad_k.astype(k_BGTK.dtype), grad_v.astype(v_BGTK.dtype), None


_mixed.defvjp(_forward, _backward)


def _cudnn(q_BSHK, k_BTGK, v_BTGK, *segments, start, scale, softcap, window) -> jax.Array:
    """cuDNN's flash attention. Segments, and windows that differ by layer, take a mask of all scores."""
    assert not softcap and isinstance(start, int) and start == 0  # of generation alone
    (B, S, H, _), G = q_BSHK.shape, k_BTGK.shape[2]
    if sharding.num_shards("heads", H) != sharding.num_shards("kv_heads", G):
        # It wants all cut alike: each query head gets keys and values of its own.
        k_BTGK, v_BTGK = (
            sharding.constrain(jnp.repeat(x, H // G, 2), "batch", "seq", "heads", "head_dim")
            for x in (k_BTGK, v_BTGK)
        )
    static = window is None or isinstance(window, int)
    mask, missing = None, S % 2  # to train with it takes even lengths alone
    if segments[0] is not None or not static:
        seen = _seen(slice(0, S), slice(0, S), *segments, start, window)
        # Of all heads, as jax's rule for vmap has it.
        mask = jnp.broadcast_to(seen[:, None], (B, H, S, S))
        mask = jnp.pad(mask, [(0, 0), (0, 0), (0, missing), (0, missing)])
    padded = (jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) for x in (q_BSHK, k_BTGK, v_BTGK))
    out_BSHK = jax.nn.dot_product_attention(
        *padded,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if static and window else None,
        implementation="cudnn",
    )
    return out_BSHK[:, :S]
