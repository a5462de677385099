"""Reads Parquet and Arrow files: the columns that are needed, some rows at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.data import formats
from meshtrain.data.prepare import sources
from meshtrain.data.prepare.records import (
    Position,
    ReadOptions,
    Record,
    check_size,
    max_document_bytes,
)
from meshtrain.data.template import MAX_SHOWN
from meshtrain.errors import ConfigError, import_optional

ROWS = 256  # read at a time
MAX_COLUMN_BYTES = 256 << 20  # of a column in a group of rows, of a file that may be small
SLICE_BYTES = 64 << 20  # of the rows that are read at a time, if they are more than one


class Column(NamedTuple):
    """Where a field is: a column, or a field of the struct that a column holds."""

    field: str  # as it was given: a.b
    path: tuple[str, ...]  # ("a", "b"), or ("a.b",) if there is such a column


def _columns(path: Path, schema: Any, options: ReadOptions) -> list[Column]:
    """Returns the columns of the fields that are read; raises ConfigError that names a fault."""
    columns = []
    for field in options.fields:
        found, kind = _find(path, schema, field)
        value = value_type(kind)
        if not is_text(value) and not (options.template and is_number(value)):
            wanted = (
                "texts or numbers; change --template"
                if options.template
                else "strings; set --field"
            )
            raise ConfigError(
                f"{sources.name_of(path)}: column {field!r} holds {kind}, not {wanted}"
            )
        columns.append(Column(field, found))
    return columns


def _find(path: Path, schema: Any, field: str) -> tuple[tuple[str, ...], Any]:
    """Returns the names on the way to a field, and its type."""
    pyarrow = import_optional("pyarrow", "parquet")
    is_column = bool(schema.get_all_field_indices(field))
    names = (field,) if is_column else tuple(field.split("."))
    found: Any = schema  # what has the fields: the file, then a struct
    for depth, name in enumerate(names):
        has_fields = not depth or pyarrow.types.is_struct(found)
        count = len(found.get_all_field_indices(name)) if has_fields else 0
        if count > 1:
            raise ConfigError(
                f"{sources.name_of(path)}: {count} columns are named {name!r}; rename them"
            )
        if not count:
            shown = ", ".join(repr(one.name) for one in [*schema][:MAX_SHOWN])
            raise ConfigError(
                f"{sources.name_of(path)}: not a file with a column {field!r}"
                f"{f' among {shown}' if shown else ''}; set --field or --template"
            )
        found = found.field(name).type
    return names, found


def value_type(kind: Any) -> Any:
    """Returns the type of the values of a column, without how they are stored."""
    pyarrow = import_optional("pyarrow", "parquet")
    if isinstance(kind, pyarrow.BaseExtensionType):
        return value_type(kind.storage_type)
    if pyarrow.types.is_dictionary(kind) or pyarrow.types.is_run_end_encoded(kind):
        return value_type(kind.value_type)
    return kind


def is_text(kind: Any) -> bool:
    """Returns True for strings, for bytes, which must be UTF-8, and for nulls without a type."""
    pyarrow = import_optional("pyarrow", "parquet")
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    data = (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())
    return kind in (*texts, *data, pyarrow.null())


def is_number(kind: Any) -> bool:
    types = import_optional("pyarrow", "parquet").types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in tests)


def _values(array: Any) -> Iterator[Any]:
    """Yields the values of an array, texts as bytes; one that it stores once is in memory once."""
    pyarrow = import_optional("pyarrow", "parquet")
    compute = import_optional("pyarrow.compute", "parquet")
    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        yield from _values(array.storage)
    elif pyarrow.types.is_run_end_encoded(kind):
        yield from _values(compute.run_end_decode(array))
    elif pyarrow.types.is_dictionary(kind):
        used = array.indices.unique().drop_null()
        values = _values(array.dictionary.take(used))
        value_at = dict(zip(used.to_pylist(), values, strict=True))
        for index in array.indices.to_pylist():
            yield value_at.get(index)
    elif is_text(kind):
        yield from array.cast(pyarrow.large_binary()).to_pylist()
    else:
        written = as_written(kind)
        for value in array.to_pylist():
            yield None if value is None else written(value)


def as_written(kind: Any) -> Callable[[Any], Any]:
    """Returns what makes the number that a template writes of one of pyarrow, of a type."""
    types = import_optional("pyarrow", "parquet").types
    if types.is_float16(kind) or types.is_float32(kind):
        # With the digits that tell the number among those of its own precision.
        dtype = kind.to_pandas_dtype()
        return lambda value: float(str(dtype(value)))
    return str if types.is_decimal(kind) else lambda value: value


def _rows(batch: Any, columns: list[Column]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch, as the values of the fields."""
    compute = import_optional("pyarrow.compute", "parquet")
    arrays = []
    for column in columns:
        array = batch.column(column.path[0])
        for name in column.path[1:]:
            array = compute.struct_field(array, name)
        arrays.append(_values(array))
    for values in zip(*arrays, strict=True):
        yield {column.field: value for column, value in zip(columns, values, strict=True)}


def _records(
    path: Path, rows: Iterator[tuple[int, int, dict[str, Any]]], begin: Position
) -> Iterator[Record]:
    """Yields a record for each row; `rows` has its number, the bytes read before it, and itself."""
    limit = max_document_bytes(path)
    for row, bytes_read, values in rows:
        size = sum(len(value) for value in values.values() if isinstance(value, bytes))
        check_size(path, size, limit, row)
        yield Record(values, Position(begin.file, row, row), bytes_read)


# ---- Parquet ----


