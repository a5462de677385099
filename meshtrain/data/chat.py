"""Rows of conversations, of which only the assistant's replies are learned.

Conversations are read from JSON lines, or from rows of Arrow, Parquet and ArrayRecord files. The
tokenizer's chat template writes them as text; the tokens of replies have weight 1. Tokens and
weights are computed once, and cached in files that are mapped: no process holds them in memory.
"""

import dataclasses
import functools
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import console, foreign
from meshtrain.config.rounding import to_12_digits
from meshtrain.data import (
    chat_template,
    conversations,
    files,
    identity,
    index_cache,
    row_files,
    tokens,
)
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_tokenizer import ConversationTokenizer
from meshtrain.data.corpus import Corpus, concatenate_ranges
from meshtrain.data.prepare import inputs, saved_datasets
from meshtrain.data.source import Batch, Source, check_sizes
from meshtrain.data.workers import Message, Workers
from meshtrain.errors import ConfigError, choice_faults, minimum_faults

# T tokens of all conversations, V vocabulary

EXTENSIONS = (".jsonl", ".ndjson", ".json")  # of JSON lines, perhaps with .gz
# Of a table. It has `messages`, or `prompt` and `completion`; other columns are not read.
COLUMNS = row_files.AnyOf(
    (
        *("messages", "prompt", "completion", "tools", "documents", "conversations", "system"),
        *("instruction", "input", "output", "history"),
    ),
    needed=(
        ("messages",),
        ("prompt", "completion"),
        ("conversations",),
        ("instruction", "output"),
    ),
)
ROWS_AT_ONCE = 64  # rows read together
GROUP = 1000  # conversations, and
GROUP_BYTES = 1 << 20  # bytes of lines, that are tokenized together
MAX_FAULTS_SHOWN = 5

# The cached files. While they are computed, the conversations are in the order of the lines.
FORMAT = 1
TOKENS, LEARNED, STARTS = "tokens", "learned", "starts.npy"  # int32, uint8, int64
PARTS = ("tokens.part", "learned.part", "lengths.part")  # int32, uint8, int64


def build(
    *,
    path: str,
    tokenizer_path: str,
    seq_len: int,
    vocab_size: int,
    heldout: float,
    seed: int,
    split: str,
    packing: str = "windows",
    mixture: tuple = (),
    num_workers: int = 0,
    index_path: str = "",
    heldout_path: str = "",
    learned: str = "replies",
    **unread,
) -> Source:
    """Returns the "train" or "heldout" split of the conversations in `path`.

    `path` is a file of JSON lines, or of rows with such columns, or a folder of them;
    `conversations.parse` says what a line holds. `tokenizer_path` is a folder with a tokenizer.json
    and a chat template. `num_workers` processes tokenize, 0: this one. `index_path` is the folder
    for the tokens; "": next to the data.
    A token has weight 1 if its target is learned: of the "replies" of the assistant, of its
    "last_reply", both with what the template writes at their end, or of "all" of the text.
    `packing` is that of tokens.py, with a conversation as a
    document. The last `heldout` fraction of the conversations is held out, at least one if it is
    above 0; with `heldout_path` all of that is instead. Raises ConfigError if the data is unusable.
    """
    check_sizes(seq_len, vocab_size, seed)
    faults = choice_faults("data.packing", packing, tokens.PACKINGS)
    faults += choice_faults("data.learned", learned, conversations.LEARNED)
    faults += minimum_faults(0, {"data.num_workers": num_workers})
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    if mixture:
        faults.append(f"data.mixture={mixture}: put the conversations into one folder, data.path")
    if not tokenizer_path:
        faults.append("data.tokenizer_path is empty: give the folder of the model's tokenizer")
    faults += tokens.unread_faults("meshtrain.data.chat:build", unread)
    if faults:
        raise ConfigError(*faults)
    if heldout_path:
        path, heldout = (path, 0.0) if split == "train" else (heldout_path, 1.0)

    loaded = load(
        path,
        tokenizer_path,
        vocab_size=vocab_size,
        num_workers=num_workers,
        index_path=index_path,
        learned=learned,
    )
    corpus = loaded.corpus
    starts = corpus.document_starts
    num_conversations = len(starts) - 1
    num_train = num_conversations - math.ceil(to_12_digits(num_conversations * heldout))
    border = int(starts[num_train])
    first, last = (0, border) if split == "train" else (border, corpus.num_tokens)

    counts = _count_learned(loaded, first, last, vocab_size)

    def rows_of(corpus: Corpus) -> Source:
        name = f"the {split} split of data.heldout={heldout}"
        return tokens.split_source(
            tokens.Split(corpus, first, last, name, "conversations", tokens.entropy(counts)),
            packing,
            separator=-1,
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
        )

    source = rows_of(corpus)
    marks = rows_of(corpus._replace(file_tokens=[loaded.is_learned]))

    def read(indices: np.ndarray) -> Batch:
        batch = source.read(indices)
        # In the same rows, with marks for tokens, the targets say whether the next one is learned.
        return batch._replace(weights=batch.weights * marks.read(indices).targets)

    share = counts.sum() / (last - first)
    return dataclasses.replace(
        source,
        strided=None,  # it would not know what is learned
        read=read,
        description=f"{source.description}, {share:.2%} of the tokens learned",
        warnings=[*loaded.warnings, *_length_warnings(starts, packing, seq_len)],
    )


