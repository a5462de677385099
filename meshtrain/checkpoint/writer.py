"""Writes arrays with Orbax in the background: each process its shards."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from meshtrain.checkpoint import orbax_patches

orbax_patches.apply()


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
