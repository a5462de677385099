"""Comparisons of trees of arrays."""

import chex
import jax
import numpy as np


def assert_same(found, expected, rtol):
    """Compares each leaf relative to its largest value, but at least 1 % of the largest of all.

    The minimum is for the gradient of a key's bias: its exact value is zero, so all of it is
    rounding noise.
    """
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0]))

    def compare(path, a, b):
        scale = max(np.abs(b).max(), 0.01 * largest)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, found, expected)


def assert_bit_equal(a, b):
    """Compares dtypes and shapes too."""
    chex.assert_trees_all_equal(jax.device_get(a), jax.device_get(b), strict=True)
