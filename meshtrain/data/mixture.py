"""A weighted mixture of sources, and the permutation that shuffles samples.

Both are functions of the index of a sample, so the position in the data is one number. The weights
may change at some samples of a run: its phases.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.data import identity
from meshtrain.data.source import Batch, Part, Source, concatenate
from meshtrain.errors import ConfigError

BLOCK = 1 << 16  # samples; each source has exactly its share of every block
SORTED_SIZE = 1 << 16  # `permute` sorts up to this size

BlockKey = Callable[[int], int]


class Shares(NamedTuple):
    """The shares of the sources from a sample on."""

    first: int  # this sample
    counts: np.ndarray  # (sources,) of each block: see `block_counts`
    block_key: BlockKey | None  # see `assign`; None: one source has all samples, in its own order

    @classmethod
    def of(cls, weights: Sequence[float], first: int, block_key: BlockKey | None) -> "Shares":
        """Returns the shares in proportion to `weights`.

        Raises ConfigError if a source would give no sample, although its weight is above 0.
        """
        counts = block_counts(weights)
        if ((counts == 0) & (np.asarray(weights) > 0)).any():
            raise ConfigError(
                f"data.mixture: a weight is less than one sample in {BLOCK}; remove that path"
            )
        return cls(first, counts, block_key)

    def assign(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `assign` does, of samples counted from the first one of these shares."""
        if self.block_key is None:
            return np.full_like(indices, np.argmax(self.counts)), indices
        return assign(indices, self.counts, self.block_key)


class Unread(NamedTuple):
    """What a phase has before it in each source: samples that were left out, and all from one on.

    A phase may end within a block, of which it has read some samples of each source, in any order.
    """

    left_out: list[np.ndarray]  # of each source
    rest: np.ndarray  # (sources,)

    def number(self, source: int, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers of samples, of which `indices` are unread samples of a source."""
        left_out = self.left_out[source]
        is_left_out = indices < len(left_out)
        numbers = self.rest[source] + indices - len(left_out)
        numbers[is_left_out] = left_out[indices[is_left_out]]
        return numbers


def mix(sources: Sequence[Source], names: Sequence[str], phases: Sequence[Shares]) -> Source:
    """Returns the mixture; each source counts its own epochs, through all phases.

    `phases` are in order, the first one from sample 0 on.
    """
    firsts = np.array([phase.first for phase in phases])
    unread = _unread(phases)

    def place(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample, and its index in that source; both (n,) int64."""
        phase_numbers = np.searchsorted(firsts, indices, side="right") - 1
        source_numbers = np.empty_like(indices)
        source_indices = np.empty_like(indices)
        for number in np.unique(phase_numbers):
            selected = phase_numbers == number
            chosen, within = phases[number].assign(indices[selected] - firsts[number])
            for one in np.unique(chosen):
                within[chosen == one] = unread[number].number(one, within[chosen == one])
            source_numbers[selected] = chosen
            source_indices[selected] = within
        return source_numbers, source_indices

    def read(indices: np.ndarray) -> Batch:
        source_numbers, source_indices = place(indices)
        batches = []
        for number in np.unique(source_numbers):
            batch = sources[number].read(source_indices[source_numbers == number])
            batches.append(_with_segments(batch))
        # The batches are grouped by source: restore the order of `indices`.
        order = np.argsort(np.argsort(source_numbers, kind="stable"))
        return concatenate(batches, order)

    def prefetch(indices: np.ndarray) -> None:
        source_numbers, source_indices = place(indices)
        for number in np.unique(source_numbers):
            if bring := sources[number].prefetch:
                bring(source_indices[source_numbers == number])

    def samples_before(sample: int) -> np.ndarray:
        """Returns how many of the samples before this one come from each source."""
        counts = np.zeros_like(phases[0].counts)
        for phase, end in zip(phases, [*firsts[1:].tolist(), sample], strict=True):
            counts += _num_assigned(phase, max(0, min(end, sample) - phase.first))
        return counts

    def parts(first: int, last: int) -> list[Part]:
        samples = (samples_before(last) - samples_before(first)).tolist()
        sizes = [source.size for source in sources]
        return [Part(*values) for values in zip(names, samples, sizes, strict=True)]

    tokenizers = [source.identity.get("tokenizer", "") for source in sources]
    known_tokenizers = [tokenizer for tokenizer in tokenizers if tokenizer]
    return Source(
        read,
        description="; ".join(describe(phases[0], [source.description for source in sources])),
        token_bytes=sources[0].token_bytes,
        identity={
            # Of several phases each has a digest of its own.
            "data": digest(sources, phases[0]) if len(phases) == 1 else "",
            "tokenizer": known_tokenizers[0] if known_tokenizers else "",
        },
        parts=parts,
        prefetch=prefetch if any(source.prefetch for source in sources) else None,
    )


def digest(sources: Sequence[Source], shares: Shares) -> str:
    """Returns what identifies a mixture: its data and their shares."""
    digests = [source.identity.get("data", "") for source in sources]
    used = np.flatnonzero(shares.counts)
    if shares.block_key is None:
        return digests[used[0]]
    return identity.of_parts([[digests[one] for one in used], shares.counts[used].tolist()])


def describe(shares: Shares, names: Sequence[str]) -> list[str]:
    """Returns the shares of the sources that have one."""
    counts = zip(shares.counts, names, strict=True)
    return [f"{count / BLOCK:.2%} {name}" for count, name in counts if count]


def _num_assigned(shares: Shares, num_samples: int) -> np.ndarray:
    """Returns how many of the first samples each source gives, (sources,) int64."""
    sources, _ = shares.assign(_of_last_block(num_samples))
    num_sources = len(shares.counts)
    return num_samples // BLOCK * shares.counts + np.bincount(sources, minlength=num_sources)


def _of_last_block(num_samples: int) -> np.ndarray:
    """Returns the samples of a block that is not complete."""
    return np.arange(num_samples // BLOCK * BLOCK, num_samples)


def _unread(phases: Sequence[Shares]) -> list[Unread]:
    """Returns what each phase has before it."""
    num_sources = len(phases[0].counts)
    nothing = [np.zeros(0, np.int64)] * num_sources
    unread = [Unread(nothing, np.zeros(num_sources, np.int64))]
    for phase, following in zip(phases[:-1], phases[1:], strict=True):
        before = unread[-1]
        num_samples = following.first - phase.first
        sources, indices = phase.assign(_of_last_block(num_samples))
        num_blocks = -(-num_samples // BLOCK)
        left_out, rest = [], before.rest.copy()
        for source in range(num_sources):
            # All of the complete blocks were read, and of the last one these.
            first, last = (
                count * phase.counts[source] for count in (num_samples // BLOCK, num_blocks)
            )
            not_read = np.setdiff1d(np.arange(first, last), indices[sources == source])
            older = before.left_out[source]
            left_out.append(np.concatenate([before.number(source, not_read), older[last:]]))
            rest[source] += max(0, last - len(older))
        unread.append(Unread(left_out, rest))
    return unread


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Returns how many samples of a block each source gives; they add up to BLOCK."""
    exact = BLOCK * np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    # Largest remainder method: those that lose most by rounding down get one more.
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    return counts


def assign(
    indices: np.ndarray, counts: np.ndarray, block_key: BlockKey
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
