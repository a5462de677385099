"""Statistics of random orders: each is a number of standard deviations from that of uniform ones.

The means and variances are exact, for orders that are all as likely (Knuth, "The Art of Computer
Programming" 3, 5.1.1; Arratia, Barbour and Tavare, "Logarithmic Combinatorial Structures", 1.1).
"""

import math

import numpy as np

# K orders of n numbers each

LIMIT = 4.5  # standard deviations; numpy's own orders stay below


def deviations(orders_Kn: np.ndarray) -> dict[str, float]:
    """Returns the statistics of K orders, by name; in each order every number is there once."""
    K, n = orders_Kn.shape
    ranks_Kn = orders_Kn - (n - 1) / 2
    squares = n * (n**2 - 1) / 12  # sum of the squares of the ranks
    found = {
        "place of a number": excess(_counts_by_place(orders_Kn), degrees=(n - 1) ** 2),
        "fixed points": _deviation((orders_Kn == np.arange(n)).sum(1), 1, 1),
        "cycles": _deviation(num_cycles(orders_Kn), *_moments_of_cycles(n)),
        # Half of all permutations are even.
        "parity": _deviation((n - num_cycles(orders_Kn)) % 2, 1 / 2, 1 / 4),
        "inversions": _deviation(
            num_inversions(orders_Kn), n * (n - 1) / 4, n * (n - 1) * (2 * n + 5) / 72
        ),
        "ascents": _deviation(
            (np.diff(orders_Kn) > 0).sum(1), (n - 1) / 2, (n + 1) / 12 if n > 2 else 1 / 4
        ),
        "rank correlation": _deviation(
            ranks_Kn @ (np.arange(n) - (n - 1) / 2) / squares, 0, 1 / (n - 1)
        ),
    }
    # Neighbours that stay neighbours, and all other distances: modulo n each is as likely.
    steps = np.diff(orders_Kn, append=orders_Kn[:, :1]) % n
    found["distance of neighbours"] = excess(np.bincount(steps.ravel(), minlength=n)[1:])
    halves = (orders_Kn - np.roll(orders_Kn, -(n // 2), axis=1)) % n
    found["distance of opposites"] = excess(np.bincount(halves.ravel(), minlength=n)[1:])
    if n > 3:
        for lag in sorted({1, 2, n // 2}):
            products = (ranks_Kn * np.roll(ranks_Kn, -lag, axis=1)).sum(1) / squares
            found[f"serial correlation {lag}"] = _deviation(
                products, -1 / (n - 1), products.var() or 1
            )
    # The variance of a statistic shows numbers that move together, which its mean does not.
    inversions = num_inversions(orders_Kn)
    if n > 8:
        ratio = inversions.var() / (n * (n - 1) * (2 * n + 5) / 72)
        found["variance of inversions"] = (ratio - 1) / math.sqrt(2 / K)
        correlations = ranks_Kn @ (np.arange(n) - (n - 1) / 2) / squares
        ratio = (correlations**2).mean() * (n - 1)
        found["variance of rank correlation"] = (ratio - 1) / math.sqrt(2 / K)
    # The same of successive orders: epochs, or seeds.
    found["order before"] = _deviation((orders_Kn[1:] == orders_Kn[:-1]).sum(1), 1, 1)
    between = (ranks_Kn[1:] * ranks_Kn[:-1]).sum(1) / squares
    found["rank correlation with the order before"] = _deviation(between, 0, 1 / (n - 1))
    return found


def excess(counts: np.ndarray, degrees: int | None = None) -> float:
    """Returns by how many standard deviations the chi-square of equal counts is exceeded.

    Its cube root is about normal (Wilson and Hilferty, 1931).
    """
    degrees = max(1, counts.size - 1 if degrees is None else degrees)
    expected = counts.mean()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    variance = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - 1 + variance) / math.sqrt(variance))


def _deviation(values_K: np.ndarray, mean: float, variance: float) -> float:
    return float((values_K.mean() - mean) / math.sqrt(variance / len(values_K)))


def _counts_by_place(orders_Kn: np.ndarray) -> np.ndarray:
    n = orders_Kn.shape[1]
    return np.stack([np.bincount(column, minlength=n) for column in orders_Kn.T])


def num_inversions(orders_Kn: np.ndarray) -> np.ndarray:
    """Returns how many pairs of each order are in descending order (K,)."""
    n = orders_Kn.shape[1]
    total_K = np.zeros(len(orders_Kn), np.int64)
    for place in range(n - 1):
        total_K += (orders_Kn[:, place : place + 1] > orders_Kn[:, place + 1 :]).sum(1)
    return total_K


def num_cycles(orders_Kn: np.ndarray) -> np.ndarray:
    """Returns the number of cycles of each permutation (K,)."""
    K, n = orders_Kn.shape
    # The smallest number of each cycle, by pointer doubling.
    smallest_Kn = np.broadcast_to(np.arange(n), (K, n))
    jumps_Kn = orders_Kn
    for _ in range(max(1, (n - 1).bit_length())):
        smallest_Kn = np.minimum(smallest_Kn, np.take_along_axis(smallest_Kn, jumps_Kn, 1))
        jumps_Kn = np.take_along_axis(jumps_Kn, jumps_Kn, 1)
    return (smallest_Kn == np.arange(n)).sum(1)


def _moments_of_cycles(n: int) -> tuple[float, float]:
    harmonic = sum(1 / k for k in range(1, n + 1))
    return harmonic, harmonic - sum(1 / k**2 for k in range(1, n + 1))
