"""Several sources as one: which one a sample comes from follows from its number alone."""

from collections.abc import Callable, Sequence

import numpy as np

from meshtrain.data.permute import permute
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError

BLOCK = 1 << 16  # samples in which every source has exactly its share


def shares(weights: Sequence[float]) -> np.ndarray:
    """Returns how many samples of a block each source has; the largest remainders are rounded up."""
    exact = BLOCK * np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


def place(indices: np.ndarray, counts: np.ndarray, key: Callable[[int], int]):
    """Returns the source of each sample, and its number there; both (n,) int64.

    The samples of a block are in an order of its own, and each source's are counted without gaps.
    """
    blocks, within = np.divmod(indices, BLOCK)
    shuffled = np.empty_like(within)
    for block in np.unique(blocks):
        here = blocks == block
        shuffled[here] = permute(within[here], BLOCK, key=key(int(block)))
    ends = np.cumsum(counts)
    sources = np.searchsorted(ends, shuffled, side="right")
    return sources, blocks * counts[sources] + shuffled - (ends - counts)[sources]


def mix(sources: Sequence[Source], weights: Sequence[float], key: Callable[[int], int]) -> Source:
    """Returns the mixture; every source goes through epochs of its own."""
    counts = shares(weights)
    if (counts == 0).any():
        raise ConfigError(
            f"data.mixture: a weight is less than one sample in {BLOCK}; leave it out"
        )

    def read(indices: np.ndarray) -> Batch:
        of, numbers = place(indices, counts, key)
        batches = {one: _filled(sources[one].read(numbers[of == one])) for one in np.unique(of)}
        order = np.argsort(np.argsort(of, kind="stable"))
        return Batch(
            *(np.concatenate(leaves)[order] for leaves in zip(*batches.values(), strict=True))
        )

    told = [
        f"{count / BLOCK:.2%} {one.description}" for count, one in zip(counts, sources, strict=True)
    ]
    return Source(read, description="; ".join(told), token_bytes=sources[0].token_bytes)


def _filled(batch: Batch) -> Batch:
    """Gives rows of one document each what packed rows have."""
    if batch.segments is not None:
        return batch
    places = np.broadcast_to(np.arange(batch.tokens.shape[1], dtype=np.int32), batch.tokens.shape)
    return batch._replace(positions=places, segments=np.zeros_like(places))
