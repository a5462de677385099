"""Records to tokens, in several processes at once and in their order."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.inputs import Place, Reading, Record, text_of
from meshtrain.data.tokenizer import Tokenizer

UNIT = 1 << 20  # bytes of input that a process takes at a time, and small enough to share out
AHEAD = 3  # units for each process that are read before they are asked for


@dataclass(frozen=True)
class Job:
    """What is the same for all records."""

    tokenizer: str  # a path, or "bytes"
    sha256: str  # of that file
    eos: int  # closes each document
    bos: int | None  # begins each document
    dtype: str
    how: Reading


class Told(NamedTuple):
    """What became of a record."""

    num_tokens: int
    text_bytes: int
    after: Place
    read: int
    ends: bool
    fault: str  # "" where it has tokens


def units(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yields the records in lists of about UNIT bytes."""
    unit, size = [], 0
    for record in records:
        unit.append(record)
        size += len(record.data or "") + 100
        if size >= UNIT:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def tokenise(job: Job, unit: list[Record]) -> tuple[np.ndarray, list[Told]]:
    """Returns the tokens of all records, one after the other, and what became of each."""
    tokenizer = _loaded(job.tokenizer, job.sha256)
    texts: list[str | None] = []
    faults: list[str] = []
    for record in unit:
        try:
            texts.append(text_of(record, job.how))
            faults.append("")
        except ValueError as error:
            texts.append(None)
            faults.append(str(error))
    pieces = [tokenizer.pieces(text) if text else [] for text in texts]
    encoded = iter(tokenizer.encode_batch([piece for many in pieces for piece in many]))
    found, told = [], []
    for record, text, many, fault in zip(unit, texts, pieces, faults, strict=True):
        mine = [next(encoded) for _ in many]
        if text is not None:
            if record.begins and job.bos is not None:
                mine.insert(0, np.array([job.bos]))
            if record.ends:
                mine.append(np.array([job.eos]))
        text_bytes = len(text.encode()) if text else 0
        size = sum(map(len, mine))
        told.append(Told(size, text_bytes, record.after, record.read, record.ends, fault))
        found += mine
    tokens = np.concatenate([np.zeros(0, np.int64), *found])
    return tokens.astype(job.dtype), told


@functools.lru_cache(maxsize=1)
def _loaded(path: str, sha256: str) -> Tokenizer:
    return tokenizers.load(path)


def in_order(function: Callable, items: Iterable, num_workers: int) -> Iterator:
    """Yields function(item) in the order of the items, worked off by so many processes."""
    # The processes are what runs at once; threads of each would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if num_workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_end_with_parent)
    ahead: deque = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > AHEAD * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Ends this process when its parent does, which may be killed without a chance to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    parent = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()
