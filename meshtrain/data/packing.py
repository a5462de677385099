"""Pack complete documents into rows of a fixed length with little padding: best fit, longest first.

The packing is computed once, from the document lengths, and cached in a file next to the data.
All documents of a row lie in the same file, so that reading a row reads one file.

There may be 10^8 documents, so neither they nor the packing are in memory: documents are read CHUNK
at a time, the packing is written to its file in place, and mapped when it is complete. What is in
memory are the runs (`Run`): pieces of equal length that fill consecutive rows.
"""

import contextlib
import functools
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
from isal import isal_zlib

from meshtrain import foreign
from meshtrain.data.corpus import Corpus, check_ids, concatenate_ranges, gather
from meshtrain.data.source import Batch, concatenate

# B rows of a batch, S tokens of a row, R rows in total
# N pieces: documents, or parts of the documents longer than S

CHUNK = 1 << 18  # documents, pieces or numbers that are in memory at a time


class Packing(NamedTuple):
    """The pieces of each row. Pieces are numbered in the order of the rows."""

    rows: np.ndarray  # (R + 1,) int64: first piece of each row, then N
    starts: np.ndarray  # (N,) int64: first token of each piece, in the stream
    sizes: np.ndarray  # (N,) int64: 2 * length, plus 1 if the document continues after the piece


def load_or_pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of a split from its cache file; writes a missing or corrupt file.

    Several processes may call this at the same time. Without a writable folder the file is a
    temporary one; for text that is in memory itself, the packing is too.
    """
    if not corpus.cache_prefix:
        return pack(corpus, first, last, seq_len)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(corpus.document_starts), CHUNK):
        digest.update(np.ascontiguousarray(corpus.document_starts[start : start + CHUNK]))
    digest.update(corpus.file_offsets)
    name = f"{corpus.cache_prefix}.best_fit-{seq_len}-{first}-{last}-{digest.hexdigest()}.npy"
    cached = _read_cache(name)
    if cached is not None:
        return cached
    plan = plan_packing(corpus, first, last, seq_len)
    with contextlib.suppress(OSError):
        _write_cache(name, functools.partial(_write, plan))
        # Read it back: all processes of a machine then share the mapped pages.
        cached = _read_cache(name)
        if cached is not None:
            return cached
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(suffix=".npy") as file:
        _write(plan, file)
        cached = _read_cache(file.name)
        if cached is not None:
            return cached  # it stays mapped after the file has no name
    return pack(corpus, first, last, seq_len)


# ---- the file: CRC-32 of the rest, R + 1 and N; then rows, starts and sizes, all int64 ----


def _write_cache(name: str, write: Callable[[BinaryIO], None]) -> None:
    handle, new = tempfile.mkstemp(dir=os.path.dirname(name) or ".", suffix=".new")
    try:
        with open(handle, "w+b") as file:
            write(file)
        os.chmod(new, 0o644)
        os.replace(new, name)
    except BaseException:
        os.unlink(new)
        raise


def _write(plan: "Plan", file: BinaryIO) -> None:
    """Writes the packing to a file, as `np.save` writes an array."""
    num_rows = plan.num_rows + 1
    num_numbers = 3 + num_rows + 2 * plan.num_pieces
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": (num_numbers,)}
    )
    body = len(header.getvalue())
    file.write(header.getvalue())
    file.truncate(body + 8 * num_numbers)
    file.flush()

    def part(offset: int, count: int) -> np.ndarray:
        """Returns `count` int64 of the file, from number `offset` on, mapped."""
        place = body + 8 * offset
        return np.memmap(file, np.int64, mode="r+", offset=place, shape=(count,))

    def parts() -> Packing:
        return Packing(
            rows=part(3, num_rows),
            starts=part(3 + num_rows, plan.num_pieces),
            sizes=part(3 + num_rows + plan.num_pieces, plan.num_pieces),
        )

    # Mapped anew for each chunk: pages that stay mapped count as memory of the process.
    for chunk in plan.chunks():
        chunk.put(parts())
    crc = 0
    for numbers in _numbers(file, body + 24):
        crc = isal_zlib.crc32(numbers, crc)
    part(0, 3)[:] = crc, num_rows, plan.num_pieces


def _numbers(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yields the content of a file from an offset on, read and not mapped."""
    file.seek(offset)
    while data := file.read(8 * CHUNK):
        yield data


