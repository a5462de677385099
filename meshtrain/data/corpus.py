"""Tokens on disk as one stream: raw files, folders of text, Megatron-LM files, prepared folders."""

import collections
import difflib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import foreign, object_store
from meshtrain.data import files, formats, identity, indexed, prepared, remote
from meshtrain.errors import ConfigError

# B windows, W tokens of a window, T tokens of a file

DTYPES = ("uint8", "uint16", "uint32", "int32")  # of raw files
END_OF_FILE = 0  # the byte put after each file of a folder, which is a document


class Corpus(NamedTuple):
    """The tokens of one or more files, concatenated to one stream."""

    path: str  # data.path
    files: list[str]  # names, for messages
    file_tokens: list[Any]  # tokens of each file (T,): arrays, or RemoteTokens
    # (files + 1,) int64: start of each file in the stream, then the length of the stream
    file_offsets: np.ndarray
    # (documents + 1,) int64: start of each document, then the length of the stream; None: unknown
    document_starts: np.ndarray | indexed.DocumentStarts | None = None
    document_files: Sequence[str] = ()  # of a folder of text: the file of each document
    digest: str = ""  # of the tokens; see identity.py
    tokenizer: str = ""  # digest of the tokenizer; "": unknown
    tokenizer_path: Path | None = None  # its file, or a prepared folder, which has it
    vocab_size: int = 0  # 0: unknown
    token_bytes: np.ndarray | None = None  # (vocab_size,) number of text bytes of each token
    # Path prefix of the files that cache computed results; "": none are written.
    cache_prefix: str = ""
    warnings: Sequence[str] = ()  # lines to log before a run reads it

    @property
    def num_tokens(self) -> int:
        return int(self.file_offsets[-1])

    @property
    def is_remote(self) -> bool:
        return isinstance(self.file_tokens[0], remote.RemoteTokens)


# ---- load ----


def load_corpus(
    path: str,
    *,
    dtype: str,
    vocab_size: int,
    pattern: str,
    exclude: tuple,
    cache_gb: float = remote.CACHE_GB,
) -> Corpus:
    """Returns the corpus at `path`: a file, a folder, or the prefix of Megatron-LM files.

    It may be the URL of a prepared folder on an object store, of which `cache_gb` are cached on the
    local disk. `dtype` is that of a raw file; "": uint8, if the file is text and the vocabulary is
    that of bytes. Raises ConfigError if `path` does not exist, or if the data is incomplete or
    corrupt.
    """
    if object_store.is_url(path):
        return _load_remote(path, cache_gb)
    with files.report_errors(f"data.path={path}"):
        # First, since a prefix need not exist itself.
        prefix = indexed.prefix_of(path)
        if prefix:
            return _load_megatron(path, prefix)
        fault = files.path_fault(path)
        if fault:
            raise ConfigError(f"data.path={path}: {fault}; give a token file or a folder of text")
        if os.path.isfile(os.path.join(path, prepared.MANIFEST)):
            return _load_prepared(path)
        if os.path.isdir(path):
            return _load_text(path, dtype, vocab_size, pattern, tuple(exclude))
        return _load_raw_file(path, dtype, vocab_size)


def _load_megatron(path: str, prefix: str) -> Corpus:
    shard = indexed.load(prefix)
    digest = identity.of_tokens(shard.tokens, shard.starts)
    return _join_shards(path, [shard])._replace(cache_prefix=prefix, digest=digest)


def _load_prepared(path: str) -> Corpus:
    folder = Path(path)
    manifest = prepared.read_manifest(folder)
    shards = [indexed.load(str(folder / entry["name"])) for entry in manifest["shards"]]
    return _join_prepared(path, shards, folder, manifest)


def _load_remote(path: str, cache_gb: float) -> Corpus:
    opened = remote.open_folder(path, cache_gb)
    corpus = _join_prepared(path, opened.shards, opened.folder, opened.manifest)
    return corpus._replace(warnings=opened.warnings)


