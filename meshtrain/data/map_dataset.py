"""Grain's MapDataset as a Source: its rows are read by their index, so a resumed run skips none."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError

NUM_THREADS = 16  # elements read at the same time, as in grain's own ReadOptions
NO_ROW = (
    "a filter of a MapDataset leaves such holes; filter what it is made from, or pass "
    "dataset.to_iter_dataset().batch(n) with n=train.global_batch, which skips them"
)


def as_source(data: Any) -> Any:
    """Returns a Source of a grain.MapDataset; any other data as it is.

    Each element is a row, and rows are stacked to a batch. After `dataset.batch(n)` an element is n
    rows, whatever the batch of the run is. An index above the length of the dataset is one of a
    later epoch: grain shuffles each in an order of its own.
    """
    grain = sys.modules.get("grain")  # nobody has a MapDataset who has not imported it
    if grain is None or not isinstance(data, grain.MapDataset):
        return data
    if not len(data):
        raise ConfigError("data: the MapDataset is empty")
    first = _element(data, 0)
    if _is_batched(data, first):
        return _of_batches(data, _num_rows(first, 0))
    return _of_rows(data)


def _is_batched(dataset: Any, first: Any) -> bool:
    """Returns whether the elements are batches: a Batch shows it, else a step of the pipeline."""
    if isinstance(first, Batch):
        return np.ndim(first.tokens) > 1
    return any("Batch" in type(step).__name__ for step in _steps(dataset))


def _steps(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all that it is made from."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _steps(parent)


def _length(dataset: Any) -> int | None:
    """Returns the number of elements of an epoch; None of dataset.repeat(), which has no end."""
    return None if len(dataset) >= sys.maxsize else len(dataset)


def _of_rows(dataset: Any) -> Source:
    readers = ThreadPoolExecutor(NUM_THREADS, "map_dataset")

    def read(indices: np.ndarray) -> Any:
        rows = list(readers.map(lambda index: _element(dataset, int(index)), indices))
        return _joined(np.stack, rows, indices)

    size = _length(dataset)
    return Source(read, description=f"your MapDataset: {_counted(size)}", size=size)


def _of_batches(dataset: Any, num_rows: int) -> Source:
    """Returns the rows of elements of `num_rows` rows; the last one of an epoch may have fewer."""
    readers = ThreadPoolExecutor(NUM_THREADS, "map_dataset")
    length = _length(dataset)
    size = None
    if length is not None:
        size = (length - 1) * num_rows + _num_rows(_element(dataset, length - 1), length - 1)

    def read_element(number: int) -> Any:
        element = _element(dataset, number)
        rows = _num_rows(element, number)
        is_last = length is not None and number % length == length - 1
        expected = num_rows if size is None or not is_last else size - (length - 1) * num_rows
        if rows != expected:
            raise ConfigError(
                f"data: element {number} of the MapDataset has {rows} rows, and the others have "
                f"{num_rows}; use .batch({num_rows}, drop_remainder=True)"
            )
        return element

    def read(indices: np.ndarray) -> Any:
        epochs, within = np.divmod(indices, size) if size else (0, indices)
        numbers, rows = np.divmod(within, num_rows)
        if length is not None:
            numbers = numbers + epochs * length
        needed, which = np.unique(numbers, return_inverse=True)
        elements = list(readers.map(lambda number: read_element(int(number)), needed))
        # All elements but the last of an epoch have num_rows rows, so count them.
        counts = [_num_rows(element, 0) for element in elements]
        starts = np.cumsum([0, *counts[:-1]])
        chosen = starts[which] + rows
        batch = _joined(np.concatenate, elements, needed)
        return jax.tree.map(lambda array: array[chosen], batch)

    return Source(read, description=f"your MapDataset: {_counted(size)}", size=size)


def _counted(size: int | None) -> str:
    return "rows without end" if size is None else f"{size:,} rows"


def _element(dataset: Any, number: int) -> Any:
    element = dataset[number]
    if element is None:
        raise ConfigError(f"data: row {number} of the MapDataset is None; {NO_ROW}")
    return element


def _num_rows(element: Any, number: int) -> int:
    """Returns the leading dim of all arrays of an element; raises ConfigError if they differ."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(element)]
    if not shapes or not all(shape[:1] == shapes[0][:1] for shape in shapes) or not shapes[0]:
        raise ConfigError(
            f"data: the arrays of element {number} of the MapDataset have the shapes "
            f"{', '.join(map(str, shapes))}; after .batch() all need the same leading dim"
        )
    return shapes[0][0]


def _joined(join: Any, elements: Sequence[Any], numbers: np.ndarray) -> Any:
    """Returns arrays of all elements; raises ConfigError if their arrays do not fit together."""
    try:
        return jax.tree.map(lambda *leaves: join([*map(np.asarray, leaves)]), *elements)
    except (TypeError, ValueError) as error:
        # One error of jax's and numpy's is several lines long.
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"data: the rows {numbers.min()} to {numbers.max()} of the MapDataset do not fit in "
            f"one batch: {reason}; give all of them the same keys and shapes"
        ) from error
