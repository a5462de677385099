"""Causal attention: XLA, blockwise, and the fused kernels of cuDNN (GPU) and splash (TPU)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.errors import ConfigError
from meshtrain.ops import (
    blockwise,
    context_attention,
    context_fused,
    cudnn,
    implementations,
    splash,
)
from meshtrain.ops.blockwise import Dropout
from meshtrain.parallel import accelerator, context, sharding
from meshtrain.parallel.remat import ATTENTION

# B batch, S and T sequence (queries and keys), H heads = G key/value heads x R, Q = R x S, K head
# dim, V of values

# Longer sequences are computed blockwise if no fused kernel supports them.
MAX_XLA_TOKENS = 2048
UNLIMITED_WINDOW = 2**30  # positions; more than any sequence has


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGV: jax.Array,
    segments_BS: jax.Array | None,
    segments_BT: jax.Array | None = None,
    *,
    start: jax.Array | int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    window: jax.Array | int | None = None,
    is_local: jax.Array | bool = True,
    implementation: str = "xla",
    dropout: Dropout | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax(q k scale) v over the earlier positions of the same segment, (B, S, H, V).

    H is a multiple of G: each key/value head serves R = H / G query heads (grouped-query attention,
    arXiv 2305.13245). If `segments_BS` is None, each row is one segment. With a key/value cache,
    query s has the position of key `start` + s, and `segments_BT` has the segments of the keys.
    `scale` 0: 1/sqrt(K). `softcap` c > 0: scores become c tanh(score / c) (Gemma 2, arXiv
    2408.00118). `window`: the number of positions that a query sees, its own included (Mistral,
    arXiv 2310.06825). It applies if `is_local`, which is an array where layers differ.
    `implementation` is one of implementations.NAMES; "xla:N" and "blockwise:N" compute blocks of N
    positions. `dropout` sets random probabilities to 0; without a cache only, and not with
    fused kernels. `sinks_H` are logits, one of each head, that are added to the denominator of its
    softmax; not with fused kernels.
    Without a cache, a sequence that the rules shard is in the order of `context.order`; see
    parallel/context.py. The softmax is in float32 or wider. Raises ConfigError if `implementation`
    does not support the inputs.
    """
    options = dict(
        scale=scale,
        softcap=softcap,
        window=window,
        is_local=is_local,
        implementation=implementation,
        dropout=dropout,
        sinks_H=sinks_H,
    )
    if segments_BT is None and sharding.num_shards("seq", q_BSHK.shape[1]) > 1:
        return _attend_sharded(q_BSHK, k_BTGK, v_BTGV, segments_BS, **options)
    return _attend_whole(q_BSHK, k_BTGK, v_BTGV, segments_BS, segments_BT, start=start, **options)


def _attend_whole(
    q_BSHK,
    k_BTGK,
    v_BTGV,
    segments_BS,
    segments_BT=None,
    *,
    start: jax.Array | int = 0,
    scale: float,
    softcap: float,
    window: jax.Array | int | None,
    is_local: jax.Array | bool,
    implementation: str,
    dropout: Dropout | None,
    sinks_H: jax.Array | None,
    is_named: bool = True,
) -> jax.Array:
    """Computes `attention` of sequences that are not sharded.

    `is_named`: the result has the name ATTENTION, for `train.remat`; that of a fused kernel has it
    already.
    """
    S, K, V = q_BSHK.shape[1], q_BSHK.shape[-1], v_BTGV.shape[-1]
    kind, block = implementations.split(implementation)
    name, _ = choose_implementation(
        kind,
        seq_len=S,
        head_dim=max(K, V),
        dtype=q_BSHK.dtype,
        softcap=softcap,
        packed=segments_BS is not None,
        dropout=dropout is not None,
        sinks=sinks_H is not None,
    )
    segments_BT = segments_BS if segments_BT is None else segments_BT
    scale = scale or K**-0.5

    inputs = q_BSHK, k_BTGK, v_BTGV
    if isinstance(is_local, bool):
        window = window if is_local else None
    elif window is not None and name not in implementations.FUSED:
        window = jnp.where(is_local, window, UNLIMITED_WINDOW)

    if name not in implementations.FUSED:
        function = _xla if name == "xla" else blockwise.attention
        out_BSHV = function(
            *inputs,
            segments_BS,
            segments_BT,
            start=start,
            scale=scale,
            softcap=softcap,
            window=window,
            block=block,
            dropout=dropout,
            sinks_H=sinks_H,
        )
        return checkpoint_name(out_BSHV, ATTENTION) if is_named else out_BSHV

    if name == "splash":
        return splash.attention(
            *inputs,
            segments_BS,
            start=start,
            scale=scale,
            softcap=softcap,
            window=window,
            is_local=is_local,
        )

    def fused(window, *inputs):
        return cudnn.attention(
            *inputs,
            segments_BS,
            segments_BT,
            start=start,
            scale=scale,
            softcap=softcap,
            window=window,
        )

    if window is None or isinstance(is_local, bool):
        return fused(window, *inputs)
    # Its windows are static.
    return cudnn.either(
        is_local,
        partial(fused, window),
        partial(fused, None),
        *inputs,
        constrain=partial(cudnn.constrain, num_heads=q_BSHK.shape[2]),
    )


