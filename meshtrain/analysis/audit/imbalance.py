"""Computes how evenly the devices that hold parts of a sequence share the work of attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.analysis.audit.placement import Placement
from meshtrain.config.build import build
from meshtrain.config.schema import Config
from meshtrain.data import synthetic
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.parallel import context

NUM_BATCHES = 4
FULL_ROWS = "rows of one document; the data is not read"


@dataclass(frozen=True)
class Imbalance:
    """Pairs of a query and a key that it attends to: the most on a device, over the mean of all devices."""

    contiguous: float  # if device i held the i-th part of each sequence
    zigzag: float  # in the order of `context.order`, which runs use
    of: str  # the rows that were counted


def imbalance(cfg: Config, placement: Placement, data: Any, batch: Any) -> Imbalance | None:
    """Returns the imbalance of a few batches of `data`, of the config's data if it is None, else of full rows.

    None if the mesh does not shard sequences. Windows are ignored.
    """
    if not placement.sequence_axes:
        return None
    source = _source(cfg) if data is None else data
    size, length = cfg.train.global_batch, batch.tokens.shape[1]
    rows, of = [np.broadcast_to(np.arange(length), (size, length))], FULL_ROWS
    if isinstance(source, Source):
        batches = [source.read(n * size + np.arange(size)) for n in range(NUM_BATCHES)]
        rows = [_positions(one) for one in batches]
        of = f"{NUM_BATCHES} batches of {source.description or 'the data'}"
    num_devices = placement.num_devices(placement.sequence_axes)
    groups = placement.num_devices(placement.token_axes) // num_devices
    orders = np.arange(length), context.order(length, num_devices)
    ratios = [[_ratio(one[:, order], groups, num_devices) for one in rows] for order in orders]
    contiguous, zigzag = (float(np.mean(each)) for each in ratios)
    return Imbalance(contiguous, zigzag, of)


def _source(cfg: Config) -> Source | None:
    """Returns the config's training data; None if it is in files that are not there."""
    path = cfg.data.options.get("path")
    if cfg.data.build in synthetic.FILES_BUILDS and not (path and Path(path).exists()):
        return None
    try:
        return build(cfg).train_data
    except ConfigError:
        return None


def _positions(batch: Batch) -> np.ndarray:
    """Returns the position of each token in its document, (B, S)."""
    if batch.positions is not None:
        return np.asarray(batch.positions)
    return np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)


def _ratio(positions: np.ndarray, groups: int, num_devices: int) -> float:
    """Returns the most pairs of a device over the mean; `groups` of devices share the rows."""
    # A query attends to itself and to all earlier tokens of its document.
    pairs = (positions + 1).reshape(groups, -1, num_devices, positions.shape[1] // num_devices)
    pairs = pairs.sum((1, 3))
    return pairs.max() / pairs.mean()