def _join_prepared(
    path: str, shards: list[indexed.Shard], folder: Path, manifest: dict[str, Any]
) -> Corpus:
    """Returns the corpus of a prepared folder; `folder` has its small files."""
    for shard, entry in zip(shards, manifest["shards"], strict=True):
        num_documents = len(shard.starts) - 1
        if len(shard.tokens) != entry["tokens"] or num_documents != entry["documents"]:
            raise ConfigError(
                f"{shard.path} does not hold the tokens that {prepared.MANIFEST} lists; "
                f"copy it again"
            )
    return _join_shards(path, shards)._replace(
        digest=identity.of_manifest(manifest),
        tokenizer=manifest["tokenizer"]["sha256"],
        vocab_size=manifest["tokenizer"]["vocab_size"],
        token_bytes=prepared.read_token_bytes(folder, manifest),
        tokenizer_path=folder,
        cache_prefix=str(folder / "all"),
    )


def _join_shards(path: str, shards: list[indexed.Shard]) -> Corpus:
    file_tokens = [shard.tokens for shard in shards]
    offsets = _file_offsets(file_tokens)
    return Corpus(
        path,
        files=[shard.path for shard in shards],
        file_tokens=file_tokens,
        file_offsets=offsets,
        document_starts=indexed.DocumentStarts([shard.index for shard in shards]),
    )


def _file_offsets(file_tokens: list[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, file_tokens)], dtype=np.int64)


def _load_text(path: str, dtype: str, vocab_size: int, pattern: str, exclude: tuple) -> Corpus:
    """Returns the bytes of the files of a folder; each file is a document."""
    if os.path.exists(os.path.join(path, prepared.JOURNAL)):
        raise ConfigError(
            f"data.path={path}: preparation is not finished; run the same `meshtrain prepare` again"
        )
    if vocab_size > 256 and not dtype:
        raise ConfigError(
            f"data.path={path}: a folder of text is read as bytes, of which there are 256, but "
            f"data.vocab_size={vocab_size}; tokenize it with `meshtrain prepare`, or set "
            f"data.dtype=uint8 for bytes"
        )
    warnings = []
    if pattern and not _matches(path, pattern, exclude):
        given, pattern = pattern, _pattern_of(path, pattern) or pattern
        if pattern != given:
            warnings = [
                f"data.path={path}: no files match data.pattern={given}; it has most of {pattern}, "
                f"which are read instead"
            ]
    tokens, starts, names, digest = _read_folder(path, pattern, exclude, any_format=bool(dtype))
    return Corpus(
        path,
        files=[path],
        file_tokens=[tokens],
        file_offsets=_file_offsets([tokens]),
        document_starts=starts,
        document_files=names,
        digest=digest,
        tokenizer="bytes",
        token_bytes=(np.arange(256) != END_OF_FILE).astype(np.int32),
        warnings=warnings,
    )


def _matches(path: str, pattern: str, exclude: tuple) -> bool:
    """Returns whether a folder has files to read, or a prepared folder to name instead."""
    return any(files.find(Path(path), pattern, key="data.pattern", exclude=frozenset(exclude)))


def _pattern_of(path: str, given: str) -> str:
    """Returns the pattern of the most frequent kind of text in a folder; "": it has none.

    Raises ConfigError if the folder has data of another format, of which the texts may be a note.
    """
    found, _ = files.find(Path(path), "*", key="data.pattern")
    sizes: collections.Counter[str] = collections.Counter()  # bytes of each kind of text
    counts: collections.Counter[str] = collections.Counter()
    tables: dict[Path, formats.Format] = {}  # texts that are rows of data
    for file in found:
        size = file.stat().st_size
        if known := formats.in_folder(file):
            raise _other_format(path, given, file, known)
        if not size or _looks_wider(_start(file)):
            continue
        if known := formats.by_name(file):
            tables[file] = known
            continue
        sizes[file.suffix] += size
        counts[file.suffix] += 1
    ending = counts.most_common(1)[0][0] if counts else ""
    if tables and sum(file.stat().st_size for file in tables) > sizes[ending]:
        raise _other_format(path, given, *next(iter(tables.items())))
    return f"*{ending}" if counts else ""


def _other_format(path: str, given: str, file: Path, known: formats.Format) -> ConfigError:
    return ConfigError(
        f"data.path={path}: no files match data.pattern={given}, and {file} is {known.name}; "
        f"{formats.way_out(known, file)}, or set data.pattern to the texts to read"
    )


