"""Norms with a derivative of their own, against `jax.grad` of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops.norms import normalise

B, S, D = 2, 6, 12
EPSILON = 1e-3
RNG = np.random.default_rng(0)


def formula(x, scale, bias, is_centred):
    dims = tuple(range(x.ndim - scale.ndim, x.ndim))
    if is_centred:
        x = x - x.mean(dims, keepdims=True)
    normalised = x / jnp.sqrt((x**2).mean(dims, keepdims=True) + EPSILON)
    y = normalised * scale[(None,) * (x.ndim - scale.ndim)]
    return y if bias is None else y + bias[(None,) * (x.ndim - bias.ndim)]


def arguments(shape, has_bias, *, offset=0.0):
    x = RNG.normal(size=(B, S, *shape)) + offset
    scale, bias = RNG.normal(size=shape), RNG.normal(size=shape)
    return x, scale, bias if has_bias else None, RNG.normal(size=x.shape)


def value_and_gradients(norm, x, scale, bias, cotangent):
    y, vjp = jax.vjp(norm, x, scale, bias)
    return y, vjp(cotangent)


@pytest.mark.parametrize("shape", [(D,), (3, 4)], ids=["D", "H x K"])
@pytest.mark.parametrize(
    ("is_centred", "has_bias"),
    [(True, True), (True, False), (False, False)],
    ids=["LayerNorm", "LayerNorm without bias", "RMSNorm"],
)
def test_value_and_gradients_equal_the_formula(shape, is_centred, has_bias):
    with jax.enable_x64(True):
        *given, cotangent = arguments(shape, has_bias, offset=0.5)
        found = value_and_gradients(
            lambda x, scale, bias: normalise(x, scale, bias, is_centred, EPSILON),
            *given,
            cotangent,
        )
        expected = value_and_gradients(
            lambda *given: formula(*given, is_centred), *given, cotangent
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, expected
        )


@pytest.mark.parametrize("outlier", [0.0, 3e3, -1e4])
def test_an_outlier_of_a_row_loses_no_digits_of_its_variance(outlier):
    """The variance from sums of x and of x^2 would be wrong from the third digit."""
    x = RNG.normal(size=(1, 1, 768)) + 100
    x[0, 0, 0] += outlier
    scale = np.ones(768)
    found = normalise(jnp.float32(x), jnp.float32(scale), None, True, EPSILON)
    with jax.enable_x64(True):
        expected = formula(jnp.array(x), jnp.array(scale), None, True)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_only_the_results_are_rounded(dtype):
    x, scale, bias, cotangent = (jnp.asarray(one, dtype) for one in arguments((D,), True))
    found = value_and_gradients(
        lambda x, scale, bias: normalise(x, scale, bias, True, EPSILON), x, scale, bias, cotangent
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    wide = (one.astype("float32") for one in (x, scale, bias, cotangent))
    expected = value_and_gradients(lambda *given: formula(*given, True), *wide)
    half_a_step = float(jnp.finfo(dtype).eps) / 2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), b, rtol=1.01 * half_a_step, atol=1e-5)


def test_the_backward_pass_keeps_the_input_and_two_numbers_of_a_row():
    x, scale, bias, _ = (jnp.asarray(one, "bfloat16") for one in arguments((D,), True))
    _, vjp = jax.vjp(lambda *given: normalise(*given, True, EPSILON), x, scale, bias)
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(vjp))
    rows = ("float32", B * S)
    assert kept == [("bfloat16", D), ("bfloat16", D), ("bfloat16", x.size), rows, rows]


def test_a_row_of_equal_numbers_has_finite_gradients():
    x = jnp.full((1, 1, D), 3.0)
    grads = jax.grad(lambda x: normalise(x, jnp.ones(D), None, True, 1e-6).sum())(x)
    assert jnp.isfinite(grads).all()