def read_parquet(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the rows of a Parquet file as records."""
    yield from _records(path, parquet_rows(path, options, begin.offset), begin)


def parquet_rows(
    path: Path, options: ReadOptions, start: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the rows from number `start` on.

    Of each it yields the number of rows up to it, how much of the file that is in bytes, and the
    values of the fields.
    """
    parquet = import_optional("pyarrow.parquet", "parquet")
    with _opened(path, mapped=False) as file:
        try:
            table = parquet.ParquetFile(file)
        except (ValueError, NotImplementedError) as error:
            raise _unreadable(path, "Parquet", error) from None
        columns = _columns(path, table.schema_arrow, options)
        limit = max(MAX_COLUMN_BYTES, max_document_bytes(path))
        size = sources.size_of(path)
        num_rows = table.metadata.num_rows
        row = 0
        for group in range(table.num_row_groups):
            row_group = table.metadata.row_group(group)
            if row + row_group.num_rows <= start:  # not read
                row += row_group.num_rows
                continue
            chunks = _column_chunks(row_group, columns)
            for chunk in chunks:
                check_size(path, chunk.total_uncompressed_size, limit, row + 1)
            # All rows that are read at a time may hold the largest text of the dictionary.
            largest = sum(dictionary_bytes(file, chunk) for chunk in chunks)
            num_at_once = max(1, min(ROWS, limit // max(1, largest)))
            names = [".".join(column.path) for column in columns]
            try:
                for batch in table.iter_batches(num_at_once, row_groups=[group], columns=names):
                    for values in _rows(batch, columns):
                        row += 1
                        if row > start:
                            # An estimate: rows have about the same size.
                            yield row, size * row // num_rows, values
            except (ValueError, NotImplementedError) as error:
                raise _unreadable(path, "Parquet", error) from None


def _opened(path: Path, *, mapped: bool) -> Any:
    """Returns a file of pyarrow, on a local disk `mapped` into memory if that is asked for."""
    pyarrow = import_optional("pyarrow", "parquet")
    if sources.is_stored(path):
        return pyarrow.PythonFile(sources.open_stored(path))
    return pyarrow.memory_map(str(path)) if mapped else pyarrow.OSFile(str(path))


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    cause = str(error).strip().partition("\n")[0][:300]
    return ConfigError(
        f"{sources.name_of(path)}: not {'an' if kind[0] in 'AEIOU' else 'a'} {kind} file that can "
        f"be read: {cause}; repair it or leave it out"
    )


def _column_chunks(row_group: Any, columns: list[Column]) -> list[Any]:
    """Returns the metadata of the columns in a group of rows."""
    wanted = {".".join(column.path) for column in columns}
    chunks = [row_group.column(number) for number in range(row_group.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema in wanted]


DICTIONARY_PAGE = 2  # type of a page


def dictionary_bytes(file: Any, chunk: Any) -> int:
    """Returns the size of the texts that a chunk of a column stores once for many rows.

    The metadata has only the size of all pages, so it is read from the header of the page, which is
    in Thrift's compact protocol: its first two fields are the type and the size, each a byte for
    the field and a zigzag number of 7 bits a byte, the lowest first.
    """
    offset = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    header = iter(file.read_at(16, offset))
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


# ---- Arrow ----

FILE_MAGIC = (
    b"ARROW1"  # of the file format, which is also Feather's of version 2; a stream has none
)


def read_arrow(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the rows of an Arrow file as records: the stream or the file format."""
    yield from _records(path, arrow_rows(path, options, begin.offset), begin)


def arrow_rows(
    path: Path, options: ReadOptions, start: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the rows from number `start` on, as `parquet_rows` does."""
    ipc = import_optional("pyarrow.ipc", "parquet")
    pyarrow = import_optional("pyarrow", "parquet")
    limit = max(MAX_COLUMN_BYTES, max_document_bytes(path))
    # Mapped, since a file may be a single batch, and only some columns of it are read.
    with _opened(path, mapped=True) as file:
        magic = file.read_at(len(FILE_MAGIC), 0)
    feather = formats.FEATHER_1
    if magic.startswith(feather.magic):
        raise ConfigError(f"{sources.name_of(path)}: is {feather.name}; {feather.way_out}")
    is_file = magic == FILE_MAGIC
    open_reader = ipc.open_file if is_file else ipc.open_stream
    # A stream of a store is read ahead.
    is_ahead = sources.is_stored(path) and not is_file
    with sources.open_source(path) if is_ahead else _opened(path, mapped=True) as file:
        try:
            file.seek(0)
            schema = open_reader(file).schema
            columns = _columns(path, schema, options)
            needed = sorted({schema.get_field_index(column.path[0]) for column in columns})
            file.seek(0)
            reader = open_reader(file, options=ipc.IpcReadOptions(included_fields=needed))
            row = 0
            for batch in _batches(reader, is_file):
                first = row
                row += batch.num_rows
                if row <= start:
                    continue
                check_size(path, batch.nbytes, limit, first + 1)
                yield from _rows_of(batch, columns, first, start, file.tell())
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise _unreadable(path, "Arrow", error) from None


def _batches(reader: Any, is_file: bool) -> Iterator[Any]:
    if is_file:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _rows_of(
    batch: Any, columns: list[Column], first: int, start: int, bytes_read: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the rows of a batch that begins with row `first`, from row `start` on."""
    row = max(first, start)
    while row < first + batch.num_rows:
        part = batch.slice(row - first, ROWS)
        while part.num_rows > 1 and part.nbytes > SLICE_BYTES:
            part = part.slice(0, part.num_rows // 2)
        for values in _rows(part, columns):
            row += 1
            yield row, bytes_read, values
