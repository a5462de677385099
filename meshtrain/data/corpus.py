"""Tokens on disk as one stream: raw token files, folders of text, Megatron-LM files, prepared folders."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.data import files, identity, indexed, prepared
from meshtrain.errors import ConfigError

# B windows, W tokens of a window, T tokens of a file

DTYPES = ("uint8", "uint16", "uint32", "int32")  # of raw files

END_OF_FILE = 0  # the byte put after each file of a folder, which is a document


class Corpus(NamedTuple):
    """The tokens of one or more files, concatenated to one stream."""

    path: str  # data.path
    files: list[str]  # names, for messages
    file_tokens: list[np.ndarray]  # tokens of each file (T,)
    # (files + 1,) int64: start of each file in the stream, then the length of the stream
    file_offsets: np.ndarray
    # (documents + 1,) int64: start of each document, then the length of the stream; None: unknown
    document_starts: np.ndarray | None = None
    digest: str = ""  # of the tokens; see identity.py
    tokenizer: str = ""  # digest of the tokenizer; "": unknown
    vocab_size: int = 0  # 0: unknown
    token_bytes: np.ndarray | None = None  # (vocab_size,) number of text bytes of each token
    cache_prefix: str = (
        ""  # path prefix of the files that cache computed results; "": none are written
    )

    @property
    def num_tokens(self) -> int:
        return int(self.file_offsets[-1])


def load(path: str, *, dtype: str, vocab_size: int, pattern: str, exclude: tuple) -> Corpus:
    """Returns the corpus at `path`: a file, a folder, or the prefix of Megatron-LM files.

    `dtype` is that of a raw file; "": uint8, if the file is text and the vocabulary is that of bytes.
    Raises ConfigError if `path` does not exist, or if the data is incomplete or corrupt.
    """
    with files.report_errors(f"data.path={path}"):
        return _load(path, dtype, vocab_size, pattern, tuple(exclude))


def _load(path: str, dtype: str, vocab_size: int, pattern: str, exclude: tuple) -> Corpus:
    if prefix := indexed.prefix_of(path):
        shard = indexed.load(prefix)
        digest = identity.of_tokens(shard.tokens, shard.starts)
        return _join_shards(path, [shard])._replace(cache_prefix=prefix, digest=digest)
    if fault := files.path_fault(path):
        raise ConfigError(f"data.path={path}: {fault}; give a token file or a folder of text")
    if os.path.isfile(os.path.join(path, prepared.MANIFEST)):
        return _load_prepared(path)
    if not os.path.isdir(path):
        tokens = _map_file(path, dtype or _default_dtype(path, vocab_size))
        return _concatenate(path, [path], [tokens])._replace(digest=identity.of_tokens(tokens))
    if os.path.exists(os.path.join(path, prepared.JOURNAL)):
        raise ConfigError(
            f"data.path={path}: preparation is not finished; run the same `meshtrain prepare` again"
        )
    if vocab_size > 256 and not dtype:
        raise ConfigError(
            f"data.path={path}: a folder of text is read as bytes, of which there are 256, but "
            f"data.vocab_size={vocab_size}; tokenize it with `meshtrain prepare`, or set data.dtype=uint8 for bytes"
        )
    token_bytes = (np.arange(256) != END_OF_FILE).astype(np.int32)
    tokens, starts, digest = _read_folder(path, pattern, exclude)
    text = _concatenate(path, [path], [tokens])._replace(document_starts=starts, digest=digest)
    return text._replace(tokenizer="bytes", token_bytes=token_bytes)


def read_windows(corpus: Corpus, starts_B: np.ndarray, width: int, vocab_size: int) -> np.ndarray:
    """Returns the windows (B, W) int32 that begin at `starts_B` in the stream; one gather per file.

    Raises ConfigError for a token outside the vocabulary.
    """
    rows_BW = np.empty((len(starts_B), width), np.int32)
    file_B = np.searchsorted(corpus.file_offsets, starts_B, side="right") - 1
    inside_B = starts_B + width <= corpus.file_offsets[file_B + 1]
    for file in np.unique(file_B[inside_B]):
        here = inside_B & (file_B == file)
        windows = _all_windows(corpus.file_tokens[file], width)
        found = windows[starts_B[here] - corpus.file_offsets[file]]
        check_ids(corpus, found, vocab_size)
        rows_BW[here] = found
    for row in np.flatnonzero(~inside_B):  # windows that span two files or more
        position, end, file = starts_B[row], starts_B[row] + width, file_B[row]
        while position < end:
            first, last = corpus.file_offsets[file : file + 2]
            found = corpus.file_tokens[file][position - first : min(end, last) - first]
            check_ids(corpus, found, vocab_size)
            rows_BW[row, position - starts_B[row] :][: len(found)] = found
            position, file = position + len(found), file + 1
    return rows_BW


def _all_windows(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns all windows (T - W + 1, W) as a view, like sliding_window_view with less overhead."""
    shape = (len(tokens) - width + 1, width)
    return np.ndarray(shape, tokens.dtype, tokens, strides=2 * tokens.strides)


