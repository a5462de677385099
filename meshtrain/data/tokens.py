"""Windows of a long stream of tokens: a memory-mapped file, or a folder of text read as bytes."""

import functools
import os
from pathlib import Path

import numpy as np

from meshtrain.data.permute import permute
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError, below

DTYPES = ("uint8", "uint16", "uint32", "int32")
END_OF_FILE = 0  # the byte put after each file of a folder
ENTROPY_TOKENS = 1 << 26  # the unigram entropy is taken over at most so many


def build(
    *,
    path: str,
    dtype: str,
    pattern: str,
    exclude: tuple,
    seq_len: int,
    vocab_size: int,
    separator: int,
    heldout: float,
    seed: int,
    split: str,
) -> Source:
    """Returns the "train" or "heldout" split of `path`; raises ConfigError where it cannot be used.

    A file is mapped, not read: `.npy`, or raw numbers of `dtype` ("uint8" for any text). A folder is
    read into memory: the bytes of its files that match `pattern`, outside folders named in `exclude`.
    The last `heldout` of the tokens are held out; the files of a folder are shuffled first.
    Sample i is a window of `seq_len` + 1 tokens; an epoch visits each window once, in its own order.
    """
    if not os.path.exists(path):
        raise ConfigError(
            f"data.path={path}: no such file or folder; give a token file or a folder of text"
        )
    tokens = (
        _read_folder(path, pattern, tuple(exclude))
        if os.path.isdir(path)
        else _map_file(path, dtype)
    )
    check_sizes(seq_len, vocab_size, seed)
    if not 0 <= heldout < 1:
        raise ConfigError(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    border = len(tokens) - int(len(tokens) * heldout)
    first, last = (0, border) if split == "train" else (border, len(tokens))
    num_windows = (last - first - 1) // seq_len
    if num_windows < 1:
        raise ConfigError(
            f"data.path={path}: the {split} split has {last - first} tokens, too few for one window of "
            f"data.seq_len={seq_len} + 1; use more text, a shorter seq_len, or another data.heldout={heldout}"
        )

    def read(indices: np.ndarray) -> Batch:
        starts = first + seq_len * _shuffled(indices, num_windows, seed)
        rows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        if rows.max() >= vocab_size or rows.min() < 0:
            wrong = rows[(rows >= vocab_size) | (rows < 0)][0]
            raise ConfigError(
                f"data.path={path} holds token {wrong}, outside data.vocab_size={vocab_size}; "
                f"set model.vocab_size above the largest token, and check data.dtype={dtype}"
            )
        return to_batch(rows.astype(np.int32), separator)

    return Source(
        read,
        description=f"{path}: {last - first:,} tokens, {num_windows:,} windows of {seq_len}",
        baseline=unigram_entropy(tokens[first : min(last, first + ENTROPY_TOKENS)], vocab_size),
    )


def check_sizes(seq_len: int, vocab_size: int, seed: int) -> None:
    """Raises ConfigError for sizes that no data has."""
    faults = below(1, {"data.seq_len": seq_len, "data.vocab_size": vocab_size})
    if faults := faults + below(0, {"data.seed": seed}):
        raise ConfigError(*faults)


def to_batch(rows: np.ndarray, separator: int = -1) -> Batch:
    """Makes a Batch of (B, S + 1) tokens; where `separator` >= 0 ends documents, each is its own segment.

    The target that follows a separator belongs to another document and weighs nothing.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    if separator < 0:
        return Batch(tokens, targets, np.ones(tokens.shape, np.float32))
    ends = tokens == separator
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    place = np.arange(tokens.shape[1], dtype=np.int32)[None, :]
    return Batch(
        tokens,
        targets,
        weights=(~ends).astype(np.float32),
        positions=place - np.maximum.accumulate(np.where(starts, place, 0), axis=1),
        segments=np.cumsum(starts, axis=1, dtype=np.int32),
    )


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Returns the entropy of the token frequencies, in nats: the loss of guessing without context."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 20):
        part = tokens[start : start + (1 << 20)]
        counts += np.bincount(part[(part >= 0) & (part < vocab_size)], minlength=vocab_size)
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _shuffled(indices: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
    epochs, places = np.divmod(indices, num_windows)
    result = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = permute(places[here], num_windows, key=_key(seed, epoch))
    return result


def _key(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, int(epoch))).generate_state(1, np.uint64)[0])


def _map_file(path: str, dtype: str) -> np.ndarray:
    if path.endswith(".npy"):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ConfigError(f"data.path={path} is no .npy file: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
            raise ConfigError(
                f"data.path={path} holds {tokens.dtype.name}{list(tokens.shape)}; use one dim of {', '.join(DTYPES)}"
            )
        return tokens
    if dtype not in DTYPES:
        raise ConfigError(f"data.dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    size, width = os.path.getsize(path), np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ConfigError(
            f"data.path={path} has {size} bytes, no whole number of data.dtype={dtype} tokens"
        )
    return np.memmap(path, dtype, mode="r")


@functools.lru_cache(maxsize=1)  # both splits read the same folder
def _read_folder(path: str, pattern: str, exclude: tuple) -> np.ndarray:
    if Path(pattern).is_absolute() or not pattern:
        raise ConfigError(f"data.pattern={pattern!r}: use a pattern of names, such as *.txt")
    files = sorted(
        file
        for file in Path(path).rglob(pattern)
        if file.is_file() and not set(file.relative_to(path).parts[:-1]) & set(exclude)
    )
    if not files:
        raise ConfigError(f"data.path={path}: no files match data.pattern={pattern!r}")
    # A fixed shuffle, so that what is held out is a fair sample and the same on every machine.
    order = np.random.default_rng(0).permutation(len(files))
    end = bytes([END_OF_FILE])
    return np.frombuffer(b"".join(files[i].read_bytes() + end for i in order), np.uint8)
