"""Whole documents in rows of a fixed length, with little room left: best fit, the longest first.

Where each document goes is computed once, by counts of lengths, and kept in a file beside the data.
Documents share rows with others of their file, so that a row is read from one file.
"""

import contextlib
import hashlib
import os
import tempfile
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from meshtrain.data import corpus as corpora
from meshtrain.data.corpus import Corpus, expand
from meshtrain.data.source import Batch

# B rows of a batch, S tokens of a row, R rows in all, N pieces: documents, or parts of those longer than S


class Packing(NamedTuple):
    rows: np.ndarray  # (R + 1,) int64: first piece of each row, then N
    starts: np.ndarray  # (N,) int64: first token of each piece, in the stream
    sizes: np.ndarray  # (N,) int64: twice its length, plus one where its document goes on after it


def pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Packs what documents have in tokens first ... last - 1 of the stream."""
    rows, starts, sizes = [np.zeros(1, np.int64)], [], []
    num_pieces = 0
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True):
        piece_starts, piece_sizes = _pieces(corpus, max(first, begin), min(last, end), seq_len)
        row, slot = best_fit(piece_sizes >> 1, seq_len)
        counts = np.bincount(row)
        place = (np.cumsum(counts) - counts)[row] + slot
        order = np.empty_like(place)
        order[place] = np.arange(len(place))
        rows.append(num_pieces + np.cumsum(counts))
        num_pieces += len(place)
        starts.append(piece_starts[order])
        sizes.append(piece_sizes[order])
    return Packing(np.concatenate(rows), np.concatenate(starts), np.concatenate(sizes))


def _pieces(corpus: Corpus, first: int, last: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `starts` and `sizes` of a Packing, in the stream's order, of tokens first ... last - 1."""
    if first >= last:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    inner = corpus.starts[np.searchsorted(corpus.starts, first, side="right") :]
    borders = np.concatenate([[first], inner[: np.searchsorted(inner, last)], [last]])
    lengths = np.diff(borders)
    parts = -(-lengths // seq_len)
    starts = np.repeat(borders[:-1], parts) + seq_len * expand(np.zeros_like(parts), parts)
    ends = np.repeat(borders[1:], parts)
    lengths = np.minimum(seq_len, ends - starts)
    return starts, 2 * lengths + (starts + lengths < ends)


def best_fit(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the slot in it, (N,) int64 each, of pieces with 1 ... `seq_len` tokens.

    Each piece, from the longest on, goes where it leaves the least room; a new row where it fits none.
    All that is known of a row is its room, so rows are handled by the group, not one by one.
    """
    small = np.uint16 if seq_len < 1 << 16 else np.int64  # numpy's radix sort takes 16 bits
    order = np.argsort(lengths.astype(small), kind="stable")
    ends = np.cumsum(np.bincount(lengths, minlength=seq_len + 1))
    row, slot = np.empty((2, len(lengths)), np.int64)
    used = np.zeros(len(lengths), np.int64)  # pieces in each row
    groups: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]  # rows, by the room they have
    rooms, num_rows = 0, 0  # bit r of rooms: groups[r] is not empty

    def keep(room: int, rows: np.ndarray) -> None:
        nonlocal rooms
        if rows.size and room:
            groups[room].append(rows)
            rooms |= 1 << room

    for length in np.flatnonzero(np.bincount(lengths, minlength=1))[::-1].tolist():
        left = order[ends[length - 1] : ends[length]]
        while left.size:
            fitting = rooms >> length
            if not fitting:
                new = -(-len(left) // (seq_len // length))
                keep(seq_len, np.arange(num_rows, num_rows + new))
                num_rows += new
                continue
            room = length + (fitting & -fitting).bit_length() - 1
            rows = groups[room].pop()
            rooms &= ~(0 if groups[room] else 1 << room)
            each = room // length
            taken, rest = np.split(rows, [-(-len(left) // each)])
            keep(room, rest)
            now, left = np.split(left, [len(taken) * each])
            number, turn = np.divmod(np.arange(len(now)), each)
            row[now], slot[now] = taken[number], used[taken[number]] + turn
            full = len(now) // each
            used[taken[:full]] += each
            keep(room - each * length, taken[:full])
            if full < len(taken):
                used[taken[full]] += len(now) - full * each
                keep(room - (len(now) - full * each) * length, taken[full:])
    return row, slot


def load(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of a split, from its file; makes the file where it is missing or damaged.

    Several processes may do so at once. Where the folder cannot be written, it stays in memory.
    """
    data = hashlib.blake2b(corpus.starts, digest_size=8)
    data.update(corpus.offsets)
    name = f"{corpus.beside}.best_fit-{seq_len}-{first}-{last}-{data.hexdigest()}.npy"
    found = _read(name)
    if found is None:
        packing = pack(corpus, first, last, seq_len)
        body = np.concatenate(packing)
        head = [isal_zlib.crc32(body), len(packing.rows), len(packing.starts)]
        with contextlib.suppress(OSError):
            _write(name, np.concatenate([head, body]))
        return _read(name) or packing
    return found


def _write(name: str, array: np.ndarray) -> None:
    handle, new = tempfile.mkstemp(dir=os.path.dirname(name) or ".", suffix=".new")
    try:
        with open(handle, "wb") as file:
            np.save(file, array)
        os.chmod(new, 0o644)
        os.replace(new, name)
    except BaseException:
        os.unlink(new)
        raise


def _read(name: str) -> Packing | None:
    try:
        numbers = np.asarray(np.load(name, mmap_mode="r", allow_pickle=False))
        (crc, num_rows, num_pieces), body = numbers[:3], numbers[3:]
    except (OSError, ValueError, EOFError):
        return None
    if len(body) != num_rows + 2 * num_pieces or isal_zlib.crc32(body) != crc:
        return None
    return Packing(*np.split(body, [num_rows, num_rows + num_pieces]))


def read(
    corpus: Corpus, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows of the packing. Each piece is a segment, and so is the padding, which weighs nothing.

    The last token of a document has no target, and weighs nothing; that of a piece whose document goes
    on has the token after it.
    """
    starts = packing.starts[packing.rows[rows_B]]
    numbers = np.searchsorted(corpus.offsets, starts, side="right") - 1
    parts = {
        int(number): _of_file(
            corpus, number, packing, rows_B[numbers == number], seq_len, vocab_size
        )
        for number in np.unique(numbers)
    }
    if len(parts) == 1:
        return parts[int(numbers[0])]
    order = np.argsort(np.argsort(numbers, kind="stable"))
    return Batch(*(np.concatenate(leaves)[order] for leaves in zip(*parts.values(), strict=True)))


def _of_file(
    corpus: Corpus, number: int, packing: Packing, rows_B: np.ndarray, seq_len: int, vocab_size: int
) -> Batch:
    """Returns rows that are read from one file."""
    stream, S = corpus.parts[number], seq_len
    first = packing.rows[rows_B]
    count = packing.rows[rows_B + 1] - first
    # The padding of a row is one more piece, perhaps of no tokens.
    is_padding = np.zeros(count.sum() + len(rows_B), bool)
    is_padding[np.cumsum(count + 1) - 1] = True
    starts, sizes = np.zeros((2, is_padding.size), np.int64)
    starts[~is_padding] = packing.starts[expand(first, count)] - corpus.offsets[number]
    sizes[~is_padding] = packing.sizes[expand(first, count)]
    lengths, goes_on = sizes >> 1, (sizes & 1).astype(bool)
    lengths[is_padding] = S - np.add.reduceat(lengths, np.cumsum(count + 1) - count - 1)
    positions = expand(np.zeros_like(lengths), lengths)
    padded = np.repeat(is_padding, lengths)
    found = stream[np.where(padded, 0, np.repeat(starts, lengths) + positions)]
    after = stream[(starts + lengths)[goes_on]]
    corpora.check_ids(corpus, found, vocab_size)
    corpora.check_ids(corpus, after, vocab_size)
    tokens = np.where(padded, 0, found).astype(np.int32)
    ends = np.cumsum(lengths) - 1
    targets = np.append(tokens[1:], np.int32(0))
    targets[padded] = targets[ends[~is_padding]] = 0
    targets[ends[goes_on]] = after
    weights = (~padded).astype(np.float32)
    weights[ends[~is_padding & ~goes_on]] = 0
    segments = np.repeat(expand(np.zeros_like(count), count + 1).astype(np.int32), lengths)
    leaves = (tokens, targets, weights, positions.astype(np.int32), segments)
    return Batch(*(leaf.reshape(-1, S) for leaf in leaves))
