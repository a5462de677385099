"""Rotary position embeddings against complex numbers, with their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.models.rope import frequencies, rope

B, S, H, K = 2, 5, 3, 8
RNG = np.random.default_rng(0)


def formula(x, positions, frequency, factor):
    """Multiplies dim k + i dim k + K/2 by factor e^(i position frequency)."""
    numbers = x[..., : K // 2] + 1j * x[..., K // 2 :]
    angle = positions[:, :, None, None] * frequency[None, None, None]
    turned = numbers * factor * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_rope_and_its_gradient_equal_the_product_of_complex_numbers(factor, x64):
    x, cotangent = RNG.normal(size=(2, B, S, H, K))
    given = RNG.integers(0, 50, (B, S)), frequencies(K, 100.0), factor
    found, vjp = jax.vjp(lambda x: rope(x, *given), x)
    expected, expected_vjp = jax.vjp(lambda x: formula(x, *given), x)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(*vjp(cotangent), *expected_vjp(cotangent), rtol=1e-12, atol=1e-12)
