"""Sums over examples: weights, masks and micro-batches add up exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.metrics import Metrics, weighted

LOSS = np.float32([[1, 2, 4], [8, 16, 32], [64, 128, 256], [512, 1024, 2048]])
WEIGHT = np.float32([[1, 0, 1], [0, 0, 0], [0.5, 1, 1], [1, 1, 1]])


def test_values_are_summed_by_weight():
    sums = weighted(jnp.array(LOSS), jnp.array(WEIGHT), squares=jnp.array(LOSS**2))
    assert sums.loss == (LOSS * WEIGHT).sum()
    assert sums.weight == WEIGHT.sum()
    assert sums.extra.keys() == {"squares"} and sums.extra["squares"] == (LOSS**2 * WEIGHT).sum()


def test_each_counts_as_one_without_weights():
    sums = weighted(jnp.array(LOSS))
    assert (sums.loss, sums.weight, sums.extra) == (LOSS.sum(), LOSS.size, {})


@pytest.mark.parametrize("masked", [np.nan, np.inf, -np.inf])
def test_what_weighs_nothing_may_be_anything(masked):
    values = jnp.array(np.where(WEIGHT == 0, np.float32(masked), LOSS))
    sums = weighted(values, jnp.array(WEIGHT), extra=values)
    assert sums.loss == sums.extra["extra"] == (LOSS * WEIGHT).sum()
    grad = jax.grad(lambda values: weighted(values, jnp.array(WEIGHT)).loss)(values)
    np.testing.assert_array_equal(grad, WEIGHT)


@pytest.mark.parametrize("cuts", [[2], [1, 2], [1, 2, 3], [3]])
def test_uneven_micro_batches_add_up_to_the_whole(cuts):
    whole = weighted(jnp.array(LOSS), jnp.array(WEIGHT), twice=jnp.array(2 * LOSS)).mean()
    parts = [
        weighted(jnp.array(loss), jnp.array(weight), twice=jnp.array(2 * loss))
        for loss, weight in zip(np.split(LOSS, cuts), np.split(WEIGHT, cuts), strict=True)
    ]
    mean = jax.tree.map(lambda *values: sum(values), *parts).mean()
    np.testing.assert_allclose(mean["loss"], np.average(LOSS, weights=WEIGHT), rtol=1e-6)
    assert mean == whole and mean["twice"] == 2 * mean["loss"]


def test_the_mean_of_nothing_is_zero():
    assert Metrics(jnp.float32(0), jnp.float32(0), {"x": jnp.float32(0)}).mean() == {
        "loss": 0,
        "x": 0,
    }
