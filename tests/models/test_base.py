"""The stack of layers: order and number, whatever is unrolled."""

import jax.numpy as jnp
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
