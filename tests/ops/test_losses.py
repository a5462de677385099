"""Cross-entropy against its formula, in one piece and in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshtrain.ops import kernels, loss_kernel, losses
from meshtrain.ops.losses import chunked_cross_entropy, cross_entropy, fused_cross_entropy

B, S, V = 2, 3, 5
RNG = np.random.default_rng(0)
LOGITS = jnp.array(3 * RNG.normal(size=(B, S, V)), jnp.float32)
TARGETS = jnp.array(RNG.integers(0, V, (B, S)), jnp.int32)
WEIGHTS = jnp.array([[1, 0, 0.5], [1, 1, 2]], jnp.float32)


def pallas_cross_entropy(*args, **options):
    with kernels.use("pallas"):
        return fused_cross_entropy(*args, **options)


KINDS = {
    "plain": cross_entropy,
    "fused": partial(fused_cross_entropy, vocab_size=V, softcap=0.0),
    "pallas": partial(pallas_cross_entropy, vocab_size=V, softcap=0.0),
}


@pytest.fixture(params=KINDS)
def loss_of(request):
    return KINDS[request.param]


def formula(logits, *, z_loss=0.0):
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
    log_z = jnp.log(jnp.sum(jnp.exp(logits), -1))
    return jnp.sum(WEIGHTS * (nll + z_loss * log_z**2))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_and_gradient_equal_the_formula(loss_of, z_loss):
    def loss(logits):
        return loss_of(logits, TARGETS, WEIGHTS, z_loss=z_loss).loss

    value, grad = jax.value_and_grad(loss)(LOGITS)
    expected, expected_grad = jax.value_and_grad(formula)(LOGITS, z_loss=z_loss)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_with_z_loss_the_cross_entropy_is_an_extra_metric(loss_of):
    with_z = loss_of(LOGITS, TARGETS, WEIGHTS, z_loss=0.1)
    without = loss_of(LOGITS, TARGETS, WEIGHTS, z_loss=0.0)
    assert with_z.weight == without.weight == WEIGHTS.sum()
    assert with_z.extra == {"cross_entropy": without.loss} and without.extra == {}


def test_a_target_without_weight_may_be_outside_the_vocabulary(loss_of):
    targets = jnp.where(WEIGHTS == 0, -100, TARGETS)
    logits = jnp.where(WEIGHTS[..., None] == 0, jnp.nan, LOGITS)
    loss = loss_of(logits, targets, WEIGHTS, z_loss=0.1).loss
    np.testing.assert_allclose(loss, formula(LOGITS, z_loss=0.1), rtol=1e-6)


def test_a_token_masked_by_an_infinite_logit_has_no_effect(loss_of):
    masked = (jnp.arange(V) == 4)[None, None] & (TARGETS != 4)[..., None]
    logits = jnp.where(masked, -jnp.inf, LOGITS)
    loss = loss_of(logits, TARGETS, WEIGHTS, z_loss=0.0).loss
    np.testing.assert_allclose(loss, formula(logits), rtol=1e-6)


def test_large_logits_do_not_overflow(loss_of):
    large = loss_of(LOGITS + 1e4, TARGETS, WEIGHTS, z_loss=0.0).loss
    np.testing.assert_allclose(large, formula(LOGITS), rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "computed"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")]
)
def test_the_loss_is_computed_in_float32_or_wider(loss_of, dtype, computed):
    with jax.enable_x64(True):
        logits = LOGITS.astype(dtype)
        loss = loss_of(logits, TARGETS, WEIGHTS, z_loss=0.0).loss
        assert loss.dtype == computed
        np.testing.assert_allclose(loss, formula(logits.astype("float64")), rtol=1e-6)


PADDED = jnp.pad(LOGITS, [(0, 0), (0, 0), (0, 3)], constant_values=7.0)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_fused_loss_caps_the_logits_and_leaves_out_the_padding(softcap, z_loss):
    """Also where a device has nothing but padding: the last two logits, of which it is one half."""

    def expected_loss(logits):
        capped = softcap * jnp.tanh(logits / softcap) if softcap else logits
        return formula(capped[..., :V], z_loss=z_loss)

    def loss(logits):
        options = dict(z_loss=z_loss, vocab_size=V, softcap=softcap)
        return fused_cross_entropy(logits, TARGETS, WEIGHTS, **options).loss

    with jax.enable_x64(True):
        logits = PADDED.astype("float64")
        value, grad = jax.value_and_grad(loss)(logits)
        expected, expected_grad = jax.value_and_grad(expected_loss)(logits)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-14)
        assert not grad[..., V:].any()
        mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        sharded = jax.device_put(logits, jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
        on_mesh = jax.jit(jax.value_and_grad(loss))(sharded)
        np.testing.assert_allclose(on_mesh[0], expected, rtol=1e-12)
        np.testing.assert_allclose(on_mesh[1], expected_grad, rtol=1e-12, atol=1e-14)


def test_the_fused_loss_keeps_nothing_as_large_as_the_logits_in_float32():
    """The residuals are the logits in their own dtype, and the logsumexp of each token."""
    logits = PADDED.astype("bfloat16")
    options = dict(z_loss=0.1, vocab_size=V, softcap=2.0)

    def loss(logits):
        return fused_cross_entropy(logits, TARGETS, WEIGHTS, **options).loss

    kept = jax.tree.leaves(jax.vjp(loss, logits)[1])
    large = [leaf.dtype for leaf in kept if leaf.size >= logits.size]
    assert large == [jnp.bfloat16]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("num_tokens", [3, 8, 11])
def test_the_kernel_reads_blocks_that_the_vocabulary_does_not_fill(
    softcap, num_tokens, monkeypatch
):
    """Blocks of 4: the padding begins in one, fills the last one, or there is none."""
    monkeypatch.setattr(loss_kernel, "BLOCK", 4)
    logits = 3 * RNG.normal(size=(2, 3, 11))
    targets = jnp.int32(RNG.integers(0, num_tokens, (2, 3)))
    options = dict(z_loss=0.1, vocab_size=num_tokens, softcap=softcap)

    def value_and_grad(function, logits):
        def scaled(logits):  # the loss may have any cotangent
            return 3 * function(logits, targets, WEIGHTS, **options).loss

        return jax.value_and_grad(scaled)(logits)

    with jax.enable_x64(True):
        found = value_and_grad(pallas_cross_entropy, jnp.array(logits))
        expected = value_and_grad(fused_cross_entropy, jnp.array(logits))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected
        )
        text = str(jax.make_jaxpr(lambda x: value_and_grad(pallas_cross_entropy, x))(logits))
        assert "pallas_call" in text


def test_a_target_beyond_the_logits_has_no_score(monkeypatch):
    """Also where the last block of the kernel goes beyond them."""
    monkeypatch.setattr(loss_kernel, "BLOCK", 8)
    targets = TARGETS.at[0, 0].set(V + 1)
    options = dict(z_loss=0.0, vocab_size=V, softcap=0.0)

    def loss(function):
        grad_and_loss = jax.value_and_grad(lambda x: function(x, targets, WEIGHTS, **options).loss)
        return grad_and_loss(LOGITS)

    found, expected = loss(pallas_cross_entropy), loss(fused_cross_entropy)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def test_the_kernel_writes_the_gradient_over_the_logits_in_their_dtype():
    def loss(logits):
        return pallas_cross_entropy(
            logits, TARGETS, WEIGHTS, z_loss=0.0, vocab_size=V, softcap=0.0
        ).loss

    logits = LOGITS.astype("bfloat16")
    (kept,) = [leaf for leaf in jax.tree.leaves(jax.vjp(loss, logits)[1]) if leaf.size > 1]
    assert (kept.shape, kept.dtype) == (logits.shape, jnp.bfloat16)
    (call,) = pallas_calls(jax.make_jaxpr(jax.grad(loss))(logits).jaxpr)
    assert call.params["input_output_aliases"] == ((0, 2),)


def pallas_calls(jaxpr):
    """Returns all equations of hand-written kernels."""
    found = [one for one in jaxpr.eqns if one.primitive.name == "pallas_call"]
    for equation in jaxpr.eqns:
        if equation.primitive.name != "pallas_call":
            for inside in jaxprs_in_params(equation.params):
                found += pallas_calls(inside)
    return found


# ---- in chunks ----

D, ROWS, LENGTH = 4, 8, 6


def project(kernel, x):
    return 3 * jnp.tanh(x @ kernel / 3)  # with a soft cap


def mib_of(num_tokens):
    """Returns the MiB of a chunk's logits."""
    return 4 * V * num_tokens / losses.MIB


