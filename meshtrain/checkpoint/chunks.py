"""Verifies a whole checkpoint by reading every chunk of its arrays; it needs no jax.

A run does not: it verifies the chunks that it reads (arrays.py).
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshtrain import console, storage
from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest

MAX_THREADS = 4  # each holds one chunk, which may be as large as the shard of a device
# In the messages of TensorStore: what only damage causes (decoders say at which byte they failed), the key of the
# chunk, errors of the disk and of a store.
DAMAGED = re.compile(
    r"DATA_LOSS|; at byte \d|Requested byte range .* is not valid|http_response_code='(404|416)'"
)
KEY = re.compile('in "([^"]+)" in OCDBT')
OS_ERROR = re.compile(r"os_error_code='(\d+)'")
STORE_ERROR = re.compile("http_response_code=|curl_code=")


def verify(directory: Path) -> Manifest:
    """Returns the manifest after verifying every byte that a run can read.

    Raises CorruptCheckpoint, and ConfigError if the checkpoint may be valid but cannot be read.
    """
    found = manifest.check(directory)
    if all(crc for _, crc in found.files.values()):
        return found
    with reading(directory):
        arrays = _arrays(directory)
        size = sum(array.size * array.dtype.numpy_dtype.itemsize for array in arrays)
        with (
            console.progress(f"reading {directory}", size) as advance,
            ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads,
        ):
            chunks = (array[box] for array in arrays for box in _boxes(array))
            for count in threads.map(lambda chunk: chunk.read().result().nbytes, chunks):
                advance(count)
    return found


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Raises CorruptCheckpoint for damaged chunks that the block reads, ConfigError for errors of disk or store."""
    try:
        yield
    except Exception as error:
        cause, text = error, str(error)
        while cause := cause.__cause__:  # Orbax raises errors of its own
            text += f"\n{cause}"
        if code := OS_ERROR.search(text):
            why = OSError(int(code[1]), os.strerror(int(code[1])))
            raise manifest.unreadable(directory, why) from error
        if DAMAGED.search(text):
            key = KEY.search(text)
            name = f"arrays/{key[1]}" if key else "a chunk of arrays"
            raise CorruptCheckpoint(f"{name} fails its checksum") from error
        if STORE_ERROR.search(text):
            why = OSError(None, storage.cause(text), storage.url(directory))
            raise manifest.unreadable(directory, why) from error
        raise


def _arrays(directory: Path) -> list[Any]:
    """Returns a TensorStore for each array of a checkpoint; they are opened in parallel."""
    import tensorstore  # here, since it takes a while and a run does not need it

    base = storage.spec(directory / "arrays") or f"file://{directory.absolute()}/arrays/"
    store = {"driver": "ocdbt", "base": base}
    opened = []
    for key in tensorstore.KvStore.open(store).result().list().result():
        if key.endswith(b"/zarr.json"):
            path = key.decode().removesuffix("zarr.json")
            # Without the last entry, a missing chunk would be read as zeros.
            spec = {
                "driver": "zarr3",
                "kvstore": store | {"path": path},
                "fill_missing_data_reads": False,
            }
            opened.append(tensorstore.open(spec, read=True))
    return [array.result() for array in opened]


def _boxes(array: Any) -> Iterator[tuple[slice, ...]]:
    """Yields the index of each chunk of an array."""
    shape = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    starts = (range(0, size, step) for size, step in zip(array.shape, shape, strict=True))
    for corner in itertools.product(*starts):
        ends = (min(a + b, size) for a, b, size in zip(corner, shape, array.shape, strict=True))
        yield tuple(map(slice, corner, ends))