@functools.lru_cache(maxsize=1)  # both splits read the same folder
def _read_folder(
    path: str, pattern: str, exclude: tuple, *, any_format: bool
) -> tuple[np.ndarray, np.ndarray, list[str], str]:
    """Returns the bytes of all files, where each begins (files + 1,), their names, and a digest.

    Unless `any_format`, raises ConfigError for a file that is not text.
    """
    if not pattern:
        raise ConfigError("data.pattern='': use a pattern of names, such as *.txt")
    _check_excluded(path, exclude)
    paths, prepared_folders = files.find(
        Path(path), pattern, key="data.pattern", exclude=frozenset(exclude)
    )
    if prepared_folders:
        prepared_folder = prepared_folders[0]
        raise ConfigError(
            f"data.path={path}: `meshtrain prepare` wrote {prepared_folder}, whose files match "
            f"data.pattern={pattern}; set data.path={prepared_folder}, or "
            f"data.exclude=('{prepared_folder.name}',)"
        )
    if not paths:
        raise ConfigError(
            f"data.path={path}: no files match data.pattern={pattern!r}, and none is text; give "
            f"another folder"
        )
    for file in () if any_format else paths:
        known = formats.in_folder(file)
        if known:
            raise ConfigError(
                f"data.path={path}: {file} is {known.name}, not text; "
                f"{formats.way_out(known, file)}, or leave it out with data.pattern; to train on "
                f"the bytes of all files, set data.dtype=uint8"
            )
    sizes = [file.stat().st_size for file in paths]
    total = sum(sizes)
    if not total:
        raise ConfigError(f"data.path={path}: all files that match {pattern!r} are empty")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * total > memory:  # the files, and then all of them as one array
        raise ConfigError(
            f"data.path={path}: {total / 1e9:,.1f} GB of text do not fit in "
            f"{memory / 1e9:,.1f} GB of memory; tokenize them with `meshtrain prepare`"
        )
    # Shuffle with a fixed seed: the held-out end is a fair sample, and the same on every machine.
    order = np.random.default_rng(0).permutation(len(paths))
    documents = []
    for number in order:
        # A file of size 0 is not opened: those of /proc may wait for ever.
        text = files.read(paths[number]) if sizes[number] else b""
        documents.append(text + bytes([END_OF_FILE]))
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    tokens = np.frombuffer(b"".join(documents), np.uint8)
    names = [str(paths[number]) for number in order]
    return tokens, starts, names, identity.of_tokens(tokens, starts, full=True)


def _check_excluded(path: str, exclude: tuple) -> None:
    """Raises ConfigError for an entry of `exclude` that is no name, or nearly that of a subfolder.

    Others may be in a list that is used for several folders.
    """
    if not exclude:
        return
    subfolders = {name for _, names, _ in os.walk(path) for name in names}
    for name in exclude:
        fault = ""
        if not isinstance(name, str) or not name or any(letter in name for letter in "/*?["):
            fault = "use the names of subfolders, without a path or a pattern"
        elif name not in subfolders:
            near = difflib.get_close_matches(name, subfolders - {*exclude}, n=1, cutoff=0.8)
            if near:
                fault = f'no subfolder has this name (did you mean "{near[0]}"?)'
        if fault:
            raise ConfigError(f"data.exclude={','.join(map(str, exclude))}: {name!r}: {fault}")


def _load_raw_file(path: str, dtype: str, vocab_size: int) -> Corpus:
    tokens = _map_file(path, dtype or _default_dtype(path, vocab_size))
    return Corpus(
        path,
        files=[path],
        file_tokens=[tokens],
        file_offsets=_file_offsets([tokens]),
        digest=identity.of_tokens(tokens),
    )


