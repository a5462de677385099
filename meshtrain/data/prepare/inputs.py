"""Reads documents from text, JSON lines and Parquet, in order, starting at any position."""

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

from meshtrain import foreign
from meshtrain.data import files, formats, prepared
from meshtrain.errors import ConfigError, import_optional

JSON_LINES = (".jsonl", ".ndjson", ".json")  # one document per line

# Of the files that are read in a folder; all but those of .parquet may end in .gz.
EXTENSIONS = (".txt", *JSON_LINES, ".parquet")
CHUNK = 1 << 20  # bytes read at a time
MAX_SHOWN = 5  # lines about files of the same kind

# The largest document has MAX_DOCUMENT_BYTES or MAX_RATIO times the size of its file, whichever is
# more. Text is compressed to a tenth, so a larger one was made to fill the memory.
MAX_DOCUMENT_BYTES = 16 << 20
MAX_RATIO = 32
MAX_LINE_BYTES = 256 << 20  # of JSON lines: a file with holes has a large size of its own


class Position(NamedTuple):
    """The start of a document in the inputs; the journal of a prepared folder stores it."""

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
    """How documents are read from the files."""

    field: str  # the field (JSON lines) or column (Parquet) with the text
    separator: str  # between the documents of a text file; "": one document per file
    forbidden: str  # a character that documents must not contain; "": none


def find_files(
    inputs: list[str], pattern: str, output: Path, *, skip_bad: bool = False
) -> tuple[list[Path], list[str]]:
    """Returns the input files, including those in input folders, and lines about what is ignored.

    Ignored are hidden files in folders, what `meshtrain prepare` wrote (to `output`, or before), a
    file that another path names too, and with `skip_bad` files of a format that is not read.
    The order is shuffled with a fixed seed: training may hold out the end, which is then a fair
    sample. Raises ConfigError for an input that cannot be read, or a folder without matching files.
    """
    paths: list[Path] = []
    faults: list[str] = []
    ignored_folders: set[Path] = set()
    others: list[Path] = []  # files with other extensions
    for name in inputs:
        path = Path(name)
        fault = files.path_fault(path)
        if fault:
            faults.append(f"{name}: {fault}; give files or folders of text")
            continue
        if path.is_dir():
            matching, prepared_folders, others_here = _find_in_folder(name, pattern)
            others += others_here
        else:
            matching = [path]
            others_here = []
            prepared_folders = [path.parent] if prepared.is_prepared(path.parent) else []
        in_output = [file for file in matching if output.resolve() in file.resolve().parents]
        ignored_folders.update(prepared_folders)
        ignored_folders.update(file.parent for file in in_output)
        if in_output and not _is_output(output):
            faults.append(f"--output={output}: holds {in_output[0]}, an input; use another folder")
        elif not matching and not prepared_folders:
            kinds = f"match --pattern={pattern}" if pattern else f"end in {', '.join(EXTENSIONS)}"
            faults.append(
                f"{name}: no files in it {kinds}; give another folder or --pattern"
                f"{_known_format(others_here)}"
            )
        paths += [file for file in matching if file.parent not in ignored_folders]
    if not paths and not faults:
        faults.append(f"{', '.join(inputs)}: written by `meshtrain prepare`; give the text itself")
    if faults:
        raise ConfigError(*faults)
    notes = []
    for folder in sorted(ignored_folders):
        notes.append(f"ignored: {folder}, which `meshtrain prepare` wrote")
    if others:
        notes.append(
            f"ignored: {len(others):,} files that do not end in {', '.join(EXTENSIONS)}; "
            f"--pattern=GLOB selects others{_known_format(others)}"
        )
    paths, repeated = _without_repeated(paths)
    notes += _first_of(repeated)
    misread = {}
    named = {Path(name) for name in inputs}
    for path in paths:
        fault = format_fault(path, is_named=path in named)
        if fault:
            misread[path] = f"{path}: {fault}, or leave it out"
    if misread and not skip_bad:
        raise ConfigError(*_first_of([*misread.values()]))
    notes += [f"skipped {fault}" for fault in misread.values()]
    paths = [path for path in paths if path not in misread]
    order = np.random.default_rng(0).permutation(len(paths))
    return [paths[number] for number in order], notes


