"""A shuffle in constant memory: a keyed permutation of range(n), computed one index at a time."""

import numpy as np


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Returns the images of `indices` (int64, each < n <= 2^62) under a pseudo-random permutation of range(n).

    A four-round Feistel network on the smallest even number of bits that holds n - 1; a result outside
    range(n) is permuted again until it lies inside (cycle walking), which keeps it a permutation
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    result = np.asarray(indices, np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        left, right = result[outside] >> shift, result[outside] & mask
        for round_ in range(4):
            left, right = right, left ^ (_hash(right, key * 4 + round_) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """Returns a 64-bit hash (splitmix64's finaliser; Steele et al., OOPSLA 2014)."""
    x = x + np.uint64((key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
