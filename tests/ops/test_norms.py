"""Norms with a derivative of their own, against `jax.grad` of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops import norm_kernel
from meshtrain.ops.norms import normalise, normalise_and_pass
from meshtrain.parallel import sharding

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


# ---- the kernel of the backward pass ----

KINDS = pytest.mark.parametrize(
    ("is_centred", "has_bias"),
    [(True, True), (True, False), (False, False)],
    ids=["LayerNorm", "LayerNorm without bias", "RMSNorm"],
)


def passing(norm):
    """Returns a norm of which the input passes by."""
    return lambda x, scale, bias: (norm(x, scale, bias), x)


@KINDS
@pytest.mark.parametrize("tile", [1, 32, 4096])
def test_the_kernel_adds_the_gradients_of_norm_and_residual(
    is_centred, has_bias, tile, monkeypatch
):
    """Rows of 12 numbers in a width of 16: one row at a time, two, or all rows of a program."""
    monkeypatch.setattr(norm_kernel, "TILE", tile)
    with jax.enable_x64(True):
        *given, cotangent = arguments((D,), has_bias, offset=0.5)
        cotangents = jnp.array(cotangent), RNG.normal(size=cotangent.shape)
        found = value_and_gradients(
            lambda *given: normalise_and_pass(*given, is_centred, EPSILON), *given, cotangents
        )
        expected = value_and_gradients(
            passing(lambda *given: formula(*given, is_centred)), *given, cotangents
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, expected
        )


@pytest.mark.parametrize("shape", [(1, 1, 12), (3, 1, 7), (2, 5, 1), (1, 3, 130)], ids=str)
def test_the_kernel_takes_any_number_of_rows_and_of_numbers_in_a_row(shape, x64):
    x, grad, residual = RNG.normal(size=(3, *shape))
    scale = RNG.normal(size=shape[-1])

    def gradients(norm):
        return jax.vjp(norm, x, scale, None)[1]((jnp.array(grad), jnp.array(residual)))

    found = gradients(lambda *given: normalise_and_pass(*given, False, EPSILON))
    expected = gradients(passing(lambda *given: formula(*given, False)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, expected
    )


def test_each_device_runs_the_kernel_on_its_rows(x64):
    """Batch and sequence are sharded, and so are, outside the layers, slices of the batch."""
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    rules = [("batch", "fsdp"), ("residual_seq", "context"), ("residual", None)]
    x, scale, bias = RNG.normal(size=(2, 2, 6, D)), RNG.normal(size=D), RNG.normal(size=D)
    cotangents = RNG.normal(size=x.shape), RNG.normal(size=x.shape)

    def gradients(norm):
        def of_slices(x, scale, bias):
            return jax.vmap(norm, (0, None, None), spmd_axis_name="data")(x, scale, bias)

        return jax.jit(lambda *given: jax.vjp(of_slices, *given)[1](cotangents))(x, scale, bias)

    expected = gradients(passing(lambda *given: formula(*given, True)))
    with jax.set_mesh(mesh), sharding.use_rules(rules):
        x = jax.device_put(x, jax.P("data", "fsdp", "context"))
        found = gradients(lambda *given: normalise_and_pass(*given, True, EPSILON))
        assert found[0].sharding.spec == jax.P("data", "fsdp", "context")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, expected
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_the_kernel_rounds_only_its_results(dtype):
    *given, cotangent = (jnp.asarray(one, dtype) for one in arguments((D,), True))
    cotangents = cotangent, cotangent[::-1]
    _, found = value_and_gradients(
        lambda *given: normalise_and_pass(*given, True, EPSILON), *given, cotangents
    )
    wide, wide_cotangents = jax.tree.map(lambda x: x.astype("float32"), (given, cotangents))
    _, expected = value_and_gradients(
        passing(lambda *given: formula(*given, True)), *wide, wide_cotangents
    )
    assert {leaf.dtype for leaf in found} == {jnp.dtype(dtype)}
    half_a_step = float(jnp.finfo(dtype).eps) / 2
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(a), b, rtol=1.01 * half_a_step, atol=1e-5)