def _length_warnings(starts: np.ndarray, packing: str, seq_len: int) -> list[str]:
    if packing == "windows":
        return [
            "data.packing=windows splits conversations at the ends of rows; best_fit keeps them "
            "together"
        ]
    lengths = np.diff(starts)
    num_long = int(np.sum(lengths > seq_len))
    if not num_long:
        return []
    return [
        f"data.seq_len={seq_len}: {num_long:,} of {len(lengths):,} conversations are longer and "
        f"are split; their later parts do not see the earlier ones"
    ]


# ---- load all conversations ----


class Learned(NamedTuple):
    """Conversations as one stream of tokens, shuffled with a fixed seed; its arrays are mapped."""

    corpus: Corpus
    is_learned: np.ndarray  # (T,) uint8: the token is learned
    warnings: list[str]


def load(
    path: str,
    tokenizer_path: str,
    *,
    vocab_size: int,
    num_workers: int = 0,
    index_path: str = "",
    learned: str = "replies",
) -> Learned:
    """Returns the conversations in a file or a folder; a ConfigError names faulty lines."""
    with files.report_errors(f"data.path={path}"):
        paths = _find(path)
        root = Path(os.path.commonpath([file.absolute().parent for file in paths]))
        tokenizer = tokenizers.load(tokenizer_path)
        if tokenizer.file is None or tokenizer.kind != "huggingface":
            raise ConfigError(
                f"data.tokenizer_path={tokenizer_path}: chat templates need a tokenizer.json, and "
                f"this is a {tokenizer.kind} tokenizer; give the folder of a Hugging Face model"
            )
        # What is wrong with the settings is reported before all conversations are tokenized.
        template = chat_template.load(tokenizer.file.parent, now=conversations.DATE)
        faults = tokens.vocabulary_faults(path, tokenizer.vocab_size, vocab_size)
        if faults:
            raise ConfigError(*faults)
        what = [
            FORMAT,
            index_cache.fingerprint(paths, root),
            tokenizers.digest(tokenizer),
            template.digest,
        ]
        if learned != "replies":  # the default has the name that it had before this key
            what.append(learned)
        # Both splits need the same conversations.
        corpus, is_learned = _load(
            path,
            tuple(paths),
            tokenizer_path=tokenizer_path,
            num_workers=num_workers,
            learned=learned,
            folder=index_cache.folder_for(root, index_path, f"chat-{index_cache.key_of(what)}"),
        )
    warnings = [*tokenizer.warnings]
    if template.reads_clock:
        warnings.append(
            f"data.path={path}: the chat template asks for the date; the training data says "
            f"{conversations.DATE:%d %b %Y}"
        )
    return Learned(corpus, is_learned, warnings)


def _find(path: str) -> list[Path]:
    """Returns the files with conversations, sorted, and then those of saved datasets.

    Raises ConfigError if there are none.
    """
    faults: list[str] = []
    found: list[Path] = []
    splits: list[saved_datasets.Split] = []
    for one in row_files.named(path, "give a .jsonl file or a folder of them"):
        paths = [one]
        if one.is_dir():
            paths, _ = files.find(one, "*", key="data.path")
            of_folder, paths = saved_datasets.find(paths)
            splits += of_folder
        found += _with_conversations(path, sorted(paths), faults, is_folder=one.is_dir())
    _report_faults(faults)
    found += [file for together in row_files.files_of_splits(path, splits) for file in together]
    if not found:
        raise ConfigError(
            f"data.path={path}: no file ends in {', '.join(EXTENSIONS)}, .arrow or .parquet; give "
            f"conversations as JSON lines"
        )
    return found


