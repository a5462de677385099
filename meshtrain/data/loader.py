"""Load the batches of a source onto devices, ahead of the step; a process reads its own rows."""

import contextlib
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from meshtrain.config.schema import Config
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.parallel import context
from meshtrain.parallel.sharding import Rules, axes_of, spec_for

# b rows of this process, S sequence

PREFETCHED = 64  # batches that are brought to this machine before they are read, if they are remote
PREFETCHERS = 8  # of them at the same time
AHEAD = 2  # batches read and sent to the devices before they are needed


def open_loader(
    data: Source | Iterable[Any],
    cfg: Config,
    mesh: jax.sharding.Mesh,
    position: int,
    *,
    check: Callable[[Any], None] | None = None,
    num_batches: int | None = None,
) -> contextlib.closing:
    """Returns a context with the Loader of a run's Source, or of an iterable of global batches.

    With `data.per_process` the iterable yields the rows of this process. `check` is
    `Model.check_batch`; `num_batches` is their number, if the loader is closed after them. Raises
    ConfigError if several processes hold the same rows.
    """
    global_batch = cfg.train.global_batch
    per_process = cfg.data.options.get("per_process", False)
    if not isinstance(data, Source):
        source = from_iterable(
            data,
            global_batch=global_batch,
            position=position,
            num_local=_num_local(cfg, mesh) if per_process else 0,
        )
    elif per_process:
        raise ConfigError(
            "data.per_process=True: the data is a Source, which reads the rows of a process by "
            "itself; set it to False, or pass an iterable to train()"
        )
    else:
        source = data
    loader = Loader(
        source,
        mesh,
        cfg.rules,
        global_batch=global_batch,
        position=position,
        check=check,
        num_batches=num_batches,
    )
    return contextlib.closing(loader)


