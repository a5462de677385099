"""Reads and writes safetensors files.

A file holds the length of its header (8 bytes, little endian), the header in JSON, and the bytes of
the tensors without gaps. Reading first verifies the header of every file, then maps tensors into
memory: only bytes that are used are read. Writing streams one tensor at a time.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshtrain import foreign
from meshtrain.errors import ConfigError

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8  # of the length of the header
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_DIMS, MAX_NUMBER = 32, 2**63 - 1  # of a tensor, and of its sizes and offsets
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Only the size of the other dtypes matters: no parameter has one of them.
ITEM_BYTES = {
    **{code: dtype.itemsize for code, dtype in DTYPES.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I64", "U64", "C64"), 8),
}

# ---- reading ----


@dataclass(frozen=True)
class Tensor:
    """The location of a tensor's bytes."""

    path: Path
    code: str  # of the dtype, a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file

    def read(self) -> np.ndarray:
        """Returns the values, memory-mapped: bytes are read when they are used."""
        return np.memmap(self.path, DTYPES[self.code], "r", self.start, self.shape)

    def split(self, num_parts: int) -> list["Tensor"]:
        """Returns equal parts of the first dim, which their number must divide."""
        shape = (self.shape[0] // num_parts, *self.shape[1:])
        size = ITEM_BYTES[self.code] * math.prod(shape)
        return [
            replace(self, shape=shape, start=self.start + part * size) for part in range(num_parts)
        ]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a model's files by name.

    Raises ConfigError if a file is missing or damaged.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if not (folder / INDEX).is_file():
        bin_files = sorted(path.name for path in folder.glob("*.bin"))
        advice = "download the model's files again"
        if bin_files:
            advice = f"{bin_files[0]} can run code and is never read: save the model as safetensors"
        raise ConfigError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX}; {advice}")
    try:
        file_of = foreign.read_json(folder / INDEX)["weight_map"]
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise ValueError("its weight_map does not name the file of each tensor")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / INDEX}: is damaged: {error!r}") from error
    outside = [file for file in file_of.values() if Path(file).name != file]
    if outside:
        raise ConfigError(
            f"{folder / INDEX}: {outside[0]!r} is not the name of a file in its folder"
        )
    headers = {file: read_header(folder / file) for file in sorted({*file_of.values()})}
    missing = [name for name, file in file_of.items() if name not in headers[file]]
    if missing:
        name = missing[0]
        raise ConfigError(f"{folder / file_of[name]}: has no tensor {name}, which {INDEX} lists")
    return {name: headers[file][name] for name, file in file_of.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file.

    Raises ConfigError unless they fill it without gaps or overlaps.
    """
    try:
        with foreign.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(
                    f"a header of {length} bytes in a file of {size}: truncated, or not safetensors"
                )
            entries = foreign.parse_json(file.read(length), make_object=_without_duplicates)
        entries.pop("__metadata__", None)
        data_start = 8 + length
        header = {name: _tensor(path, data_start, name, **entry) for name, entry in entries.items()}
        end = _check_no_gaps(entries)
        if data_start + end != size:
            raise ValueError(f"{size} bytes instead of {data_start + end}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (struct.error, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path}: is damaged; download it again: {error}") from error
    return header


def _check_no_gaps(entries: dict[str, Any]) -> int:
    """Returns where the last tensor ends; raises ValueError unless each begins where one ends."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, next_end = entry["data_offsets"]
        if start != end:
            raise ValueError(f"{name} begins at {start}, but the tensor before it ends at {end}")
        end = next_end
    return end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return entries


def _tensor(
    path: Path, data_start: int, name: str, *, dtype: str, shape: list, data_offsets: list
) -> Tensor:
    numbers = [*shape, *data_offsets]
    # Before they are multiplied, which takes hours for long lists of long numbers.
    if len(numbers) > MAX_DIMS or any(
        isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MAX_NUMBER for n in numbers
    ):
        raise ValueError(f"{name} has no valid shape and offsets")
    start, end = data_offsets
    if dtype not in ITEM_BYTES or end - start != ITEM_BYTES[dtype] * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return Tensor(path, dtype, tuple(shape), data_start + start)


def equal(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are bit-identical."""
    if (a.code, a.shape) != (b.code, b.shape) or a.code not in DTYPES:
        return False
    return all(x.tobytes() == y.tobytes() for x, y in zip(a.read(), b.read(), strict=True))


# ---- writing ----


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    folder: Path, specs: Iterable[TensorSpec], arrays: Iterable[np.ndarray], *, shard_bytes: int
) -> None:
    """Writes `arrays`, one at a time, to files of at most `shard_bytes`, headers included.

    A larger tensor gets its own file.
    """
    arrays = iter(arrays)
    shards = _shards(specs, shard_bytes)
    total = len(shards)
    if total == 1:
        write_file(folder / SINGLE_FILE, shards[0], arrays)
        return
    size = 0
    file_of = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{total:05}.safetensors"
        write_file(folder / file, shard, arrays)
        for spec in shard:
            size += spec.bytes
            file_of[spec.name] = file
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, specs: list[TensorSpec], arrays: Iterable[np.ndarray]) -> None:
    """Writes one file with as many of `arrays` as there are `specs`."""
    with open(path, "wb") as file:
        file.write(_header(specs))
        # The specs come first: zip must not take an array that belongs to the next file.
        for spec, array in zip(specs, arrays, strict=False):
            assert (array.shape, array.dtype) == (spec.shape, spec.dtype), spec.name
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


METADATA = {"__metadata__": {"format": "pt"}}


def _shards(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Returns the tensors of each file; a file with its header has at most `shard_bytes`."""
    shards: list[list[TensorSpec]] = [[]]
    data_bytes = 0
    text_bytes = len(json.dumps(METADATA))
    for spec in specs:
        # In the header ", " comes before it, which is as long as its own braces.
        entry_bytes = len(json.dumps(_entry(spec, data_bytes)))
        header_bytes = LENGTH_BYTES + _aligned(text_bytes + entry_bytes)
        if shards[-1] and header_bytes + data_bytes + spec.bytes > shard_bytes:
            shards.append([])
            data_bytes = 0
            text_bytes = len(json.dumps(METADATA))
            entry_bytes = len(json.dumps(_entry(spec, data_bytes)))
        shards[-1].append(spec)
        data_bytes += spec.bytes
        text_bytes += entry_bytes
    return shards


def _header(shard: list[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {**METADATA}
    start = 0
    for spec in shard:
        entries |= _entry(spec, start)
        start += spec.bytes
    text = json.dumps(entries).encode()
    text = text.ljust(_aligned(len(text)))  # tensors begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _entry(spec: TensorSpec, start: int) -> dict[str, Any]:
    """Returns the entry of a tensor in the header; its bytes begin at `start`."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    offsets = [start, start + spec.bytes]
    return {spec.name: {"dtype": codes[spec.dtype], "shape": spec.shape, "data_offsets": offsets}}


def _aligned(size: int) -> int:
    return size + -size % 8
