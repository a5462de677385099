"""Files of safetensors: checked as a whole before a byte of any tensor is read, written as a stream.

A file is the length of its header (8 bytes, little endian), the header in JSON, and the tensors' bytes
without gaps. Numpy maps them into memory, so that only what is used is read.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshtrain.errors import ConfigError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes, as the format has it
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Of others only the size is known: none of them is a parameter here.
BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
BYTES |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
BYTES |= dict.fromkeys(("I16", "U16"), 2) | dict.fromkeys(("I32", "U32"), 4)
BYTES |= dict.fromkeys(("I64", "U64", "C64"), 8)


@dataclass(frozen=True)
class Tensor:
    """Where the bytes of a tensor are."""

    path: Path
    code: str  # of its dtype, as in the file
    shape: tuple[int, ...]
    start: int  # its first byte in the file

    def read(self) -> np.ndarray:
        """Returns its values, which are read from the file when they are used."""
        return np.memmap(self.path, DTYPES[self.code], "r", self.start, self.shape)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a model's files, by name; raises ConfigError where a file is damaged."""
    if (folder / ONE).is_file():
        return header(folder / ONE)
    if not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        why = f"; {others[0]} can run code, and is never read: save it as safetensors"
        raise ConfigError(f"{folder}: neither {ONE} nor {INDEX} there{why if others else ''}")
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
            raise ValueError("its weight_map does not say the file of each tensor")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / INDEX}: is damaged: {error!r}") from error
    if outside := [file for file in places.values() if Path(file).name != file]:
        raise ConfigError(f"{folder / INDEX}: {outside[0]!r} is no name of a file beside it")
    there = {file: header(folder / file) for file in sorted({*places.values()})}
    if missing := [name for name, file in places.items() if name not in there[file]]:
        name = missing[0]
        raise ConfigError(f"{folder / places[name]}: no {name} in it, though {INDEX} says so")
    return {name: there[file][name] for name, file in places.items()}


def header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file; raises ConfigError unless they fill it without gap or overlap."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError(
                    f"its header of {length} bytes does not fit in {size}; it was cut off, or is none"
                )
            entries = json.loads(file.read(length).decode(), object_pairs_hook=_once)
        entries.pop("__metadata__", None)
        found = {name: _tensor(path, 8 + length, name, **entry) for name, entry in entries.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][0] != end:
                raise ValueError(
                    f"{name} begins at {entry['data_offsets'][0]}, and the one before ends at {end}"
                )
            end = entry["data_offsets"][1]
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes of {8 + length + end}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path}: is damaged, get it again: {error}") from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands in its header twice")
    return entries


def _tensor(
    path: Path, begin: int, name: str, *, dtype: str, shape: list, data_offsets: list
) -> Tensor:
    numbers = [*shape, *data_offsets]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError(f"{name} has shape {shape} and offsets {data_offsets}")
    start, end = data_offsets
    if end - start != BYTES.get(dtype, math.nan) * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return Tensor(path, dtype, tuple(shape), begin + start)


def same(a: Tensor, b: Tensor) -> bool:
    """Says whether two tensors are equal, bit for bit."""
    if (a.code, a.shape) != (b.code, b.shape) or a.code not in DTYPES:
        return False
    return all(x.tobytes() == y.tobytes() for x, y in zip(a.read(), b.read(), strict=True))


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    folder: Path, planned: Iterable[Planned], arrays: Iterable[np.ndarray], *, shard_bytes: int
) -> None:
    """Writes tensors in their order, one at a time, to files of at most `shard_bytes` (or one tensor)."""
    shards, arrays = _shards(planned, shard_bytes), iter(arrays)
    total = len(shards)
    names = [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
    names = names if total > 1 else [ONE]
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as file:
            file.write(_header(shard))
            for one, array in zip(shard, arrays, strict=False):
                assert (array.shape, array.dtype) == (one.shape, one.dtype), one.name
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if total > 1:
        size = sum(one.bytes for shard in shards for one in shard)
        places = {
            one.name: name for name, shard in zip(names, shards, strict=True) for one in shard
        }
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(planned: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    for one in planned:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + one.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(one)
    return shards


def _header(shard: list[Planned]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    codes = {dtype: code for code, dtype in DTYPES.items()}
    start = 0
    for one in shard:
        place = [start, start := start + one.bytes]
        entries[one.name] = {"dtype": codes[one.dtype], "shape": one.shape, "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text
