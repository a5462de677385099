"""Tokens on disk as one long stream: raw files, folders of text, Megatron's files, prepared folders."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.data import indexed
from meshtrain.data import prepared as manifest
from meshtrain.errors import ConfigError

# B windows, W tokens of a window, T tokens of a file

DTYPES = ("uint8", "uint16", "uint32", "int32")  # of raw files
END_OF_FILE = 0  # the byte put after each file of a folder


class Corpus(NamedTuple):
    path: str  # as the config has it
    files: list[str]  # names, for messages
    parts: list[np.ndarray]  # tokens of each file (T,)
    offsets: np.ndarray  # (files + 1,) int64: where each begins in the stream
    starts: np.ndarray | None = None  # (documents + 1,) int64: where each begins; then the length
    tokenizer: str = ""  # what tells it from others; "" where nothing is known
    vocab_size: int = 0  # 0: not known
    token_bytes: np.ndarray | None = None  # (vocab_size,) bytes of text
    beside: str = ""  # what is computed once is kept under names that begin so

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])


def load(path: str, *, dtype: str, pattern: str, exclude: tuple) -> Corpus:
    """Returns what lies at `path`, which may be the prefix of Megatron's files; raises ConfigError."""
    if prefix := indexed.prefix_of(path):
        shard = indexed.load(prefix)
        return _joined(path, [shard])._replace(beside=prefix)
    if not os.path.exists(path):
        raise ConfigError(
            f"data.path={path}: no such file or folder; give a token file or a folder of text"
        )
    if os.path.isfile(os.path.join(path, manifest.NAME)):
        return _prepared(path)
    if not os.path.isdir(path):
        return _stream(path, [path], [_map_file(path, dtype)])
    if os.path.exists(os.path.join(path, manifest.JOURNAL)):
        raise ConfigError(
            f"data.path={path}: is not prepared to its end; run the same `meshtrain prepare` again"
        )
    bytes_each = (np.arange(256) != END_OF_FILE).astype(np.int32)
    text = _stream(path, [path], [_read_folder(path, pattern, tuple(exclude))])
    return text._replace(tokenizer="bytes", token_bytes=bytes_each)


def windows(corpus: Corpus, starts_B: np.ndarray, width: int, vocab_size: int) -> np.ndarray:
    """Returns tokens (B, W) int32 of the stream, from each start on; one gather for each file.

    Raises ConfigError for a token that is not in the vocabulary.
    """
    rows_BW = np.empty((len(starts_B), width), np.int32)
    number_B = np.searchsorted(corpus.offsets, starts_B, side="right") - 1
    inside_B = starts_B + width <= corpus.offsets[number_B + 1]
    for number in np.unique(number_B[inside_B]):
        here = inside_B & (number_B == number)
        found = _every(corpus.parts[number], width)[starts_B[here] - corpus.offsets[number]]
        check_ids(corpus, found, vocab_size)
        rows_BW[here] = found
    for row in np.flatnonzero(~inside_B):  # from the end of a file on into the next
        place, end, number = starts_B[row], starts_B[row] + width, number_B[row]
        while place < end:
            begin, stop = corpus.offsets[number : number + 2]
            found = corpus.parts[number][place - begin : min(end, stop) - begin]
            check_ids(corpus, found, vocab_size)
            rows_BW[row, place - starts_B[row] :][: len(found)] = found
            place, number = place + len(found), number + 1
    return rows_BW


