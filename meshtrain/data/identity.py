"""Which tokens a run reads, as a digest: data that was moved or renamed keeps it, other data has another."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

# T tokens of a file, D documents

NUM_BLOCKS, BLOCK = 64, 1 << 18  # blocks of a large file that are hashed, and their size in bytes


def of_tokens(tokens_T: np.ndarray, starts: np.ndarray | None = None, *, full: bool = False) -> str:
    """Returns a digest of tokens, their dtype, and the starts of the documents (D + 1,) if they are known.

    Unless `full`, only NUM_BLOCKS blocks of an array above NUM_BLOCKS * BLOCK bytes (16 MiB) are read: the
    first, the last and others at equal distances. A change that none of them sees does not change the digest.
    """
    found = hashlib.sha256()
    for array in (tokens_T, starts):
        if array is None:
            continue
        data = np.ascontiguousarray(array).view(np.uint8)
        found.update(f"{array.dtype.str} {array.size};".encode())
        if full or data.size <= NUM_BLOCKS * BLOCK:
            found.update(data)
            continue
        for first in np.linspace(0, data.size - BLOCK, NUM_BLOCKS, dtype=np.int64):
            found.update(data[first : first + BLOCK])
    return found.hexdigest()


def of_manifest(manifest: dict[str, Any]) -> str:
    """Returns the digest of a prepared folder: of its tokenizer, and of the hashes of all its shards."""
    shards = [
        [file["sha256"] for _, file in sorted(shard["files"].items())]
        for shard in manifest["shards"]
    ]
    return of_parts([manifest["tokenizer"]["sha256"], manifest["dtype"], shards])


def of_parts(parts: Sequence[Any]) -> str:
    """Returns the digest of digests and numbers."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