def format_fault(path: Path, *, is_named: bool) -> str:
    """Returns why a file cannot be read as what its name says, and the way out; "": it can.

    `is_named` is False for a file of a folder.
    """
    known = formats.of_input(path, is_named=is_named)
    if known is None:
        return ""
    expected = "JSON lines" if extension_of(path) in JSON_LINES else "text"
    return f"is {known.name}, not {expected}; {formats.way_out(known, path, in_prepare=True)}"


def check_separator(paths: list[Path], separator: str) -> None:
    """Raises ConfigError if no text file holds the separator; reads up to the first that does."""
    text_files = [path for path in paths if extension_of(path) not in (*JSON_LINES, ".parquet")]
    if not text_files:
        raise ConfigError(
            f"--separator={separator!r}: only text files are split, and the inputs have none; "
            f"leave it out"
        )
    if any(_holds(path, separator.encode()) for path in text_files):
        return
    escape = "; in bash, $'\\n' is a newline" if "\\" in separator else ""
    raise ConfigError(
        f"--separator={separator!r}: does not occur in the inputs, of which {len(text_files):,} "
        f"are text files{escape}; give the text between the documents, or leave it out: each file "
        f"is then a document"
    )


def _holds(path: Path, separator: bytes) -> bool:
    """Returns whether a file holds the separator; False if it cannot be read, reported later.

    True for a compressed file with a document that is too large, which is reported later too.
    """
    try:
        if not path.stat().st_size:
            return False  # not opened: a file of /proc may wait for ever
        with _open_at(path, 0) as (file, _):
            end = b""  # of the chunk before: the separator may lie between two
            while chunk := file.read(CHUNK):
                if separator in end + chunk or file.tell() > _max_document_bytes(path):
                    return True
                end = chunk[-len(separator) :]
    except (OSError, EOFError, zlib.error):
        pass
    return False


def _known_format(others: list[Path]) -> str:
    """Returns what to do with the first of the files that has a known format; "": none has."""
    for path in others:
        known = formats.by_name(path)
        if known:
            return f" ({path} is {known.name}: {formats.way_out(known, path, in_prepare=True)})"
    return ""


