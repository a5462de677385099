"""The stack of layers: order and number, whatever is unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.models.blocks import run_blocks


@pytest.mark.parametrize("num_layers", [1, 5, 6, 8])
@pytest.mark.parametrize("unroll", [1, 2, 3, 4, 12])
def test_all_layers_run_in_order(num_layers, unroll):
    layers = {"shift": jnp.arange(1.0, num_layers + 1)}
    found = run_blocks(
        lambda layer, x, _: 2 * x + layer["shift"], layers, jnp.zeros(()), None, unroll
    )
    expected = 0.0
    for shift in range(1, num_layers + 1):
        expected = 2 * expected + shift
    assert found == expected


def test_layers_of_which_gradients_are_summed_in_order_have_the_gradients_of_the_loop(
    simulated_gpu,
):
    layers = {"kernel": jax.random.normal(jax.random.key(0), (5, 8, 8)), "bias": jnp.ones((5, 8))}
    x = jax.random.normal(jax.random.key(1), (4, 8))

    def block(layer, x, _):
        return x + jnp.tanh(x @ layer["kernel"] + layer["bias"][None])

    def loss(layers, x, **options):
        return (run_blocks(block, layers, x, None, **options) ** 2).sum()

    with jax.enable_x64(True):
        layers, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (layers, x))
        found = jax.grad(loss, (0, 1))(layers, x, unroll=5, sum_in_order=True)
        expected = jax.grad(loss, (0, 1))(layers, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)
