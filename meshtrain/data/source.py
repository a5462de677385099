"""The interface of a dataset: a pure function from global sample indices to a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshtrain.errors import ConfigError, minimum_faults

# B batch, S sequence, V vocabulary


class Batch(NamedTuple):
    """A batch of token sequences. Without positions and segments, each row is one document."""

    tokens: np.ndarray  # (B, S) int32
    targets: np.ndarray  # (B, S) int32, the next token
    weights: np.ndarray  # (B, S) float32, 0 where the target does not count
    positions: np.ndarray | None = None  # (B, S) int32, from 0 within each segment
    segments: np.ndarray | None = None  # (B, S) int32, a token attends only to its own segment
    # (B, W) uint32, which no dataset yields: the train step of a model with dropout adds them;
    # see ops/dropout.py.
    row_keys: Any = None
    # (B,) int32, which no dataset yields: in generation, the positions before a row's first token.
    # Its sequences are in the order of positions on every mesh.
    num_pads: Any = None
    # (B, 2 + C) int32, which no dataset yields: what inference/scores.py asks of each row.
    questions: Any = None


class Phase(NamedTuple):
    """A part of a run with a mixture of its own."""

    step: int  # at which it begins
    sample: int  # the first one
    digest: str  # of its data and their shares


class Part(NamedTuple):
    """What a run reads of one of the data sets that are mixed."""

    name: str
    samples: int
    size: int | None  # samples of an epoch


class Timeline(NamedTuple):
    """A run, or the rest of one that resumes, as far as its data depends on it."""

    num_steps: int
    global_batch: int
    step: int = 0  # the next one, which reads the samples from `position` on
    position: int = 0
    phases: Sequence[Phase] = ()  # of the checkpoint that the run resumes from
    same_batch: bool = True  # whether the steps before had this global batch


def last_sample(run: Timeline) -> int:
    """Returns the number of samples that a run has read at its end."""
    return run.position + (run.num_steps - run.step) * run.global_batch


@dataclass(frozen=True)
class Source:
    """A dataset. The result of `read` must depend only on its argument; this makes runs resumable.

    Sample i is the i-th of the run, over all epochs and processes; the source itself handles
    seed, shuffle and epochs. `read` accepts an int64 array of n indices and returns any
    pytree of arrays with a leading dim of n. It is called from a background thread.
    """

    read: Callable[[np.ndarray], Any]
    description: str = ""
    # Loss of the best guess without context (unigram entropy), in nats per token; None: unknown.
    baseline: float | None = None
    size: int | None = None  # samples per epoch; None: there are no epochs
    token_bytes: np.ndarray | None = None  # (V,) number of text bytes of each token
    # Returns (V,) how many of these bytes the tokenizer added to the token after each one.
    added_bytes: Callable[[], np.ndarray] | None = None
    # What the samples are made of, wherever it is stored: "data", a digest of all tokens, and
    # "tokenizer", the digest of their tokenizer, or "". Empty: unknown.
    identity: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()  # lines to log before a run trains on it
    # First sample of a global batch that was read -> its samples without padding; None: all.
    num_samples: Callable[[int], int] | None = None
    # Brings samples to this machine before they are read: returns when they are there, or cannot be
    # read, which only `read` reports. Called from several threads. None: they are here.
    prefetch: Callable[[np.ndarray], None] | None = None
    # Of data that changes during a run: returns the source of that run, which has phases. Raises
    # ConfigError if it may not resume so. None: the data depends on nothing but the sample.
    in_run: Callable[[Timeline], "Source"] | None = None
    phases: Sequence[Phase] = ()  # checkpoints record them
    # Returns what is read of each data set of a mixture from one sample up to another.
    parts: Callable[[int, int], Sequence[Part]] | None = None
    # Returns the same data in windows that begin N tokens apart: see `with_stride`. None: its
    # rows are no windows of a stream.
    strided: Callable[[int], "Source"] | None = None


def check_sizes(seq_len: int, vocab_size: int, seed: int, separator: int = -1) -> None:
    """Raises ConfigError for a size below 1, a negative seed, or a separator that is no token."""
    faults = minimum_faults(1, {"data.seq_len": seq_len, "data.vocab_size": vocab_size})
    faults += minimum_faults(0, {"data.seed": seed})
    if not -1 <= separator < vocab_size:
        faults.append(
            f"data.separator={separator}: no token below data.vocab_size={vocab_size}; "
            f"use the token that ends documents, or -1"
        )
    if faults:
        raise ConfigError(*faults)


def with_stride(source: Source, stride: int) -> Source:
    """Returns the data in windows that begin `stride` tokens apart; 0: as it is.

    They overlap, and each token but the first of the stream counts once, with as much context as
    possible. Raises ConfigError for data that is no stream of tokens, or windows without overlap.
    """
    if not stride:
        return source
    if source.strided is None:
        raise ConfigError(
            f"eval.stride={stride}: this data is no stream of tokens; set eval.stride=0, or use "
            f"data.build=meshtrain.data.tokens:build with data.packing=windows and one data.path"
        )
    return source.strided(stride)


def to_batch(rows: np.ndarray, separator: int = -1) -> Batch:
    """Returns a Batch of (B, S + 1) tokens; a row is one document, unless `separator` splits it."""
    tokens = rows[:, :-1]
    batch = Batch(tokens, targets=rows[:, 1:], weights=np.ones(tokens.shape, np.float32))
    return split_documents(batch, separator)


def to_segmented_batch(rows: np.ndarray, is_start: np.ndarray) -> Batch:
    """Returns a Batch of (B, S + 1) tokens; each document is a segment.

    `is_start` (B, S + 1) is True for the first token of each document.
    """
    # The first token of a document does not follow from the document before it.
    weights = (~is_start[:, 1:]).astype(np.float32)
    positions, segments = _positions_and_segments(is_start[:, :-1])
    return Batch(rows[:, :-1], rows[:, 1:], weights, positions, segments)


def split_documents(batch: Batch, separator: int) -> Batch:
    """Returns the batch with one more segment after each token `separator` within a document.

    The target of a separator belongs to the next document and has weight 0. With `separator` -1
    the batch is returned as it is.
    """
    if separator < 0:
        return batch
    is_end = (batch.tokens == separator) & (batch.weights > 0)
    if batch.positions is None:
        is_start = np.zeros(is_end.shape, bool)
    else:
        is_start = batch.positions == 0
    is_start[:, 1:] |= is_end[:, :-1]
    weights = np.where(is_end, np.float32(0), batch.weights)
    positions, segments = _positions_and_segments(is_start)
    return Batch(batch.tokens, batch.targets, weights, positions, segments)


def _positions_and_segments(is_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both (B, S) int32; `is_start` (B, S) is True for the first token of each segment."""
    S = is_start.shape[1]
    is_start = is_start.copy()
    is_start[:, 0] = True
    # There are few segments and many tokens, so compute each number once and repeat it.
    starts = np.flatnonzero(is_start)
    lengths = np.diff(starts, append=is_start.size)
    # A segment's number counts from 0 in each row: subtract the number of the row's first segment.
    row_starts = starts - starts % S
    numbers = np.arange(starts.size) - np.searchsorted(starts, row_starts)
    segments = np.repeat(numbers.astype(np.int32), lengths)
    segment_starts = np.repeat(starts.astype(np.int32), lengths)
    positions = np.arange(is_start.size, dtype=np.int32) - segment_starts
    return positions.reshape(-1, S), segments.reshape(-1, S)


def concatenate(batches: Iterable[Batch], order: np.ndarray) -> Batch:
    """Returns the rows of all batches, which have the same fields, in this order."""
    fields = []
    for arrays in zip(*batches, strict=True):
        is_missing = arrays[0] is None  # a field that only some batches have
        fields.append(None if is_missing else np.concatenate(arrays)[order])
    return Batch(*fields)
