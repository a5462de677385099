"""A digest of the tokens that a run reads: it stays the same if the data is moved or renamed."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtrain.data.indexed import DocumentStarts

# T tokens of a file, D documents

NUM_BLOCKS = 64  # blocks of a large file that are hashed
BLOCK = 1 << 18  # bytes of a block


def of_tokens(
    tokens_T: np.ndarray,
    starts: np.ndarray | DocumentStarts | None = None,
    *,
    full: bool = False,
) -> str:
    """Returns a digest of tokens, their dtype, and the starts of the documents (D + 1,) if known.

    Unless `full`, only NUM_BLOCKS blocks of an array above NUM_BLOCKS * BLOCK bytes (16 MiB) are
    read: the first, the last and others at equal distances. A change outside these blocks does not
    change the digest.
    """
    digest = hashlib.sha256()
    for array in (tokens_T, starts):
        if array is None:
            continue
        size = array.size * array.dtype.itemsize
        digest.update(f"{array.dtype.str} {array.size};".encode())
        if full or size <= NUM_BLOCKS * BLOCK:
            digest.update(np.ascontiguousarray(array))
            continue
        for first in np.linspace(0, size - BLOCK, NUM_BLOCKS, dtype=np.int64):
            digest.update(_bytes(array, int(first), int(first) + BLOCK))
    return digest.hexdigest()


def _bytes(array: np.ndarray | DocumentStarts, first: int, last: int) -> np.ndarray:
    """Returns bytes `first` ... `last` - 1 of an array, which may be a file that is not read."""
    itemsize = array.dtype.itemsize
    start = first // itemsize
    entries = np.ascontiguousarray(array[start : -(-last // itemsize)])
    return entries.view(np.uint8)[first - start * itemsize : last - start * itemsize]


def of_manifest(manifest: dict[str, Any]) -> str:
    """Returns the digest of a prepared folder: of its tokenizer and the hashes of its shards."""
    shard_hashes = []
    for shard in manifest["shards"]:
        shard_files = sorted(shard["files"].items())
        shard_hashes.append([file["sha256"] for _, file in shard_files])
    return of_parts([manifest["tokenizer"]["sha256"], manifest["dtype"], shard_hashes])


def of_parts(parts: Sequence[Any]) -> str:
    """Returns the digest of digests and numbers."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
