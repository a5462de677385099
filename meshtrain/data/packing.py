"""Pack complete documents into rows of a fixed length with little padding: best fit, longest first.

The packing is computed once, from the document lengths, and cached in a file next to the data.
All documents of a row lie in the same file, so that reading a row reads one file.
"""

import contextlib
import hashlib
import os
import tempfile
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from meshtrain.data.corpus import Corpus, check_ids, concatenate_ranges
from meshtrain.data.source import Batch, concatenate

# B rows of a batch, S tokens of a row, R rows in total
# N pieces: documents, or parts of the documents longer than S


class Packing(NamedTuple):
    rows: np.ndarray  # (R + 1,) int64: first piece of each row, then N
    starts: np.ndarray  # (N,) int64: first token of each piece, in the stream
    sizes: np.ndarray  # (N,) int64: 2 * length, plus 1 if the document continues after the piece


def pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of tokens first ... last - 1 of the stream."""
    rows, starts, sizes = [np.zeros(1, np.int64)], [], []
    num_pieces = 0
    for begin, end in zip(corpus.file_offsets[:-1], corpus.file_offsets[1:], strict=True):
        piece_starts, piece_sizes = _pieces(corpus, max(first, begin), min(last, end), seq_len)
        row, slot = best_fit(piece_sizes >> 1, seq_len)
        counts = np.bincount(row)
        position = (np.cumsum(counts) - counts)[row] + slot
        order = np.empty_like(position)
        order[position] = np.arange(len(position))
        rows.append(num_pieces + np.cumsum(counts))
        num_pieces += len(position)
        starts.append(piece_starts[order])
        sizes.append(piece_sizes[order])
    return Packing(np.concatenate(rows), np.concatenate(starts), np.concatenate(sizes))


def _pieces(corpus: Corpus, first: int, last: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `starts` and `sizes` of a Packing for tokens first ... last - 1, in stream order."""
    if first >= last:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    inner = corpus.document_starts[np.searchsorted(corpus.document_starts, first, side="right") :]
    borders = np.concatenate([[first], inner[: np.searchsorted(inner, last)], [last]])
    lengths = np.diff(borders)
    parts = -(-lengths // seq_len)
    part_index = concatenate_ranges(np.zeros_like(parts), parts)
    starts = np.repeat(borders[:-1], parts) + seq_len * part_index
    ends = np.repeat(borders[1:], parts)
    lengths = np.minimum(seq_len, ends - starts)
    return starts, 2 * lengths + (starts + lengths < ends)


def best_fit(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the slot within it, (N,) int64 each, of pieces with 1 ... `seq_len` tokens.

    Each piece, longest first, goes to the row with the least room that fits it, else to a new row.
    Rows with equal room are interchangeable, so they are handled as groups.
    """
    small = np.uint16 if seq_len < 1 << 16 else np.int64  # numpy has a radix sort for 16 bits
    order = np.argsort(lengths.astype(small), kind="stable")
    ends = np.cumsum(np.bincount(lengths, minlength=seq_len + 1))
    row, slot = np.empty((2, len(lengths)), np.int64)
    used = np.zeros(len(lengths), np.int64)  # pieces in each row
    groups: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]  # rows, by their room
    rooms, num_rows = 0, 0  # bit r of rooms: groups[r] is not empty

    def add_rows(room: int, rows: np.ndarray) -> None:
        nonlocal rooms
        if rows.size and room:
            groups[room].append(rows)
            rooms |= 1 << room

    for length in np.flatnonzero(np.bincount(lengths, minlength=1))[::-1].tolist():
        remaining = order[ends[length - 1] : ends[length]]
        while remaining.size:
            fitting = rooms >> length
            if not fitting:
                new = -(-len(remaining) // (seq_len // length))
                add_rows(seq_len, np.arange(num_rows, num_rows + new))
                num_rows += new
                continue
            room = length + (fitting & -fitting).bit_length() - 1
            rows = groups[room].pop()
            rooms &= ~(0 if groups[room] else 1 << room)
            per_row = room // length
            taken, rest = np.split(rows, [-(-len(remaining) // per_row)])
            add_rows(room, rest)
            placed, remaining = np.split(remaining, [len(taken) * per_row])
            number, index = np.divmod(np.arange(len(placed)), per_row)
            row[placed], slot[placed] = taken[number], used[taken[number]] + index
            full = len(placed) // per_row
            used[taken[:full]] += per_row
            add_rows(room - per_row * length, taken[:full])
            if full < len(taken):
                used[taken[full]] += len(placed) - full * per_row
                add_rows(room - (len(placed) - full * per_row) * length, taken[full:])
    return row, slot


def load_or_pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of a split from its cache file; writes the file if it is missing or corrupt.

    Several processes may call this at the same time. Without a writable folder, or for text that is in memory
    itself, the packing stays in memory.
    """
    if not corpus.cache_prefix:
        return pack(corpus, first, last, seq_len)
    digest = hashlib.blake2b(corpus.document_starts, digest_size=8)
    digest.update(corpus.file_offsets)
    name = f"{corpus.cache_prefix}.best_fit-{seq_len}-{first}-{last}-{digest.hexdigest()}.npy"
    cached = _read_cache(name)
    if cached is None:
        packing = pack(corpus, first, last, seq_len)
        body = np.concatenate(packing)
        header = [isal_zlib.crc32(body), len(packing.rows), len(packing.starts)]
        with contextlib.suppress(OSError):
            _write_cache(name, np.concatenate([header, body]))
        return _read_cache(name) or packing
    return cached


def _write_cache(name: str, array: np.ndarray) -> None:
    handle, new = tempfile.mkstemp(dir=os.path.dirname(name) or ".", suffix=".new")
    try:
        with open(handle, "wb") as file:
            np.save(file, array)
        os.chmod(new, 0o644)
        os.replace(new, name)
    except BaseException:
        os.unlink(new)
        raise


def _read_cache(name: str) -> Packing | None:
    """Returns the packing in a cache file; None if the file is missing or corrupt."""
    try:
        numbers = np.asarray(np.load(name, mmap_mode="r", allow_pickle=False))
        (crc, num_rows, num_pieces), body = numbers[:3], numbers[3:]
    except (OSError, ValueError, EOFError):
        return None
    if len(body) != num_rows + 2 * num_pieces or isal_zlib.crc32(body) != crc:
        return None
    return Packing(*np.split(body, [num_rows, num_rows + num_pieces]))


def read_rows(
    corpus: Corpus, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows of the packing. Each piece is a segment; padding is a segment with weight 0.

    The last token of a document has no target and weight 0. The last token of a piece whose document
    continues has the next token of the document as its target.
    """
    starts = packing.starts[packing.rows[rows_B]]
    file_B = np.searchsorted(corpus.file_offsets, starts, side="right") - 1
    parts = {
        int(file): _read_from_file(
            corpus, file, packing, rows_B[file_B == file], seq_len, vocab_size
        )
        for file in np.unique(file_B)
    }
    if len(parts) == 1:
        return parts[int(file_B[0])]
    # The parts are grouped by file: restore the order of `rows_B`.
    order = np.argsort(np.argsort(file_B, kind="stable"))
    return concatenate(parts.values(), order)


def _read_from_file(
    corpus: Corpus, file: int, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows whose documents all lie in one file."""
    file_tokens, S = corpus.file_tokens[file], seq_len
    first = packing.rows[rows_B]
    count = packing.rows[rows_B + 1] - first
    # The padding of a row is one more piece, perhaps of no tokens.
    is_padding = np.zeros(count.sum() + len(rows_B), bool)
    is_padding[np.cumsum(count + 1) - 1] = True
    pieces = concatenate_ranges(first, count)
    starts, sizes = np.zeros((2, is_padding.size), np.int64)
    starts[~is_padding] = packing.starts[pieces] - corpus.file_offsets[file]
    sizes[~is_padding] = packing.sizes[pieces]
    lengths, continues = sizes >> 1, (sizes & 1).astype(bool)
    lengths[is_padding] = S - np.add.reduceat(lengths, np.cumsum(count + 1) - count - 1)
    positions = concatenate_ranges(np.zeros_like(lengths), lengths)
    padded = np.repeat(is_padding, lengths)
    found = file_tokens[np.where(padded, 0, np.repeat(starts, lengths) + positions)]
    after = file_tokens[(starts + lengths)[continues]]
    check_ids(corpus, found, vocab_size)
    check_ids(corpus, after, vocab_size)
    tokens = np.where(padded, 0, found).astype(np.int32)
    ends = np.cumsum(lengths) - 1
    targets = np.append(tokens[1:], np.int32(0))
    targets[padded] = targets[ends[~is_padding]] = 0
    targets[ends[continues]] = after
    weights = (~padded).astype(np.float32)
    weights[ends[~is_padding & ~continues]] = 0
    segment_ids = concatenate_ranges(np.zeros_like(count), count + 1).astype(np.int32)
    segments = np.repeat(segment_ids, lengths)
    leaves = (tokens, targets, weights, positions.astype(np.int32), segments)
    return Batch(*(leaf.reshape(-1, S) for leaf in leaves))
