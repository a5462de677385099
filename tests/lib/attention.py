"""Attention by its formula, and cuDNN compared with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.ops.attention import attention

B, S, K = 2, 6, 4


# ---- xla and blockwise, against autodiff of the formula ----


def formula(q, k, v, segments, *, window=None, softcap=0.0, scale=K**-0.5):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("bshk,bthk->bhst", q, k)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    mask = (distance >= 0) & (distance < (window or len(distance)))
    mask = np.broadcast_to(mask, (B, *mask.shape))
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    exp = jnp.where(mask[:, None], jnp.exp(scores), 0)
    return jnp.einsum("bhst,bthk->bshk", exp / exp.sum(-1, keepdims=True), v)


# ---- cuDNN's results ----


CUDNN_CASES = {
    "packed": {"segments": True},
    "mixed": {"window": 3},
    "packed, mixed": {"segments": True, "window": 3},
    "one document": {},
}


def check_cudnn(case, length, head_dim):
    """Compares values and gradients in bfloat16 with the formula in float32; the length is odd."""
    rng = np.random.default_rng(0)
    options = dict(CUDNN_CASES[case])
    shapes = [(B, length, heads, head_dim) for heads in (4, 2, 2, 4)]
    *inputs, weights = (jnp.array(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    segments = np.sort(rng.integers(0, 4, (B, length)), 1) if options.pop("segments", 0) else None
    window = options.pop("window", None)

    def run(compute, dtype):
        def summed(q, k, v):
            out = compute(q, k, v, segments).astype(jnp.float32)
            return (out * weights.astype(jnp.float32)).sum(), out

        args = [x.astype(dtype) for x in inputs]
        (_, out), grads = jax.jit(jax.value_and_grad(summed, (0, 1, 2), has_aux=True))(*args)
        return out, *grads

    for is_local in (True, False) if window else (True,):
        local = {"is_local": jnp.array(is_local)} if window else {}
        fused = partial(attention, implementation="cudnn", window=window, **local)
        plain = partial(formula, window=window if is_local else None, scale=head_dim**-0.5)
        found, expected = run(fused, jnp.bfloat16), run(plain, jnp.float32)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.float32(a), b, atol=0.03 * np.abs(b).max())
