"""Sums over examples: weights, masks and micro-batches add up exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.metrics import Metrics, weighted

LOSS = np.float32([[1, 2, 4], [8, 16, 32], [64, 128, 256], [512, 1024, 2048]])
WEIGHT = np.float32([[1, 0, 1], [0, 0, 0], [0.5, 1, 1], [1, 1, 1]])


def test_values_are_multiplied_by_their_weight_and_summed():
    sums = weighted(jnp.array(LOSS), jnp.array(WEIGHT), squares=jnp.array(LOSS**2))
    assert sums.loss == (LOSS * WEIGHT).sum()
    assert sums.weight == WEIGHT.sum()
    assert sums.extra.keys() == {"squares"} and sums.extra["squares"] == (LOSS**2 * WEIGHT).sum()


def test_the_default_weight_is_one():
    sums = weighted(jnp.array(LOSS))
    assert (sums.loss, sums.weight, sums.extra) == (LOSS.sum(), LOSS.size, {})


def test_low_precision_is_summed_in_float32():
    sums = weighted(jnp.ones(1001, jnp.bfloat16), extra=jnp.ones(1001, jnp.bfloat16))
    assert (sums.loss, sums.weight, sums.extra["extra"]) == (1001, 1001, 1001)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("masked", [np.nan, np.inf, -np.inf])
def test_a_value_of_weight_zero_may_be_nan_or_infinite(masked):
    values = jnp.array(np.where(WEIGHT == 0, np.float32(masked), LOSS))
    sums = weighted(values, jnp.array(WEIGHT), extra=values)
    assert sums.loss == sums.extra["extra"] == (LOSS * WEIGHT).sum()
    grad = jax.grad(lambda values: weighted(values, jnp.array(WEIGHT)).loss)(values)
    np.testing.assert_array_equal(grad, WEIGHT)


@pytest.mark.parametrize("bounds", [[2], [1, 2], [1, 2, 3], [3]])
def test_uneven_micro_batches_add_up_to_the_batch(bounds):
    expected = weighted(jnp.array(LOSS), jnp.array(WEIGHT), twice=jnp.array(2 * LOSS)).mean()
    parts = [
        weighted(jnp.array(loss), jnp.array(weight), twice=jnp.array(2 * loss))
        for loss, weight in zip(np.split(LOSS, bounds), np.split(WEIGHT, bounds), strict=True)
    ]
    mean = jax.tree.map(lambda *values: sum(values), *parts).mean()
    np.testing.assert_allclose(mean["loss"], np.average(LOSS, weights=WEIGHT), rtol=1e-6)
    assert mean == expected and mean["twice"] == 2 * mean["loss"]


def test_the_mean_of_a_weight_below_one_is_divided_by_it():
    assert Metrics(jnp.float32(1), jnp.float32(0.25)).mean() == {"loss": 4}


def test_without_weight_there_is_no_mean():
    means = Metrics(jnp.float32(0), jnp.float32(0), {"x": jnp.float32(0)}).mean()
    assert np.isnan(means["loss"]) and np.isnan(means["x"])
