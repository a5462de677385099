"""Megatron-LM's token files: PREFIX.bin holds the tokens, PREFIX.idx the document boundaries.

An .idx is little-endian: the magic, u64 version, u8 dtype, u64 number of sequences, u64 number of
documents + 1; then the int32 lengths (tokens) and int64 pointers (bytes) of the sequences; then the
int64 indices of the sequences that begin a document, followed by the number of sequences. Most
documents are one sequence.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from meshtrain.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents + 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# Tokens; lengths are int32. A longer document is stored as several sequences.
MAX_SEQUENCE_LENGTH = 2**31 - 1


SPARSE = 512  # every SPARSE-th start is in memory, to search the others in few pages
CHUNK = 1 << 20  # entries of an .idx that are read at a time


class DocumentStarts:
    """First token of each document (documents + 1,) int64, the last is the number of tokens.

    Of the files the entries are mapped, not read: 10^8 documents would need 800 MB. It is indexed
    and searched as an array; `np.asarray` reads all of them.
    """

    dtype = np.dtype(np.int64)
    ndim = 1

    def __init__(self, shards: Sequence["ShardStarts"]):
        self._shards = shards
        counts = [len(shard) - 1 for shard in shards]
        self._first = np.cumsum([0, *counts])  # number of the first document of each shard
        # (shards + 1,) first token of each shard; every shard has one token or more.
        self._offsets = np.cumsum([0, *[shard.num_tokens for shard in shards]], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first[-1]) + 1

    @property
    def size(self) -> int:
        return len(self)

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._range(*key.indices(len(self)))
        numbers = np.asarray(key)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        found = self._at(numbers.reshape(-1)).reshape(numbers.shape)
        return found if found.ndim else found[()]

    def _range(self, start: int, stop: int, step: int) -> np.ndarray:
        if step != 1:
            return self._at(np.arange(start, stop, step))
        parts = []
        for shard, first, offset in zip(self._shards, self._first, self._offsets, strict=False):
            low = max(start, first)
            high = min(stop, first + len(shard) - 1)
            if low < high:
                parts.append(offset + shard.read(low - first, high - first))
        if start < stop == len(self):
            parts.append(self._offsets[-1:])
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"of {len(self)} starts of documents there is no {numbers.max()}")
        shard_of = np.searchsorted(self._first, numbers, side="right") - 1
        starts = np.full(numbers.shape, self._offsets[-1])  # of the last number, which ends all
        for shard in np.unique(shard_of[shard_of < len(self._shards)]):
            selected = shard_of == shard
            local = self._shards[shard].at(numbers[selected] - self._first[shard])
            starts[selected] = self._offsets[shard] + local
        return starts

    def searchsorted(self, values: Any, side: str = "left", sorter: None = None) -> Any:
        """Returns what `np.searchsorted` returns for an array; that function calls this method."""
        values = np.asarray(values, np.int64)
        flat = values.reshape(-1)
        # A document of no tokens at the end of a shard begins where the next shard does.
        shard_of = np.searchsorted(self._offsets, flat, side=side) - 1
        numbers = np.where(shard_of < 0, 0, len(self))
        for shard in np.unique(shard_of[(shard_of >= 0) & (shard_of < len(self._shards))]):
            selected = shard_of == shard
            local = self._shards[shard].search(flat[selected] - self._offsets[shard], side)
            numbers[selected] = self._first[shard] + local
        found = numbers.reshape(values.shape)
        return found if found.ndim else found[()]


class ShardStarts:
    """First token of each document of an .idx, then the number of tokens, memory-mapped."""

    def __init__(self, name: str, layout: "_Layout", sparse: np.ndarray, num_tokens: int):
        self._name = name
        self._layout = layout
        self._pointers = layout.map(name, "pointers")
        self._documents = layout.map(name, "documents")
        self._itemsize = layout.dtype.itemsize
        self._sparse = sparse  # every SPARSE-th start
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self._documents)

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the starts with these numbers, (n,) int64."""
        sequences = self._documents[numbers]
        # The number of sequences stands for the end of the last one.
        is_end = sequences >= len(self._pointers)
        pointers = self._pointers[np.where(is_end, 0, sequences)]
        return np.where(is_end, self.num_tokens, pointers // self._itemsize)

    def read(self, first: int, last: int) -> np.ndarray:
        """Returns starts `first` ... `last` - 1, read from the file and not mapped: many pages."""
        with open(self._name, "rb") as file:
            sequences = self._layout.read(file, "documents", first, last - first)
            low = int(sequences[0])
            high = min(int(sequences[-1]) + 1, self._layout.num_sequences)
            pointers = self._layout.read(file, "pointers", low, max(0, high - low))
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        inside = sequences < self._layout.num_sequences
        starts[inside] = pointers[sequences[inside] - low] // self._itemsize
        return starts

    def search(self, values: np.ndarray, side: str) -> np.ndarray:
        """Returns `np.searchsorted` of the starts of documents, without the last entry."""
        num_documents = len(self) - 1
        # The number is in [low, high]: all starts before `low` are smaller than the value.
        low = np.maximum(np.searchsorted(self._sparse, values, side=side) - 1, 0) * SPARSE
        high = np.minimum(low + SPARSE, num_documents)
        while (is_open := low < high).any():
            middle = (low + high) // 2
            starts = self.at(np.where(is_open, middle, 0))
            is_before = starts < values if side == "left" else starts <= values
            low = np.where(is_open & is_before, middle + 1, low)
            high = np.where(is_open & ~is_before, middle, high)
        return low


class Shard(NamedTuple):
    """The tokens and documents of a pair of files."""

    path: str  # of the .bin
    tokens: Any  # (T,) memory-mapped, or remote.RemoteTokens
    index: ShardStarts

    @property
    def starts(self) -> DocumentStarts:
        """First token of each document (documents + 1,), then T."""
        return DocumentStarts([self.index])


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest of uint8, uint16 and int32 that holds the vocabulary."""
    if vocab_size <= 1 << 8:
        return np.dtype("<u1")
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<i4")


def pack_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Returns the .idx of consecutive documents with these lengths (int64, tokens)."""
    # Sequences of each document: full ones, and a last one with the rest.
    counts = np.maximum(1, -(-lengths // MAX_SEQUENCE_LENGTH))
    documents = np.concatenate([[0], np.cumsum(counts)])
    sequences = np.full(documents[-1], MAX_SEQUENCE_LENGTH, np.int64)
    sequences[documents[1:] - 1] = lengths - MAX_SEQUENCE_LENGTH * (counts - 1)
    pointers = (np.cumsum(sequences) - sequences) * dtype.itemsize
    code_of_dtype = {name: code for code, name in DTYPES.items()}
    header = HEADER.pack(MAGIC, VERSION, code_of_dtype[dtype.name], len(sequences), len(documents))
    return b"".join(
        [
            header,
            sequences.astype("<i4").tobytes(),
            pointers.astype("<i8").tobytes(),
            documents.astype("<i8").tobytes(),
        ]
    )


def prefix_of(path: str) -> str | None:
    """Returns the PREFIX if `path` is a prefix, .bin or .idx of existing files, else None."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    is_pair = os.path.isfile(prefix + ".idx") and os.path.isfile(prefix + ".bin")
    return prefix if is_pair else None


class _Layout(NamedTuple):
    """Where the parts of an .idx file are."""

    dtype: np.dtype  # of the tokens
    num_sequences: int
    num_documents: int  # + 1

    def place(self, part: str) -> tuple[int, str, int]:
        """Returns offset (bytes), dtype and number of entries of a part.

        Parts are the "lengths" (tokens) and "pointers" (bytes) of the sequences, and "documents",
        the first sequence of each and then their number.
        """
        pointers_offset = HEADER.size + 4 * self.num_sequences
        documents_offset = pointers_offset + 8 * self.num_sequences
        places = {
            "lengths": (HEADER.size, "<i4", self.num_sequences),
            "pointers": (pointers_offset, "<i8", self.num_sequences),
            "documents": (documents_offset, "<i8", self.num_documents),
        }
        return places[part]

    def map(self, name: str, part: str) -> np.ndarray:
        offset, dtype, count = self.place(part)
        if not count:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(name, dtype, mode="r", offset=offset, shape=(count,)))

    def chunks(self, file: BinaryIO, part: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number of the first entry and the entries, CHUNK at a time.

        They are read, not mapped: pages that are mapped count as memory of the process.
        """
        _, _, count = self.place(part)
        for first in range(0, count, CHUNK):
            yield first, self.read(file, part, first, min(CHUNK, count - first))

    def read(self, file: BinaryIO, part: str, first: int, count: int) -> np.ndarray:
        """Returns `count` entries of a part, from number `first` on."""
        offset, dtype, _ = self.place(part)
        file.seek(offset + np.dtype(dtype).itemsize * first)
        return np.fromfile(file, dtype, count)


def load(prefix: str) -> Shard:
    """Returns the documents of PREFIX.bin.

    If the index is corrupt, raises ConfigError with its name and the offset.
    """
    name = prefix + ".bin"
    dtype, starts = load_index(prefix + ".idx", name, os.path.getsize(name))
    return Shard(name, map_tokens(name, dtype), starts)


def load_index(name: str, bin_name: str, bin_size: int) -> tuple[np.dtype, ShardStarts]:
    """Returns the dtype of the tokens in a .bin of this size (bytes), and its documents.

    `name` is the .idx. If it is corrupt, raises ConfigError with its name and the offset.
    """
    with open(name, "rb") as file:
        layout = _read_layout(file, name)
        expected = _check_sequences(file, name, layout)
        _check_documents(file, name, layout)
        if expected != bin_size or not expected:
            raise ConfigError(
                f"{bin_name} has {bin_size} bytes, but its .idx lists {expected}; create both again"
            )
        sparse = _sparse_starts(file, layout, expected)
    return layout.dtype, ShardStarts(name, layout, sparse, expected // layout.dtype.itemsize)


def _check_sequences(file: BinaryIO, name: str, layout: _Layout) -> int:
    """Returns the size of all sequences in bytes.

    They must follow each other without gaps, which keeps all pointers within the file.
    """
    itemsize = layout.dtype.itemsize
    end = 0  # bytes
    chunks = zip(layout.chunks(file, "lengths"), layout.chunks(file, "pointers"), strict=True)
    for (first, lengths), (_, pointers) in chunks:
        wrong = np.flatnonzero(lengths < 0)
        if wrong.size:
            offset, _, _ = layout.place("lengths")
            number = wrong[0]
            raise _corrupt(name, offset + 4 * (first + number), f"length {lengths[number]}")
        sizes = lengths.astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        wrong = np.flatnonzero(pointers != ends - sizes)
        if wrong.size:
            offset, _, _ = layout.place("pointers")
            number = wrong[0]
            fault = f"pointer {pointers[number]} is not where sequence {first + number} begins"
            raise _corrupt(name, offset + 8 * (first + number), fault)
        end = int(ends[-1])
    return end


def _check_documents(file: BinaryIO, name: str, layout: _Layout) -> None:
    offset, _, _ = layout.place("documents")
    num_sequences = layout.num_sequences
    fault = f"document indices do not increase from 0 to {num_sequences}"
    previous = 0
    for first, documents in layout.chunks(file, "documents"):
        wrong = np.flatnonzero(np.diff(documents, prepend=previous) < 0)
        if first == 0 and documents[0] != 0:
            wrong = np.zeros(1, np.int64)
        if wrong.size:
            raise _corrupt(name, offset + 8 * (first + wrong[0]), fault)
        previous = documents[-1]
    if previous != num_sequences:
        raise _corrupt(name, offset + 8 * layout.num_documents, fault)


def _sparse_starts(file: BinaryIO, layout: _Layout, end: int) -> np.ndarray:
    """Returns every SPARSE-th start; `end` (bytes) is where empty documents at the end begin."""
    parts = []
    for first, documents in layout.chunks(file, "documents"):
        parts.append(documents[-first % SPARSE :: SPARSE].copy())
    sequences = np.concatenate(parts)
    if layout.num_documents % SPARSE == 1:
        sequences = sequences[:-1]  # the number of sequences, which is no document
    starts = np.full(len(sequences), end, np.int64)
    for first, pointers in layout.chunks(file, "pointers"):
        # `sequences` do not decrease.
        low, high = np.searchsorted(sequences, (first, first + len(pointers)))
        starts[low:high] = pointers[sequences[low:high] - first]
    return starts // layout.dtype.itemsize


def _read_layout(file: BinaryIO, name: str) -> _Layout:
    """Returns the layout of an .idx file; raises ConfigError if its header is corrupt."""
    size = os.path.getsize(name)
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _corrupt(name, 0, f"begins with {header[:9]!r}, not {MAGIC!r}")
    _, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if version != VERSION:
        raise _corrupt(name, 9, f"version {version}, not {VERSION}")
    if code not in DTYPES:
        raise _corrupt(name, 17, f"dtype {code}, not one of the integers {DTYPES}")
    if size < HEADER.size + 12 * num_sequences + 8 * num_documents or num_documents < 1:
        counts = f"{num_sequences} sequences and {num_documents} document entries"
        raise _corrupt(name, 18, f"{counts} do not fit its {size} bytes")
    return _Layout(np.dtype(DTYPES[code]), num_sequences, num_documents)


def map_tokens(path: str, dtype: np.dtype | str) -> np.ndarray:
    """Returns the tokens of a raw file, as a plain array: numpy slices it faster than a memmap."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _corrupt(name: str, offset: int, fault: str) -> ConfigError:
    return ConfigError(f"{name}: at byte {offset}: {fault}; is it a complete .idx of Megatron-LM?")
