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
        # The rows of the global batch that this process reads, in order, and their local indices.
        self._sharding, self._rows = local_rows(mesh, rules, global_batch)
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


def local_rows(
    mesh: jax.sharding.Mesh, rules: Rules, global_batch: int
) -> tuple[jax.sharding.NamedSharding, np.ndarray]:
    """Returns the sharding of the rows of a batch, and the numbers of those that devices of this process hold."""
    spec = spec_for(("batch",), (global_batch,), rules, mesh.shape)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    slices = sharding.addressable_devices_indices_map((global_batch,)).values()
    return sharding, np.unique(np.concatenate([np.arange(global_batch)[rows] for rows in slices]))


def from_iterable(
    batches: Iterable[Any], *, global_batch: int, position: int = 0, num_local: int = 0
) -> Source:
    """Returns a Source that reads `batches`: pytrees of arrays, each with a leading dim of `global_batch`.

    Batches are read in order. At the end, a list or another object with `__iter__` starts again. The last batch
    before the end may have fewer rows: see `_padded`. A resumed run skips the first `position` samples, so the
    iterable must yield the same batches in the same order on every iteration and on every process. With
    `num_local`, each process has its own batches, of `num_local` rows.
    """
    if position % global_batch:
        raise ConfigError(
            f"train.global_batch={global_batch} does not divide the {position} samples seen so far; "
            f"resume with the global_batch that the run used"
        )
    size = num_local or global_batch
    what = f"train.global_batch={global_batch}"
    what += f" with data.per_process=True, {num_local} on this process" if num_local else ""
    stream = itertools.islice(_epochs(batches, size, what), position // global_batch, None)
    expected = position

    def read(indices: np.ndarray) -> Any:
        nonlocal expected
        start = int(indices[0]) // global_batch * global_batch
        assert start == expected, "batches of an iterable are read in order"
        expected += global_batch
        rows = slice(None) if num_local else indices - start
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], next(stream))

    return Source(read, description="your iterable")


def _epochs(batches: Iterable[Any], size: int, what: str) -> Iterator[Any]:
    """Yields batches of `size` rows; the last one of an epoch is padded. `what` describes the size in an error."""
    for epoch in itertools.count():
        empty, iterator = True, iter(batches)
        for batch in iterator:
            empty = False
            if (num_rows := _num_rows(batch, size, what)) < size:
                if next(iterator, None) is not None:
                    raise ConfigError(
                        f"data: a batch has {num_rows} rows, and {what}; only the last one of an epoch may be short"
                    )
                batch = _padded(batch, num_rows, size, what)
            yield batch
        if empty:
            raise ConfigError(
                f"data: the iterable ended (in epoch {epoch}); give one that starts again (a list, or an object "
                f"with __iter__), or set fewer train.steps"
            )


def _num_rows(batch: Any, size: int, what: str) -> int:
    """Returns the leading dim of all arrays; raises ConfigError unless it is one number from 1 to `size`."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    num_rows = shapes[0][0] if shapes and shapes[0] else 0
    for shape in shapes:
        if not shape or shape[0] != num_rows or not 0 < num_rows <= size:
            raise ConfigError(
                f"data: a batch has an array of shape {shape}, and {what}; yield arrays with a leading dim of {size}"
            )
    return num_rows


def _padded(batch: Any, num_rows: int, size: int, what: str) -> Any:
    """Returns the batch with `size` rows: its own repeated, with weight 0.

    Repeated rows are valid input, so that a loss times 0 has a gradient of 0. The weights are `weights` of a Batch,
    or of a dict. Raises ConfigError if there are none.
    """
    rows = np.arange(size) % num_rows
    padded = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)

    def cleared(weights: np.ndarray) -> np.ndarray:
        is_own = (np.arange(size) < num_rows).reshape(-1, *[1] * (weights.ndim - 1))
        return np.where(is_own, weights, 0).astype(weights.dtype)

    if isinstance(padded, Batch):
        return padded._replace(weights=cleared(padded.weights))
    if isinstance(padded, dict) and "weights" in padded:
        return {**padded, "weights": cleared(padded["weights"])}
    raise ConfigError(
        f"data: the last batch has {num_rows} rows, and {what}; leave it out (drop_last), or add an array `weights` to "
        f"every batch, 1 for each row, by which the loss weighs: its padding gets 0"
    )


def open_loader(
    source: Any, cfg: Config, mesh: jax.sharding.Mesh, position: int
) -> contextlib.closing:
    """Returns a context with the Loader of a run's Source, or of an iterable of global batches.

    With `data.per_process` the iterable yields the rows of this process. Raises ConfigError if several processes
    hold the same rows.
    """
    options = dict(global_batch=cfg.train.global_batch, position=position)
    per_process = cfg.data.options.get("per_process", False)
    if isinstance(source, Source):
        if per_process:
            raise ConfigError(
                "data.per_process=True: the data is a Source, which reads the rows of a process by itself; set it to "
                "False, or pass an iterable to train()"
            )
    else:
        num_local = _num_local(cfg, mesh) if per_process else 0
        source = from_iterable(source, **options, num_local=num_local)
    return contextlib.closing(Loader(source, mesh, cfg.rules, **options))


def _num_local(cfg: Config, mesh: jax.sharding.Mesh) -> int:
    """Returns the number of rows of this process; raises ConfigError if other processes hold some of them."""
    global_batch, num_processes = cfg.train.global_batch, jax.process_count()
    _, rows = local_rows(mesh, cfg.rules, global_batch)
    if len(rows) * num_processes != global_batch:
        raise ConfigError(
            f"data.per_process=True: this process holds {len(rows)} of train.global_batch={global_batch} rows, not "
            f"1/{num_processes} of them: processes along mesh.tensor, context or pipeline hold the same rows; yield "
            f"global batches on every process, with data.per_process=False"
        )
    return len(rows)
