"""A weighted mixture of sources: the index of a sample alone determines its source."""

from collections.abc import Callable, Sequence

import numpy as np

from meshtrain.data import identity
from meshtrain.data.permute import permute
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