class Loader:
    """Iterates over the global batches of a source, starting at sample `position`.

    The sequences of a `Batch` are in the order of `context.order`, sharded over the mesh axes of
    rule "seq". `check` raises ConfigError for rows that the model cannot read. Close it when done.
    """

    def __init__(
        self,
        source: Source,
        mesh: jax.sharding.Mesh,
        rules: Rules,
        *,
        global_batch: int,
        position: int = 0,
        check: Callable[[Any], None] | None = None,
        num_batches: int | None = None,
    ):
        self._source = source
        self._check = check
        self._global_batch = global_batch
        self._mesh = mesh
        self._rules = rules
        # The rows of the global batch that this process reads, in order.
        self._sharding, self._rows = local_rows(mesh, rules, global_batch)
        self._next = position  # first sample that is not being read
        self.num_samples = 0  # of the newest batch, without padding
        self._reader = ThreadPoolExecutor(1, "loader")
        self._ahead: deque[Future] = deque()
        # Of a source with data elsewhere: the next batches that are being brought here.
        self._prefetcher = ThreadPoolExecutor(PREFETCHERS, "prefetch") if source.prefetch else None
        self._prefetched: deque[Future] = deque()
        # First sample after those that are worth bringing here.
        self._end = math.inf if num_batches is None else position + num_batches * global_batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next batch as jax arrays; re-raises an error of the source that read it."""
        batch = self.peek()
        count = self._source.num_samples
        self.num_samples = count(self.position) if count else self._global_batch
        self._ahead.popleft()  # only now: a batch that cannot be read is not consumed
        if self._prefetched:
            self._prefetched.popleft()
        return batch

    def peek(self) -> Any:
        """Returns the next batch without consuming it."""
        self._prefetch()
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._reader.submit(self.read, self._next))
            self._next += self._global_batch
        return self._ahead[0].result()

    def _prefetch(self) -> None:
        """Brings the next batches to this machine; at the start of a run, waits for all of them.

        Then a store has the time of PREFETCHED steps for each batch, also for the first ones.
        """
        if self._prefetcher is None:
            return
        is_start = not self._prefetched and not self._ahead
        while len(self._prefetched) < PREFETCHED + AHEAD:
            first = self.position + len(self._prefetched) * self._global_batch
            if first >= self._end:
                break
            future = self._prefetcher.submit(self._source.prefetch, first + self._rows)
            self._prefetched.append(future)
        if is_start:
            wait(self._prefetched)

    @property
    def position(self) -> int:
        """The first sample of the next batch."""
        return self._next - len(self._ahead) * self._global_batch

    def read(self, position: int) -> Any:
        """Returns samples `position` ... `position` + global_batch - 1 as sharded jax arrays."""
        batch = as_arrays(self._source.read(position + self._rows))
        for key, array in _by_key(batch):
            if array.shape[:1] != self._rows.shape:
                raise ConfigError(
                    f"data: {key} of a batch has the shape {array.shape}, and its source was asked "
                    f"for {len(self._rows)} samples; return arrays with one row for each"
                )
        if self._check is not None:
            self._check(batch)

        def is_batch(part: Any) -> bool:
            return isinstance(part, Batch)

        # A source may yield any pytree; only in a Batch is the second dim known to be the sequence.
        parts, tree = jax.tree.flatten(batch, is_leaf=is_batch)
        context_size = self._mesh.shape.get("context", 1)
        if context_size > 1 and not any(map(is_batch, parts)):
            raise ConfigError(
                f"mesh.context={context_size}: it splits the sequences of a meshtrain.Batch, and "
                f"the data yields a {type(batch).__name__}; yield a Batch, or put the devices on "
                f"data or fsdp"
            )
        sharded = []
        for part in parts:
            if is_batch(part):
                sharded.append(jax.tree.map(self._sequences_to_devices, part))
            else:
                sharded.append(self._to_devices(part, self._sharding))
        return jax.tree.unflatten(tree, sharded)

    def _sequences_to_devices(self, rows: np.ndarray) -> jax.Array:
        """Returns rows (b, S) as an array with the sequences in the order of `context.order`."""
        length = rows.shape[1]
        sizes = self._mesh.shape
        (axes,) = spec_for(("seq",), (length,), self._rules, sizes)
        num_chunks = math.prod(sizes[axis] for axis in axes_of(axes))
        if num_chunks == 1:
            return self._to_devices(rows, self._sharding)
        spec = jax.P(*self._sharding.spec, axes)
        sharding = jax.sharding.NamedSharding(self._mesh, spec)
        return self._to_devices(rows[:, context.order(length, num_chunks)], sharding)

    def _to_devices(self, rows: np.ndarray, sharding: jax.sharding.NamedSharding) -> jax.Array:
        """Returns the global array, of which `rows` (b, ...) are those of this process."""

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            # Each device asks for a contiguous slice of the global batch.
            start, stop, _ = index[0].indices(self._global_batch)
            first = np.searchsorted(self._rows, start)
            return rows[first:][: stop - start, *index[1:]]

        shape = (self._global_batch, *rows.shape[1:])
        return jax.make_array_from_callback(shape, sharding, shard)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=True, cancel_futures=True)


def local_rows(
    mesh: jax.sharding.Mesh, rules: Rules, global_batch: int
) -> tuple[jax.sharding.NamedSharding, np.ndarray]:
    """Returns the sharding of a batch's rows, and the numbers (b,) of those of this process."""
    spec = spec_for(("batch",), (global_batch,), rules, mesh.shape)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    slices = sharding.addressable_devices_indices_map((global_batch,)).values()
    # Devices hold the same rows or other ones.
    spans = sorted({index[0].indices(global_batch)[:2] for index in slices})
    return sharding, np.concatenate([np.arange(start, stop) for start, stop in spans])


def as_arrays(batch: Any) -> Any:
    """Returns the batch with numpy arrays of numbers; a ConfigError names what has none."""

    def to_array(path: tuple, leaf: Any) -> np.ndarray:
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError) as error:  # such as a tensor of torch on a GPU
            raise ConfigError(
                f"data: {_key(path)} of a batch is no array: {error}; yield numpy arrays"
            ) from error
        # bfloat16 and other types of jax are no np.number to numpy.
        if not (jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == bool):
            kind = "strings" if array.dtype.kind in "UST" else f"{array.dtype} values"
            raise ConfigError(
                f"data: {_key(path)} of a batch holds {kind}, not numbers; encode it as numbers of "
                f"one shape, or leave it out of the batch"
            )
        return array

    return jax.tree.map_with_path(to_array, batch)


def _by_key(batch: Any) -> list[tuple[str, Any]]:
    """Returns the name of each array in a batch, and the array."""
    return [(_key(path), leaf) for path, leaf in jax.tree.leaves_with_path(batch)]


