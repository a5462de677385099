"""Pairwise (all-pairs) test design: few rows in which every pair of settings occurs."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

Row = dict[str, Any]  # factor -> level


def pairwise(possible: Iterable[Row]) -> list[Row]:
    """Returns some of the possible rows; every pair of levels in a possible row is in one of them.

    A greedy search: it repeatedly chooses the first row with the most pairs that are not covered yet.
    """
    rows = list(possible)
    if not rows:
        return []
    level_numbers = {name: {} for name in rows[0]}  # factor -> level -> number
    numbered = [
        [levels.setdefault(row[name], len(levels)) for name, levels in level_numbers.items()]
        for row in rows
    ]
    pairs = _pairs_of(np.array(numbered), [len(levels) for levels in level_numbers.values()])
    uncovered = np.zeros(pairs.max() + 1, bool)
    uncovered[pairs] = True
    chosen = []
    while uncovered.any():
        best = uncovered[pairs].sum(axis=1).argmax()
        uncovered[pairs[best]] = False
        chosen.append(rows[best])
    return chosen


def _pairs_of(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Returns a unique number for each pair of levels in each row, (rows, pairs of factors)."""
    columns, first = [], 0
    for a, b in itertools.combinations(range(len(sizes)), 2):
        columns.append(first + rows[:, a] * sizes[b] + rows[:, b])
        first += sizes[a] * sizes[b]
    return np.stack(columns, axis=1)