def _map_file(path: str, dtype: str) -> np.ndarray:
    if path.endswith(".npy"):
        try:
            tokens = foreign.map_npy(path)
        except ValueError as error:
            raise ConfigError(f"data.path={path} is {error}") from error
        # Integers of any size: the tokens of each row are checked when it is read.
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ConfigError(
                f"data.path={path} holds {tokens.dtype.name}{list(tokens.shape)}; "
                f"use one dim of integers"
            )
        return np.asarray(tokens)
    if dtype not in DTYPES:
        raise ConfigError(f"data.dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    size = os.path.getsize(path)
    itemsize = np.dtype(dtype).itemsize
    if size == 0 or size % itemsize:
        raise ConfigError(
            f"data.path={path} has {size} bytes, not a positive multiple of the {itemsize} bytes "
            f"of data.dtype={dtype}; set data.dtype, or copy the file again"
        )
    return indexed.map_tokens(path, dtype)


def _default_dtype(path: str, vocab_size: int) -> str:
    """Returns "uint8" if a raw file can hold bytes.

    Raises ConfigError if its tokens are wider, or if it has a format of its own.
    """
    if path.endswith(".npy") or not os.path.getsize(path):
        return "uint8"  # not used
    known = formats.of_file(path)
    if known:
        raise ConfigError(
            f"data.path={path}: is {known.name}, not text; "
            f"{formats.way_out(known, Path(path))}; to train on the bytes of the file itself, set "
            f"data.dtype=uint8"
        )
    reason = ""
    if vocab_size > 256:
        reason = f"with data.vocab_size={vocab_size}, its tokens are not bytes"
    elif _looks_wider(_start(Path(path))):
        reason = "its bytes look like numbers of 16 bits or more"
    if not reason:
        return "uint8"
    raise ConfigError(
        f"data.path={path}: {reason}; set data.dtype to that of its tokens: "
        f"uint16 (nanoGPT's .bin), uint32, int32, or uint8 for bytes"
    )


def _start(path: Path) -> bytes:
    """Returns the first bytes of a file."""
    with open(path, "rb") as file:
        return file.read(1 << 16)


def _looks_wider(sample: bytes) -> bool:
    """Returns whether the bytes are probably numbers of 16 or 32 bits.

    The bytes of such numbers have different frequencies at positions 0, 1, 2 and 3 modulo 4:
    high bytes are mostly small. Text is never taken for numbers.
    """
    # Text may hold a few faults. UTF-16 is valid UTF-8 with many zeros.
    num_valid = len(sample.decode(errors="ignore").encode())
    if num_valid >= 0.9 * len(sample) and sample.count(0) <= 0.4 * len(sample):
        return False
    num_groups = len(sample) // 4
    groups = np.frombuffer(sample[: 4 * num_groups], np.uint8).reshape(num_groups, 4)
    # 16 bins of similar values: a small sample fills them better than 256.
    bins = groups >> 4
    num_samples = max(num_groups, 1)
    frequencies = np.zeros((4, 16))
    for position in range(4):
        frequencies[position] = np.bincount(bins[:, position], minlength=16) / num_samples
    # Total variation distance between position 0 and each other one, from 0 to 1.
    distances = np.abs(frequencies[1:] - frequencies[0]).sum(axis=1) / 2
    # The distance of two samples of the same distribution is rarely more than twice its mean.
    chance = 2 * np.sqrt(16 / (np.pi * num_samples))
    return bool(distances.max() > 0.1 + chance)


# ---- read ----


def read_windows(corpus: Corpus, starts_B: np.ndarray, width: int, vocab_size: int) -> np.ndarray:
    """Returns the windows (B, W) int32 that begin at `starts_B` in the stream.

    Raises ConfigError for a token outside the vocabulary.
    """
    windows_BW = np.empty((len(starts_B), width), np.int32)
    file_B = np.searchsorted(corpus.file_offsets, starts_B, side="right") - 1
    is_inside_B = starts_B + width <= corpus.file_offsets[file_B + 1]

    # The windows that lie inside a file: one gather per file.
    for file in np.unique(file_B[is_inside_B]):
        selected_B = is_inside_B & (file_B == file)
        starts = starts_B[selected_B] - corpus.file_offsets[file]
        windows = _windows(corpus.file_tokens[file], starts, width)
        check_ids(corpus, windows, vocab_size)
        windows_BW[selected_B] = windows

    # The windows that span two files or more: one part after the other.
    for row in np.flatnonzero(~is_inside_B):
        start = starts_B[row]
        end = start + width
        file = file_B[row]
        position = start
        while position < end:
            first, last = corpus.file_offsets[file : file + 2]
            part = corpus.file_tokens[file][position - first : min(end, last) - first]
            check_ids(corpus, part, vocab_size)
            column = position - start
            windows_BW[row, column : column + len(part)] = part
            position += len(part)
            file += 1
    return windows_BW


def _windows(tokens: Any, starts_B: np.ndarray, width: int) -> np.ndarray:
    """Returns the windows (B, W) that begin at `starts_B` in a file."""
    if isinstance(tokens, remote.RemoteTokens):
        return tokens.gather(starts_B, np.full_like(starts_B, width)).reshape(-1, width)
    if not isinstance(tokens, np.ndarray):  # not in memory, nor mapped
        return tokens[starts_B[:, None] + np.arange(width)]
    # All windows (T - W + 1, W) as a view: sliding_window_view with less overhead.
    shape = (len(tokens) - width + 1, width)
    return np.ndarray(shape, tokens.dtype, tokens, strides=2 * tokens.strides)[starts_B]


def is_document_start(corpus: Corpus, starts_B: np.ndarray, width: int) -> np.ndarray:
    """Returns (B, W) bool: whether a token of the windows at `starts_B` begins a document."""
    is_start_BW = np.zeros((len(starts_B), width), bool)
    first_B = np.searchsorted(corpus.document_starts, starts_B)
    count_B = np.searchsorted(corpus.document_starts, starts_B + width) - first_B
    # One entry per document that begins in a window: its row, its number in the corpus.
    rows = np.repeat(np.arange(len(starts_B)), count_B)
    documents = concatenate_ranges(first_B, count_B)
    columns = corpus.document_starts[documents] - starts_B[rows]
    is_start_BW[rows, columns] = True
    return is_start_BW


def concatenate_ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns the ranges first[i] ... first[i] + count[i] - 1 of all i, as one array."""
    ends = np.cumsum(count)
    total = ends[-1] if ends.size else 0
    # Within range i, the position in the result minus the start of the range counts from 0.
    return np.repeat(first - (ends - count), count) + np.arange(total)


def prefetch(corpus: Corpus, starts_B: np.ndarray, lengths_B: np.ndarray) -> None:
    """Returns when these ranges of the stream are on this machine, or cannot be read.

    May be called from several threads. Ranges may span files.
    """
    futures = []
    file_B = np.searchsorted(corpus.file_offsets, starts_B, side="right") - 1
    for file in np.unique(file_B):
        selected_B = file_B == file
        starts = starts_B[selected_B] - corpus.file_offsets[file]
        tokens = corpus.file_tokens[file]
        lengths = np.minimum(lengths_B[selected_B], len(tokens) - starts)
        futures += tokens.prefetch(starts, lengths)
    remote.wait_for(futures)


def gather(tokens: Any, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens of ranges of a file, one range after the other."""
    if isinstance(tokens, remote.RemoteTokens):
        return tokens.gather(starts, lengths)
    return tokens[concatenate_ranges(starts, lengths)]


def token_range(corpus: Corpus, first: int, last: int) -> Any:
    """Returns tokens `first` ... `last` - 1 of the stream; a view if they lie in one file."""
    parts = []
    for tokens, offset in zip(corpus.file_tokens, corpus.file_offsets[:-1], strict=True):
        start, stop = max(0, first - offset), max(0, last - offset)
        # Of a store, the caller reads them in parts.
        is_remote = isinstance(tokens, remote.RemoteTokens)
        part = tokens.range(start, stop) if is_remote else tokens[start:stop]
        if part.size:
            parts.append(part)
    if not parts:
        return corpus.file_tokens[0][:0]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_ids(corpus: Corpus, ids: np.ndarray, vocab_size: int) -> None:
    """Raises ConfigError for a token outside the vocabulary, which JAX would clamp silently."""
    if not ids.size or (ids.max() < vocab_size and ids.min() >= 0):
        return
    wrong = ids[(ids >= vocab_size) | (ids < 0)].flat[0]
    raise ConfigError(
        f"data.path={corpus.path} holds token {wrong}{_location_of(corpus, wrong)}, outside "
        f"data.vocab_size={vocab_size}; set model.vocab_size above the largest token, "
        f"and check data.dtype={corpus.file_tokens[0].dtype}"
    )


def _location_of(corpus: Corpus, token: np.integer) -> str:
    """Returns where a token first occurs, for an error message."""
    chunk = 1 << 24  # tokens searched at a time
    if corpus.is_remote:
        return ""  # it could be anywhere in terabytes
    for file, tokens in zip(corpus.files, corpus.file_tokens, strict=True):
        for start in range(0, len(tokens), chunk):
            hits = np.flatnonzero(tokens[start : start + chunk] == token)
            if not hits.size:
                continue
            place = start + hits[0]
            if corpus.document_files:
                document = np.searchsorted(corpus.document_starts, place, side="right") - 1
                place -= corpus.document_starts[document]
                file = corpus.document_files[document]
            return f" (at byte {place * tokens.itemsize} of {file})"
    return ""
