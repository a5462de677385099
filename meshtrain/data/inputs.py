"""Read documents from text, JSON lines and Parquet, in order, starting at any position."""

import codecs
import contextlib
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from isal import igzip

from meshtrain.data.tokenizer import import_optional
from meshtrain.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")  # one document per line
# Files with these extensions are read from a folder; all but .parquet may end in .gz.
EXTENSIONS = (".txt", *JSON_LINES, ".parquet")
CHUNK = 1 << 20  # bytes read at a time
PARQUET_ROWS = 256  # rows read at a time


class Position(NamedTuple):
    """The start of a document in the inputs. The journal of a prepared folder stores the three numbers."""

    file: int = 0  # index in the list of inputs
    offset: int = 0  # bytes after decompression; rows of a Parquet file
    number: int = 0  # lines, documents or rows before it


START = Position()


class Record(NamedTuple):
    """A document, or a piece of a long one, as read from a file."""

    data: Any  # JSON lines: the line as bytes; Parquet: the text, or None; other files: the text
    # Where the next document begins. Its `number` is the number of this document, counted from 1.
    next_position: Position
    bytes_read: int  # read from the file so far, before decompression
    starts_document: bool = True  # False for a piece after the first
    ends_document: bool = True  # False for a piece before the last
    fault: str = ""  # why the record cannot be used; "": it can


@dataclass(frozen=True)
class ReadOptions:
    field: str  # the field (JSON lines) or column (Parquet) with the text
    separator: str  # between the documents of a text file; "": one document per file
    forbidden: str  # a character that documents must not contain; "": none


def find_files(inputs: list[str], pattern: str, output: Path) -> list[Path]:
    """Returns the input files, including those in input folders but not those in `output`.

    The order is shuffled with a fixed seed: training may hold out the end, which is then a fair sample.
    Raises ConfigError for an input that does not exist, or a folder without matching files.
    """
    files, faults, known = [], [], ", ".join(EXTENSIONS)
    for name in inputs:
        path = Path(name)
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = (file for file in path.rglob(pattern or "*") if _is_input(file, path, pattern))
            inside = [file for file in inside if output.resolve() not in file.resolve().parents]
            files += sorted(inside)
            if not inside:
                kinds = f"match --pattern={pattern}" if pattern else f"end in {known}"
                faults.append(f"{name}: no files in it {kinds}; give another folder or --pattern")
        else:
            faults.append(f"{name}: no such file or folder")
    if faults:
        raise ConfigError(*faults)
    return [files[i] for i in np.random.default_rng(0).permutation(len(files))]


def num_unknown_files(inputs: list[str]) -> int:
    """Returns how many files in the input folders have an unknown extension; hidden files do not count."""
    inside = ((path, Path(name)) for name in inputs for path in Path(name).rglob("*"))
    visible = [path for path, root in inside if _is_input(path, root, pattern="*")]
    return sum(extension_of(path) not in EXTENSIONS for path in visible)


def _is_input(path: Path, root: Path, pattern: str) -> bool:
    """Returns True for a file that is not hidden; without a pattern, only for a known extension."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and bool(pattern or extension_of(path) in EXTENSIONS)


def extension_of(path: Path) -> str:
    """Returns the extension without .gz: a.txt.gz -> .txt"""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def fingerprint(files: list[Path]) -> str:
    """Returns a hash of the paths, sizes and modification times of the files."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def read_records(
    files: list[Path],
    options: ReadOptions,
    last_split_point: Callable[[str], int],
    start: Position = START,
) -> Iterator[Record]:
    """Yields the records of the files, starting at `start`.

    `last_split_point` returns where a long text can be split; see tokenizer.py. Raises ConfigError for
    a file that cannot be read.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        begin = start if number == start.file else Position(number)
        try:
            if extension_of(path) == ".parquet":
                yield from _read_parquet(path, options, begin)
            elif extension_of(path) in JSON_LINES:
                yield from _read_lines(path, begin)
            elif options.separator:
                yield from _read_separated(path, options, begin)
            elif not begin.number:
                yield from _read_document(path, options, begin, last_split_point)
        except (OSError, EOFError, zlib.error) as error:
            fault = f"{path}: cannot be read: {error}; repair it or leave it out"
            raise ConfigError(fault) from None


@contextlib.contextmanager
def _open_at(path: Path, offset: int) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Yields the decompressed file at an offset, and a function: the bytes read so far, before decompression."""
    with open(path, "rb") as raw:
        is_gzip = path.suffix == ".gz"
        file = io.BufferedReader(igzip.IGzipFile(fileobj=raw), CHUNK) if is_gzip else raw
        if not offset and file.peek(3)[:3] == codecs.BOM_UTF8:
            offset = 3
        file.seek(offset)
        yield file, raw.tell


