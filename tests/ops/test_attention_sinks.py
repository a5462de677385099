"""Attention sinks: logits that only enlarge the denominator of the softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.ops.attention import attention
from meshtrain.ops.dropout import OfAttention

B, S, H, G, K = 2, 11, 4, 2, 6
SEGMENTS = np.int32([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
CASES = {
    "global": {},
    "window": dict(window=3),
    "window of some layers": dict(window=3, is_local=jnp.array(True)),
    "documents, soft cap": dict(segments_BS=SEGMENTS, softcap=2.0),
    "dropout": dict(dropout=OfAttention(np.arange(4, dtype=np.uint32).reshape(2, 2), 0.3, 0)),
}


def inputs(dtype="float64"):
    random = np.random.default_rng(0)
    shapes = [(B, S, heads, K) for heads in (H, G, G)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in (*shapes, (H,))]


def with_a_key_of_value_0(q, k, v, sinks, *, segments_BS=None, **options):
    """Computes sinks as one more dim of queries and keys, and one more key before all others."""
    q = jnp.concatenate([q, jnp.broadcast_to(sinks[None, None, :, None], (B, S, H, 1))], -1)
    k = jnp.concatenate([jnp.repeat(k, H // G, 2), jnp.zeros((B, S, H, 1))], -1)
    sink_key = jnp.zeros((B, 1, H, K + 1)).at[..., -1].set(1)
    scale = K**-0.5
    scores = jnp.einsum("bshk,bthk->bhst", q.at[..., :K].multiply(scale), k)
    if options.get("softcap"):
        scores = options["softcap"] * jnp.tanh(scores / options["softcap"])
    distance = np.subtract.outer(np.arange(S), np.arange(S))
    mask = (distance >= 0) & (distance < options.get("window", S))
    if segments_BS is not None:
        mask = mask[None, None] & (segments_BS[:, None, :, None] == segments_BS[:, None, None])
    scores = jnp.where(mask, scores, -jnp.inf)
    of_sink = jnp.einsum("bshk,bthk->bhst", q, sink_key)
    probs = jax.nn.softmax(jnp.concatenate([scores, of_sink], -1), axis=-1)[..., :S]
    if options.get("dropout"):
        positions = jnp.arange(S)
        grouped = probs.reshape(B, G, H // G, S, S)
        probs = options["dropout"](grouped, positions, positions).reshape(probs.shape)
    return jnp.einsum("bhst,bthk->bshk", probs, jnp.repeat(v, H // G, 2))


@pytest.mark.parametrize("implementation", ["xla", "xla:4", "blockwise:4"])
@pytest.mark.parametrize("case", CASES)
def test_sinks_equal_a_key_of_value_0(case, implementation, x64):
    options = dict(CASES[case])
    weights = np.random.default_rng(1).normal(size=(B, S, H, K))

    def actual(q, k, v, sinks):
        how = dict(segments_BS=None) | options
        out = attention(q, k, v, **how, sinks_H=sinks, implementation=implementation)
        return (out * weights).sum()

    def expected(*arrays):
        return (with_a_key_of_value_0(*arrays, **options) * weights).sum()

    both = [jax.jit(jax.value_and_grad(one, (0, 1, 2, 3)))(*inputs()) for one in (actual, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), *both)


@pytest.mark.parametrize("implementation", ["xla", "blockwise:4"])
@pytest.mark.parametrize("sink", [-300.0, 300.0])
def test_extreme_sinks_are_finite(sink, implementation):
    """A query then attends as without a sink, or to nothing."""
    q, k, v, _ = inputs("bfloat16")

    def total(sinks):
        how = dict(segments_BS=None, implementation=implementation)
        return attention(q, k, v, **how, sinks_H=sinks).astype(jnp.float32).sum()

    value, grads = jax.value_and_grad(total)(jnp.full(H, sink, jnp.bfloat16))
    plain = attention(q, k, v, None, implementation=implementation).astype(jnp.float32).sum()
    np.testing.assert_allclose(value, plain if sink < 0 else 0, rtol=1e-6)
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_a_fused_kernel_declines_in_one_line(kernel, monkeypatch):
    from meshtrain.parallel import accelerator

    monkeypatch.setattr(accelerator, "platform", lambda: "gpu" if kernel == "cudnn" else "tpu")
    q, k, v, sinks = inputs("bfloat16")
    with pytest.raises(ConfigError, match=f"'{kernel}': it does not support model.attention_sinks"):
        attention(q, k, v, None, sinks_H=sinks, implementation=kernel)
