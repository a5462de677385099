"""Fused attention of some keys: the calls that context_fused.py merges, by cuDNN or emulated.

A kernel returns, next to its output, log(sum of exp(score)) of each query, by which outputs for
different keys merge. Its backward pass gets the merged output and the merged log-sum-exp, so that
the gradients for different keys add up (FlashAttention-2, arXiv 2307.08691).
"""

import inspect
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

# jax.nn returns the log-sum-exp in 16 bits, and has no backward pass that accepts one.
from jax._src.cudnn import fused_attention_stablehlo as fused

# N batch, S queries, T keys, H heads = G key/value heads x R, K head dim of queries, keys and
# values


class Forward(Protocol):
    def __call__(
        self, q_NSHK: jax.Array, k_NTGK: jax.Array, v_NTGK: jax.Array, *, scale: float, causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output (N, S, H, K) and the log-sum-exp (N, H, S), in float32 or wider.

        `causal`: query s sees the keys up to s; otherwise all of them.
        """
        ...


class Backward(Protocol):
    def __call__(
        self,
        q_NSHK: jax.Array,
        k_NTGK: jax.Array,
        v_NTGK: jax.Array,
        out_NSHK: jax.Array,
        log_z_NHS: jax.Array,
        grad_NSHK: jax.Array,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of q, k and v, by output and log-sum-exp over all keys."""
        ...


class Kernel(NamedTuple):
    forward: Forward
    backward: Backward


def of(name: str) -> Kernel:
    """Returns the kernel of attention's implementation "cudnn" or "emulated"."""
    return {"cudnn": CUDNN, "emulated": EMULATED}[name]


# ---- cuDNN ----


def _cudnn_forward(q_NSHK, k_NTGK, v_NTGK, *, scale, causal):
    inputs = q_NSHK, k_NTGK, v_NTGK, *_unused(q_NSHK)
    out, log_z = fused._dot_product_attention_fwd_p_wrapper.bind(
        *inputs, **_options(scale, causal), is_training=True
    )
    return out, log_z


def _cudnn_backward(q_NSHK, k_NTGK, v_NTGK, out_NSHK, log_z_NHS, grad_NSHK, *, scale, causal):
    inputs = q_NSHK, k_NTGK, v_NTGK, *_unused(q_NSHK), log_z_NHS, out_NSHK, grad_NSHK
    return fused._dot_product_attention_bwd_p_wrapper.bind(*inputs, **_options(scale, causal))


def _unused(q_NSHK: jax.Array) -> list[jax.Array]:
    """Returns bias, lengths, offsets and page tables: none."""
    return [jnp.zeros(0, q_NSHK.dtype)] * 7


def _options(scale: float, causal: bool) -> dict[str, Any]:
    options = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    if "score_mod" in inspect.signature(fused._dot_product_attention_bwd_impl).parameters:
        options["score_mod"] = None  # jax 0.12
    return options


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)


# ---- the same in plain JAX, in any dtype; it stores all scores ----


def _emulated_forward(q_NSHK, k_NTGK, v_NTGK, *, scale, causal):
    scores_NGRST = _scores(q_NSHK, k_NTGK, scale, causal)
    log_z_NGRS = jax.nn.logsumexp(scores_NGRST, axis=-1)
    probs_NGRST = jnp.exp(scores_NGRST - log_z_NGRS[..., None])
    out_NSGRK = jnp.einsum("ngrst,ntgk->nsgrk", probs_NGRST, v_NTGK)
    N, S, H, _ = q_NSHK.shape
    return out_NSGRK.reshape(N, S, H, -1).astype(q_NSHK.dtype), log_z_NGRS.reshape(N, H, S)


def _emulated_backward(q_NSHK, k_NTGK, v_NTGK, out_NSHK, log_z_NHS, grad_NSHK, *, scale, causal):
    N, S, _, K = q_NSHK.shape
    G = k_NTGK.shape[2]
    dtype = log_z_NHS.dtype
    q_NSGRK, out_NSGRK, grad_NSGRK = (
        x.astype(dtype).reshape(N, S, G, -1, K) for x in (q_NSHK, out_NSHK, grad_NSHK)
    )
    scores_NGRST = _scores(q_NSHK, k_NTGK, scale, causal)
    probs_NGRST = jnp.exp(scores_NGRST - log_z_NHS.reshape(N, G, -1, S)[..., None])
    row_dot_NGRS = jnp.einsum("nsgrk,nsgrk->ngrs", out_NSGRK, grad_NSGRK)
    grad_probs_NGRST = jnp.einsum("nsgrk,ntgk->ngrst", grad_NSGRK, v_NTGK)
    grad_scores_NGRST = scale * probs_NGRST * (grad_probs_NGRST - row_dot_NGRS[..., None])
    grad_q = jnp.einsum("ngrst,ntgk->nsgrk", grad_scores_NGRST, k_NTGK).reshape(q_NSHK.shape)
    grad_k = jnp.einsum("ngrst,nsgrk->ntgk", grad_scores_NGRST, q_NSGRK)
    grad_v = jnp.einsum("ngrst,nsgrk->ntgk", probs_NGRST, grad_NSGRK)
    return grad_q.astype(q_NSHK.dtype), grad_k.astype(k_NTGK.dtype), grad_v.astype(v_NTGK.dtype)


def _scores(q_NSHK, k_NTGK, scale, causal) -> jax.Array:
    N, S, _, K = q_NSHK.shape
    T, G = k_NTGK.shape[1:3]
    dtype = jnp.promote_types(q_NSHK.dtype, jnp.float32)
    q_NSGRK = q_NSHK.astype(dtype).reshape(N, S, G, -1, K)
    scores_NGRST = scale * jnp.einsum("nsgrk,ntgk->ngrst", q_NSGRK, k_NTGK.astype(dtype))
    if not causal:
        return scores_NGRST
    is_seen_ST = jnp.arange(S)[:, None] >= jnp.arange(T)[None, :]
    return jnp.where(is_seen_ST[None, None, None], scores_NGRST, -jnp.inf)


EMULATED = Kernel(_emulated_forward, _emulated_backward)