def _without_repeated(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Returns the paths without those of a file that an earlier one names, and a line for each.

    Links, `./a` and `a`, or a folder and a file in it name a file more than once.
    """
    first_names: dict[tuple[int, int], Path] = {}
    repeated = []
    for path in paths:
        found = path.stat()
        first = first_names.setdefault((found.st_dev, found.st_ino), path)
        if first is not path:
            same = "which is named twice" if path == first else f"the same file as {first}"
            repeated.append(f"ignored: {path}, {same}")
    return list(first_names.values()), repeated


def _first_of(lines: list[str]) -> list[str]:
    """Returns the first MAX_SHOWN lines, and the number of further ones."""
    num_more = len(lines) - MAX_SHOWN
    return lines if num_more <= 0 else [*lines[:MAX_SHOWN], f"and {num_more:,} more"]


def _is_output(folder: Path) -> bool:
    """Returns whether `meshtrain prepare` wrote a folder, even if it was killed at once."""
    return (folder / prepared.JOURNAL).exists() or prepared.is_prepared(folder)


def _find_in_folder(name: str, pattern: str) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the files to read, the prepared folders, and the files left out.

    Without a pattern, files are left out by their extension.
    """
    with files.report_errors(name):
        paths, prepared_folders = files.find(Path(name), pattern or "*", key="--pattern")
    if pattern:
        return paths, prepared_folders, []
    known = []
    others = []
    for file in paths:
        same_kind = known if extension_of(file) in EXTENSIONS else others
        same_kind.append(file)
    return known, prepared_folders, others


def extension_of(path: Path) -> str:
    """Returns the extension without .gz: a.txt.gz -> .txt"""
    if path.suffix == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


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

    `last_split_point` returns where a long text can be split; see tokenizer.py. Raises ConfigError
    for a file that cannot be read.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        begin = start if number == start.file else Position(file=number)
        try:
            if extension_of(path) == ".parquet":
                yield from _read_parquet(path, options, begin)
            elif not path.stat().st_size:
                continue  # not opened: a file of /proc may wait for ever
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
    """Yields the decompressed file at an offset, and a function without parameters.

    It returns how many bytes of the file were read so far, before decompression.
    """
    with open(path, "rb") as raw:
        file: io.BufferedReader = raw
        if path.suffix == ".gz":
            file = io.BufferedReader(igzip.IGzipFile(fileobj=raw), CHUNK)
        if not offset and file.peek(3)[:3] == codecs.BOM_UTF8:
            offset = len(codecs.BOM_UTF8)
        file.seek(offset)
        yield file, raw.tell


def _max_document_bytes(path: Path) -> int:
    """Returns how large a document of a file may be: small compressed files may be bombs."""
    return max(MAX_DOCUMENT_BYTES, MAX_RATIO * path.stat().st_size)


def _check_size(path: Path, size: int, limit: int, number: int) -> None:
    if size > limit:
        raise ConfigError(
            f"{path}:{number}: is larger than {limit:,} bytes, in a file of "
            f"{path.stat().st_size:,}; leave the file out, or decompress it"
        )


def _read_lines(path: Path, begin: Position) -> Iterator[Record]:
    """Yields the lines of a file, except blank ones."""
    with _open_at(path, begin.offset) as (file, bytes_read):
        offset = file.tell()
        number = begin.number
        limit = min(_max_document_bytes(path), MAX_LINE_BYTES)
        while line := file.readline(limit + 1):
            offset += len(line)
            number += 1
            _check_size(path, len(line), limit, number)
            if line.strip():
                yield Record(line, Position(begin.file, offset, number), bytes_read())


def _read_parquet(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    limit = _max_document_bytes(path)
    for row, num_rows, value in read_parquet_column(path, options.field, begin.offset):
        _check_size(path, len(value or b""), limit, row)
        text, fault = (None, "") if value is None else _decode(value, 0)
        # An estimate for the progress: rows have about the same size.
        bytes_read = path.stat().st_size * row // num_rows
        yield Record(text, Position(begin.file, row, row), bytes_read, fault=fault)


def _read_separated(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the documents between separators, except blank ones."""
    separator = options.separator.encode()
    with _open_at(path, begin.offset) as (file, bytes_read):
        offset = file.tell()  # of the first byte in `pending`
        number = begin.number
        pending = [b""]  # chunks of the document that is being read
        pending_bytes = 0
        limit = _max_document_bytes(path)
        while chunk := file.read(CHUNK):
            pending.append(chunk)
            pending_bytes += len(chunk)
            _check_size(path, pending_bytes, limit, number + 1)
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
                    text, fault = _decode(document, start)
                    after = Position(begin.file, offset, number)
                    yield Record(text, after, bytes_read(), fault=fault)
        rest = b"".join(pending)
        if rest.strip():
            text, fault = _decode(rest, offset)
            after = Position(begin.file, file.tell(), number + 1)
            yield Record(text, after, bytes_read(), fault=fault)


def _read_document(
    path: Path, options: ReadOptions, begin: Position, last_split_point: Callable[[str], int]
) -> Iterator[Record]:
    """Yields a text file as one document, in pieces if it is long and can be split."""
    end = Position(begin.file, 0, 1)  # number 1: a resumed run skips the file
    with _open_at(path, 0) as (file, bytes_read):
        # Look for a fault first: a faulty document is skipped as one, not from some piece on.
        start = file.tell()
        fault = _find_fault(file, options.forbidden)
        if fault:
            yield Record("", end, bytes_read(), fault=fault)
            return
        file.seek(start)
        pending = [""]  # of the next piece
        pending_chars = 0
        limit = _max_document_bytes(path)
        is_first = True
        for text, is_last in _mark_last(_decode_chunks(file)):
            before = pending[-1][-1:]  # the split point may lie between two chunks
            split = 0 if is_last else last_split_point(before + text)
            if not split:
                pending.append(text)
                pending_chars += len(text)
                _check_size(path, pending_chars, limit, 1)
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
        incomplete, _ = decoder.getstate()  # the first bytes of a character
        offset = file.tell() - len(incomplete)
        chunk = file.read(CHUNK)
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


# ---- the text of a record ----


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
    parsed = foreign.parse_json(line)
    if not isinstance(parsed, dict) or field not in parsed:
        names = ", ".join(map(repr, [*parsed][:MAX_SHOWN])) if isinstance(parsed, dict) else ""
        raise ValueError(f"no field {field!r}" + (f" among {names}" if names else ""))
    return parsed[field]


# ---- Parquet ----

PARQUET_ROWS = 256  # rows read at a time
MAX_PARQUET_BYTES = 256 << 20  # of a column in a group of rows, of a file that may be small


def read_parquet_column(
    path: Path, field: str, start: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields the rows of a column, beginning at row `start`.

    Of each it yields the row + 1, the number of rows of the file, and the text or None.
    """
    parquet = import_optional("pyarrow.parquet", "parquet")
    pyarrow = import_optional("pyarrow", "parquet")
    try:
        table = parquet.ParquetFile(path)
        column = table.schema_arrow.field(field).type
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not a Parquet file with a column {field!r}: {error}") from None
    if not _is_text(column, pyarrow):
        raise ConfigError(f"{path}: column {field!r} holds {column}, not strings; set --field")
    limit = max(MAX_PARQUET_BYTES, _max_document_bytes(path))
    row = 0
    for group in range(table.num_row_groups):
        row_group = table.metadata.row_group(group)
        num_rows = row_group.num_rows
        chunk = _column_chunk(row_group, field)
        _check_size(path, chunk.total_uncompressed_size, limit, row + 1)
        # All rows that are read at a time may hold the largest text of the dictionary.
        largest = max(1, _dictionary_bytes(path, chunk))
        num_at_once = max(1, min(PARQUET_ROWS, limit // largest))
        if row + num_rows <= start:  # not read
            row += num_rows
            continue
        for batch in table.iter_batches(num_at_once, row_groups=[group], columns=[field]):
            for value in _texts_of(batch.column(0), pyarrow):
                row += 1
                if row > start:
                    yield row, table.metadata.num_rows, value


def _texts_of(values: Any, pyarrow: Any) -> Iterator[bytes | None]:
    """Yields the texts of an array; one that it stores once is in memory once."""
    if not pyarrow.types.is_dictionary(values.type):
        yield from values.cast(pyarrow.large_binary()).to_pylist()
        return
    used = values.indices.unique().drop_null()
    texts = values.dictionary.take(used).cast(pyarrow.large_binary()).to_pylist()
    text_at = dict(zip(used.to_pylist(), texts, strict=True))
    for index in values.indices.to_pylist():
        yield text_at.get(index)


def _column_chunk(row_group: Any, field: str) -> Any:
    """Returns the metadata of a column in a group of rows."""
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    return next(one for one in columns if one.path_in_schema == field)


DICTIONARY_PAGE = 2  # type of a page


def _dictionary_bytes(path: Path, chunk: Any) -> int:
    """Returns the size of the texts that a chunk of a column stores once for many rows.

    The metadata has only the size of all pages, so it is read from the header of the page, which is
    in Thrift's compact protocol: its first two fields are the type and the size, each a byte for
    the field and a zigzag number of 7 bits a byte, the lowest first.
    """
    offset = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    with open(path, "rb") as file:
        file.seek(offset)
        header = iter(file.read(16))
    numbers = []
    for _ in range(2):
        next(header, 0)
        number = shift = 0
        for byte in header:
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        numbers.append(number >> 1)
    page_type, size = numbers
    return size if page_type == DICTIONARY_PAGE else 0


def _is_text(column: Any, pyarrow: Any) -> bool:
    """Returns True for strings, also for a dictionary that stores each different one once."""
    if pyarrow.types.is_dictionary(column):
        column = column.value_type
    return column in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
