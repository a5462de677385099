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

from meshtrain import foreign
from meshtrain.data.corpus import Corpus, check_ids, concatenate_ranges
from meshtrain.data.source import Batch, concatenate

# B rows of a batch, S tokens of a row, R rows in total
# N pieces: documents, or parts of the documents longer than S


class Packing(NamedTuple):
    """The pieces of each row. Pieces are numbered in the order of the rows."""

    rows: np.ndarray  # (R + 1,) int64: first piece of each row, then N
    starts: np.ndarray  # (N,) int64: first token of each piece, in the stream
    sizes: np.ndarray  # (N,) int64: 2 * length, plus 1 if the document continues after the piece


def load_or_pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of a split from its cache file; writes a missing or corrupt file.

    Several processes may call this at the same time. Without a writable folder, or for text that is
    in memory itself, the packing stays in memory.
    """
    if not corpus.cache_prefix:
        return pack(corpus, first, last, seq_len)
    digest = hashlib.blake2b(corpus.document_starts, digest_size=8)
    digest.update(corpus.file_offsets)
    name = f"{corpus.cache_prefix}.best_fit-{seq_len}-{first}-{last}-{digest.hexdigest()}.npy"
    cached = _read_cache(name)
    if cached is not None:
        return cached
    packing = pack(corpus, first, last, seq_len)
    body = np.concatenate(packing)
    header = [isal_zlib.crc32(body), len(packing.rows), len(packing.starts)]
    with contextlib.suppress(OSError):
        _write_cache(name, np.concatenate([header, body]))
    # Read it back: all processes of a machine then share the mapped pages.
    return _read_cache(name) or packing


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
        numbers = np.asarray(foreign.map_npy(name))
        if numbers.ndim != 1 or numbers.dtype != np.int64:
            return None
        crc, num_rows, num_pieces = numbers[:3]
    except (OSError, ValueError):
        return None
    body = numbers[3:]
    if len(body) != num_rows + 2 * num_pieces or isal_zlib.crc32(body) != crc:
        return None
    rows, starts, sizes = np.split(body, [num_rows, num_rows + num_pieces])
    return Packing(rows, starts, sizes)


# ---- pack ----


def pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of tokens first ... last - 1 of the stream."""
    rows = [np.zeros(1, np.int64)]
    starts = []
    sizes = []
    num_pieces = 0
    for file_start, file_end in zip(corpus.file_offsets[:-1], corpus.file_offsets[1:], strict=True):
        piece_starts, piece_sizes = _pieces(
            corpus, max(first, file_start), min(last, file_end), seq_len
        )
        row, slot = best_fit(piece_sizes >> 1, seq_len)
        # Number the pieces row by row, and within a row by their slot.
        counts = np.bincount(row)
        row_starts = np.cumsum(counts) - counts
        number = row_starts[row] + slot
        order = np.empty_like(number)
        order[number] = np.arange(len(number))
        rows.append(num_pieces + np.cumsum(counts))
        starts.append(piece_starts[order])
        sizes.append(piece_sizes[order])
        num_pieces += len(number)
    return Packing(np.concatenate(rows), np.concatenate(starts), np.concatenate(sizes))