def _read_cache(name: str) -> Packing | None:
    """Returns the packing in a cache file; None if the file is missing or corrupt."""
    try:
        mapped = foreign.map_npy(name)
        if mapped.ndim != 1 or mapped.dtype != np.int64:
            return None
        numbers = np.asarray(mapped)
        expected, num_rows, num_pieces = numbers[:3].tolist()
        if len(numbers) != 3 + num_rows + 2 * num_pieces:
            return None
        crc = 0
        with open(name, "rb") as file:
            for data in _numbers(file, os.path.getsize(name) - 8 * (len(numbers) - 3)):
                crc = isal_zlib.crc32(data, crc)
    except (OSError, ValueError):
        return None
    if crc != expected:
        return None
    rows, starts, sizes = np.split(numbers[3:], [num_rows, num_rows + num_pieces])
    return Packing(rows, starts, sizes)


# ---- pack ----


def pack(corpus: Corpus, first: int, last: int, seq_len: int) -> Packing:
    """Returns the packing of tokens first ... last - 1 of the stream, in memory."""
    plan = plan_packing(corpus, first, last, seq_len)
    packing = Packing(
        rows=np.empty(plan.num_rows + 1, np.int64),
        starts=np.empty(plan.num_pieces, np.int64),
        sizes=np.empty(plan.num_pieces, np.int64),
    )
    for chunk in plan.chunks():
        chunk.put(packing)
    return packing


class Run(NamedTuple):
    """Pieces of equal length that fill consecutive rows, or the columns of all runs, (runs,)."""

    first_piece: np.ndarray  # the number of its first piece, longest first
    first_row: np.ndarray
    num_rows: np.ndarray
    per_row: np.ndarray  # pieces in each row
    slot: np.ndarray  # of the first of them in its row


class _FilePlan(NamedTuple):
    """The rows of the pieces of one file."""

    first: int  # the tokens of the split in this file
    last: int
    counts: np.ndarray  # (S + 1,) number of pieces of each length
    runs: Run
    # The rows from `borders[i]` to the next border have `row_counts[i]` pieces each, the first of
    # which is `row_starts[i]`.
    borders: np.ndarray
    row_counts: np.ndarray
    row_starts: np.ndarray
    num_rows: int
    num_pieces: int


class _Chunk(NamedTuple):
    """Numbers of a packing, of any of its three arrays."""

    name: str  # of the array
    where: np.ndarray | slice
    values: np.ndarray

    def put(self, packing: Packing) -> None:
        getattr(packing, self.name)[self.where] = self.values


class Plan(NamedTuple):
    """A packing that is not computed yet but for its sizes."""

    corpus: Corpus
    seq_len: int
    files: list[_FilePlan]

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def num_pieces(self) -> int:
        return sum(file.num_pieces for file in self.files)

    def chunks(self) -> Iterator[_Chunk]:
        """Yields the packing in any order."""
        yield _Chunk("rows", slice(0, 1), np.zeros(1, np.int64))
        first_row = 1
        first_piece = 0
        for file in self.files:
            for start in range(0, file.num_rows, CHUNK):
                rows = np.arange(start, min(start + CHUNK, file.num_rows))
                where = slice(first_row + start, first_row + start + len(rows))
                yield _Chunk("rows", where, first_piece + _first_piece(file, rows + 1))
            for numbers, starts, sizes in _sorted_pieces(self.corpus, file, self.seq_len):
                for start in range(0, len(numbers), CHUNK):
                    part = slice(start, start + CHUNK)
                    where = first_piece + _place(file, numbers[part])
                    yield _Chunk("starts", where, starts[part])
                    yield _Chunk("sizes", where, sizes[part])
            first_row += file.num_rows
            first_piece += file.num_pieces


def plan_packing(corpus: Corpus, first: int, last: int, seq_len: int) -> Plan:
    """Returns the plan of the packing of tokens first ... last - 1 of the stream."""
    files = []
    for file_start, file_end in zip(corpus.file_offsets[:-1], corpus.file_offsets[1:], strict=True):
        start = max(first, int(file_start))
        end = min(last, int(file_end))
        counts = np.zeros(seq_len + 1, np.int64)
        for _, sizes in _pieces(corpus, start, end, seq_len):
            counts += np.bincount(sizes >> 1, minlength=seq_len + 1)
        files.append(_plan_file(start, end, counts))
    return Plan(corpus, seq_len, files)


