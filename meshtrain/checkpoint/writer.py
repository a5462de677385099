"""Writes arrays with Orbax in the background: each process its shards.

Each chunk ends with its CRC-32C, which TensorStore computes when it writes the chunk and checks when it reads it.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils


def _with_checksums(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Orbax's function that says how an array is written, with a CRC-32C for each chunk."""

    def build_with_checksums(*args: Any, **kwargs: Any) -> Any:
        spec = build(*args, **kwargs)
        array = spec.json.get("base", spec.json)  # within a cast
        if array["driver"] == "zarr3":  # the format of AsyncWriter
            (sharding,) = array["metadata"]["codecs"]
            sharding["configuration"]["codecs"].append({"name": "crc32c"})
        return spec

    return build_with_checksums


# Orbax has no option for it.
tensorstore_utils.build_array_write_spec = _with_checksums(tensorstore_utils.build_array_write_spec)


class AsyncWriter:
    """Writes trees of arrays in the background, one at a time."""

    def __init__(self):
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True))

    def save(self, folder: Path, tree: Any) -> None:
        """Starts to write to a new folder; returns after the copy to the host, when the arrays may be donated."""
        with self._first_error():
            self._orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(tree), force=True)

    def wait(self) -> None:
        """Waits until all processes have written their arrays; raises the first error of the write."""
        with self._first_error():
            self._orbax.wait_until_finished()

    @contextlib.contextmanager
    def _first_error(self) -> Iterator[None]:
        """Drops all errors of a save but the first: Orbax raises one per call, and would raise the next in `close`."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
            raise

    def close(self) -> None:
        self._orbax.close()