def _attend_sharded(
    q_BSHK,
    k_BSGK,
    v_BSGV,
    segments_BS,
    *,
    scale: float,
    softcap: float,
    window: jax.Array | int | None,
    is_local: jax.Array | bool,
    implementation: str,
    dropout: Dropout | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Computes `attention` by the method of context parallelism that is active."""
    S, H, K = q_BSHK.shape[1:]
    shapes = dict(
        seq_len=S,
        head_dim=max(K, v_BSGV.shape[-1]),
        dtype=q_BSHK.dtype,
        softcap=softcap,
        packed=segments_BS is not None,
        dropout=dropout is not None,
        sinks=sinks_H is not None,
    )
    seen_window = None if is_local is False else window
    method, _ = choose_for_context(
        implementation,
        num_heads=H,
        num_kv_heads=k_BSGK.shape[2],
        window=seen_window,
        **shapes,
    )
    if method == "ulysses":
        compute = partial(
            _attend_whole,
            scale=scale,
            softcap=softcap,
            window=window,
            is_local=is_local,
            implementation=implementation,
            dropout=dropout,
            sinks_H=sinks_H,
            is_named=False,
        )
        out_BSHV = context.ulysses(compute, q_BSHK, k_BSGK, v_BSGV, segments_BS)
        kind, _ = implementations.split(implementation)
        is_fused = choose_implementation(kind, **shapes)[0] in implementations.FUSED
        return out_BSHV if is_fused else checkpoint_name(out_BSHV, ATTENTION)
    kernel, _ = choose_for_chunks(implementation, window=seen_window, **shapes)
    if kernel:
        return context_fused.attention(
            q_BSHK,
            k_BSGK,
            v_BSGV,
            segments_BS,
            method=method,
            scale=scale or K**-0.5,
            kernel=kernel,
        )
    if window is not None and is_local is not True:
        window = jnp.where(is_local, window, UNLIMITED_WINDOW)
    out_BSHV = context_attention.attention(
        q_BSHK,
        k_BSGK,
        v_BSGV,
        segments_BS,
        method=method,
        scale=scale or K**-0.5,
        softcap=softcap,
        window=window,
        implementation=implementation,
        dropout=dropout,
        sinks_H=sinks_H,
    )
    return checkpoint_name(out_BSHV, ATTENTION)


def choose_for_context(
    name: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: jax.Array | int | None = None,
    **shapes: Any,
) -> tuple[str, str]:
    """Returns the method of context parallelism for these shapes, and text to log about it.

    `shapes` as for `choose_implementation`, of full sequences. `window`: that of local layers.
    """
    num_devices = sharding.num_shards("seq", shapes["seq_len"])
    kind, _ = implementations.split(name)
    inside, text = choose_implementation(kind, **shapes)
    kernel, reason = choose_for_chunks(name, window=window, **shapes)
    method = context.choose(
        num_heads,
        num_kv_heads,
        num_devices,
        fused=inside in implementations.FUSED,
        fused_chunks=bool(kernel),
    )
    if method == "ulysses":
        return method, f"{method} over {num_devices} devices, {text}"
    if kind in implementations.FUSED and reason:
        raise ConfigError(
            f"model.attention_impl={kind!r}: context.method={method!r}: {reason}; use 'auto' or "
            "'blockwise', or context.method='ulysses'"
        )
    reason = reason and f"; not {_fused_kernel(kind)}: {reason}"
    return method, f"{method} over {num_devices} devices, {kernel or 'blockwise'}{reason}"


def choose_for_chunks(
    name: str, *, seq_len: int, window: jax.Array | int | None, **shapes: Any
) -> tuple[str, str]:
    """Returns the fused kernel for the chunks of a ring, or of gathered keys, and why it is none.

    A name of chunk_kernels, or "" for blocks. Arguments as for `choose_for_context`.
    """
    kind, _ = implementations.split(name)
    if kind not in ("auto", "emulated", *implementations.FUSED):
        return "", ""
    if _fused_kernel(kind) == "splash":
        return "", "it computes whole sequences only"
    length = seq_len // (2 * sharding.num_shards("seq", seq_len))
    kernel = "emulated" if kind == "emulated" else "cudnn"
    reason = cudnn.why_not(**shapes) if kernel == "cudnn" else ""
    if kernel == "emulated" and (shapes["softcap"] or shapes["dropout"] or shapes.get("sinks")):
        reason = "it supports neither a soft cap nor dropout nor sinks"
    elif not reason and window is not None and not (isinstance(window, int) and window >= seq_len):
        reason = "its windows have no offset, and model.window is shorter than the row"
    elif not reason and length % 2:
        reason = f"its backward pass supports even lengths, and a chunk has {length} tokens"
    return ("", reason) if reason else (kernel, "")


def choose_implementation(
    name: str,
    *,
    seq_len: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    softcap: float,
    packed: bool,
    dropout: bool,
    sinks: bool = False,
) -> tuple[str, str]:
    """Returns the implementation that `name` selects for these shapes, and text to log about it.

    `packed`: rows hold several documents. `dropout`: of probabilities. `sinks`: in the softmax.
    "auto" selects the fused kernel of the platform if it supports them: splash on TPUs, cuDNN
    elsewhere. Otherwise XLA, which stores the S x S scores, up to MAX_XLA_TOKENS tokens, and
    blockwise above. "emulated" is for chunks, and selects one of the last two. Raises ConfigError
    if `name` is a fused kernel that does not support them.
    """
    if name not in ("auto", "emulated", *implementations.FUSED):
        return name, name
    kernel = _fused_kernel(name)
    if name == "emulated":
        reason = "it is emulated"
    elif kernel == "splash":
        reason = splash.why_not(dtype, dropout, sinks)
    else:
        reason = cudnn.why_not(head_dim, dtype, softcap, packed, dropout, sinks)
    if name == kernel and reason:
        raise ConfigError(
            f"model.attention_impl={name!r}: {reason}; use 'auto', 'xla' or 'blockwise'"
        )
    if not reason:
        return kernel, kernel
    name = "xla" if seq_len <= MAX_XLA_TOKENS else "blockwise"
    return name, f"{name}; not {kernel}: {reason}"


def _fused_kernel(name: str) -> str:
    """Returns the fused kernel that `name` stands for: its own, or that of the platform."""
    if name in implementations.FUSED:
        return name
    return "splash" if name == "auto" and accelerator.platform() == "tpu" else "cudnn"


def choose_for_generation(name: str, num_queries: int, num_keys: int) -> str:
    """Returns the implementation with a key/value cache, which no fused kernel supports."""
    kind, _ = implementations.split(name)
    is_long = kind == "blockwise" or (kind != "xla" and num_keys > MAX_XLA_TOKENS)
    if not is_long or num_queries == 1:
        return "xla"
    return name if kind == "blockwise" else "blockwise"


# Queries are split into blocks, unless the name of the implementation gives their size.
MAX_QUERY_BLOCKS = 4
MIN_QUERIES_PER_BLOCK = 64


def _xla(
    q_BSHK,
    k_BTGK,
    v_BTGV,
    segments_BS,
    segments_BT,
    *,
    start,
    scale,
    softcap,
    window,
    block=0,
    dropout=None,
    sinks_H=None,
) -> jax.Array:
    """Computes the formula directly: `jax.nn.dot_product_attention` casts float64 down.

    Queries are split into a few blocks. Each block gets only the keys that its queries may see,
    which skips 6 of 16 parts of the causal S x S square. The slices are static, so a window that
    differs between layers, and is therefore traced, skips no keys.
    """
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    q_BGRSK = jnp.einsum("bsgrk->bgrsk", q_BSHK.reshape(B, S, G, H // G, K))
    k_BGTK, v_BGTV = (jnp.einsum("btgk->bgtk", x) for x in (k_BTGK, v_BTGV))
    aligned = isinstance(start, int) and start == 0 and S == T
    block = block or max(MIN_QUERIES_PER_BLOCK, -(-S // MAX_QUERY_BLOCKS))
    block_size = block if aligned else S
    segments = segments_BS, segments_BT
    blocks = []
    for low in range(0, S, block_size):
        queries = slice(low, min(low + block_size, S))
        keys = slice(0, queries.stop if aligned else T)
        if aligned and isinstance(window, int):
            keys = slice(max(0, low - window + 1), queries.stop)
        mask_BST = _attention_mask(queries, keys, *segments, start, window)
        # Queries and heads share one dim: XLA is slow if two dims are contracted.
        q_BGQK = q_BGRSK[..., queries, :].reshape(B, G, -1, K)
        k, v = k_BGTK[:, :, keys], v_BGTV[:, :, keys]
        drop = dropout and (dropout, *_positions(queries, keys))
        sinks_GQ1 = None
        if sinks_H is not None:
            num_queries = queries.stop - queries.start
            sinks_GQ1 = jnp.repeat(sinks_H.reshape(G, H // G), num_queries, axis=1)[..., None]
        out_BGQV = _attend_block(scale, softcap, q_BGQK, k, v, mask_BST, drop, sinks_GQ1)
        blocks.append(out_BGQV.reshape(B, G, H // G, *mask_BST.shape[1:2], -1))
    return jnp.einsum("bgrsv->bsgrv", jnp.concatenate(blocks, 3)).reshape(B, S, H, -1)


def _positions(queries: slice, keys: slice) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(queries.start, queries.stop), jnp.arange(keys.start, keys.stop)


def _attention_mask(
    queries: slice, keys: slice, segments_BS, segments_BT, start, window
) -> jax.Array:
    """Returns which of these queries see which of these keys, (B or 1, s, t) bool."""
    query_s, key_t = _positions(queries, keys)
    distance_st = start + query_s[:, None] - key_t[None, :]
    mask_st = distance_st >= 0
    if window is not None:
        mask_st = mask_st & (distance_st < window)
    if segments_BS is None:
        return mask_st[None]
    return mask_st[None] & (segments_BS[:, queries, None] == segments_BT[:, None, keys])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_block(scale, softcap, q_BGQK, k_BGTK, v_BGTV, mask_BST, drop, sinks_GQ1) -> jax.Array:
    """Returns softmax(scores) v of one block of queries, (B, G, Q, V).

    `drop` is dropout and the positions of queries and keys, or None. `sinks` is None or, for each
    query, a logit that is added to the denominator.
    """
    return _forward(scale, softcap, q_BGQK, k_BGTK, v_BGTV, mask_BST, drop, sinks_GQ1)[0]


def _dropped(drop, probs_BGQT) -> jax.Array:
    if drop is None:
        return probs_BGQT
    dropout, query_s, key_t = drop
    shape = *probs_BGQT.shape[:2], -1, len(query_s), len(key_t)
    return dropout(probs_BGQT.reshape(shape), query_s, key_t).reshape(probs_BGQT.shape)


def _forward(scale, softcap, q_BGQK, k_BGTK, v_BGTV, mask_BST, drop, sinks_GQ1):
    """Keeps one number per score, its exponential (two with a soft cap); autodiff keeps three."""
    dtype = jnp.promote_types(q_BGQK.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    scores_BGQT = dot("bgqk,bgtk->bgqt", q_BGQK * scale, k_BGTK)
    softcap_slope = None
    if softcap:
        tanh_BGQT = jnp.tanh(scores_BGQT / softcap)
        scores_BGQT, softcap_slope = softcap * tanh_BGQT, (1 - tanh_BGQT**2).astype(q_BGQK.dtype)
    # Not -inf: the result of a query that sees no key must be finite.
    scores_BGRST = scores_BGQT.reshape(*scores_BGQT.shape[:2], -1, *mask_BST.shape[1:])
    scores_BGRST = jnp.where(mask_BST[:, None, None], scores_BGRST, jnp.finfo(dtype).min)
    scores_BGQT = scores_BGRST.reshape(scores_BGQT.shape)
    max_BGQ1 = scores_BGQT.max(-1, keepdims=True)
    exp_of_sinks = None
    if sinks_GQ1 is not None:
        sinks_BGQ1 = sinks_GQ1[None].astype(dtype)
        max_BGQ1 = jnp.maximum(max_BGQ1, sinks_BGQ1)
        exp_of_sinks = jnp.exp(sinks_BGQ1 - max_BGQ1)
    exp_BGQT = jnp.exp(scores_BGQT - max_BGQ1)
    sum_BGQ1 = exp_BGQT.sum(-1, keepdims=True)
    inverse_sum_BGQ1 = 1 / (sum_BGQ1 if exp_of_sinks is None else sum_BGQ1 + exp_of_sinks)
    exp_BGQT = exp_BGQT.astype(v_BGTV.dtype)
    out_BGQV = dot("bgqt,bgtv->bgqv", _dropped(drop, exp_BGQT), v_BGTV) * inverse_sum_BGQ1
    out_BGQV = out_BGQV.astype(q_BGQK.dtype)
    residuals = q_BGQK, k_BGTK, v_BGTV, exp_BGQT, inverse_sum_BGQ1, softcap_slope, out_BGQV
    return out_BGQV, (*residuals, drop, sinks_GQ1, exp_of_sinks)


def _backward(scale, softcap, residuals, grad_BGQV):
    q_BGQK, k_BGTK, v_BGTV, exp_BGQT, inverse_sum_BGQ1, softcap_slope, out_BGQV, *rest = residuals
    drop, sinks_GQ1, exp_of_sinks = rest
    dtype, compute_dtype = inverse_sum_BGQ1.dtype, q_BGQK.dtype
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    grad_BGQV = grad_BGQV * inverse_sum_BGQ1  # the cotangent of exp v
    row_dot_BGQ1 = (grad_BGQV * out_BGQV).sum(-1, keepdims=True)
    grad_BGQV = grad_BGQV.astype(compute_dtype)
    grad_v = dot("bgqt,bgqv->bgtv", _dropped(drop, exp_BGQT), grad_BGQV)
    grad_scores = _dropped(drop, dot("bgqv,bgtv->bgqt", grad_BGQV, v_BGTV)) - row_dot_BGQ1
    grad_scores *= exp_BGQT.astype(dtype) * scale
    if softcap_slope is not None:
        grad_scores = grad_scores * softcap_slope
    grad_scores = grad_scores.astype(compute_dtype)
    grad_q = dot("bgqt,bgtk->bgqk", grad_scores, k_BGTK)
    grad_k = dot("bgqt,bgqk->bgtk", grad_scores, q_BGQK)
    grad_sinks = None
    if sinks_GQ1 is not None:
        # A sink is a key whose value is 0, so that only the sum over all keys has its probability.
        grad_sinks = -(exp_of_sinks * row_dot_BGQ1).sum(0).astype(sinks_GQ1.dtype)
    return (
        grad_q.astype(compute_dtype),
        grad_k.astype(k_BGTK.dtype),
        grad_v.astype(v_BGTV.dtype),
        None,
        None,
        grad_sinks,
    )


_attend_block.defvjp(_forward, _backward)
