"""The interface of a dataset: a pure function from global sample indices to a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# B batch, S sequence, V vocabulary


class Batch(NamedTuple):
    """A batch of token sequences. Without positions and segments, each row is one document."""

    tokens: np.ndarray  # (B, S) int32
    targets: np.ndarray  # (B, S) int32, the next token
    weights: np.ndarray  # (B, S) float32, 0 where the target does not count
    positions: np.ndarray | None = None  # (B, S) int32, from 0 within each segment
    segments: np.ndarray | None = None  # (B, S) int32, attention stays within equal numbers


@dataclass(frozen=True)
class Source:
    """A dataset. `read` must depend on its argument only: that makes a run resumable.

    Sample i is the i-th of the run, over all epochs and processes; the source itself handles
    the seed, the shuffle and the epochs. `read` accepts an int64 array of n indices and returns any
    pytree of arrays with a leading dim of n. It is called from a background thread.
    """

    read: Callable[[np.ndarray], Any]
    description: str = ""
    # Nats per token of the best guess without context: the loss to compare with.
    baseline: float | None = None
    size: int | None = None  # samples of an epoch: 0 ... size - 1 visit each sample once
    token_bytes: np.ndarray | None = None  # (V,) bytes of text of each token
