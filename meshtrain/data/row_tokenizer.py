"""Tokenizes rows, in the worker processes that workers.py starts.

A row is a document: `bos` if the tokenizer has it so, its text, and `eos`, as `meshtrain prepare`
writes it.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data import row_files, workers
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.row_files import Fault, TextOf
from meshtrain.data.workers import Message
from meshtrain.errors import ConfigError

ROWS_AT_ONCE = 64  # rows read together
MAX_FAULTS = 6  # faulty rows of a unit that are named
MODULUS = 1 << 256  # of digests


class Job(NamedTuple):
    """What the worker processes need to know."""

    paths: tuple[Path, ...]
    rows: np.ndarray  # (files + 1,) int64: first row of each file, then all rows
    wanted: TextOf
    tokenizer: str  # a path, or "bytes"
    eos: int
    bos: int | None

    def settings(self) -> dict[str, Any]:
        """Returns this as JSON can spell it."""
        return {
            **self._asdict(),
            "paths": [*map(str, self.paths)],
            "rows": self.rows.tolist(),
            "wanted": [self.wanted.field, self.wanted.template],
        }


def job_of(settings: dict[str, Any]) -> Job:
    """Returns the job with these `settings()`."""
    return Job(**settings)._replace(
        paths=tuple(map(Path, settings["paths"])),
        rows=np.array(settings["rows"], np.int64),
        wanted=TextOf(*settings["wanted"]),
    )


class RowTokenizer:
    """Tokenizes rows."""

    def __init__(self, settings: dict[str, Any]):
        self._job = job = job_of(settings)
        self._tokenizer = tokenizers.load(job.tokenizer)
        self._files = row_files.OpenFiles(job.paths, job.wanted, job.rows)

    def __call__(self, request: Message) -> Message:
        match request:
            case Message([first, last], []):
                return self.measure(first, last)
            case Message(_, [numbers]):
                return self.tokens(numbers)
            case _:
                raise ValueError(f"unknown request {request}")

    def measure(self, first: int, last: int) -> Message:
        """Returns what is known of rows `first` ... `last` - 1.

        The value has `digest`, the sum of a hash of each row, of its number and tokens: the digest
        of all rows is then the same, whatever files and units they are in; and `faults`, FILE:ROW
        and the reason, of rows that cannot be used. The arrays are the lengths of the rows, the
        different tokens, and how often each occurs.
        """
        lengths = []
        counts = np.zeros(self._tokenizer.vocab_size, np.int64)
        faults = []
        digest = 0
        for number, ids in self._encoded(np.arange(first, last)):
            if isinstance(ids, Fault):
                faults.append(f"{self._place(number)}: {ids.reason}")
                continue
            lengths.append(len(ids))
            counts += np.bincount(ids, minlength=len(counts))
            digest += int.from_bytes(hashlib.sha256(number.to_bytes(8) + ids.tobytes()).digest())
        (token_ids,) = np.nonzero(counts)
        value = {"digest": digest % MODULUS, "faults": faults[:MAX_FAULTS]}
        return Message(value, [np.array(lengths, np.int32), token_ids, counts[token_ids]])

    def tokens(self, numbers: np.ndarray) -> Message:
        """Returns the tokens of rows, int32, and their lengths; numbers ascend."""
        found = []
        for number, ids in self._encoded(numbers):
            if isinstance(ids, Fault):
                raise changed(self._place(number), ids.reason)
            found.append(ids)
        return Message(None, [np.concatenate(found), np.array([*map(len, found)])])

    def _encoded(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray | Fault]]:
        """Yields the number and the tokens of each row, int32."""
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            part = numbers[start : start + ROWS_AT_ONCE]
            texts = [self._text(row) for row in self._files.read(part)]
            # One call for all pieces of all texts: most texts are short, and a call has a cost.
            pieces: list[str] = []
            num_pieces = []
            for text in texts:
                text_pieces = [] if isinstance(text, Fault) else self._tokenizer.pieces(text)
                pieces += text_pieces
                num_pieces.append(len(text_pieces))
            encoded = iter(self._tokenizer.encode_batch(pieces))
            for number, text, count in zip(part.tolist(), texts, num_pieces, strict=True):
                if isinstance(text, Fault):
                    yield number, text
                    continue
                ids = [next(encoded) for _ in range(count)]
                if self._job.bos is not None:
                    ids.insert(0, np.array([self._job.bos], np.int32))
                ids.append(np.array([self._job.eos], np.int32))
                yield number, np.concatenate(ids, dtype=np.int32)

    def _place(self, number: int) -> str:
        return row_files.place(self._job.paths, self._job.rows, number)

    def _text(self, row: Any) -> str | Fault:
        if isinstance(row, Fault):
            return row
        try:
            text = self._job.wanted.text(row)
        except ValueError as error:
            return Fault(str(error))
        if self._tokenizer.kind == tokenizers.BYTES and "\0" in text:
            return Fault(r"holds '\0', which ends documents")
        return text


def changed(place: str, what: str) -> ConfigError:
    """Returns the error that a row is not what the index says."""
    return ConfigError(
        f"{place}: {what}, but not when its length was measured: the file has changed; start the "
        f"run again, which measures it again"
    )


if __name__ == "__main__":
    workers.serve(RowTokenizer)