def _read_lines(path: Path, begin: Position) -> Iterator[Record]:
    """Yields the lines of a file, except blank ones."""
    with _open_at(path, begin.offset) as (file, bytes_read):
        offset, number = file.tell(), begin.number
        for line in file:
            offset, number = offset + len(line), number + 1
            if line.strip():
                yield Record(line, Position(begin.file, offset, number), bytes_read())


def _read_parquet(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    parquet, pyarrow = (import_optional(name, "parquet") for name in ("pyarrow.parquet", "pyarrow"))
    field = options.field
    try:
        table = parquet.ParquetFile(path)
        column = table.schema_arrow.field(field).type
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not a Parquet file with a column {field!r}: {error}") from None
    if column not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ConfigError(f"{path}: column {field!r} holds {column}, not strings; set --field")
    size, row = path.stat().st_size, 0
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if row + num_rows <= begin.offset:
            row += num_rows
            continue
        for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[field]):
            for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                row += 1
                if row > begin.offset:
                    text, fault = (None, "") if value is None else _decode(value, 0)
                    bytes_read = size * row // table.metadata.num_rows
                    yield Record(text, Position(begin.file, row, row), bytes_read, fault=fault)


def _read_separated(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the documents between separators, except blank ones."""
    separator = options.separator.encode()
    with _open_at(path, begin.offset) as (file, bytes_read):
        offset, number, pending = file.tell(), begin.number, [b""]
        while chunk := file.read(CHUNK):
            pending.append(chunk)
            # Search only the new bytes: searching all of a long document per chunk would be quadratic.
            if separator not in b"".join(pending[-2:])[-len(chunk) - len(separator) :]:
                continue
            *documents, rest = b"".join(pending).split(separator)
            pending = [rest]
            for document in documents:
                start, offset = offset, offset + len(document) + len(separator)
                if document.strip():
                    number += 1
                    text, fault = _decode(document, start)
                    after = Position(begin.file, offset, number)
                    yield Record(text, after, bytes_read(), fault=fault)
        if (rest := b"".join(pending)).strip():
            text, fault = _decode(rest, offset)
            after = Position(begin.file, file.tell(), number + 1)
            yield Record(text, after, bytes_read(), fault=fault)


def _read_document(
    path: Path, options: ReadOptions, begin: Position, last_split_point: Callable[[str], int]
) -> Iterator[Record]:
    """Yields a text file as one document, in pieces if it is long and can be split."""
    end = Position(begin.file, 0, 1)  # number 1: a resumed run skips the file
    with _open_at(path, 0) as (file, bytes_read):
        start = file.tell()
        if fault := _find_fault(file, options.forbidden):
            yield Record("", end, bytes_read(), fault=fault)
            return
        file.seek(start)
        pending, is_first = [""], True
        for text, is_last in _mark_last(_decode_chunks(file)):
            before = pending[-1][-1:]  # the split point may lie between two chunks
            split = 0 if is_last else last_split_point(before + text)
            if not split:
                pending.append(text)
                continue
            piece = "".join([*pending, text[: split - len(before)]])
            yield Record(piece, end, bytes_read(), starts_document=is_first, ends_document=False)
            pending, is_first = [text[split - len(before) :]], False
        if rest := "".join(pending):
            yield Record(rest, end, bytes_read(), starts_document=is_first)


def _decode_chunks(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while chunk := file.read(CHUNK):
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
        offset, chunk = file.tell() - len(decoder.getstate()[0]), file.read(CHUNK)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 at byte {offset + error.start}"
        if forbidden and forbidden in text:
            return f"holds {forbidden!r}, which ends documents"
        if not chunk:
            return ""


def _decode(data: bytes, offset: int) -> tuple[str, str]:
    """Returns the text of bytes at an offset of the file, and its fault or ""."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8 at byte {offset + error.start}"


def text_of(record: Record, options: ReadOptions) -> str:
    """Returns the text of a record; raises ValueError if it has none or the text is faulty."""
    if record.fault:
        raise ValueError(record.fault)
    text = record.data
    if isinstance(text, bytes):
        text = _parse_line(text, options.field)
    if not isinstance(text, str):
        raise ValueError(f"{options.field} is {type(text).__name__}, not a string")
    if not text:
        raise ValueError(f"{options.field} is empty")
    if options.forbidden and options.forbidden in text:
        raise ValueError(f"holds {options.forbidden!r}, which ends documents")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise ValueError("invalid UTF-8: half of a surrogate pair") from None
    return text


def _parse_line(line: bytes, field: str) -> Any:
    try:
        parsed = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(parsed, dict) or field not in parsed:
        raise ValueError(f"no field {field!r}")
    return parsed[field]
