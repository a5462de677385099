"""Which combinations to try: every pair of settings together at least once, in few rows."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

Row = dict[str, Any]  # one level for each factor


def pairwise(possible: Iterable[Row]) -> list[Row]:
    """Returns rows that hold every pair of levels that any possible row holds; the fullest come first.

    Greedy: of all possible rows, each time the (first) one with the most pairs not yet seen.
    """
    rows = list(possible)
    if not rows:
        return []
    numbers = {name: {} for name in rows[0]}  # of each factor's levels, in order of appearance
    coded = [
        [levels.setdefault(row[name], len(levels)) for name, levels in numbers.items()]
        for row in rows
    ]
    pairs = _pairs_of(np.array(coded), [len(levels) for levels in numbers.values()])
    unseen = np.zeros(pairs.max() + 1, bool)
    unseen[pairs] = True
    chosen = []
    while unseen.any():
        best = unseen[pairs].sum(axis=1).argmax()
        unseen[pairs[best]] = False
        chosen.append(rows[best])
    return chosen


def _pairs_of(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Returns (rows, pairs of factors) numbers: one for each pair of levels of each two factors."""
    columns, first = [], 0
    for a, b in itertools.combinations(range(len(sizes)), 2):
        columns.append(first + rows[:, a] * sizes[b] + rows[:, b])
        first += sizes[a] * sizes[b]
    return np.stack(columns, axis=1)
