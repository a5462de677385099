"""Bias, GELU and gated products with derivatives of their own, against `jax.grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops.feed_forward import add_bias, gated_product, gelu

N, D, F = 6, 5, 8
RNG = np.random.default_rng(0)


def assert_same_gradients(found, expected, *arguments):
    with jax.enable_x64(True):
        cotangent = RNG.normal(size=jax.eval_shape(expected, *arguments).shape)
        values = []
        for function in (found, expected):
            y, vjp = jax.vjp(function, *arguments)
            values.append((y, vjp(cotangent)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), *values)


@pytest.mark.parametrize("shape", [(F,), (2, 4)])
def test_a_bias(shape):
    x, bias = RNG.normal(size=(2, N, *shape)), RNG.normal(size=shape)
    assert_same_gradients(add_bias, lambda x, bias: x + bias[None, None], x, bias)


def test_the_gradient_of_a_bias_is_added_in_float32():
    """In bfloat16, a sum of 1,024 ones stops growing at 256."""
    x, bias = jnp.zeros((1024, 1), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    _, vjp = jax.vjp(add_bias, x, bias)
    assert vjp(jnp.ones_like(x))[1] == 1024
    jaxpr = str(jax.make_jaxpr(lambda x: vjp(x))(jnp.ones_like(x)))
    assert "f32[1] = reduce_sum" in jaxpr


def test_gelu_is_the_one_by_tanh():
    assert_same_gradients(gelu, jax.nn.gelu, RNG.normal(size=(N, F)))


def product(hidden, kernel):
    return 0.5 * hidden @ kernel


def gated_by(activation):
    return lambda up, gate: activation(gate) * up


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu], ids=["swiglu", "geglu"])
def test_a_gated_product(activation):
    arguments = RNG.normal(size=(N, F)), RNG.normal(size=(N, F)), RNG.normal(size=(F, D))
    assert_same_gradients(
        lambda *given: gated_product(product, gated_by(activation), *given),
        lambda up, gate, kernel: product(activation(gate) * up, kernel),
        *arguments,
    )


def test_a_gated_product_keeps_its_operands_and_no_hidden_activations():
    up, gate = jnp.ones((N, F), jnp.bfloat16), jnp.ones((N, F), jnp.bfloat16)
    kernel = jnp.ones((F, D), jnp.bfloat16)
    _, vjp = jax.vjp(
        lambda *given: gated_product(product, gated_by(jax.nn.silu), *given), up, gate, kernel
    )
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(vjp))
    assert sizes == sorted([up.size, gate.size, kernel.size])
