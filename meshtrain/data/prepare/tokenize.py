"""Tokenizes records in several processes, in order; trains a byte-level BPE tokenizer on them."""

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.cluster import signals
from meshtrain.data import prepared, tokenizer
from meshtrain.data.prepare.inputs import read_records
from meshtrain.data.prepare.records import Position, ReadOptions, Record, size_of, text_of
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, import_optional

UNIT_BYTES = 1 << 20  # of input per work unit: small, so that all processes get equal work
UNITS_AHEAD = 3  # units per process that are submitted before their results are needed


@dataclass(frozen=True)
class Job:
    """The settings that all work units share."""

    tokenizer: str  # a path, or "bytes"
    sha256: str  # of that file
    eos: int  # ends each document
    bos: int | None  # begins each document
    dtype: str
    options: ReadOptions


class RecordResult(NamedTuple):
    """The result for one record; records.Record describes the fields that both have."""

    num_tokens: int
    text_bytes: int
    next_position: Position
    bytes_read: int
    ends_document: bool
    fault: str  # "" if the record was tokenized


def work_units(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yields the records in lists of about UNIT_BYTES."""
    unit = []
    size = 0
    for record in records:
        unit.append(record)
        size += size_of(record) + 100  # an empty record costs time too
        if size >= UNIT_BYTES:
            yield unit
            unit = []
            size = 0
    if unit:
        yield unit


def tokenize_unit(job: Job, unit: list[Record]) -> tuple[np.ndarray, list[RecordResult]]:
    """Returns the concatenated tokens of all records of a unit, and a result for each record."""
    loaded = _load_tokenizer(job.tokenizer, job.sha256)
    texts: list[str | None] = []  # None: the record has a fault
    faults: list[str] = []
    for record in unit:
        try:
            texts.append(text_of(record, job.options))
            faults.append("")
        except ValueError as error:
            texts.append(None)
            faults.append(str(error))

    # Encode all texts of the unit in one call: most texts are short, and each call has a cost.
    pieces = []
    num_pieces = []
    for text in texts:
        text_pieces = loaded.pieces(text) if text else []
        pieces += text_pieces
        num_pieces.append(len(text_pieces))
    encoded = iter(loaded.encode_batch(pieces))

    all_tokens = [np.zeros(0, np.int64)]
    results = []
    for record, text, count, fault in zip(unit, texts, num_pieces, faults, strict=True):
        tokens = list(itertools.islice(encoded, count))
        if text is not None:
            if record.starts_document and job.bos is not None:
                tokens.insert(0, np.array([job.bos]))
            if record.ends_document:
                tokens.append(np.array([job.eos]))
        result = RecordResult(
            num_tokens=sum(map(len, tokens)),
            text_bytes=len(text.encode()) if text else 0,
            next_position=record.next_position,
            bytes_read=record.bytes_read,
            ends_document=record.ends_document,
            fault=fault,
        )
        results.append(result)
        all_tokens += tokens
    return np.concatenate(all_tokens).astype(job.dtype), results


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: str, sha256: str) -> Tokenizer:
    """Returns the tokenizer in a file; the digest tells a changed file from the cached one."""
    return tokenizer.load(path)


def map_in_order(function: Callable, items: Iterable, num_workers: int) -> Generator:
    """Yields function(item) in the order of the items, computed by `num_workers` processes."""
    # The processes already use all cores: threads within each would compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if num_workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Ctrl-C is for this process: its children must not print a traceback, not even while they
    # start. Nor must the process that removes the semaphores of this one: it gets these options.
    sys.warnoptions.append("ignore:resource_tracker")
    resource_tracker.ensure_running()  # first: it unblocks SIGINT when it has started its process
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_exit_with_parent)
    ahead: deque = deque()
    try:
        for item in items:
            with signals.deferred():
                ahead.append(pool.submit(function, item))  # may start a process
            if len(ahead) > UNITS_AHEAD * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _exit_with_parent() -> None:
    """Make this process exit when its parent does, even if the parent is killed by SIGKILL."""
    parent = multiprocessing.parent_process()

    def watch(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


# ---- train a tokenizer ----

BPE_EOS = "<|endoftext|>"
SAMPLE_CHARS = 1 << 28  # train on at most this many characters, from the start of the inputs
MIN_VOCAB_SIZE = 257  # all bytes, and EOS


def train_bpe(files: list[Path], options: ReadOptions, vocab_size: int, output: Path) -> None:
    """Write a tokenizer.json with `vocab_size` tokens; the same inputs give the same file.

    Raises ConfigError if the text is too short for `vocab_size` tokens.
    """
    tokenizers = import_optional("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_sample_texts(files, options), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"--train_bpe={vocab_size}: the text is enough for only {tokenizer.get_vocab_size()} "
            f"tokens; use that number, or more text"
        )
    prepared.write_durably(output, tokenizer.to_str(pretty=True))


def _sample_texts(files: list[Path], options: ReadOptions) -> Iterator[str]:
    """Yields up to SAMPLE_CHARS characters of text; skips faulty records, reported later."""
    chars_left = SAMPLE_CHARS
    for record in read_records(files, options, len):
        if chars_left <= 0:
            return
        try:
            text = text_of(record, options)
        except ValueError:
            continue
        chars_left -= len(text)
        yield text
