"""Goes through every token of prepared data."""

import hashlib
from pathlib import Path

import numpy as np

from meshtrain.data import indexed
from meshtrain.data import prepared as manifest
from meshtrain.data.indexed import Shard
from meshtrain.errors import ConfigError

CHUNK = 1 << 24  # tokens, or bytes, at a time


def check(path: Path) -> list[str]:
    """Returns a line for what is there; raises ConfigError with a line for each fault.

    A prepared folder has the tokens that its manifest tells, byte for byte, all in the vocabulary, and
    each document ends as it should. Of Megatron's files only the index can be checked.
    """
    if prefix := indexed.prefix_of(str(path)):
        shard = indexed.load(prefix)
        largest = max(int(part.max()) for part in _chunks(shard.tokens))
        return [f"{shard.path}: {_described(shard)}, the largest {largest}; its index is good"]
    if not (path / manifest.NAME).is_file():
        raise ConfigError(f"--verify={path}: no {manifest.NAME} there; give a prepared folder")
    found = manifest.read(path)
    faults, lines, tokenizer = [], [], found["tokenizer"]
    if tokenizer["file"]:
        faults += _changed(path / tokenizer["file"], tokenizer["sha256"])
    try:
        manifest.token_bytes(path, found)
    except ConfigError as error:
        faults += error.faults
    for told in found["shards"]:
        for kind, file in told["files"].items():
            faults += _changed(path / f"{told['name']}.{kind}", file["sha256"])
        try:
            shard = indexed.load(str(path / told["name"]))
            faults += _faults_of(shard, told, tokenizer)
            lines.append(f"{shard.path}: {_described(shard)}")
        except ConfigError as error:
            faults += error.faults
    for key in ("documents", "tokens", "text_bytes"):
        if sum(one[key] for one in found["shards"]) != found[key]:
            faults.append(
                f"{path / manifest.NAME}: {key}={found[key]} is not the sum of its shards"
            )
    if faults:
        raise ConfigError(*faults)
    return [*lines, f"{path}: all {found['tokens']:,} tokens are good"]


def _described(shard: Shard) -> str:
    return f"{len(shard.starts) - 1:,} documents, {len(shard.tokens):,} tokens"


def _chunks(tokens: np.ndarray):
    return (tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK))


def _changed(name: Path, sha256: str) -> list[str]:
    try:
        with open(name, "rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == sha256:
                return []
    except OSError as error:
        return [f"{name}: {error.strerror}; copy it again"]
    return [f"{name}: was changed since it was written (sha256); copy it again"]


def _faults_of(shard: Shard, told: dict, tokenizer: dict) -> list[str]:
    faults = []
    counts = {"tokens": len(shard.tokens), "documents": len(shard.starts) - 1}
    faults += [
        f"{shard.path}: {count} {key}, {manifest.NAME} tells of {told[key]}"
        for key, count in counts.items()
        if count != told[key]
    ]
    size = tokenizer["vocab_size"]
    for number, part in enumerate(_chunks(shard.tokens)):
        wrong = np.flatnonzero((part >= size) | (part < 0))
        if wrong.size:
            at = (number * CHUNK + wrong[0]) * part.itemsize
            faults.append(f"{shard.path}: at byte {at}: token {part[wrong[0]]}, vocabulary {size}")
            break
    ends = shard.tokens[shard.starts[1:] - 1]
    wrong = np.flatnonzero(ends != tokenizer["eos"])
    if wrong.size:
        faults.append(
            f"{shard.path}: document {wrong[0]} ends with {ends[wrong[0]]}, not {tokenizer['eos']}"
        )
    return faults