def loss_and_grads(mib, dtype="float64", scale=1.0, shape=(ROWS, LENGTH)):
    """Returns the Metrics of a loss, and the gradients of `scale` times the loss."""
    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=(D, V)), rng.normal(size=(*shape, D))
    targets, weights = np.int32(rng.integers(0, V, shape)), rng.integers(0, 3, shape) / 2

    def loss(kernel, x):
        metrics = chunked_cross_entropy(
            project,
            kernel,
            x,
            targets,
            weights,
            loss_of=partial(cross_entropy, z_loss=0.1),
            mib=mib,
        )
        return metrics.loss * scale, metrics

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, metrics), grads = run(jnp.array(kernel, dtype), jnp.array(x, dtype))
    return metrics, grads


# The largest divisor of 48 up to `max_tokens` is the size of a chunk.
@pytest.mark.parametrize("max_tokens", [1, 5, 7, 30, 47])
def test_loss_and_gradients_do_not_depend_on_the_chunks(max_tokens):
    mib = mib_of(max_tokens)
    with jax.enable_x64(True):
        found, expected = loss_and_grads(mib, scale=0.25), loss_and_grads(0, scale=0.25)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected
        )
    text = str(jax.make_jaxpr(lambda: loss_and_grads(mib, "float32"))())
    assert f"[1,{max(n for n in range(1, max_tokens + 1) if 48 % n == 0)},{V}]" in text


