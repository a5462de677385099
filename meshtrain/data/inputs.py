"""Documents from text, JSON lines and Parquet, one after the other, from any place on."""

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

from meshtrain.data.tokenizer import needed
from meshtrain.errors import ConfigError

LINES = (".jsonl", ".ndjson", ".json")  # a document a line
KNOWN = (".txt", *LINES, ".parquet")  # and .gz after it, but Parquet; what is taken from a folder
CHUNK = 1 << 20  # bytes read at a time
ROWS = 256  # of Parquet read at a time


class Place(NamedTuple):
    """Where a document begins."""

    file: int = 0  # number in the list of inputs
    offset: int = 0  # bytes, unpacked; rows of Parquet
    number: int = 0  # lines, documents or rows before it


FIRST = Place()


class Record(NamedTuple):
    """A document, or a piece of a long one, as it stands in a file."""

    data: Any  # a line of JSON, as bytes; of other files the text
    after: Place  # where the next one begins; its number is that of this one, counted from 1
    read: int  # bytes of the file so far, packed
    begins: bool = True  # False: a piece, and not the first
    ends: bool = True  # False: a piece, and not the last
    fault: str = ""


@dataclass(frozen=True)
class Reading:
    """How inputs are to be read."""

    field: str  # of JSON lines and Parquet, that holds the text
    separator: str  # between the documents of a text file; "": one document a file
    forbidden: str  # a character that no document may hold; "": all may be there


def find(inputs: list[str], pattern: str, output: Path) -> list[Path]:
    """Returns the files of the inputs, those of folders as well, in a fixed order; not what is in `output`.

    The order is shuffled, so that the end of the data, which may be held out, is a fair sample.
    """
    files, faults = [], []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = [
                one for one in path.rglob(pattern or "*") if _wanted(one, path, bool(pattern))
            ]
            inside = [one for one in inside if output.resolve() not in one.resolve().parents]
            files += sorted(inside)
            if not inside:
                kinds = f"match --pattern={pattern}" if pattern else f"end in {', '.join(KNOWN)}"
                faults.append(f"{name}: no files in it {kinds}; give another folder or --pattern")
        else:
            faults.append(f"{name}: no such file or folder")
    if faults:
        raise ConfigError(*faults)
    return [files[i] for i in np.random.default_rng(0).permutation(len(files))]


def passed_over(inputs: list[str]) -> int:
    """Returns how many files of the folders, hidden ones aside, are of no kind that is known."""
    inside = ((path, Path(name)) for name in inputs for path in Path(name).rglob("*"))
    return sum(
        _wanted(path, root, chosen=True) and kind_of(path) not in KNOWN for path, root in inside
    )


def _wanted(path: Path, root: Path, chosen: bool) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and (chosen or kind_of(path) in KNOWN)


def kind_of(path: Path) -> str:
    """.txt of a.txt.gz"""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def fingerprint(files: list[Path]) -> str:
    """Returns what changes with names, sizes or times of the files."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def records(
    files: list[Path], how: Reading, last_border: Callable[[str], int], start: Place = FIRST
) -> Iterator[Record]:
    """Yields what is in the files from a place on; raises ConfigError for a file that cannot be read.

    `last_border` says where a long text can be cut, see tokenizer.py.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        begin = start if number == start.file else Place(number)
        try:
            if kind_of(path) == ".parquet":
                yield from _rows(path, how, begin)
            elif kind_of(path) in LINES:
                yield from _lines(path, begin)
            elif how.separator:
                yield from _separated(path, how, begin)
            elif not begin.number:
                yield from _whole(path, how, begin, last_border)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}; repair it or leave it out"
            ) from None


