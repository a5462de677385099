"""Reads JSON lines, and the elements of a JSON array one after the other."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from meshtrain import foreign
from meshtrain.data.prepare import sources, streams
from meshtrain.data.prepare.records import (
    MAX_LINE_BYTES,
    Position,
    ReadOptions,
    Record,
    check_size,
    max_document_bytes,
)
from meshtrain.errors import ConfigError

NOT_BLANK = re.compile(r"[^ \t\r\n]")


def read(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the objects of a file, as bytes, which the workers parse; of an array, also texts."""
    if _is_array(path):
        yield from _read_array(path, begin)
    else:
        yield from _read_lines(path, begin)


def _is_array(path: Path) -> bool:
    """Returns whether the first character is that of an array, not of an object."""
    with streams.open_at(path, 0) as (file, _):
        first = b""
        while not first.strip() and (chunk := file.read(1 << 10)):
            first = chunk.lstrip()
        return first.startswith(b"[")


def _read_lines(path: Path, begin: Position) -> Iterator[Record]:
    """Yields the lines of a file, except blank ones."""
    with streams.open_at(path, begin.offset) as (file, bytes_read):
        offset = file.tell()
        number = begin.number
        limit = min(max_document_bytes(path), MAX_LINE_BYTES)
        while line := file.readline(limit + 1):
            offset += len(line)
            number += 1
            check_size(path, len(line), limit, number)
            if line.strip():
                yield Record(line, Position(begin.file, offset, number), bytes_read())


def _read_array(path: Path, begin: Position) -> Iterator[Record]:
    """Yields the elements of the array that is the file; `begin` is after one of them."""
    limit = min(max_document_bytes(path), MAX_LINE_BYTES)
    with streams.open_at(path, begin.offset) as (file, bytes_read):
        text = _Text(path, file)
        number = begin.number
        if number:
            is_at_end = text.take(",]") == "]"
        else:
            text.take("[")
            is_at_end = text.next() == "]"
            if is_at_end:
                text.take("]")
        while not is_at_end:
            number += 1
            element = text.element(number, limit)
            yield Record(element, Position(begin.file, text.offset, number), bytes_read())
            is_at_end = text.take(",]") == "]"
        if text.next():
            raise text.fault("more text after the end of the array")


class _Text:
    """The text of a file from some byte on, of which a part is in memory."""

    def __init__(self, path: Path, file: BinaryIO):
        self.offset = file.tell()  # bytes before `_position`
        self._path = path
        self._file = file
        self._buffer = ""
        self._position = 0
        self._is_at_end = False
        # An invalid byte becomes half of a surrogate pair: the fault of the element that holds it.
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoder = decoder("surrogateescape")
        # Of more than 4300 digits Python reads no integer: a fault of the element, found later.
        self._json = json.JSONDecoder(parse_int=float)

    def next(self) -> str:
        """Skips blank characters; returns the next one, or "" at the end."""
        while True:
            found = NOT_BLANK.search(self._buffer, self._position)
            end = found.start() if found else len(self._buffer)
            self.offset += end - self._position
            self._position = end
            if found:
                return found[0]
            if not self._read():
                return ""

    def take(self, expected: str) -> str:
        """Returns the next character, one of `expected`."""
        found = self.next()
        if not found:
            raise self.fault("ends within the array")
        if found not in expected:
            raise self.fault(f"expected {' or '.join(expected)}, not {found!r}")
        self._position += 1
        self.offset += 1
        return found

    def element(self, number: int, limit: int) -> bytes | str:
        """Returns the next value: a text as str, another one as it is written."""
        if not self.next():
            raise self.fault("ends within the array")
        while True:
            start = self._position
            unread = len(self._buffer) - start
            check_size(self._path, unread if unread > limit else 0, limit, number)
            try:
                value, end = self._json.raw_decode(self._buffer, start)
            except json.JSONDecodeError as error:
                # It may go on in the part that was not read. If all was read, or the error is far
                # from its end, it does not.
                is_open = error.msg.startswith("Unterminated string")
                is_far = error.pos < len(self._buffer) - 16 and not is_open
                if is_far or not self._read(unread):
                    self.offset += len(self._encoded(self._buffer[start : error.pos]))
                    raise self.fault(f"not JSON: {error.msg}") from None
                continue
            except RecursionError:
                depth = foreign.MAX_DEPTH
                raise self.fault(f"nested more than {depth} levels deep") from None
            # A number near the end of the part in memory may go on: .5 or e+5 may follow.
            if len(self._buffer) - end < 3 and self._read(unread):
                continue
            written = self._encoded(self._buffer[start:end])
            check_size(self._path, len(written), limit, number)
            self._position = end
            self.offset += len(written)
            return value if isinstance(value, str) else written

    def _read(self, size: int = 0) -> bool:
        """Reads at least `size` more bytes if there are as many; returns whether there were any.

        An element that is larger than a chunk is read in parts of double the size.
        """
        if self._is_at_end:
            return False
        data = self._file.read(max(size, streams.CHUNK))
        self._is_at_end = not data
        self._buffer = self._buffer[self._position :] + self._decoder.decode(data, not data)
        self._position = 0
        return bool(data) or bool(self._buffer)

    @staticmethod
    def _encoded(text: str) -> bytes:
        return text.encode(errors="surrogateescape")

    def fault(self, what: str) -> ConfigError:
        return ConfigError(
            f"{sources.name_of(self._path)}: not a JSON array: at byte {self.offset}: {what}; "
            f"repair it or leave it out"
        )