def _key(path: tuple) -> str:
    """Returns the name of an array in a batch, with those of the dicts around it: 'inputs.text'."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return repr(name) if name else "the array"


def _num_local(cfg: Config, mesh: jax.sharding.Mesh) -> int:
    """Returns the number of rows of this process.

    Raises ConfigError if other processes hold some of them.
    """
    global_batch = cfg.train.global_batch
    num_processes = jax.process_count()
    _, rows = local_rows(mesh, cfg.rules, global_batch)
    if len(rows) * num_processes != global_batch:
        raise ConfigError(
            f"data.per_process=True: this process holds {len(rows)} of "
            f"train.global_batch={global_batch} rows, not 1/{num_processes} of them: processes "
            f"along mesh.tensor, context or pipeline hold the same rows; yield global batches on "
            f"every process, with data.per_process=False"
        )
    return len(rows)


# ---- iterables ----


def rows_of_epoch(data: Any, first: Any) -> int | None:
    """Returns the rows of an epoch of an iterable whose first batch is `first`.

    They are known of a list, and of a DataLoader of PyTorch. Returns None if they are not, or if
    the length of the iterable decides: a short last batch with weights is a batch of its own.
    """
    if isinstance(data, Source) or has_weights(first):
        return None
    if isinstance(data, list | tuple):
        return (len(data) - 1) * leading_dim(first) + leading_dim(data[-1]) or None
    # With drop_last all batches are full; without a batch_size another sampler makes the batches.
    batch_size, sampler = getattr(data, "batch_size", None), getattr(data, "sampler", None)
    if not batch_size or getattr(data, "drop_last", True) or not hasattr(sampler, "__len__"):
        return None
    return len(sampler)


def peek(data: Source | Iterable[Any] | None) -> tuple[Any, Source | Iterable[Any] | None]:
    """Returns a batch of the data, of any number of rows, and data that still has this batch.

    None has no batch. Raises ConfigError if the data is empty, or has rows in place of batches.
    """
    if data is None:
        return None, None
    if isinstance(data, Source):
        return as_arrays(data.read(np.arange(1))), data
    batches = iter(data)
    try:
        batch = next(batches)
    except StopIteration:
        raise ConfigError("data: has no batch") from None
    # What can be iterated only once continues with the batch that was taken.
    rest = itertools.chain([batch], batches) if batches is data else data
    batch = as_arrays(batch)
    if isinstance(batch, Batch) and batch.tokens.ndim != 2:
        raise ConfigError(
            f"data: 'tokens' of a batch has the shape {batch.tokens.shape}, not (rows, sequence); "
            f"yield batches of train.global_batch rows, with .batch(n) of a pipeline of grain"
        )
    return batch, rest


def from_iterable(
    batches: Iterable[Any], *, global_batch: int, position: int = 0, num_local: int = 0
) -> Source:
    """Returns a Source that reads `batches`: pytrees of arrays (`global_batch`, ...).

    Batches are read in order. At the end, a list or another object with `__iter__` starts again.
    The last batch before the end may have fewer rows: see `_epochs`. A resumed run skips the first
    `position` samples, so the iterable must yield the same batches in the same order on every
    iteration and on every process. With `num_local`, each process has its own batches, of
    `num_local` rows.
    """
    if position % global_batch:
        raise ConfigError(
            f"train.global_batch={global_batch} does not divide the {position} samples seen so "
            f"far; resume with the global_batch that the run used"
        )
    size = num_local or global_batch
    size_name = f"train.global_batch={global_batch}"
    if num_local:
        size_name += f" with data.per_process=True, {num_local} on this process"
    epochs = _epochs(batches, size, size_name)
    stream = itertools.islice(epochs, position // global_batch, None)
    expected = position
    num_samples: dict[int, int] = {}  # first sample of a batch -> its samples without padding

    def read(indices: np.ndarray) -> Any:
        nonlocal expected
        start = int(indices[0]) // global_batch * global_batch
        assert start == expected, "batches of an iterable are read in order"
        expected += global_batch
        batch, num_rows = next(stream)
        # Of the other processes it is only known that theirs end together.
        num_samples[start] = num_rows * (global_batch // size)
        rows = slice(None) if num_local else indices - start
        return jax.tree.map(lambda array: array[rows], batch)

    return Source(read, description="your iterable", num_samples=num_samples.pop)


def _epochs(batches: Iterable[Any], size: int, size_name: str) -> Iterator[tuple[Any, int]]:
    """Yields batches of `size` rows, without end, and their number of rows without padding.

    A short last batch of an epoch is padded if its rows have weights. Without weights, rows of the
    next epoch follow in the same batch: no row is lost, and none counts twice in an epoch.
    `size_name` describes the size in an error.
    """
    rest: Any = None  # the latest rows, fewer than `size`, which have not been yielded
    for epoch in itertools.count():
        is_empty = True
        iterator = iter(batches)
        for batch in iterator:
            is_empty = False
            batch = as_arrays(batch)
            num_rows = _num_rows(batch, size, size_name)
            if num_rows < size:
                if next(iterator, None) is not None:
                    raise ConfigError(
                        f"data: a batch has {num_rows} rows, and {size_name}; only the last one of "
                        f"an epoch may be short"
                    )
                if has_weights(batch):
                    yield _padded(batch, num_rows, size), num_rows
                    continue
            if rest is not None:
                batch = _joined(rest, batch)
                num_rows = len(jax.tree.leaves(batch)[0])
            if num_rows < size:
                rest = batch
                continue
            yield jax.tree.map(lambda array: array[:size], batch), size
            rest = jax.tree.map(lambda array: array[size:], batch) if num_rows > size else None
        if is_empty:
            raise ConfigError(
                f"data: the iterable ended (in epoch {epoch}); give one that starts again (a list, "
                f"or an object with __iter__), or set fewer train.steps"
            )


def _num_rows(batch: Any, size: int, size_name: str) -> int:
    """Returns the leading dim of all arrays.

    Raises ConfigError unless it is one number from 1 to `size`.
    """
    arrays = _by_key(batch)
    num_rows = arrays[0][1].shape[0] if arrays and arrays[0][1].shape else 0
    for key, array in arrays:
        if array.shape[:1] != (num_rows,) or not 0 < num_rows <= size:
            raise ConfigError(
                f"data: {key} of a batch has the shape {array.shape}, and {size_name}; yield "
                f"arrays with a leading dim of {size}"
            )
    return num_rows


def leading_dim(batch: Any) -> int:
    """Returns the leading dim of the first array of a batch; 0 if there is none."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)[:1]]
    return shapes[0][0] if shapes and shapes[0] else 0


