"""Check every token of prepared data, for `meshtrain prepare --verify`."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from meshtrain import console
from meshtrain.data import indexed, prepared
from meshtrain.data.indexed import Shard
from meshtrain.errors import ConfigError

CHUNK = 1 << 24  # tokens read at a time


def validate(path: Path) -> list[str]:
    """Returns lines to print about the data; raises ConfigError with a line for each fault.

    The files of a prepared folder must have the hashes in its manifest, all tokens must be in the
    vocabulary, and each document must end with the end-of-document token. For Megatron-LM files
    only the index can be checked.
    """
    prefix = indexed.prefix_of(str(path))
    if prefix:
        shard = indexed.load(prefix)
        with console.progress("checking", len(shard.tokens)) as advance:
            largest = max(int(chunk.max()) for chunk in _chunks(shard.tokens, advance))
        return [f"{shard.path}: {_describe(shard)}, largest token {largest}; the index is valid"]
    if not (path / prepared.MANIFEST).is_file():
        raise ConfigError(f"--verify={path}: no {prepared.MANIFEST} there; give a prepared folder")
    manifest = prepared.read_manifest(path)
    tokenizer = manifest["tokenizer"]
    faults = []
    lines = []
    if tokenizer["file"]:
        faults += _hash_faults(path / tokenizer["file"], tokenizer["sha256"])
    try:
        prepared.read_token_bytes(path, manifest)
    except ConfigError as error:
        faults += error.faults
    with console.progress("checking", manifest["tokens"]) as advance:
        for entry in manifest["shards"]:
            for kind, file in entry["files"].items():
                faults += _hash_faults(path / f"{entry['name']}.{kind}", file["sha256"])
            try:
                shard = indexed.load(str(path / entry["name"]))
                faults += _shard_faults(shard, entry, tokenizer, advance)
                lines.append(f"{shard.path}: {_describe(shard)}")
            except ConfigError as error:
                faults += error.faults
    for key in ("documents", "tokens", "text_bytes"):
        if sum(entry[key] for entry in manifest["shards"]) != manifest[key]:
            faults.append(
                f"{path / prepared.MANIFEST}: {key}={manifest[key]} is not the sum over its shards"
            )
    if faults:
        raise ConfigError(*faults)
    return [*lines, f"{path}: all {manifest['tokens']:,} tokens are valid"]


def _describe(shard: Shard) -> str:
    return f"{len(shard.starts) - 1:,} documents, {len(shard.tokens):,} tokens"


def _chunks(tokens: np.ndarray, advance: Callable) -> Iterator[np.ndarray]:
    """Yields the tokens in chunks; calls `advance` with the size of each after it was used."""
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        yield chunk
        advance(len(chunk))


def _hash_faults(path: Path, sha256: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return []
    except OSError as error:
        return [f"{path}: {error.strerror}; copy it again"]
    return [f"{path}: was changed since it was written (sha256); copy it again"]


def _shard_faults(shard: Shard, entry: dict, tokenizer: dict, advance: Callable) -> list[str]:
    """Returns the faults of a shard; `entry` and `tokenizer` are the entries in the manifest."""
    faults = []
    counts = {"tokens": len(shard.tokens), "documents": len(shard.starts) - 1}
    for key, count in counts.items():
        if count != entry[key]:
            faults.append(
                f"{shard.path}: {count} {key}, but {prepared.MANIFEST} lists {entry[key]}"
            )
    vocab_size = tokenizer["vocab_size"]
    for number, chunk in enumerate(_chunks(shard.tokens, advance)):
        wrong = np.flatnonzero((chunk >= vocab_size) | (chunk < 0))
        if wrong.size:
            offset = (number * CHUNK + wrong[0]) * chunk.itemsize
            token = chunk[wrong[0]]
            faults.append(f"{shard.path}: at byte {offset}: token {token}, vocab_size {vocab_size}")
            break
    ends = shard.tokens[shard.starts[1:] - 1]
    wrong = np.flatnonzero(ends != tokenizer["eos"])
    if wrong.size:
        faults.append(
            f"{shard.path}: document {wrong[0]} ends with {ends[wrong[0]]}, not {tokenizer['eos']}"
        )
    return faults
