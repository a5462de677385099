"""What a dataset is: a pure function from global sample indices to a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# B batch, S sequence


class Batch(NamedTuple):
    """A batch of token sequences. None for positions and segments: each row is one document from 0 on."""

    tokens: np.ndarray  # (B, S) int32
    targets: np.ndarray  # (B, S) int32, the token that follows
    weights: np.ndarray  # (B, S) float32, 0 where the target does not count
    positions: np.ndarray | None = None  # (B, S) int32, from 0 within each segment
    segments: np.ndarray | None = None  # (B, S) int32, attention stays within equal numbers


@dataclass(frozen=True)
class Source:
    """A dataset. `read` must depend on nothing but its argument: that is what makes a run resumable.

    Sample i is the i-th of the whole run, over all epochs and processes; the seed, the shuffle and
    the epochs are the source's own affair. `read` gets an int64 array of n indices and returns any
    pytree of arrays with a leading dim of n. It is called from a background thread.
    """

    read: Callable[[np.ndarray], Any]
    description: str = ""
    baseline: float | None = (
        None  # nats per token of the best guess that ignores context, to compare a loss with
    )
    size: int | None = None  # samples of an epoch: 0 ... size - 1 are each of them once
    token_bytes: np.ndarray | None = None  # (V,) bytes of text that each token stands for
