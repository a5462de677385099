"""Tokens of rows: the index of their lengths, computed once, and the tokens of any of them.

The processes of workers.py do both; row_tokenizer.py is what they run.
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import console, foreign
from meshtrain.data import index_cache, row_files
from meshtrain.data.corpus import concatenate_ranges
from meshtrain.data.row_tokenizer import MODULUS, Job, changed
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.workers import Message, Workers
from meshtrain.errors import ConfigError

# T tokens of all rows, V vocabulary

MAX_SHOWN = 5  # faulty rows in a message
LENGTHS = "lengths"  # of the rows so far, (rows,) int32
STARTS = "starts.npy"  # (rows + 1,) int64: first token of each row, then T
CACHED_TOKENS = 8 << 20  # of the newest rows, kept for the next sample: 32 MB


# ---- the index ----


class Index(NamedTuple):
    """The lengths of all rows, and what else is known of their tokens."""

    starts: np.ndarray  # (rows + 1,) int64, mapped: first token of each row, then T
    digest: str
    counts: np.ndarray  # (V,) int64: how often each token occurs
    folder: Path  # for further files that are computed from these


def open_index(
    job: Job, tokenizer: Tokenizer, workers: Workers, units: np.ndarray, folder: Path
) -> Index:
    """Returns the index in a folder of the cache; computes it if it is missing.

    `units` (units + 1,) are the first rows of what a process measures together, then all rows.
    Raises ConfigError for rows without a text.
    """

    def load(folder: Path, index: dict[str, Any]) -> Index:
        starts = np.asarray(foreign.map_npy(folder / STARTS))
        if starts.dtype != np.int64 or starts.shape != (int(job.rows[-1]) + 1,):
            raise ValueError("its starts are those of other rows")
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        for token, count in index["counts"]:
            counts[token] = count
        return Index(starts, index["digest"], counts, folder)

    def build(folder: Path, parts: Path) -> None:
        _measure(job, tokenizer, workers, units, folder, parts)

    return index_cache.load_or_build(folder, load, build)


def _measure(
    job: Job,
    tokenizer: Tokenizer,
    workers: Workers,
    units: np.ndarray,
    folder: Path,
    parts: Path,
) -> None:
    """Writes the index, resuming after the last unit that a killed process has committed."""
    num_rows = int(job.rows[-1])
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with contextlib.closing(index_cache.Growing(parts, [LENGTHS])) as growing:
        num_done, digest, listed = growing.state or (0, "0", [])
        total_digest = int(digest)
        for token, count in listed:
            counts[token] = count
        borders = zip(units[num_done:-1].tolist(), units[num_done + 1 :].tolist(), strict=True)
        requests = (Message(border) for border in borders)
        label = f"measuring {num_rows:,} rows"
        with console.progress(label, num_rows, stream="stdout") as advance:
            advance(int(units[num_done]))
            for measured in workers.map(requests):
                if measured.value["faults"]:
                    raise ConfigError(*_shown(measured.value["faults"]))
                lengths, token_ids, their_counts = measured.arrays
                growing.append(LENGTHS, lengths)
                total_digest = (total_digest + measured.value["digest"]) % MODULUS
                counts[token_ids] += their_counts
                num_done += 1
                advance(len(lengths))
                if growing.is_due():
                    growing.commit([num_done, str(total_digest), _listed(counts)])
    lengths = index_cache.map_file(parts / LENGTHS, "<i4")
    num_tokens = index_cache.write_starts(lengths, folder / STARTS)
    index = {
        "digest": hashlib.sha256(f"{total_digest} {num_rows} {num_tokens}".encode()).hexdigest(),
        "counts": _listed(counts),
        "rows": num_rows,
        "tokens": num_tokens,
    }
    index_cache.finish(folder, [STARTS], index)
    index_cache.remove_parts(parts, [LENGTHS])


def _listed(counts: np.ndarray) -> list[list[int]]:
    (token_ids,) = np.nonzero(counts)
    return np.stack([token_ids, counts[token_ids]], axis=1).tolist()


def _shown(faults: Sequence[str]) -> list[str]:
    more = ["and more"] if len(faults) > MAX_SHOWN else []
    return [
        *faults[:MAX_SHOWN],
        *more,
        "such rows cannot be trained on: remove them, or tokenize the rest with `meshtrain prepare "
        "--skip_bad`",
    ]


# ---- the tokens ----


class LazyTokens:
    """The tokens of all rows as one array (T,) int32 that is not in memory.

    A slice, or an array of positions, reads and tokenizes the rows that they lie in. It may be
    indexed by several threads.
    """

    dtype = np.dtype(np.int32)
    itemsize = 4
    ndim = 1

    def __init__(self, workers: Workers, index: Index, job: Job):
        self._workers = workers
        self._starts = index.starts
        self._job = job
        self._newest: OrderedDict[int, np.ndarray] = OrderedDict()
        self._num_kept = 0  # tokens in it

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, where: slice | np.ndarray) -> np.ndarray:
        if isinstance(where, slice):
            where = np.arange(*where.indices(len(self)))
        if not where.size:
            return np.zeros(where.shape, np.int32)
        positions = where.ravel()
        rows = self._rows_of(positions)
        tokens = self._tokens_of(rows)
        # Where each row begins among the tokens of these rows.
        lengths = [len(row_tokens) for row_tokens in tokens]
        begins = np.cumsum([0, *lengths[:-1]])
        stream = np.concatenate(tokens)
        starts = self._starts[rows]
        which = np.searchsorted(starts, positions, side="right") - 1
        return stream[positions - starts[which] + begins[which]].reshape(where.shape)

    def _rows_of(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows that hold tokens, each once, in order."""
        # Positions are runs of consecutive numbers: look up the ends of each.
        breaks = np.flatnonzero(np.diff(positions) != 1)
        firsts = positions[np.concatenate([[0], breaks + 1])]
        lasts = positions[np.append(breaks, len(positions) - 1)]
        runs = np.unique(np.stack([firsts, lasts], axis=1), axis=0).astype(np.int64)
        first_rows, last_rows = (np.searchsorted(self._starts, runs, side="right") - 1).T
        return np.unique(concatenate_ranges(first_rows, last_rows - first_rows + 1))

    def _tokens_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the tokens of each of these rows; keeps the newest for the next call."""
        newest = self._newest
        tokens = {row: newest[row] for row in rows.tolist() if row in newest}
        missing = np.array([row for row in rows.tolist() if row not in tokens], np.int64)
        shares = self._shares(missing)
        results = self._workers.run([Message(None, [share]) for share in shares])
        for share, result in zip(shares, results, strict=True):
            stream, lengths = result.arrays
            arrays = np.split(stream, np.cumsum(lengths)[:-1])
            for row, row_tokens in zip(share.tolist(), arrays, strict=True):
                length = int(self._starts[row + 1] - self._starts[row])
                if len(row_tokens) != length:
                    place = row_files.place(self._job.paths, self._job.rows, row)
                    raise changed(place, f"has {len(row_tokens)} tokens")
                tokens[row] = row_tokens
        self._keep(tokens)
        return [tokens[row] for row in rows.tolist()]

    def _shares(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the rows for each process, of about the same number of tokens."""
        if not rows.size:
            return []
        ends = np.cumsum(self._starts[rows + 1] - self._starts[rows])
        num_shares = max(1, min(self._workers.num_workers, len(rows)))
        borders = np.searchsorted(ends, ends[-1] * np.arange(1, num_shares) / num_shares)
        return [share for share in np.split(rows, borders) if share.size]

    def _keep(self, tokens: dict[int, np.ndarray]) -> None:
        kept = OrderedDict(self._newest)
        for row, row_tokens in tokens.items():
            kept[row] = row_tokens
            kept.move_to_end(row)
        num_kept = sum(map(len, kept.values()))
        while num_kept > CACHED_TOKENS:
            _, old = kept.popitem(last=False)
            num_kept -= len(old)
        self._newest = kept  # at once: another thread may read it