def _plan_file(first: int, last: int, counts: np.ndarray) -> _FilePlan:
    runs, num_rows = best_fit(counts)
    # How many pieces a row has changes only where a run begins or ends.
    changes = np.zeros(0, np.int64)
    borders = np.zeros(0, np.int64)
    if num_rows:
        begins, ends = runs.first_row, runs.first_row + runs.num_rows
        borders, border_of = np.unique(np.concatenate([begins, ends]), return_inverse=True)
        changes = np.zeros(len(borders), np.int64)
        np.add.at(changes, border_of, np.concatenate([runs.per_row, -runs.per_row]))
    row_counts = np.cumsum(changes)
    pieces = row_counts * np.diff(borders, append=num_rows)
    return _FilePlan(
        first=first,
        last=last,
        counts=counts,
        runs=runs,
        borders=borders,
        row_counts=row_counts,
        row_starts=np.cumsum(pieces) - pieces,
        num_rows=num_rows,
        num_pieces=int(counts.sum()),
    )


def _first_piece(file: _FilePlan, rows: np.ndarray) -> np.ndarray:
    """Returns the number of the first piece of each row; pieces are numbered row by row."""
    at = np.searchsorted(file.borders, rows, side="right") - 1
    return file.row_starts[at] + (rows - file.borders[at]) * file.row_counts[at]


def _place(file: _FilePlan, numbers: np.ndarray) -> np.ndarray:
    """Returns where in the packing the pieces with these numbers, longest first, are."""
    runs = file.runs
    at = np.searchsorted(runs.first_piece, numbers, side="right") - 1
    row, index = np.divmod(numbers - runs.first_piece[at], runs.per_row[at])
    return _first_piece(file, runs.first_row[at] + row) + runs.slot[at] + index


