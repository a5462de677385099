"""Load the batches of a source onto devices: each process reads only its own rows, before the step needs them."""

import collections
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from meshtrain.config.schema import Config
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.parallel import context
from meshtrain.parallel.sharding import Rules, axes_of, spec_for

AHEAD = 2  # batches read and sent to the devices before they are needed


class Loader:
    """Iterates over the global batches of a source, starting at sample `position`. Close it when done.

    The sequences of a `Batch` are in the order of `context.order`, sharded over the mesh axes of rule "seq".
    """

    def __init__(
        self,
        source: Source,
        mesh: jax.sharding.Mesh,
        rules: Rules,
        *,
        global_batch: int,
        position: int = 0,
    ):
        self._source, self._global_batch = source, global_batch
        self._mesh, self._rules = mesh, rules
        spec = spec_for(("batch",), (global_batch,), rules, mesh.shape)
        self._sharding = jax.sharding.NamedSharding(mesh, spec)
        slices = self._sharding.addressable_devices_indices_map((global_batch,)).values()
        # The rows of the global batch that this process reads, in order, and their local indices.
        self._rows = np.unique(np.concatenate([np.arange(global_batch)[rows] for rows in slices]))
        self._local_index = {int(row): local for local, row in enumerate(self._rows)}
        self._next = position
        self._reader = ThreadPoolExecutor(1, "loader")
        self._ahead: collections.deque = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next batch as jax arrays; re-raises an error of the source that read it."""
        batch = self.peek()
        self._ahead.popleft()  # only now: a batch that cannot be read is not consumed
        return batch

    def peek(self) -> Any:
        """Returns the next batch without consuming it."""
        self._fill()
        return self._ahead[0].result()

    @property
    def position(self) -> int:
        """The first sample of the next batch."""
        return self._next - len(self._ahead) * self._global_batch

    def _fill(self) -> None:
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._reader.submit(self.read, self._next))
            self._next += self._global_batch

    def read(self, position: int) -> Any:
        """Returns samples `position` ... `position` + global_batch - 1, sharded over the batch axes."""
        batch = self._source.read(position + self._rows)

        def to_devices(part: Any) -> Any:
            if not isinstance(part, Batch):
                return self._to_devices(part, self._sharding)
            return jax.tree.map(lambda rows: self._to_devices(*self._in_order(rows)), part)

        parts, tree = jax.tree.flatten(batch, is_leaf=lambda part: isinstance(part, Batch))
        size = self._mesh.shape.get("context", 1)
        if size > 1 and not any(isinstance(part, Batch) for part in parts):
            raise ConfigError(
                f"mesh.context={size}: it splits the sequences of a meshtrain.Batch, and the data yields a "
                f"{type(batch).__name__}; yield a Batch, or put the devices on data or fsdp"
            )
        return jax.tree.unflatten(tree, map(to_devices, parts))

    def _to_devices(self, rows: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
        rows = np.asarray(rows)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            # Each device asks for a contiguous slice of the global batch.
            start, stop, _ = index[0].indices(self._global_batch)
            return rows[self._local_index[start] :][: stop - start, *index[1:]]

        shape = (self._global_batch, *rows.shape[1:])
        return jax.make_array_from_callback(shape, sharding, shard)

    def _in_order(self, rows: np.ndarray) -> tuple[np.ndarray, jax.sharding.NamedSharding]:
        """Returns the rows (b, S) in the order in which devices hold the sequence, and their sharding."""
        length, sizes = rows.shape[1], self._mesh.shape
        (axes,) = spec_for(("seq",), (length,), self._rules, sizes)
        num_devices = math.prod(sizes[axis] for axis in axes_of(axes))
        if num_devices == 1:
            return rows, self._sharding
        spec = jax.P(*self._sharding.spec, axes)
        order = context.order(length, num_devices)
        return rows[:, order], jax.sharding.NamedSharding(self._mesh, spec)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


def from_iterable(batches: Iterable[Any], *, global_batch: int, position: int = 0) -> Source:
    """Returns a Source that reads `batches`: pytrees of arrays, each with a leading dim of `global_batch`.

    Batches are read in order. At the end, a list or another object with `__iter__` starts again.
    A resumed run skips the first `position` samples, so the iterable must yield the same batches in
    the same order on every iteration and on every process.
    """
    if position % global_batch:
        raise ConfigError(
            f"train.global_batch={global_batch} does not divide the {position} samples seen so far; "
            f"resume with the global_batch that the run used"
        )
    stream = itertools.islice(_epochs(batches), position // global_batch, None)
    expected = position

    def read(indices: np.ndarray) -> Any:
        nonlocal expected
        start = int(indices[0]) // global_batch * global_batch
        assert start == expected, "batches of an iterable are read in order"
        expected += global_batch
        batch = next(stream)
        for leaf in jax.tree.leaves(batch):
            if np.ndim(leaf) < 1 or len(leaf) != global_batch:
                raise ConfigError(
                    f"data: a batch has an array of shape {np.shape(leaf)}, and train.global_batch={global_batch}; "
                    f"yield arrays with a leading dim of {global_batch}"
                )
        return jax.tree.map(lambda leaf: np.asarray(leaf)[indices - start], batch)

    return Source(read, description="your iterable")


def _epochs(batches: Iterable[Any]) -> Iterator[Any]:
    for epoch in itertools.count():
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ConfigError(
                f"data: the iterable ended (in epoch {epoch}); give one that starts again (a list, or an object "
                f"with __iter__), or set fewer train.steps"
            )


def opened(source: Any, cfg: Config, mesh: jax.sharding.Mesh, position: int) -> contextlib.closing:
    """Returns a context with the Loader of a run's Source, or of an iterable of global batches."""
    options = dict(global_batch=cfg.train.global_batch, position=position)
    if not isinstance(source, Source):
        source = from_iterable(source, **options)
    return contextlib.closing(Loader(source, mesh, cfg.rules, **options))
