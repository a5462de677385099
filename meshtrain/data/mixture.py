"""A weighted mixture of sources, and the permutation that shuffles samples.

Both are functions of the index of a sample, so the position in the data is one number.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from meshtrain.data import identity
from meshtrain.data.source import Batch, Source, concatenate
from meshtrain.errors import ConfigError

BLOCK = 1 << 16  # samples; each source has exactly its share of every block
SORTED_SIZE = 1 << 16  # `permute` sorts up to this size


def mix(
    sources: Sequence[Source], weights: Sequence[float], block_key: Callable[[int], int]
) -> Source:
    """Returns the mixture; each source counts its own epochs. `block_key`: see `assign`."""
    counts = block_counts(weights)
    if (counts == 0).any():
        raise ConfigError(
            f"data.mixture: a weight is less than one sample in {BLOCK}; remove that path"
        )

    def read(indices: np.ndarray) -> Batch:
        source_numbers, source_indices = assign(indices, counts, block_key)
        batches = []
        for number in np.unique(source_numbers):
            batch = sources[number].read(source_indices[source_numbers == number])
            batches.append(_with_segments(batch))
        # The batches are grouped by source: restore the order of `indices`.
        order = np.argsort(np.argsort(source_numbers, kind="stable"))
        return concatenate(batches, order)

    def prefetch(indices: np.ndarray) -> None:
        source_numbers, source_indices = assign(indices, counts, block_key)
        for number in np.unique(source_numbers):
            if bring := sources[number].prefetch:
                bring(source_indices[source_numbers == number])

    shares = [
        f"{count / BLOCK:.2%} {source.description}"
        for count, source in zip(counts, sources, strict=True)
    ]
    digests = [source.identity.get("data", "") for source in sources]
    tokenizers = [source.identity.get("tokenizer", "") for source in sources]
    known_tokenizers = [tokenizer for tokenizer in tokenizers if tokenizer]
    return Source(
        read,
        description="; ".join(shares),
        token_bytes=sources[0].token_bytes,
        identity={
            "data": identity.of_parts([digests, counts.tolist()]),
            "tokenizer": known_tokenizers[0] if known_tokenizers else "",
        },
        prefetch=prefetch if any(source.prefetch for source in sources) else None,
    )


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Returns how many samples of a block each source gives; they add up to BLOCK."""
    exact = BLOCK * np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    # Largest remainder method: those that lose most by rounding down get one more.
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    return counts


def assign(
    indices: np.ndarray, counts: np.ndarray, block_key: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each sample, and its index in that source; both (n,) int64.

    Each block is shuffled with its own key. The indices in each source have no gaps.
    """
    blocks, within = np.divmod(indices, BLOCK)
    shuffled = np.empty_like(within)
    for block in np.unique(blocks):
        selected = blocks == block
        shuffled[selected] = permute(within[selected], BLOCK, key=block_key(int(block)))
    # Positions 0 ... BLOCK - 1 of a shuffled block are divided among the sources by `counts`.
    ends = np.cumsum(counts)
    starts = ends - counts
    sources = np.searchsorted(ends, shuffled, side="right")
    return sources, blocks * counts[sources] + shuffled - starts[sources]


def _with_segments(batch: Batch) -> Batch:
    """Adds the positions and segments that packed rows have; each row is one document."""
    if batch.segments is not None:
        return batch
    num_rows, S = batch.tokens.shape
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (num_rows, S))
    return batch._replace(positions=positions, segments=np.zeros_like(positions))


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Returns the images of `indices` under a pseudo-random permutation of range(n).

    `indices` are int64, each below n <= 2^62. Up to SORTED_SIZE numbers are sorted by their hashes.
    More would take too long to sort: they are permuted one by one, by a four-round Feistel network
    on the smallest even number of bits that holds n - 1; a result outside range(n) is permuted
    again until it lies inside (cycle walking), which keeps it a permutation (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). The network links one pair of numbers in about
    sqrt(n), which shows in the statistics of thousands of orders: it permutes a power of 4 in even
    permutations only, and the variance of their inversions is half as large again as it should be.
    """
    if 2 < n <= SORTED_SIZE:
        return _sorted_order(n, key)[indices]
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    result = np.asarray(indices, np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        left = result[outside] >> shift
        right = result[outside] & mask
        for round_number in range(4):
            left, right = right, left ^ (_hash(right, key * 4 + round_number) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


@functools.lru_cache(maxsize=16)  # samples are read a batch at a time
def _sorted_order(n: int, key: int) -> np.ndarray:
    """Returns range(n), sorted by the hashes of its numbers."""
    return np.argsort(_hash(np.arange(n, dtype=np.uint64), key))


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """Returns a 64-bit hash (splitmix64's finaliser; Steele et al., OOPSLA 2014)."""
    x = x + np.uint64((key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
