"""Attention against the plain formula, and what each position may see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops.attention import attention

B, S, K = 2, 6, 4
SEGMENTS = np.int32([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])


def inputs(num_heads, num_kv_heads):
    rng = np.random.default_rng(0)
    heads = num_heads, num_kv_heads, num_kv_heads
    return [rng.normal(size=(B, S, h, K)).astype(np.float32) for h in heads]


def visible(segments):
    """(B, S, S): whether position s sees position t."""
    causal = np.broadcast_to(np.tril(np.ones((S, S), bool)), (B, S, S))
    return causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])


def plain(q, k, v, segments):
    scores = np.einsum("bshk,bthk->bhst", q, k) / np.sqrt(K)
    p = np.exp(scores - scores.max()) * visible(segments)[:, None]
    return np.einsum("bhst,bthk->bshk", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one segment", "segments"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_is_softmax_over_repeated_key_value_heads(num_kv_heads, segments):
    q, k, v = inputs(4, num_kv_heads)
    repeated = [np.repeat(x, 4 // num_kv_heads, axis=2) for x in (k, v)]
    np.testing.assert_allclose(
        attention(q, k, v, segments), plain(q, *repeated, segments), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float64", 1e-12)])
def test_large_scores_are_computed_in_float32_or_wider(dtype, tolerance):
    rng = np.random.default_rng(0)
    q = np.full((B, S, 1, K), 8.0)
    k = -8 - rng.integers(0, 4, (B, S, 1, K)) / 16  # scores of -128 to -131, in steps of 1/4
    v = rng.integers(-4, 5, (B, S, 1, K)) / 4
    with jax.enable_x64(True):
        out = attention(*(jnp.array(x, dtype) for x in (q, k, v)), None)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.float64(out), plain(q, k, v, None), atol=tolerance)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one segment", "segments"])
def test_no_gradient_flows_from_an_output_to_what_it_must_not_see(segments):
    def summed(q, k, v):
        return attention(q, k, v, segments).sum((0, 2))  # (S, K); rows of a batch are independent

    of_q, of_k, of_v = jax.jit(jax.jacrev(summed, argnums=(0, 1, 2)))(*inputs(2, 1))
    # Output position, head dim, then the input's B, S, H, K: the largest for each pair of positions.
    reach_q, reach_k, reach_v = (
        np.moveaxis(np.abs(jac).max((1, 4, 5)), 0, 1) for jac in (of_q, of_k, of_v)
    )
    np.testing.assert_array_equal(reach_v > 0, visible(segments))
    assert not reach_k[~visible(segments)].any()
    assert not reach_q[:, ~np.eye(S, dtype=bool)].any()


def test_a_segment_is_attended_as_if_alone():
    q, k, v = inputs(2, 1)
    segments = np.int32([[0, 0, 0, 1, 1, 1]] * B)
    packed = attention(q, k, v, segments)
    for here in np.s_[:, :3], np.s_[:, 3:]:
        alone = attention(q[here], k[here], v[here], None)
        np.testing.assert_allclose(packed[here], alone, rtol=1e-5, atol=1e-6)
