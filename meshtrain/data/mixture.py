"""A weighted mixture of sources, and the shuffle of each: the index of a sample alone determines what it is."""

from collections.abc import Callable, Sequence

import numpy as np

from meshtrain.data import identity
from meshtrain.data.source import Batch, Source, concatenate
from meshtrain.errors import ConfigError

BLOCK = 1 << 16  # samples; each source has exactly its share of every block


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Returns how many samples of a block each source gives; the largest remainders are rounded up."""
    exact = BLOCK * np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


def assign(indices: np.ndarray, counts: np.ndarray, block_key: Callable[[int], int]):
    """Returns the source of each sample, and its index in that source; both (n,) int64.

    Each block is shuffled with its own key. The indices in each source have no gaps.
    """
    blocks, within = np.divmod(indices, BLOCK)
    shuffled = np.empty_like(within)
    for block in np.unique(blocks):
        here = blocks == block
        shuffled[here] = permute(within[here], BLOCK, key=block_key(int(block)))
    ends = np.cumsum(counts)
    sources = np.searchsorted(ends, shuffled, side="right")
    return sources, blocks * counts[sources] + shuffled - (ends - counts)[sources]


def mix(
    sources: Sequence[Source], weights: Sequence[float], block_key: Callable[[int], int]
) -> Source:
    """Returns the mixture; each source counts its own epochs."""
    counts = block_counts(weights)
    if (counts == 0).any():
        raise ConfigError(
            f"data.mixture: a weight is less than one sample in {BLOCK}; remove that path"
        )

    def read(indices: np.ndarray) -> Batch:
        source_of, source_indices = assign(indices, counts, block_key)
        batches = [
            _with_segments(sources[number].read(source_indices[source_of == number]))
            for number in np.unique(source_of)
        ]
        # The batches are grouped by source: restore the order of `indices`.
        order = np.argsort(np.argsort(source_of, kind="stable"))
        return concatenate(batches, order)

    description = "; ".join(
        f"{count / BLOCK:.2%} {source.description}"
        for count, source in zip(counts, sources, strict=True)
    )
    digests = [one.identity.get("data", "") for one in sources]
    tokenizers = [one.identity.get("tokenizer", "") for one in sources]
    return Source(
        read,
        description=description,
        token_bytes=sources[0].token_bytes,
        identity={
            "data": identity.of_parts([digests, counts.tolist()]),
            "tokenizer": next(filter(None, tokenizers), ""),
        },
    )


def _with_segments(batch: Batch) -> Batch:
    """Adds the positions and segments that packed rows have; each row is one document."""
    if batch.segments is not None:
        return batch
    shape = batch.tokens.shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return batch._replace(positions=positions, segments=np.zeros_like(positions))


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