def _with_conversations(
    path: str, paths: list[Path], faults: list[str], *, is_folder: bool
) -> list[Path]:
    """Returns the files that are read, and appends a line about each that cannot be."""
    found = []
    for file in paths:
        if is_folder and not file.stat().st_size:
            continue
        if row_files.kind_of(file):
            found.append(file)
            continue
        if inputs.extension_of(file) in EXTENSIONS:
            found.append(file)
        elif is_folder:
            continue
        fault = inputs.format_fault(file, is_named=not is_folder)
        if fault:
            faults.append(f"data.path={path}: {file} {fault}, or leave it out")
    return found


def _report_faults(faults: list[str]) -> None:
    """Raises ConfigError with the first faults, if there are any."""
    if not faults:
        return
    num_more = len(faults) - MAX_FAULTS_SHOWN
    more = [f"and {num_more} more"] if num_more > 0 else []
    raise ConfigError(*faults[:MAX_FAULTS_SHOWN], *more)


@functools.lru_cache(maxsize=1)
def _load(
    path: str,
    paths: tuple[Path, ...],
    *,
    tokenizer_path: str,
    num_workers: int,
    learned: str,
    folder: Path,
) -> tuple[Corpus, np.ndarray]:
    """Returns the conversations in files, and (T,) whether the tokens are learned.

    The name of `folder` depends on the files, the tokenizer, and what is learned.
    """
    tokenizer = tokenizers.load(tokenizer_path)

    def read(folder: Path, index: dict[str, Any]) -> tuple[Corpus, np.ndarray]:
        stream = index_cache.map_file(folder / TOKENS, "<i4")
        is_learned = index_cache.map_file(folder / LEARNED, "u1")
        starts = np.asarray(foreign.map_npy(folder / STARTS))
        if starts.dtype != np.int64 or not len(stream) == len(is_learned) == starts[-1]:
            raise ValueError("its files do not fit together")
        corpus = Corpus(
            path,
            files=[path],
            file_tokens=[stream],
            file_offsets=np.array([0, len(stream)]),
            document_starts=starts,
            digest=index["digest"],
            tokenizer=tokenizers.digest(tokenizer),
            vocab_size=tokenizer.vocab_size,
            token_bytes=tokenizer.token_bytes(),
            cache_prefix=str(folder / "all"),
        )
        return corpus, is_learned

    def build(folder: Path, parts: Path) -> None:
        with closing(Workers(ConversationTokenizer, settings, num_workers)) as workers:
            _tokenize(path, paths, workers, parts)
        _shuffle(parts, folder)

    settings = {"tokenizer_path": tokenizer_path, "learned": learned}
    return index_cache.load_or_build(folder, read, build)


def _tokenize(path: str, paths: tuple[Path, ...], workers: Workers, parts: Path) -> None:
    """Writes PARTS, resuming after the last commit.

    A ConfigError names faulty lines; after MAX_FAULTS_SHOWN of them no more are read.
    """
    _check_columns(paths)
    num_bytes = sum(file.stat().st_size for file in paths)
    places: deque[list[str]] = deque()  # FILE:LINE of the lines that are being tokenized
    positions: deque[inputs.Position] = deque()  # after these
    faults: list[str] = []
    num_conversations = 0

    def requests(start: inputs.Position) -> Iterator[Message]:
        for records in _groups(paths, start):
            positions.append(records[-1].next_position)
            places.append([f"{paths[at.file]}:{at.number}" for at in map(_position, records)])
            lines = b"".join(record.data for record in records)
            lengths = np.array([len(record.data) for record in records], np.int64)
            advance(sum(map(len, (record.data for record in records))))
            yield Message(None, [np.frombuffer(lines, np.uint8), lengths])

    with (
        closing(index_cache.Growing(parts, PARTS)) as growing,
        ExitStack() as stack,
        console.progress("tokenizing conversations", num_bytes, stream="stdout") as advance,
    ):
        start = inputs.Position(*growing.state) if growing.state else inputs.START
        num_conversations = growing.size(PARTS[2])
        results = stack.enter_context(closing(workers.map(requests(start))))
        for result in results:
            where = places.popleft()
            position = positions.popleft()
            faults += [f"{where[number]}: {fault}" for number, fault in result.value]
            if len(faults) >= MAX_FAULTS_SHOWN:
                more = f"perhaps more: after {MAX_FAULTS_SHOWN} faulty lines no others are read"
                raise ConfigError(*faults[:MAX_FAULTS_SHOWN], more)
            if faults:
                continue  # only to name the others
            for name, array in zip(PARTS, result.arrays, strict=True):
                growing.append(name, array)
            num_conversations += len(where)
            if growing.is_due():
                growing.commit(position)
    _report_faults(faults)
    if not num_conversations:
        raise ConfigError(
            f"data.path={path}: holds no conversation; give JSON lines with `messages`"
        )