def _pieces(
    corpus: Corpus, first: int, last: int, seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields `starts` and `sizes` of a Packing for tokens first ... last - 1, in stream order."""
    if first >= last:
        return
    after_first = int(np.searchsorted(corpus.document_starts, first, side="right"))
    before_last = int(np.searchsorted(corpus.document_starts, last))
    start = first
    for at in range(after_first, max(before_last, after_first + 1), CHUNK):
        inner = corpus.document_starts[at : min(at + CHUNK, before_last)]
        is_last = at + CHUNK >= before_last
        borders = np.concatenate([[start], inner, np.full(int(is_last), last)])
        start = borders[-1]
        # Split each document into parts of seq_len; the last part may be shorter.
        num_parts = -(-np.diff(borders) // seq_len)
        part_index = concatenate_ranges(np.zeros_like(num_parts), num_parts)
        starts = np.repeat(borders[:-1], num_parts) + seq_len * part_index
        document_ends = np.repeat(borders[1:], num_parts)
        lengths = np.minimum(seq_len, document_ends - starts)
        continues = starts + lengths < document_ends
        yield starts, 2 * lengths + continues


def _sorted_pieces(
    corpus: Corpus, file: _FilePlan, seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the numbers, longest first, the starts and the sizes of all pieces of a file.

    Pieces of equal length are numbered in stream order.
    """
    counts = file.counts
    next_number = np.cumsum(counts[::-1])[::-1] - counts  # of each length
    if file.num_pieces <= CHUNK:
        spill = contextlib.nullcontext(None)
    else:
        spill = tempfile.TemporaryFile(dir=_spill_folder(corpus))
    with spill as spilled:
        for starts, sizes in _pieces(corpus, file.first, file.last, seq_len):
            lengths = sizes >> 1
            order = np.argsort(-lengths, kind="stable")
            found = np.bincount(lengths, minlength=seq_len + 1)
            present = np.flatnonzero(found)[::-1]
            numbers = concatenate_ranges(next_number[present], found[present])
            next_number += found
            if spilled is None:
                yield numbers, starts[order], sizes[order]
                continue
            # The low bit is that of `sizes`.
            values = 2 * starts[order] + (sizes[order] & 1)
            ends = np.cumsum(found[present])
            for start, end in zip(ends - found[present], ends, strict=True):
                os.pwrite(spilled.fileno(), values[start:end].tobytes(), 8 * int(numbers[start]))
        if spilled is None:
            return
        # In this order, neighbours go to neighbouring rows, so that few pages are written.
        ends = np.cumsum(counts[::-1])
        for start in range(0, file.num_pieces, CHUNK):
            spilled.seek(8 * start)
            values = np.fromfile(spilled, np.int64, min(CHUNK, file.num_pieces - start))
            numbers = np.arange(start, start + len(values))
            lengths = seq_len - np.searchsorted(ends, numbers, side="right")
            yield numbers, values >> 1, 2 * lengths + (values & 1)


def _spill_folder(corpus: Corpus) -> str | None:
    """Returns a folder for a temporary file: that of the data; None: the system's."""
    folder = os.path.dirname(corpus.cache_prefix) or "."
    return folder if corpus.cache_prefix and os.access(folder, os.W_OK) else None


def best_fit(counts: np.ndarray) -> tuple[Run, int]:
    """Returns the runs of all pieces and the number of rows; `counts` (S + 1,) by their length.

    Each piece, longest first, goes to the row with the least room that fits it, else to a new row.
    Rows with equal room are interchangeable, so they are handled as groups, and rows of a group
    that were filled together are consecutive.
    """
    seq_len = len(counts) - 1
    runs: list[tuple[int, int, int, int, int]] = []
    num_rows = 0
    # Consecutive rows with equal room, as (first, last + 1, pieces in each), by their room.
    groups: list[list[tuple[int, int, int]]] = [[] for _ in range(seq_len + 1)]
    rooms = 0  # bit r: groups[r] is not empty

    def add_rows(room: int, first: int, end: int, used: int) -> None:
        nonlocal rooms
        if first < end and room:
            groups[room].append((first, end, used))
            rooms |= 1 << room

    piece = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            fitting = rooms >> length
            if not fitting:
                num_new = -(-remaining // (seq_len // length))
                add_rows(seq_len, num_rows, num_rows + num_new, 0)
                num_rows += num_new
                continue
            # The lowest bit set in `fitting` is the least room that fits.
            room = length + (fitting & -fitting).bit_length() - 1
            first, end, used = groups[room].pop()
            if not groups[room]:
                rooms &= ~(1 << room)
            # Fill as many of these rows as the pieces of this length need, each with `per_row`.
            per_row = room // length
            num_taken = min(end - first, -(-remaining // per_row))
            add_rows(room, first + num_taken, end, used)
            num_pieces = min(remaining, num_taken * per_row)
            num_full, num_left = divmod(num_pieces, per_row)
            if num_full:
                runs.append((piece, first, num_full, per_row, used))
            add_rows(room - per_row * length, first, first + num_full, used + per_row)
            # The last row taken may get fewer pieces than it has room for.
            if num_left:
                last = first + num_full
                runs.append((piece + num_full * per_row, last, 1, num_left, used))
                add_rows(room - num_left * length, last, last + 1, used + num_left)
            piece += num_pieces
            remaining -= num_pieces
    columns = np.array(runs, np.int64).reshape(-1, len(Run._fields))
    return Run(*columns.T), num_rows


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


def ranges_of(packing: Packing, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and length of all ranges of the stream that `read_rows` reads."""
    first_B = packing.rows[rows_B]
    packed = concatenate_ranges(first_B, packing.rows[rows_B + 1] - first_B)
    starts = packing.starts[packed]
    lengths = packing.sizes[packed] >> 1
    continues = (packing.sizes[packed] & 1).astype(bool)
    ones = np.ones(continues.sum(), np.int64)
    ends = (starts + lengths)[continues]
    return np.concatenate([starts, ends]), np.concatenate([lengths, ones])


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
    ids = gather(file_tokens, starts[~is_padding], lengths[~is_padding])
    next_ids = gather(file_tokens, (starts + lengths)[continues], np.ones(continues.sum(), int))
    check_ids(corpus, ids, vocab_size)
    check_ids(corpus, next_ids, vocab_size)
    tokens = np.zeros(len(padded), np.int32)
    tokens[~padded] = ids

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
