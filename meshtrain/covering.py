"""Which combinations to try: every pair of settings together at least once, in few rows."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]  # one level for each factor


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """Returns rows that hold every pair of levels that any possible row holds; the fullest come first.

    Greedy, and exact: of all possible rows, each time the one with the most pairs not yet seen.
    """
    names = list(factors)
    product = itertools.product(*(range(len(factors[name])) for name in names))

    def level_of(row):
        return {name: factors[name][n] for name, n in zip(names, row, strict=True)}

    rows = np.array([row for row in product if possible(level_of(row))])
    if not rows.size:
        return []
    pairs = _pairs_of(rows, [len(factors[name]) for name in names])
    unseen = np.zeros(pairs.max() + 1, bool)
    unseen[pairs] = True
    chosen = []
    while unseen.any():
        best = unseen[pairs].sum(axis=1).argmax()
        unseen[pairs[best]] = False
        chosen.append(level_of(rows[best]))
    return chosen


def _pairs_of(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Returns (rows, pairs of factors) numbers: one for each pair of levels of each two factors."""
    columns, first = [], 0
    for a, b in itertools.combinations(range(len(sizes)), 2):
        columns.append(first + rows[:, a] * sizes[b] + rows[:, b])
        first += sizes[a] * sizes[b]
    return np.stack(columns, axis=1)