def test_chunks_of_a_number_of_tokens_that_they_do_not_divide_are_padded():
    mib, shape = mib_of(10), (1, 47)
    with jax.enable_x64(True):
        found, expected = (loss_and_grads(mib, scale=0.25, shape=shape) for mib in (mib, 0))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected
        )
    text = str(jax.make_jaxpr(lambda: loss_and_grads(mib, "float32", shape=shape))())
    assert f"[1,10,{V}]" in text and "length=5" in text


def test_padding_is_avoided_only_by_up_to_a_quarter_more_chunks():
    """Seven chunks of 22 tokens would become eleven; of 48 tokens they become eight."""
    assert losses._num_chunks(22, V, mib_of(22 / 7)) == 7
    assert losses._num_chunks(48, V, mib_of(48 / 7)) == 8


def test_in_float16_the_loss_is_scaled_before_its_gradient():
    """Chunks compute the gradient of the unscaled loss, which underflows in float16."""
    _, (_, grad_x) = loss_and_grads(mib_of(1), "float16", scale=2.0**-24)
    _, (_, exact) = loss_and_grads(0, "float16", scale=2.0**-24)
    np.testing.assert_array_equal(grad_x, exact)


def test_gradients_of_chunks_are_summed_in_float32():
    """In bfloat16, a sum of 1,024 equal terms stops growing after 256 of them."""
    x, targets = jnp.ones((1, 1024, D), jnp.bfloat16), jnp.zeros((1, 1024), jnp.int32)

    def grad_of(num_tokens):
        def loss(kernel):
            given = x[:, :num_tokens], targets[:, :num_tokens], jnp.ones((1, num_tokens))
            loss_of = partial(cross_entropy, z_loss=0.0)
            metrics = chunked_cross_entropy(project, kernel, *given, loss_of=loss_of, mib=mib_of(1))
            assert metrics.loss.dtype == jnp.float32
            return metrics.loss

        grad = jax.grad(loss)(jnp.ones((D, V), jnp.bfloat16))
        assert grad.dtype == jnp.bfloat16
        return np.float32(grad)

    np.testing.assert_allclose(grad_of(1024), 1024 * grad_of(1), rtol=0.01)


def test_the_memory_of_chunks_does_not_grow_with_the_vocabulary():
    """Except for the gradient of the kernel, which is as large as the kernel."""

    def temporary_bytes(vocab, mib):
        def loss(kernel, x, targets):
            weights = jnp.ones(targets.shape)
            return chunked_cross_entropy(
                lambda kernel, x: x @ kernel,
                kernel,
                x,
                targets,
                weights,
                loss_of=partial(cross_entropy, z_loss=0.0),
                mib=mib,
            ).loss

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, vocab), (8, 512, 8))]
        targets = jax.ShapeDtypeStruct((8, 512), jnp.int32)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = (temporary_bytes(vocab, 4) for vocab in (2048, 32768))
    assert large < small + 3 * 32768 * 8 * 4
    assert large < temporary_bytes(32768, 0) / 10
