"""Reads the rows of CSV and TSV files, whose first row has the names of the columns."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from meshtrain.data.prepare import sources, streams
from meshtrain.data.prepare.records import (
    MAX_LINE_BYTES,
    Position,
    ReadOptions,
    Record,
    check_size,
    max_document_bytes,
)
from meshtrain.data.template import MAX_SHOWN
from meshtrain.errors import ConfigError

DELIMITERS = {".csv": ",", ".tsv": "\t"}


class _Lines:
    """The lines of a file as text, for the reader of Python's csv module: a row is one or more."""

    def __init__(self, path: Path, file: BinaryIO):
        self.offset = file.tell()  # bytes before the next line
        self.row_bytes = 0  # of the row that is being read
        self.fault = ""  # of that row
        self.number = 0  # of that row
        self._path = path
        self._file = file
        self._limit = min(max_document_bytes(path), MAX_LINE_BYTES)
        # Of the module: it has no other way to accept fields of more than 128 KiB.
        csv.field_size_limit(MAX_LINE_BYTES)

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(self._limit + 1):
            self.row_bytes += len(line)
            check_size(self._path, self.row_bytes, self._limit, self.number)
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                self.fault = f"invalid UTF-8 at byte {self.offset + error.start}"
                text = line.decode(errors="replace")
            self.offset += len(line)
            yield text

    def begin_row(self, number: int) -> None:
        self.row_bytes = 0
        self.fault = ""
        self.number = number


def read(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the rows of a file, except empty ones; that of the names is number 1."""
    delimiter = DELIMITERS[_extension(path)]
    with streams.open_at(path, 0) as (file, _):
        lines = _Lines(path, file)
        first = next(_rows(lines, delimiter, number=0), None)
        after_names = lines.offset
    if first is None:
        return
    first_number, names, fault = first
    if fault:
        raise ConfigError(
            f"{sources.name_of(path)}:{first_number}: {fault}; repair it or leave it out"
        )
    columns = {field: _column(path, names, field) for field in options.fields}
    with streams.open_at(path, begin.offset or after_names) as (file, bytes_read):
        lines = _Lines(path, file)
        for number, row, fault in _rows(lines, delimiter, begin.number or first_number):
            if not fault and len(row) != len(names):
                fault = f"has {len(row)} fields, but the first row has {len(names)}"
            values = {} if fault else {field: row[column] for field, column in columns.items()}
            after = Position(begin.file, lines.offset, number)
            yield Record(values, after, bytes_read(), fault=fault)


def _rows(lines: _Lines, delimiter: str, number: int) -> Iterator[tuple[int, list[str], str]]:
    """Yields the number, the fields and the fault of each row, except empty lines."""
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    while True:
        number += 1
        lines.begin_row(number)
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, [], lines.fault or f"not a row of a table: {error}"
            continue
        if row:
            yield number, row, lines.fault


def _column(path: Path, names: list[str], field: str) -> int:
    """Returns the number of the column of a field; raises ConfigError if it is not one."""
    if names.count(field) == 1:
        return names.index(field)
    name = sources.name_of(path)
    if field in names:
        raise ConfigError(f"{name}: {names.count(field)} columns are named {field!r}; rename them")
    shown = ", ".join(repr(one[:40]) for one in names[:MAX_SHOWN])
    raise ConfigError(
        f"{name}: no column {field!r} among {shown}, the names in its first row; set --field or "
        f"--template"
    )


def _extension(path: Path) -> str:
    if streams.compression_of(path):
        path = path.with_suffix("")
    return path.suffix.lower()
