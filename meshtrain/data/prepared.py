"""manifest.json of a prepared folder: written last, so that a folder with one is whole."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError

NAME = "manifest.json"
TOKEN_BYTES = "token_bytes.npy"
JOURNAL = "progress.jsonl"  # of a folder that is not done; see shards.py
VERSION = 1
KEYS = {"version", "tokenizer", "settings", "dtype", "shards", "documents", "tokens", "text_bytes"}


def read(folder: Path) -> dict[str, Any]:
    """Returns the manifest, with the sizes of its files checked; raises ConfigError."""
    name = folder / NAME
    try:
        found = json.loads(name.read_text())
        version = found["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; prepare the folder anew") from None
    if version != VERSION:
        raise ConfigError(
            f"{name}: version {version}, this meshtrain reads {VERSION}; prepare anew"
        )
    if missing := KEYS - found.keys():
        raise ConfigError(f"{name}: without {', '.join(sorted(missing))}; prepare the folder anew")
    faults = []
    for shard in found["shards"]:
        for kind, file in shard["files"].items():
            path = folder / f"{shard['name']}.{kind}"
            size = path.stat().st_size if path.is_file() else -1
            if size != file["size"]:
                is_there = f"has {size} bytes" if size >= 0 else "is missing"
                faults.append(f"{path} {is_there}, {NAME} tells of {file['size']}; copy it again")
    if faults:
        raise ConfigError(*faults[:10])
    return found


def token_bytes(folder: Path, found: dict[str, Any]) -> np.ndarray:
    """Returns how many bytes of text each token stands for; raises ConfigError."""
    path, size = folder / TOKEN_BYTES, found["tokenizer"]["vocab_size"]
    try:
        sizes_V = np.load(path, allow_pickle=False)
        if sizes_V.shape != (size,):
            raise ValueError(f"is of shape {sizes_V.shape}, not ({size},)")
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; copy it again") from None
    return sizes_V


def write(path: Path, content: str | bytes) -> None:
    """Writes a file durably: after a crash it is there whole, or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