def _every(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns all windows (T - W + 1, W), as sliding_window_view does but at once: a view."""
    shape = (len(tokens) - width + 1, width)
    return np.ndarray(shape, tokens.dtype, tokens, strides=2 * tokens.strides)


def begins(corpus: Corpus, starts_B: np.ndarray, width: int) -> np.ndarray:
    """Returns where in windows (B, W) a document begins."""
    begins_BW = np.zeros((len(starts_B), width), bool)
    first = np.searchsorted(corpus.starts, starts_B)
    count = np.searchsorted(corpus.starts, starts_B + width) - first
    rows = np.repeat(np.arange(len(starts_B)), count)
    begins_BW[rows, corpus.starts[expand(first, count)] - starts_B[rows]] = True
    return begins_BW


def expand(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns first[0], first[0] + 1, ... (count[0] of them), first[1], ... as one array."""
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(ends[-1] if ends.size else 0)


def head(corpus: Corpus, first: int, last: int) -> np.ndarray:
    """Returns tokens `first` ... `last` - 1 of the stream; a view, where they are in one file."""
    found = [
        part[max(0, first - begin) : max(0, last - begin)]
        for part, begin in zip(corpus.parts, corpus.offsets[:-1], strict=True)
    ]
    found = [part for part in found if part.size] or found[:1]
    return found[0] if len(found) == 1 else np.concatenate(found)


def check_ids(corpus: Corpus, found: np.ndarray, vocab_size: int) -> None:
    """Raises ConfigError where a token is outside the vocabulary: jax would take the nearest inside."""
    if found.size and (found.max() >= vocab_size or found.min() < 0):
        wrong = found[(found >= vocab_size) | (found < 0)].flat[0]
        raise ConfigError(
            f"data.path={corpus.path} holds token {wrong}{_where(corpus, wrong)}, outside "
            f"data.vocab_size={vocab_size}; set model.vocab_size above the largest token, "
            f"and check data.dtype={corpus.parts[0].dtype}"
        )


def _where(corpus: Corpus, token: np.integer) -> str:
    """Names the first place of a token."""
    for file, tokens in zip(corpus.files, corpus.parts, strict=True):
        for start in range(0, len(tokens), 1 << 24):
            if (hits := np.flatnonzero(tokens[start : start + (1 << 24)] == token)).size:
                return f" (at byte {(start + hits[0]) * tokens.itemsize} of {file})"
    return ""


def _stream(path: str, files: list[str], parts: list[np.ndarray]) -> Corpus:
    return Corpus(path, files, parts, np.cumsum([0, *map(len, parts)], dtype=np.int64))


def _joined(path: str, shards: list[indexed.Shard]) -> Corpus:
    stream = _stream(path, [shard.path for shard in shards], [shard.tokens for shard in shards])
    starts = [shard.starts[:-1] + at for shard, at in zip(shards, stream.offsets, strict=False)]
    return stream._replace(starts=np.concatenate([*starts, stream.offsets[-1:]]))


def _prepared(path: str) -> Corpus:
    folder = Path(path)
    found = manifest.read(folder)
    shards = [indexed.load(str(folder / shard["name"])) for shard in found["shards"]]
    for shard, told in zip(shards, found["shards"], strict=True):
        if (len(shard.tokens), len(shard.starts) - 1) != (told["tokens"], told["documents"]):
            raise ConfigError(
                f"{shard.path} holds other tokens than {manifest.NAME} tells; copy it again"
            )
    return _joined(path, shards)._replace(
        tokenizer=found["tokenizer"]["sha256"],
        vocab_size=found["tokenizer"]["vocab_size"],
        token_bytes=manifest.token_bytes(folder, found),
        beside=str(folder / "all"),
    )


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
        return np.asarray(tokens)
    if dtype not in DTYPES:
        raise ConfigError(f"data.dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    size, width = os.path.getsize(path), np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ConfigError(
            f"data.path={path} has {size} bytes, no whole number of data.dtype={dtype} tokens"
        )
    return indexed.map_tokens(path, dtype)


@functools.lru_cache(maxsize=1)  # both splits read the same folder
def _read_folder(path: str, pattern: str, exclude: tuple) -> np.ndarray:
    if Path(pattern).is_absolute() or not pattern:
        raise ConfigError(f"data.pattern={pattern!r}: use a pattern of names, such as *.txt")
    root, excluded = Path(path), frozenset(exclude)
    files = sorted(
        file
        for file in root.rglob(pattern)
        if excluded.isdisjoint(file.parts[len(root.parts) : -1]) and file.is_file()
    )
    if not files:
        raise ConfigError(f"data.path={path}: no files match data.pattern={pattern!r}")
    # A fixed shuffle, so that what is held out is a fair sample and the same on every machine.
    order = np.random.default_rng(0).permutation(len(files))
    end = bytes([END_OF_FILE])
    return np.frombuffer(b"".join(files[i].read_bytes() + end for i in order), np.uint8)