def is_document_start(corpus: Corpus, starts_B: np.ndarray, width: int) -> np.ndarray:
    """Returns (B, W) bool: True where a token of the windows at `starts_B` is the first of a document."""
    is_start_BW = np.zeros((len(starts_B), width), bool)
    first = np.searchsorted(corpus.document_starts, starts_B)
    count = np.searchsorted(corpus.document_starts, starts_B + width) - first
    rows = np.repeat(np.arange(len(starts_B)), count)
    documents = concatenate_ranges(first, count)
    is_start_BW[rows, corpus.document_starts[documents] - starts_B[rows]] = True
    return is_start_BW


def concatenate_ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns the ranges first[i], first[i] + 1, ..., first[i] + count[i] - 1 of all i as one array."""
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(ends[-1] if ends.size else 0)


def token_range(corpus: Corpus, first: int, last: int) -> np.ndarray:
    """Returns tokens `first` ... `last` - 1 of the stream; a view if they lie in one file."""
    found = [
        tokens[max(0, first - offset) : max(0, last - offset)]
        for tokens, offset in zip(corpus.file_tokens, corpus.file_offsets[:-1], strict=True)
    ]
    found = [tokens for tokens in found if tokens.size] or found[:1]
    return found[0] if len(found) == 1 else np.concatenate(found)


def check_ids(corpus: Corpus, found: np.ndarray, vocab_size: int) -> None:
    """Raises ConfigError for a token outside the vocabulary, which JAX would clamp silently."""
    if found.size and (found.max() >= vocab_size or found.min() < 0):
        wrong = found[(found >= vocab_size) | (found < 0)].flat[0]
        raise ConfigError(
            f"data.path={corpus.path} holds token {wrong}{_location_of(corpus, wrong)}, outside "
            f"data.vocab_size={vocab_size}; set model.vocab_size above the largest token, "
            f"and check data.dtype={corpus.file_tokens[0].dtype}"
        )


def _location_of(corpus: Corpus, token: np.integer) -> str:
    """Returns where a token first occurs, for an error message."""
    for file, tokens in zip(corpus.files, corpus.file_tokens, strict=True):
        for start in range(0, len(tokens), 1 << 24):
            if (hits := np.flatnonzero(tokens[start : start + (1 << 24)] == token)).size:
                return f" (at byte {(start + hits[0]) * tokens.itemsize} of {file})"
    return ""


def _concatenate(path: str, files: list[str], file_tokens: list[np.ndarray]) -> Corpus:
    offsets = np.cumsum([0, *map(len, file_tokens)], dtype=np.int64)
    return Corpus(path, files, file_tokens, offsets)


def _join_shards(path: str, shards: list[indexed.Shard]) -> Corpus:
    corpus = _concatenate(
        path, [shard.path for shard in shards], [shard.tokens for shard in shards]
    )
    offsets = corpus.file_offsets
    starts = [shard.starts[:-1] + at for shard, at in zip(shards, offsets, strict=False)]
    return corpus._replace(document_starts=np.concatenate([*starts, offsets[-1:]]))


def _load_prepared(path: str) -> Corpus:
    folder = Path(path)
    manifest = prepared.read_manifest(folder)
    shards = [indexed.load(str(folder / entry["name"])) for entry in manifest["shards"]]
    for shard, entry in zip(shards, manifest["shards"], strict=True):
        if (len(shard.tokens), len(shard.starts) - 1) != (entry["tokens"], entry["documents"]):
            raise ConfigError(
                f"{shard.path} does not hold the tokens that {prepared.MANIFEST} lists; copy it again"
            )
    return _join_shards(path, shards)._replace(
        digest=identity.of_manifest(manifest),
        tokenizer=manifest["tokenizer"]["sha256"],
        vocab_size=manifest["tokenizer"]["vocab_size"],
        token_bytes=prepared.read_token_bytes(folder, manifest),
        cache_prefix=str(folder / "all"),
    )


def _default_dtype(path: str, vocab_size: int) -> str:
    """Returns "uint8" if a raw file can hold bytes; raises ConfigError if its tokens are probably wider."""
    if path.endswith(".npy") or not os.path.getsize(path):
        return "uint8"  # not used
    with open(path, "rb") as file:
        sample = file.read(1 << 16)
    reason = ""
    if vocab_size > 256:
        reason = f"with data.vocab_size={vocab_size}, its tokens are not bytes"
    elif _looks_wider(sample):
        reason = "its bytes look like numbers of 16 bits or more"
    if not reason:
        return "uint8"
    raise ConfigError(
        f"data.path={path}: {reason}; set data.dtype to that of its tokens: uint16 (nanoGPT's .bin), uint32, "
        f"int32, or uint8 for bytes"
    )


def _looks_wider(sample: bytes) -> bool:
    """Whether bytes that are not text have different frequencies at positions 0, 1, 2 and 3 modulo 4."""
    # Text may hold a few faults. UTF-16 is valid UTF-8 with many zeros.
    num_valid = len(sample.decode(errors="ignore").encode())
    if num_valid >= 0.9 * len(sample) and sample.count(0) <= 0.4 * len(sample):
        return False
    count = max(len(sample) // 4, 1)
    columns = np.frombuffer(sample[: len(sample) // 4 * 4], np.uint8).reshape(-1, 4).T >> 4
    frequencies = np.array([np.bincount(column, minlength=16) / count for column in columns])
    # The distance of two samples of the same distribution is rarely more than twice its mean.
    chance = 2 * np.sqrt(16 / (np.pi * count))
    return bool(np.abs(frequencies[1:] - frequencies[0]).sum(1).max() / 2 > 0.1 + chance)


def _map_file(path: str, dtype: str) -> np.ndarray:
    if path.endswith(".npy"):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            reason = str(error).partition(".")[0]  # without numpy's unsafe advice
            raise ConfigError(f"data.path={path} is not a .npy file: {reason}") from error
        if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
            raise ConfigError(
                f"data.path={path} holds {tokens.dtype.name}{list(tokens.shape)}; use one dim of {', '.join(DTYPES)}"
            )
        return np.asarray(tokens)
    if dtype not in DTYPES:
        raise ConfigError(f"data.dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    size, itemsize = os.path.getsize(path), np.dtype(dtype).itemsize
    if size == 0 or size % itemsize:
        raise ConfigError(
            f"data.path={path} has {size} bytes, not a positive multiple of the {itemsize} bytes of "
            f"data.dtype={dtype}; set data.dtype, or copy the file again"
        )
    return indexed.map_tokens(path, dtype)


@functools.lru_cache(maxsize=1)  # both splits read the same folder
def _read_folder(path: str, pattern: str, exclude: tuple) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the bytes of all files, where each file begins (files + 1,), and a digest of both."""
    if not pattern:
        raise ConfigError("data.pattern='': use a pattern of names, such as *.txt")
    found, written = files.find(
        Path(path), pattern, key="data.pattern", skip=frozenset(exclude).__contains__
    )
    if written:
        raise ConfigError(
            f"data.path={path}: `meshtrain prepare` wrote {written[0]}, whose files match data.pattern={pattern}; "
            f"set data.path={written[0]}, or data.exclude=('{written[0].name}',)"
        )
    if not found:
        raise ConfigError(f"data.path={path}: no files match data.pattern={pattern!r}")
    # A file of size 0 is not opened: those of /proc may wait for ever.
    sizes = [file.stat().st_size for file in found]
    if not sum(sizes):
        raise ConfigError(f"data.path={path}: all files that match {pattern!r} are empty")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * sum(sizes) > memory:  # the files, and then all of them as one array
        raise ConfigError(
            f"data.path={path}: {sum(sizes) / 1e9:,.1f} GB of text do not fit in {memory / 1e9:,.1f} GB of memory; "
            f"tokenize them with `meshtrain prepare`"
        )
    # Shuffle with a fixed seed: the held-out end is a fair sample, and the same on every machine.
    order = np.random.default_rng(0).permutation(len(found))
    end = bytes([END_OF_FILE])
    documents = [(files.read(found[i]) if sizes[i] else b"") + end for i in order]
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    tokens = np.frombuffer(b"".join(documents), np.uint8)
    return tokens, starts, identity.of_tokens(tokens, starts, full=True)
