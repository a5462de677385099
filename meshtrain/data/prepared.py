"""manifest.json of a prepared folder: written last, so a folder that has one is complete."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import foreign, storage
from meshtrain.errors import ConfigError

MANIFEST = "manifest.json"
TOKEN_BYTES = "token_bytes.npy"
JOURNAL = "progress.jsonl"  # of an unfinished folder; see shards.py
VERSION = 1
MAX_VOCAB_SIZE = 1 << 27  # the largest of today have 2^18
MAX_MANIFEST_BYTES = 1 << 30  # with checksums, 35 MB for 1 TB of tokens
PART_BYTES = 1 << 18  # of a .bin, for each of which the manifest has a checksum
KEYS = {"version", "tokenizer", "settings", "dtype", "shards", "documents", "tokens", "text_bytes"}


def is_prepared(folder: Path) -> bool:
    """Returns True if `meshtrain prepare` wrote the folder, even if it is not finished."""
    try:
        if (folder / MANIFEST).is_file():
            return KEYS <= foreign.read_json(folder / MANIFEST, max_bytes=MAX_MANIFEST_BYTES).keys()
        if (folder / JOURNAL).is_file():
            with open(folder / JOURNAL, "rb") as file:
                first_line = foreign.parse_json(file.readline(foreign.MAX_JSON_BYTES))
                return isinstance(first_line, dict) and first_line.keys() == {"settings"}
    except (OSError, ValueError):  # a file of somebody else with that name
        pass
    return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest.

    Raises ConfigError if it is corrupt, or if a file that it lists has another size.
    """
    manifest = parse_manifest(folder / MANIFEST)
    faults = []
    for file, listed in _listed_sizes(manifest).items():
        path = folder / file
        size = path.stat().st_size if path.is_file() else -1
        if size != listed:
            state = f"has {size} bytes" if size >= 0 else "is missing"
            faults.append(f"{path} {state}, but {MANIFEST} lists {listed}; copy it again")
    if faults:
        raise ConfigError(*faults[:10])
    return manifest


def parse_manifest(name: Path) -> dict[str, Any]:
    """Returns the manifest in a file; raises ConfigError if it is corrupt."""
    try:
        manifest = foreign.read_json(name, max_bytes=MAX_MANIFEST_BYTES)
        version = manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; prepare the folder again") from None
    if version != VERSION:
        raise ConfigError(
            f"{name}: version {version}, but this meshtrain reads {VERSION}; "
            f"prepare the folder again"
        )
    missing = KEYS - manifest.keys()
    if missing:
        raise ConfigError(f"{name}: no {', '.join(sorted(missing))}; prepare the folder again")
    try:
        _listed_sizes(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: is corrupt: {error!r}; prepare the folder again") from None
    return manifest


class Checksums(NamedTuple):
    """The checksums of the parts of a .bin, by which a part can be read without the rest."""

    part_bytes: int  # of each part; the last may be shorter
    crc32: np.ndarray  # (parts,) uint32


def checksums_of(file: dict[str, Any]) -> Checksums | None:
    """Returns the checksums in the entry of a .bin in the manifest; None: an older one has none.

    Raises TypeError or ValueError if they are corrupt.
    """
    if "crc32" not in file:
        return None
    part_bytes = file["part_bytes"]
    if not isinstance(part_bytes, int) or part_bytes < 1:
        raise TypeError(f"part_bytes={part_bytes!r}")
    crc32 = np.frombuffer(bytes.fromhex(file["crc32"]), ">u4")
    if len(crc32) != -(-file["size"] // part_bytes):
        raise ValueError(f"{len(crc32)} checksums for {file['size']} bytes")
    return Checksums(part_bytes, crc32)


def _listed_sizes(manifest: dict[str, Any]) -> dict[str, int]:
    """Returns the size of each file that the manifest lists.

    Raises KeyError, TypeError, ValueError or AttributeError for a corrupt manifest.
    """
    tokenizer_entry(manifest)
    texts = [manifest["dtype"]]
    numbers = [manifest[key] for key in ("documents", "tokens", "text_bytes")]
    sizes = {}
    for shard in manifest["shards"]:
        for kind, file in shard["files"].items():
            name = f"{shard['name']}.{kind}"
            if not foreign.is_file_name(name):
                raise TypeError(f"{name!r} is not the name of a file in its folder")
            sizes[name] = file["size"]
            texts.append(file["sha256"])
            checksums_of(file)
        numbers += [shard["tokens"], shard["documents"], shard["text_bytes"]]
    numbers += sizes.values()
    if not sizes or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TypeError("a count is not an integer of 0 or more")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a hash is not a text")
    return sizes


def tokenizer_entry(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of the tokenizer; raises KeyError or TypeError if it is corrupt."""
    entry = manifest["tokenizer"]
    texts = (entry["kind"], entry["sha256"])
    vocab_size = entry["vocab_size"]
    file = entry["file"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the kind or the hash of the tokenizer is not a text")
    if file is not None and not foreign.is_file_name(file):
        raise TypeError(f"{file!r} is not the name of a file in its folder")
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise TypeError(f"vocab_size {vocab_size!r} is not from 1 to {MAX_VOCAB_SIZE}")
    for key in ("eos", "bos"):
        token = entry[key]
        is_absent = key == "bos" and token is None
        if not is_absent and not (isinstance(token, int) and 0 <= token < vocab_size):
            raise TypeError(f"{key} {token!r} is not a token of the vocabulary")
    return entry


def read_token_bytes(folder: Path, manifest: dict[str, Any]) -> np.ndarray:
    """Returns the number of text bytes of each token (vocab_size,).

    Raises ConfigError if the file is corrupt.
    """
    path = folder / TOKEN_BYTES
    vocab_size = manifest["tokenizer"]["vocab_size"]
    try:
        sizes_V = foreign.map_npy(path)
        if sizes_V.shape != (vocab_size,) or sizes_V.dtype.kind not in "iu":
            raise ValueError(f"{sizes_V.dtype} of shape {sizes_V.shape}, not ({vocab_size},)")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; copy it again") from None
    return np.array(sizes_V)


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file atomically and fsync it: after a crash it is complete or absent."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    storage.sync(path.parent)
