"""manifest.json of a prepared folder: written last, so a folder that has one is complete."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError

MANIFEST = "manifest.json"
TOKEN_BYTES = "token_bytes.npy"
JOURNAL = "progress.jsonl"  # of an unfinished folder; see shards.py
VERSION = 1
KEYS = {"version", "tokenizer", "settings", "dtype", "shards", "documents", "tokens", "text_bytes"}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest; raises ConfigError if it is corrupt, or if a file that it lists has another size."""
    name = folder / MANIFEST
    try:
        manifest = json.loads(name.read_text())
        version = manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; prepare the folder again") from None
    if version != VERSION:
        raise ConfigError(
            f"{name}: version {version}, but this meshtrain reads {VERSION}; prepare the folder again"
        )
    if missing := KEYS - manifest.keys():
        raise ConfigError(f"{name}: no {', '.join(sorted(missing))}; prepare the folder again")
    faults = []
    for shard in manifest["shards"]:
        for kind, file in shard["files"].items():
            path = folder / f"{shard['name']}.{kind}"
            size = path.stat().st_size if path.is_file() else -1
            if size != file["size"]:
                state = f"has {size} bytes" if size >= 0 else "is missing"
                faults.append(f"{path} {state}, but {MANIFEST} lists {file['size']}; copy it again")
    if faults:
        raise ConfigError(*faults[:10])
    return manifest


def read_token_bytes(folder: Path, manifest: dict[str, Any]) -> np.ndarray:
    """Returns the number of text bytes of each token (vocab_size,); raises ConfigError if the file is corrupt."""
    path, vocab_size = folder / TOKEN_BYTES, manifest["tokenizer"]["vocab_size"]
    try:
        sizes_V = np.load(path, allow_pickle=False)
        if sizes_V.shape != (vocab_size,):
            raise ValueError(f"shape {sizes_V.shape}, not ({vocab_size},)")
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; copy it again") from None
    return sizes_V


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file atomically and fsync it: after a crash it is complete or absent."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that new and renamed files in it survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