def _check_columns(paths: tuple[Path, ...]) -> None:
    """Raises ConfigError that names the tables without conversations, before any is read."""
    faults: list[str] = []
    for path in paths:
        if row_files.kind_of(path):
            try:
                row_files.open_file(path, COLUMNS)
            except ConfigError as error:
                faults += error.faults
    _report_faults(faults)


def _groups(paths: Sequence[Path], start: inputs.Position) -> Iterator[list[inputs.Record]]:
    """Yields the lines of files, which are not blank, in groups."""
    group: list[inputs.Record] = []
    num_bytes = 0
    for record in _read(paths, start):
        group.append(record)
        num_bytes += len(record.data)
        if len(group) >= GROUP or num_bytes >= GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
    if group:
        yield group


def _read(paths: Sequence[Path], start: inputs.Position) -> Iterator[inputs.Record]:
    """Yields the lines of files, which are not blank; rows of tables as lines of JSON."""
    options = inputs.ReadOptions(field="", separator="", forbidden="")
    for number in range(start.file, len(paths)):
        begin = start if number == start.file else inputs.Position(file=number)
        if row_files.kind_of(paths[number]):
            yield from _read_rows(paths[number], begin)
            continue
        # Positions count the files of the list.
        lines = [*paths[: number + 1]]
        for record in inputs.read_records(lines, options, len, begin):
            if not isinstance(record.data, bytes):
                record = record._replace(data=json.dumps(record.data).encode())
            yield record


def _read_rows(path: Path, begin: inputs.Position) -> Iterator[inputs.Record]:
    opened = row_files.open_file(path, COLUMNS)
    for first in range(begin.number, opened.num_rows, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, opened.num_rows)
        rows = opened.read(np.arange(first, last))
        for number, row in enumerate(rows, first):
            # What is no object is a fault of this row.
            if isinstance(row, row_files.Fault):
                content = row.reason
            else:
                content = conversations.of_row(row)
            data = json.dumps(content, default=str).encode()
            after = inputs.Position(begin.file, number + 1, number + 1)
            yield inputs.Record(data, after, 0)


def _position(record: inputs.Record) -> inputs.Position:
    return record.next_position


def _shuffle(parts: Path, folder: Path) -> None:
    """Writes the conversations of PARTS in random order, with a fixed seed.

    The held-out end is then a fair sample, and the same on every machine.
    """
    stream = index_cache.map_file(parts / PARTS[0], "<i4")
    is_learned = index_cache.map_file(parts / PARTS[1], "u1")
    lengths = index_cache.map_file(parts / PARTS[2], "<i8")
    starts = np.cumsum(lengths) - lengths
    order = np.random.default_rng(0).permutation(len(lengths))
    index_cache.write_starts(lengths[order], folder / STARTS)
    with open(folder / TOKENS, "wb") as tokens_file, open(folder / LEARNED, "wb") as learned_file:
        for group in np.array_split(order, -(-len(order) // GROUP)):
            where = concatenate_ranges(starts[group], lengths[group])
            tokens_file.write(stream[where].data)
            learned_file.write(is_learned[where].data)
    # The marks are part of what is trained on, so they are part of the identity.
    stream = index_cache.map_file(folder / TOKENS, "<i4")
    starts = np.asarray(foreign.map_npy(folder / STARTS))
    digests = [
        identity.of_tokens(stream, starts, full=True),
        identity.of_tokens(index_cache.map_file(folder / LEARNED, "u1"), full=True),
    ]
    digest = identity.of_parts(digests)
    index_cache.finish(folder, [TOKENS, LEARNED, STARTS], {"digest": digest})
    index_cache.remove_parts(parts, PARTS)


def _count_learned(learned: Learned, first: int, last: int, vocab_size: int) -> np.ndarray:
    """Returns how often each token occurs in a reply among tokens `first` ... `last` - 1, (V,)."""
    (stream,) = learned.corpus.file_tokens
    counts = np.zeros(vocab_size, np.int64)
    for start in range(first, last, index_cache.CHUNK):
        part = slice(start, min(start + index_cache.CHUNK, last))
        counts += tokens.count_tokens(stream[part][learned.is_learned[part] > 0], vocab_size)
    return counts