@contextlib.contextmanager
def _opened(path: Path, offset: int) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Gives the unpacked bytes of a file from an offset on, and how many packed ones were read."""
    with open(path, "rb") as raw:
        file = (
            io.BufferedReader(igzip.IGzipFile(fileobj=raw), CHUNK) if path.suffix == ".gz" else raw
        )
        if not offset and file.peek(3)[:3] == codecs.BOM_UTF8:
            offset = 3
        file.seek(offset)
        yield file, raw.tell


def _lines(path: Path, begin: Place) -> Iterator[Record]:
    """Yields the lines; what is white space alone is none."""
    with _opened(path, begin.offset) as (file, read):
        offset, number = file.tell(), begin.number
        for line in file:
            offset, number = offset + len(line), number + 1
            if line.strip():
                yield Record(line, Place(begin.file, offset, number), read())


def _rows(path: Path, how: Reading, begin: Place) -> Iterator[Record]:
    parquet, pyarrow = (needed(name, "parquet") for name in ("pyarrow.parquet", "pyarrow"))
    try:
        table = parquet.ParquetFile(path)
        column = table.schema_arrow.field(how.field).type
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: no Parquet file with a column {how.field!r}: {error}") from None
    if column not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ConfigError(f"{path}: column {how.field!r} holds {column}, not strings; set --field")
    size, row = path.stat().st_size, 0
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if row + num_rows <= begin.offset:
            row += num_rows
            continue
        for batch in table.iter_batches(ROWS, row_groups=[group], columns=[how.field]):
            for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                row += 1
                if row > begin.offset:
                    text, fault = (None, "") if value is None else _decoded(value, 0)
                    after = Place(begin.file, row, row)
                    yield Record(text, after, size * row // table.metadata.num_rows, fault=fault)


def _separated(path: Path, how: Reading, begin: Place) -> Iterator[Record]:
    """Yields the documents between separators; what is white space alone is none."""
    separator = how.separator.encode()
    with _opened(path, begin.offset) as (file, read):
        offset, number, pending = file.tell(), begin.number, [b""]
        while chunk := file.read(CHUNK):
            pending.append(chunk)
            # Look only where it may be: a long document is not gone through again and again.
            if separator not in b"".join(pending[-2:])[-len(chunk) - len(separator) :]:
                continue
            *documents, left = b"".join(pending).split(separator)
            pending = [left]
            for document in documents:
                start, offset = offset, offset + len(document) + len(separator)
                if document.strip():
                    number += 1
                    text, fault = _decoded(document, start)
                    yield Record(text, Place(begin.file, offset, number), read(), fault=fault)
        if (left := b"".join(pending)).strip():
            text, fault = _decoded(left, offset)
            yield Record(text, Place(begin.file, file.tell(), number + 1), read(), fault=fault)


def _whole(
    path: Path, how: Reading, begin: Place, last_border: Callable[[str], int]
) -> Iterator[Record]:
    """Yields a text file as one document, in pieces where it is long and can be cut."""
    after = Place(begin.file, 0, 1)  # which nothing follows
    with _opened(path, 0) as (file, read):
        start = file.tell()
        if fault := _first_fault(file, how.forbidden):
            yield Record("", after, read(), fault=fault)
            return
        file.seek(start)
        pending, begins = [""], True
        for text, is_last in _with_last(_decoded_chunks(file)):
            before = pending[-1][-1:]  # the border may lie between two chunks
            border = 0 if is_last else last_border(before + text)
            if not border:
                pending.append(text)
                continue
            piece = "".join([*pending, text[: border - len(before)]])
            yield Record(piece, after, read(), begins=begins, ends=False)
            pending, begins = [text[border - len(before) :]], False
        if whole := "".join(pending):
            yield Record(whole, after, read(), begins=begins)


def _decoded_chunks(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while chunk := file.read(CHUNK):
        yield decoder.decode(chunk)


def _with_last(items: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields the items that are not empty, each with whether it is the last."""
    held = ""
    for item in items:
        if held and item:
            yield held, False
        held = item or held
    if held:
        yield held, True


def _first_fault(file: BinaryIO, forbidden: str) -> str:
    """Reads on to the end, and returns what is wrong with the text; mostly nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        offset, chunk = file.tell() - len(decoder.getstate()[0]), file.read(CHUNK)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return f"no valid UTF-8 at byte {offset + error.start}"
        if forbidden and forbidden in text:
            return f"holds {forbidden!r}, which ends documents"
        if not chunk:
            return ""


def _decoded(data: bytes, offset: int) -> tuple[str, str]:
    """Returns the text, and what is wrong with it."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"no valid UTF-8 at byte {offset + error.start}"


def text_of(record: Record, how: Reading) -> str:
    """Returns the text of a record; raises ValueError where it has none."""
    if record.fault:
        raise ValueError(record.fault)
    text = record.data
    if isinstance(text, bytes):
        text = _parsed(text, how.field)
    if not isinstance(text, str):
        raise ValueError(f"{how.field} is no string but {type(text).__name__}")
    if not text:
        raise ValueError(f"{how.field} is empty")
    if how.forbidden and how.forbidden in text:
        raise ValueError(f"holds {how.forbidden!r}, which ends documents")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise ValueError("no valid UTF-8: half of a surrogate pair") from None
    return text


def _parsed(line: bytes, field: str) -> Any:
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"no valid UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(found, dict) or field not in found:
        raise ValueError(f"no field {field!r}")
    return found[field]