def _pieces(corpus: Corpus, first: int, last: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `starts` and `sizes` of a Packing for tokens first ... last - 1, in stream order."""
    if first >= last:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    after_first = np.searchsorted(corpus.document_starts, first, side="right")
    inner = corpus.document_starts[after_first:]
    inner = inner[: np.searchsorted(inner, last)]
    borders = np.concatenate([[first], inner, [last]])
    # Split each document into parts of seq_len; the last part may be shorter.
    num_parts = -(-np.diff(borders) // seq_len)
    part_index = concatenate_ranges(np.zeros_like(num_parts), num_parts)
    starts = np.repeat(borders[:-1], num_parts) + seq_len * part_index
    document_ends = np.repeat(borders[1:], num_parts)
    lengths = np.minimum(seq_len, document_ends - starts)
    continues = starts + lengths < document_ends
    return starts, 2 * lengths + continues


def best_fit(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of each piece and its slot there, (N,) int64; a piece has 1 ... S tokens.

    Each piece, longest first, goes to the row with the least room that fits it, else to a new row.
    Rows with equal room are interchangeable, so they are handled as groups.
    """
    small = np.uint16 if seq_len < 1 << 16 else np.int64  # numpy has a radix sort for 16 bits
    order = np.argsort(lengths.astype(small), kind="stable")
    ends = np.cumsum(np.bincount(lengths, minlength=seq_len + 1))
    row = np.empty(len(lengths), np.int64)
    slot = np.empty(len(lengths), np.int64)
    used = np.zeros(len(lengths), np.int64)  # pieces in each row
    num_rows = 0
    groups: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]  # rows, by their room
    rooms = 0  # bit r: groups[r] is not empty

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
                num_new = -(-len(remaining) // (seq_len // length))
                add_rows(seq_len, np.arange(num_rows, num_rows + num_new))
                num_rows += num_new
                continue
            # The lowest bit set in `fitting` is the least room that fits.
            room = length + (fitting & -fitting).bit_length() - 1
            rows = groups[room].pop()
            if not groups[room]:
                rooms &= ~(1 << room)
            # Fill as many of these rows as the pieces of this length need, each with `per_row`.
            per_row = room // length
            num_taken = -(-len(remaining) // per_row)
            taken, rest = rows[:num_taken], rows[num_taken:]
            add_rows(room, rest)
            pieces, remaining = np.split(remaining, [len(taken) * per_row])
            number, index = np.divmod(np.arange(len(pieces)), per_row)
            row[pieces] = taken[number]
            slot[pieces] = used[taken[number]] + index
            num_full = len(pieces) // per_row
            used[taken[:num_full]] += per_row
            add_rows(room - per_row * length, taken[:num_full])
            # The last row taken may get fewer pieces than it has room for.
            if num_full < len(taken):
                num_left = len(pieces) - num_full * per_row
                used[taken[num_full]] += num_left
                add_rows(room - num_left * length, taken[num_full:])
    return row, slot


# ---- read ----


def read_rows(
    corpus: Corpus, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows of the packing. Each piece is a segment; padding is a segment with weight 0.

    The last token of a document has no target and weight 0. The last token of a piece whose
    document continues has the next token of the document as its target.
    """
    starts_B = packing.starts[packing.rows[rows_B]]
    file_B = np.searchsorted(corpus.file_offsets, starts_B, side="right") - 1
    batches = []
    for file in np.unique(file_B):
        rows = rows_B[file_B == file]
        batches.append(_read_from_file(corpus, file, packing, rows, seq_len, vocab_size))
    if len(batches) == 1:
        return batches[0]
    # The batches are grouped by file: restore the order of `rows_B`.
    order = np.argsort(np.argsort(file_B, kind="stable"))
    return concatenate(batches, order)


def _read_from_file(
    corpus: Corpus, file: int, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows whose documents all lie in one file."""
    file_tokens = corpus.file_tokens[file]
    first_B = packing.rows[rows_B]
    count_B = packing.rows[rows_B + 1] - first_B
    # The padding of a row is one more piece, perhaps of no tokens.
    row_ends_B = np.cumsum(count_B + 1)
    row_starts_B = row_ends_B - count_B - 1
    num_pieces = count_B.sum() + len(rows_B)
    is_padding = np.zeros(num_pieces, bool)
    is_padding[row_ends_B - 1] = True

    # Start in the file, length and continuation of each piece.
    packed = concatenate_ranges(first_B, count_B)
    starts = np.zeros(num_pieces, np.int64)
    starts[~is_padding] = packing.starts[packed] - corpus.file_offsets[file]
    sizes = np.zeros(num_pieces, np.int64)
    sizes[~is_padding] = packing.sizes[packed]
    lengths = sizes >> 1
    continues = (sizes & 1).astype(bool)
    lengths[is_padding] = seq_len - np.add.reduceat(lengths, row_starts_B)

    # From here on: one entry per token.
    ends = np.cumsum(lengths) - 1  # last token of each piece
    positions = concatenate_ranges(np.zeros_like(lengths), lengths)
    padded = np.repeat(is_padding, lengths)
    where = np.where(padded, 0, np.repeat(starts, lengths) + positions)
    ids = file_tokens[where]
    next_ids = file_tokens[(starts + lengths)[continues]]
    check_ids(corpus, ids, vocab_size)
    check_ids(corpus, next_ids, vocab_size)
    tokens = np.where(padded, 0, ids).astype(np.int32)

    # A target is the next token in the row, except at the end of a piece.
    targets = np.append(tokens[1:], np.int32(0))
    targets[padded] = 0
    targets[ends[~is_padding]] = 0
    targets[ends[continues]] = next_ids
    weights = (~padded).astype(np.float32)
    weights[ends[~is_padding & ~continues]] = 0
    segment_numbers = concatenate_ranges(np.zeros_like(count_B), count_B + 1).astype(np.int32)
    return Batch(
        tokens=tokens.reshape(-1, seq_len),
        targets=targets.reshape(-1, seq_len),
        weights=weights.reshape(-1, seq_len),
        positions=positions.astype(np.int32).reshape(-1, seq_len),
        segments=np.repeat(segment_numbers, lengths).reshape(-1, seq_len),
    )
