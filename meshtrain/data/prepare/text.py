"""Reads text files: one document per file, or those between separators."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from meshtrain.data.prepare import streams
from meshtrain.data.prepare.records import (
    Position,
    ReadOptions,
    Record,
    check_size,
    decode,
    max_document_bytes,
)


def read_separated(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the documents between separators, except blank ones."""
    separator = options.separator.encode()
    with streams.open_at(path, begin.offset) as (file, bytes_read):
        offset = file.tell()  # of the first byte in `pending`
        number = begin.number
        pending = [b""]  # chunks of the document that is being read
        pending_bytes = 0
        limit = max_document_bytes(path)
        while chunk := file.read(streams.CHUNK):
            pending.append(chunk)
            pending_bytes += len(chunk)
            check_size(path, pending_bytes, limit, number + 1)
            # Search only the new bytes, and a separator's length before them: searching all of a
            # long document per chunk would take quadratic time.
            new = b"".join(pending[-2:])[-len(chunk) - len(separator) :]
            if separator not in new:
                continue
            *documents, rest = b"".join(pending).split(separator)
            pending = [rest]
            pending_bytes = len(rest)
            for document in documents:
                start = offset
                offset += len(document) + len(separator)
                if document.strip():
                    number += 1
                    text, fault = decode(document, start)
                    after = Position(begin.file, offset, number)
                    yield Record(text, after, bytes_read(), fault=fault)
        rest = b"".join(pending)
        if rest.strip():
            text, fault = decode(rest, offset)
            after = Position(begin.file, file.tell(), number + 1)
            yield Record(text, after, bytes_read(), fault=fault)


def read_document(
    path: Path, options: ReadOptions, begin: Position, last_split_point: Callable[[str], int]
) -> Iterator[Record]:
    """Yields a text file as one document, in pieces if it is long and can be split."""
    end = Position(begin.file, 0, 1)  # number 1: a resumed run skips the file
    with streams.open_at(path, 0) as (file, bytes_read):
        # Look for a fault first: a faulty document is skipped as one, not from some piece on.
        fault = _find_fault(file, options.forbidden)
        if fault:
            yield Record("", end, bytes_read(), fault=fault)
            return
    with streams.open_at(path, 0) as (file, bytes_read):
        pending = [""]  # of the next piece
        pending_chars = 0
        limit = max_document_bytes(path)
        is_first = True
        for text, is_last in _mark_last(_decode_chunks(file)):
            before = pending[-1][-1:]  # the split point may lie between two chunks
            split = 0 if is_last else last_split_point(before + text)
            if not split:
                pending.append(text)
                pending_chars += len(text)
                check_size(path, pending_chars, limit, 1)
                continue
            split -= len(before)
            piece = "".join([*pending, text[:split]])
            yield Record(piece, end, bytes_read(), starts_document=is_first, ends_document=False)
            pending = [text[split:]]
            pending_chars = len(pending[0])
            is_first = False
        rest = "".join(pending)
        if rest:
            yield Record(rest, end, bytes_read(), starts_document=is_first)


def _decode_chunks(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while chunk := file.read(streams.CHUNK):
        yield decoder.decode(chunk)


def _mark_last(items: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields (item, is_last) for the items that are not empty."""
    held = ""
    for item in items:
        if held and item:
            yield held, False
        held = item or held
    if held:
        yield held, True


def _find_fault(file: BinaryIO, forbidden: str) -> str:
    """Reads to the end of the file; returns the first fault of the text, or ""."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        incomplete, _ = decoder.getstate()  # the first bytes of a character
        offset = file.tell() - len(incomplete)
        chunk = file.read(streams.CHUNK)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 at byte {offset + error.start}"
        if forbidden and forbidden in text:
            return f"holds {forbidden!r}, which ends documents"
        if not chunk:
            return ""