def _joined(first: Any, second: Any) -> Any:
    """Returns the rows of two batches as one; raises ConfigError if their arrays do not fit."""
    try:
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), first, second)
    except ValueError as error:
        raise ConfigError(
            f"data: the last batch of an epoch is short, and the first batch of the next epoch, "
            f"which fills it, has other arrays: {error}; leave short batches out (drop_last=True), "
            f"or {ADD_WEIGHTS}"
        ) from error


def _padded(batch: Any, num_rows: int, size: int) -> Any:
    """Returns the batch with `size` rows: its own repeated, with weight 0.

    Repeated rows are valid input, so that a loss times 0 has a gradient of 0. The weights are
    `weights` of a Batch, or of a dict.
    """
    rows = np.arange(size) % num_rows
    padded = jax.tree.map(lambda array: array[rows], batch)
    return _only_weights_of(padded, np.arange(size) < num_rows)


# ---- rows that fill a batch ----

ADD_WEIGHTS = (
    "add an array `weights` to every batch, 1 for each row, by which the loss weighs: its padding "
    "gets 0"
)


def one_epoch(source: Source) -> Source:
    """Returns a source whose samples after the first epoch have weight 0: they fill the last batch.

    The batches of `source` have weights (`has_weights`).
    """

    def read(indices: np.ndarray) -> Any:
        batch = source.read(np.minimum(indices, source.size - 1))
        return _only_weights_of(batch, indices < source.size)

    return dataclasses.replace(source, read=read)


def has_weights(batch: Any) -> bool:
    """Returns whether rows of the batch can get weight 0: it is a Batch, or a dict with them."""
    return isinstance(batch, Batch) or (isinstance(batch, dict) and "weights" in batch)


def _only_weights_of(batch: Any, is_own: np.ndarray) -> Any:
    """Returns the batch with weight 0 in all rows but those where `is_own` (rows,) is True."""

    def weights_of_own(weights: np.ndarray) -> np.ndarray:
        is_own_row = is_own.reshape(-1, *[1] * (weights.ndim - 1))
        return np.where(is_own_row, weights, 0).astype(weights.dtype)

    if isinstance(batch, Batch):
        return batch._replace(weights=weights_of_own(batch.weights))
    return {**batch, "weights": weights_of_own(np.asarray(batch["weights"]))}
