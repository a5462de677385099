"""Pairwise (all-pairs) test design: few rows in which every pair of settings occurs."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]  # setting -> value


def pairwise(bases: Sequence[Row], factors: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns rows in which every possible pair of values occurs.

    A row is one of `bases` and a level of each factor. The bases are the possible combinations of
    settings that depend on each other. The levels of a factor combine with every base and with
    every level of the other factors. Each row is chosen greedily: the base with the most pairs that
    are not covered yet, then the best level of one factor after the other.
    """
    if not bases:
        return []
    table = np.array(_numbered(bases), int)  # (bases, settings)
    num_values = table.max(axis=0, initial=0) + 1
    missing = _Missing(table, num_values, [len(levels) for levels in factors])
    rows = []
    while missing.any():
        base, levels = missing.next_row()
        row = dict(bases[base])
        for factor, level in zip(factors, levels, strict=True):
            row |= factor[level]
        rows.append(row)
    return rows


class _Missing:
    """The pairs that no row covers yet, as arrays of bool."""

    def __init__(self, table: np.ndarray, num_values: np.ndarray, num_levels: list[int]):
        self.table, self.num_levels = table, num_levels
        self.in_bases = {}  # two settings -> (values, values)
        for a, b in itertools.combinations(range(table.shape[1]), 2):
            self.in_bases[a, b] = np.zeros((num_values[a], num_values[b]), bool)
            self.in_bases[a, b][table[:, a], table[:, b]] = True
        self.with_bases = {  # setting, factor -> (values, levels)
            (a, f): np.ones((num_values[a], num), bool)
            for a in range(table.shape[1])
            for f, num in enumerate(num_levels)
        }
        self.in_factors = {  # two factors -> (levels, levels)
            (f, g): np.ones((num_levels[f], num_levels[g]), bool)
            for f, g in itertools.combinations(range(len(num_levels)), 2)
        }

    def any(self) -> bool:
        parts = (self.in_bases, self.with_bases, self.in_factors)
        return any(pairs.any() for part in parts for pairs in part.values())

    def next_row(self) -> tuple[int, list[int]]:
        """Returns the index of a base and of a level for each factor.

        Marks their pairs as covered.
        """
        gains = [self._gains_with_bases(f) for f in range(len(self.num_levels))]
        scores = np.zeros(len(self.table))
        for (a, b), pairs in self.in_bases.items():
            scores += pairs[self.table[:, a], self.table[:, b]]
        for gain in gains:
            scores += gain.max(axis=1)
        base = int(np.argmax(scores))
        levels: dict[int, int] = {}
        # If only pairs of two factors are missing, one of them has to be chosen.
        if not scores[base]:
            (f, g), pairs = next(item for item in self.in_factors.items() if item[1].any())
            levels[f], levels[g] = map(int, np.argwhere(pairs)[0])
        for f, gain in enumerate(gains):
            if f not in levels:
                others = [self._pairs_of(f, g)[:, level] for g, level in levels.items()]
                levels[f] = int(np.argmax(gain[base] + sum(others, np.zeros(self.num_levels[f]))))
        self._cover(self.table[base], levels)
        return base, [levels[f] for f in range(len(self.num_levels))]

    def _gains_with_bases(self, f: int) -> np.ndarray:
        """Returns the number of missing pairs of each base with each level: (bases, levels)."""
        gains = np.zeros((len(self.table), self.num_levels[f]))
        for a in range(self.table.shape[1]):
            gains += self.with_bases[a, f][self.table[:, a]]
        return gains

    def _pairs_of(self, f: int, g: int) -> np.ndarray:
        return self.in_factors[f, g] if f < g else self.in_factors[g, f].T

    def _cover(self, values: np.ndarray, levels: dict[int, int]) -> None:
        for (a, b), pairs in self.in_bases.items():
            pairs[values[a], values[b]] = False
        for (a, f), pairs in self.with_bases.items():
            pairs[values[a], levels[f]] = False
        for (f, g), pairs in self.in_factors.items():
            pairs[levels[f], levels[g]] = False


def _numbered(rows: Sequence[Row]) -> list[list[int]]:
    """Returns the rows with a number for each value."""
    numbers: dict[str, dict[Any, int]] = {name: {} for name in rows[0]}
    return [
        [known.setdefault(row[name], len(known)) for name, known in numbers.items()] for row in rows
    ]
