"""Cross-entropy against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops import losses
from meshtrain.ops.losses import cross_entropy, in_chunks

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


# ---- in chunks ----

D, ROWS, LENGTH = 4, 8, 6


def projected(kernel, x):
    logits = x @ kernel
    return 3 * jnp.tanh(logits / 3)  # soft caps bend the slope


def of_chunks(mib, dtype="float64", scale=1.0, shape=(ROWS, LENGTH)):
    """Metrics of a loss, and the gradients of `scale` times it."""
    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=(D, V)), rng.normal(size=(*shape, D))
    targets, weights = np.int32(rng.integers(0, V, shape)), rng.integers(0, 3, shape) / 2

    def loss(kernel, x):
        found = in_chunks(projected, kernel, x, targets, weights, z_loss=0.1, mib=mib)
        return found.loss * scale, found

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, found), grads = run(jnp.array(kernel, dtype), jnp.array(x, dtype))
    return found, grads


@pytest.mark.parametrize("most", [1, 5, 7, 30, 47])  # tokens of a chunk: a divisor of 48 below
def test_chunks_add_up_to_the_whole(most, monkeypatch):
    monkeypatch.setattr(losses, "MIB", 4 * V * most)
    with jax.enable_x64(True):
        found, expected = of_chunks(1, scale=0.25), of_chunks(0, scale=0.25)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected
        )
    text = str(jax.make_jaxpr(lambda: of_chunks(1, "float32"))())
    assert f"[1,{max(n for n in range(1, most + 1) if 48 % n == 0)},{V}]" in text


def test_chunks_of_a_prime_number_of_tokens_are_padded(monkeypatch):
    monkeypatch.setattr(losses, "MIB", 4 * V * 10)
    shape = (1, 47)
    with jax.enable_x64(True):
        found, expected = (of_chunks(mib, scale=0.25, shape=shape) for mib in (1, 0))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected
        )
    text = str(jax.make_jaxpr(lambda: of_chunks(1, "float32", shape=shape))())
    assert f"[1,10,{V}]" in text and "length=5" in text


def test_gradients_in_float16_are_scaled_before_they_are_made(monkeypatch):
    """Those of chunks would be of the loss itself, and scaled when they are nothing already."""
    monkeypatch.setattr(losses, "MIB", 4 * V)
    _, (_, grad_x) = of_chunks(1, "float16", scale=2.0**-24)
    _, (_, exact) = of_chunks(0, "float16", scale=2.0**-24)
    np.testing.assert_array_equal(grad_x, exact)


def test_chunks_are_summed_in_float32(monkeypatch):
    """A sum of 1,024 equal tokens would stay at 256 of them in bfloat16."""
    monkeypatch.setattr(losses, "MIB", 4 * V)
    x, targets = jnp.ones((1, 1024, D), jnp.bfloat16), jnp.zeros((1, 1024), jnp.int32)

    def grad_of(num_tokens):
        def loss(kernel):
            given = x[:, :num_tokens], targets[:, :num_tokens], jnp.ones((1, num_tokens))
            found = in_chunks(projected, kernel, *given, z_loss=0.0, mib=1)
            assert found.loss.dtype == jnp.float32
            return found.loss

        grad = jax.grad(loss)(jnp.ones((D, V), jnp.bfloat16))
        assert grad.dtype == jnp.bfloat16
        return np.float32(grad)

    np.testing.assert_allclose(grad_of(1024), 1024 * grad_of(1), rtol=0.01)


def test_the_memory_of_chunks_does_not_grow_with_the_vocabulary():
    """Beside the gradient of the kernel, which is as large as the kernel."""

    def beside_gradients(vocab, mib):
        def loss(kernel, x, targets):
            weights = jnp.ones(targets.shape)
            how = dict(z_loss=0.0, mib=mib)
            return in_chunks(lambda kernel, x: x @ kernel, kernel, x, targets, weights, **how).loss

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, vocab), (8, 512, 8))]
        targets = jax.ShapeDtypeStruct((8, 512), jnp.int32)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = (beside_gradients(vocab, 4) for vocab in (2048, 32768))
    assert large < small + 3 * 32768 * 8 * 4
    assert large < beside_gradients(32768, 0) / 10
