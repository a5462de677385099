"""The gradient of an embedding lookup keeps every term of a frequent token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops.embedding import lookup


def gradient(table, index, terms):
    return jax.jit(jax.grad(lambda table: jnp.vdot(lookup(table, index), terms)))(table)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_frequent_token_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    index = rng.choice(4, (2, 4096), p=[0.9, 0.08, 0.02, 0]).astype(np.int32)
    terms = jnp.asarray(rng.normal(1, 0.1, (*index.shape, 8)), dtype)
    table = jnp.zeros((4, 8), dtype)
    found = gradient(table, index, terms)
    exact = np.zeros(table.shape)
    np.add.at(exact, index, np.float64(terms))
    assert found.dtype == table.dtype
    np.testing.assert_allclose(np.float64(found), exact, rtol=0.51 * jnp.finfo(dtype).eps)


def test_in_float64_it_is_plain_indexing():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        table, index = rng.normal(size=(5, 3)), np.int32([[4, 0, 4], [1, 4, 2]])
        table, index = map(jnp.asarray, (table, index))
        terms = rng.normal(size=(2, 3, 3))
        assert np.array_equal(lookup(table, index), table[index])
        found = gradient(table, index, terms)
        exact = np.zeros(table.shape)
        np.add.at(exact, index, terms)
        np.testing.assert_allclose(found, exact, rtol=1e-15)
