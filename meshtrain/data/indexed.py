"""Megatron-LM's token files: PREFIX.bin holds the tokens, PREFIX.idx the document boundaries.

An .idx is little-endian: the magic, u64 version, u8 dtype, u64 number of sequences, u64 number of
documents + 1; then the int32 lengths (tokens) and int64 pointers (bytes) of the sequences; then the
int64 indices of the sequences that begin a document, followed by the number of sequences. Most
documents are one sequence.
"""

import os
import struct
from typing import NamedTuple

import numpy as np

from meshtrain.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents + 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# Tokens; lengths are int32. A longer document is stored as several sequences.
MAX_SEQUENCE_LENGTH = 2**31 - 1


class Shard(NamedTuple):
    """The tokens and documents of a pair of files."""

    path: str  # of the .bin
    tokens: np.ndarray  # (T,) memory-mapped
    starts: np.ndarray  # (documents + 1,) int64: first token of each document, then T


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


class _Index(NamedTuple):
    """The content of an .idx file."""

    dtype: np.dtype
    lengths: np.ndarray  # (sequences,) int32, tokens
    pointers: np.ndarray  # (sequences,) int64, bytes
    documents: np.ndarray  # (documents + 1,) int64: first sequence of each, then their number


def load(prefix: str) -> Shard:
    """Returns the documents of PREFIX.bin.

    If the index is corrupt, raises ConfigError with its name and the offset.
    """
    name = prefix + ".idx"
    index = _read_index(name)
    itemsize = index.dtype.itemsize
    num_sequences = len(index.lengths)
    pointers_offset = HEADER.size + 4 * num_sequences
    documents_offset = pointers_offset + 8 * num_sequences

    # Sequences must follow each other without gaps, which keeps all pointers within the file.
    wrong = np.flatnonzero(index.lengths < 0)
    if wrong.size:
        number = wrong[0]
        raise _corrupt(name, HEADER.size + 4 * number, f"length {index.lengths[number]}")
    sizes = index.lengths.astype(np.int64) * itemsize
    ends = np.cumsum(sizes)
    wrong = np.flatnonzero(index.pointers != ends - sizes)
    if wrong.size:
        number = wrong[0]
        fault = f"pointer {index.pointers[number]} is not where sequence {number} begins"
        raise _corrupt(name, pointers_offset + 8 * number, fault)
    documents = index.documents
    wrong = np.flatnonzero(np.diff(documents, prepend=0, append=num_sequences) < 0)
    if wrong.size or documents[0] != 0 or documents[-1] != num_sequences:
        number = wrong[0] if wrong.size else 0
        fault = f"document indices do not increase from 0 to {num_sequences}"
        raise _corrupt(name, documents_offset + 8 * number, fault)

    expected = int(ends[-1]) if num_sequences else 0
    size_bin = os.path.getsize(prefix + ".bin")
    if expected != size_bin or not expected:
        raise ConfigError(
            f"{prefix}.bin has {size_bin} bytes, but its .idx lists {expected}; create both again"
        )
    starts = np.append(index.pointers, expected)[documents] // itemsize
    return Shard(prefix + ".bin", map_tokens(prefix + ".bin", index.dtype), starts)


def _read_index(name: str) -> _Index:
    """Returns the content of an .idx file; raises ConfigError if its header is corrupt."""
    size = os.path.getsize(name)
    with open(name, "rb") as file:
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
        return _Index(
            dtype=np.dtype(DTYPES[code]),
            lengths=np.fromfile(file, "<i4", num_sequences),
            pointers=np.fromfile(file, "<i8", num_sequences),
            documents=np.fromfile(file, "<i8", num_documents),
        )


def map_tokens(path: str, dtype: np.dtype | str) -> np.ndarray:
    """Returns the tokens of a raw file, as a plain array: numpy slices it faster than a memmap."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _corrupt(name: str, offset: int, fault: str) -> ConfigError:
    return ConfigError(f"{name}: at byte {offset}: {fault}; is it a complete .idx of Megatron-LM?")
