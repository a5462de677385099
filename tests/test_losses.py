"""Cross-entropy against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops.losses import cross_entropy

B, S, V = 2, 3, 5
RNG = np.random.default_rng(0)
LOGITS = jnp.array(3 * RNG.normal(size=(B, S, V)), jnp.float32)
TARGETS = jnp.array(RNG.integers(0, V, (B, S)), jnp.int32)
WEIGHTS = jnp.array([[1, 0, 0.5], [1, 1, 2]], jnp.float32)


def plain(logits, *, z_loss=0.0):
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
    log_z = jnp.log(jnp.sum(jnp.exp(logits), -1))
    return jnp.sum(WEIGHTS * (nll + z_loss * log_z**2))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_log_softmax(z_loss):
    def ours(logits):
        return cross_entropy(logits, TARGETS, WEIGHTS, z_loss=z_loss).loss

    value, grad = jax.value_and_grad(ours)(LOGITS)
    expected, expected_grad = jax.value_and_grad(plain)(LOGITS, z_loss=z_loss)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_z_loss_is_reported_apart():
    with_z = cross_entropy(LOGITS, TARGETS, WEIGHTS, z_loss=0.1)
    without = cross_entropy(LOGITS, TARGETS, WEIGHTS, z_loss=0.0)
    assert with_z.weight == without.weight == WEIGHTS.sum()
    assert with_z.extra == {"cross_entropy": without.loss} and without.extra == {}


def test_a_target_without_weight_may_be_outside_the_vocabulary():
    targets = jnp.where(WEIGHTS == 0, -100, TARGETS)
    logits = jnp.where(WEIGHTS[..., None] == 0, jnp.nan, LOGITS)
    loss = cross_entropy(logits, targets, WEIGHTS, z_loss=0.1).loss
    np.testing.assert_allclose(loss, plain(LOGITS, z_loss=0.1), rtol=1e-6)


def test_a_token_ruled_out_by_its_logit_counts_for_nothing():
    ruled_out = (jnp.arange(V) == 4)[None, None] & (TARGETS != 4)[..., None]
    logits = jnp.where(ruled_out, -jnp.inf, LOGITS)
    loss = cross_entropy(logits, TARGETS, WEIGHTS, z_loss=0.0).loss
    np.testing.assert_allclose(loss, plain(logits), rtol=1e-6)


def test_large_logits_do_not_overflow():
    large = cross_entropy(LOGITS + 1e4, TARGETS, WEIGHTS, z_loss=0.0).loss
    np.testing.assert_allclose(large, plain(LOGITS), rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "computed"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")]
)
def test_narrow_logits_are_widened_and_wide_ones_kept(dtype, computed):
    with jax.enable_x64(True):
        logits = LOGITS.astype(dtype)
        loss = cross_entropy(logits, TARGETS, WEIGHTS, z_loss=0.0).loss
        assert loss.dtype == computed
        np.testing.assert_allclose(loss, plain(logits.astype("float64")), rtol=1e-6)
