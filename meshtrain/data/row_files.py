"""Rows of files that can be read in any order: Arrow, Parquet and ArrayRecord.

pyarrow and array_record read the formats. Arrow files are mapped, so a row costs what it holds. A
row of Parquet costs its group of rows, which is decompressed for it; the newest groups are kept.
"""

import functools
import glob
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshtrain import foreign
from meshtrain.data import files, formats
from meshtrain.data import template as templates
from meshtrain.data.prepare import saved_datasets, tables
from meshtrain.data.prepare.array_records import is_example
from meshtrain.errors import ConfigError, import_optional

EXTRA = "rows"  # of pyproject.toml, with the packages that read the formats
ARROW = (".arrow", ".feather", ".ipc")
PARQUET = (".parquet",)
ARRAY_RECORD = (".array_record", ".arrayrecord")
MAGICS = {b"ARROW1": "arrow", b"PAR1": "parquet", b"\x83\xafp\xd1\r\x88J?": "array_record"}
NAMES = "Arrow (.arrow), Parquet (.parquet) or ArrayRecord (.array_record)"
UNIT_ROWS = 1024  # rows of a unit of work, of files without groups of rows
GROUP_BYTES = 256 << 20  # decoded groups of rows of Parquet that a process keeps
OPEN_FILES = 64  # files that a process keeps open
SHOWN_NAMES = 8  # columns listed in a message


# ---- find the files ----


def find(path: str) -> list[Path]:
    """Returns the files with rows that `path` names: a file, a folder, or a pattern with * or ?.

    They are those that `meshtrain prepare` reads, in its order: shuffled with a fixed seed, since
    training may hold out the end; the files of a saved dataset follow each other. Raises
    ConfigError if there are none, for several splits, or for another format.
    """
    found: list[Path] = []
    splits: list[saved_datasets.Split] = []
    is_skipped: set[Path] = set()
    for one in named(path, f"give files of {NAMES}"):
        if not one.is_dir():
            found.append(one)
            continue
        inside, _ = files.find(one, "*", key="data.path")
        of_folder, others = saved_datasets.find(inside)
        splits += of_folder
        others = [file for file in others if _kind_by_name(file)]
        if not others and not of_folder:
            raise ConfigError(f"data.path={path}: no file in it is {NAMES}")
        found += others
        is_skipped.update(file for file in others if not file.stat().st_size)
    units = [[file] for file in found]
    units += [together for together in files_of_splits(path, splits) if together]
    for file in (file for together in units for file in together):
        if not kind_of(file):
            raise ConfigError(
                f"data.path={path}: {file} is no file of {NAMES}; tokenize other formats with "
                f"`meshtrain prepare`, and train on its --output with "
                f"data.build=meshtrain.data.tokens:build"
            )
    order = np.random.default_rng(0).permutation(len(units))
    # Empty files of a folder have a place in the order, as in `meshtrain prepare`, and no rows.
    chosen = [file for number in order for file in units[number] if file not in is_skipped]
    if not chosen:
        raise ConfigError(f"data.path={path}: holds no rows")
    return chosen


def named(path: str, way_out: str) -> list[Path]:
    """Returns the files and folders that `path` names, itself or as a pattern with * or ?.

    Raises ConfigError with the way out for what cannot be read.
    """
    paths = [Path(path)]
    if files.path_fault(path) and any(letter in path for letter in "*?["):
        paths = [Path(one) for one in sorted(glob.glob(path, recursive=True))]
        if not paths:
            raise ConfigError(f"data.path={path}: no files match this pattern")
    for one in paths:
        fault = files.path_fault(one)
        if fault:
            raise ConfigError(f"data.path={path}: {fault}; {way_out}")
    return paths


def files_of_splits(path: str, splits: list[saved_datasets.Split]) -> list[list[Path]]:
    """Returns the files of each saved dataset, in the order of its rows.

    Raises ConfigError if one has several splits, or lacks a file.
    """
    found = [split.files for split in saved_datasets.chosen(splits, "", key="data.path")]
    for file in (file for together in found for file in together):
        if not file.is_file():
            raise ConfigError(
                f"data.path={path}: {file.parent / saved_datasets.STATE} lists {file.name!r}, "
                f"which is missing; copy it again"
            )
    return found


def kind_of(path: Path) -> str:
    """Returns "arrow", "parquet", "array_record", or "" for another file."""
    kind = _kind_by_name(path)
    if kind:
        return kind
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError:
        return ""
    return next((kind for magic, kind in MAGICS.items() if start.startswith(magic)), "")


def _kind_by_name(path: Path) -> str:
    name = path.name.lower()
    if name.endswith(ARROW):
        return "arrow"
    if name.endswith(PARQUET):
        return "parquet"
    # Also data.array_record-00000-of-00010.
    return "array_record" if any(ending in name for ending in ARRAY_RECORD) else ""


# ---- what a row's text is ----


@dataclass(frozen=True)
class TextOf:
    """What of a row is its text: a field, or a template that joins several."""

    field: str
    template: str = ""  # "": the field

    @functools.cached_property
    def parsed(self) -> templates.Template | None:
        return templates.parse(self.template) if self.template else None

    @property
    def fields(self) -> tuple[str, ...]:
        return self.parsed.fields if self.parsed else (self.field,)

    def text(self, row: Mapping[str, Any]) -> str:
        """Returns the text of a row; raises ValueError if it has none."""
        if self.parsed:
            text = self.parsed.render(row)
        else:
            text = templates.field_of(row, self.field)
            if not isinstance(text, str):
                raise ValueError(f"{self.field} is {type(text).__name__}, not a string")
        if not text:
            raise ValueError(f"{self.template or self.field} is empty")
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
            raise ValueError("invalid UTF-8: half of a surrogate pair") from None
        return text


class AnyOf(NamedTuple):
    """Columns of any type, of which a file may lack some."""

    fields: tuple[str, ...]
    needed: tuple[tuple[str, ...], ...]  # a file has all columns of one of these


class Fault(NamedTuple):
    """Why a row cannot be used, in place of its fields."""

    reason: str


class RowFile(Protocol):
    """An open file."""

    num_rows: int
    units: np.ndarray  # (units + 1,) int64: first rows of what is read together, then all rows
    bytes_per_read: int  # bytes that are decompressed for any one row; 0: none

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any] | Fault]:
        """Returns the needed fields of rows; numbers ascend."""
        ...


def open_file(path: Path, wanted: TextOf | AnyOf, groups: "Groups | None" = None) -> RowFile:
    """Returns the rows of a file; a ConfigError names a column that is missing or has no text.

    `groups` keeps decoded groups of rows, perhaps of several files.
    """
    try:
        match kind_of(path):
            case "arrow":
                return _ArrowFile(path, wanted)
            case "parquet":
                return _ParquetFile(path, wanted, groups or Groups())
            case _:
                return _ArrayRecordFile(path, wanted)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; make it readable") from None


class OpenFiles:
    """The rows of several files as one sequence; at most OPEN_FILES are open at a time."""

    def __init__(self, paths: Sequence[Path], wanted: TextOf, rows: np.ndarray):
        """`rows` (files + 1,) are the first row of each file, and then all rows."""
        self._rows = rows
        groups = Groups()
        self._open = functools.lru_cache(OPEN_FILES)(
            lambda file: open_file(paths[file], wanted, groups)
        )

    def read(self, numbers: np.ndarray) -> list[Mapping[str, Any] | Fault]:
        """Returns the fields of rows; numbers ascend."""
        file_of = np.searchsorted(self._rows, numbers, side="right") - 1
        found: list[Mapping[str, Any] | Fault] = []
        for file in np.unique(file_of):
            found += self._open(int(file)).read(numbers[file_of == file] - self._rows[file])
        return found


def place(paths: Sequence[Path], rows: np.ndarray, number: int) -> str:
    """Returns FILE:ROW, counted from 1 in each file; `rows` are the first rows of the files."""
    file = int(np.searchsorted(rows, number, side="right")) - 1
    return f"{paths[file]}:{number - rows[file] + 1}"


# ---- Arrow ----


class _ArrowFile:
    """A mapped Arrow file, or stream, as `datasets` saves."""

    def __init__(self, path: Path, wanted: TextOf | AnyOf):
        self._pyarrow = import_optional("pyarrow", EXTRA)
        ipc = import_optional("pyarrow.ipc", EXTRA)
        self._path = path
        if not path.stat().st_size:
            raise ConfigError(f"{path}: is empty; leave it out")
        source = self._pyarrow.memory_map(str(path))
        try:
            magic = source.read(6)
            feather = formats.FEATHER_1
            if magic.startswith(feather.magic):
                raise ConfigError(f"{path}: is {feather.name}; {feather.way_out}")
            if magic == b"ARROW1":
                source.seek(0)
                self._file = ipc.open_file(source)
                schema = self._file.schema
                self._batch = functools.lru_cache(8)(self._file.get_batch)
                sizes = [self._batch(n).num_rows for n in range(self._file.num_record_batches)]
            else:
                if _is_compressed(path, self._pyarrow):
                    raise ConfigError(
                        f"{path}: is a compressed stream, which would be decompressed into memory; "
                        f"write it as an Arrow file (pyarrow.ipc.new_file) or as Parquet, or "
                        f"tokenize it with `meshtrain prepare`"
                    )
                source.seek(0)
                stream = ipc.open_stream(source)
                schema = stream.schema
                batches = list(stream)  # parts of the map
                self._batch = batches.__getitem__
                sizes = [batch.num_rows for batch in batches]
        except (self._pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{path}: not a complete Arrow file: {str(error).splitlines()[0]}; copy it again"
            ) from None
        self._fields = _fields(path, schema, wanted, self._pyarrow)
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.num_rows = int(self._starts[-1])
        self.units = _units(self.num_rows)
        self.bytes_per_read = 0

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any] | Fault]:
        batch_of = np.searchsorted(self._starts, numbers, side="right") - 1
        rows: list[Mapping[str, Any] | Fault] = []
        for number in np.unique(batch_of):
            within = np.asarray(numbers)[batch_of == number] - self._starts[number]
            batch = self._batch(int(number))
            columns = {one.column: batch.column(one.column) for one in self._fields}
            rows += _take(columns, self._fields, within)
        return rows


def _is_compressed(path: Path, pyarrow: Any) -> bool:
    """Returns whether the first batch of a stream is compressed: reading it then takes memory."""
    before = pyarrow.total_allocated_bytes()
    batch = next(iter(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))), None)
    if batch is None or not batch.nbytes:
        return False
    return pyarrow.total_allocated_bytes() - before >= batch.nbytes / 2


# ---- Parquet ----


class _ParquetFile:
    def __init__(self, path: Path, wanted: TextOf | AnyOf, groups: "Groups"):
        self._pyarrow = import_optional("pyarrow", EXTRA)
        parquet = import_optional("pyarrow.parquet", EXTRA)
        try:
            self._file = parquet.ParquetFile(path)
        except (self._pyarrow.ArrowInvalid, ValueError) as error:
            raise ConfigError(
                f"{path}: not a complete Parquet file: {str(error).splitlines()[0]}; copy it again"
            ) from None
        self._fields = _fields(path, self._file.schema_arrow, wanted, self._pyarrow)
        self._columns = tuple(dict.fromkeys(one.column for one in self._fields))
        self._path = path
        self._groups = groups
        metadata = self._file.metadata
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self.units = np.cumsum([0, *sizes], dtype=np.int64)
        self.num_rows = int(self.units[-1])
        sizes = [self._group_bytes(metadata.row_group(n)) for n in range(metadata.num_row_groups)]
        self.bytes_per_read = max(sizes, default=0)

    def _group_bytes(self, group: Any) -> int:
        """Returns the size of the columns that are read, in a group of rows."""
        chunks = [group.column(number) for number in range(group.num_columns)]
        return sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if {chunk.path_in_schema, chunk.path_in_schema.partition(".")[0]} & {*self._columns}
        )

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any] | Fault]:
        group_of = np.searchsorted(self.units, numbers, side="right") - 1
        rows: list[Mapping[str, Any] | Fault] = []
        for group in np.unique(group_of):
            within = np.asarray(numbers)[group_of == group] - self.units[group]
            columns = self._groups.get((self._path, int(group)), self._read_group)
            rows += _take(columns, self._fields, within)
        return rows

    def _read_group(self, key: tuple[Path, int]) -> dict[str, Any]:
        _, group = key
        try:
            table = self._file.read_row_group(group, columns=[*self._columns], use_threads=False)
            return {name: table.column(name) for name in self._columns}
        except (self._pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{self._path}: group {group} of its rows cannot be read: "
                f"{str(error).splitlines()[0]}; copy it again"
            ) from None


class Groups:
    """The newest decoded groups of rows, up to GROUP_BYTES and at least one."""

    def __init__(self):
        self._kept: OrderedDict[Any, dict[str, Any]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        columns = read(key)
        self._kept[key] = columns
        self._bytes += _num_bytes(columns)
        while self._bytes > GROUP_BYTES and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._bytes -= _num_bytes(old)
        return columns


def _num_bytes(columns: Mapping[str, Any]) -> int:
    return sum(column.nbytes for column in columns.values())


# ---- columns of both ----


class _Field(NamedTuple):
    """Where a field is, and what makes the value that is written of pyarrow's; None: as it is."""

    name: str
    column: str
    parts: tuple[str, ...]  # of the structs in the column
    written: Callable[[Any], Any] | None


def _fields(path: Path, schema: Any, wanted: TextOf | AnyOf, pyarrow: Any) -> list[_Field]:
    """Returns where the wanted fields are; raises ConfigError for one that holds no text."""
    if isinstance(wanted, AnyOf):
        if not any({*names} <= {*schema.names} for names in wanted.needed):
            expected = ", nor ".join(" and ".join(names) for names in wanted.needed)
            known = ", ".join(schema.names[:SHOWN_NAMES])
            raise ConfigError(
                f"{path}: has no column {expected}; rename its columns, or leave it out: "
                f"{known or 'it has none'}"
            )
        return [_Field(name, name, (), None) for name in wanted.fields if name in schema.names]
    fields = []
    repeated = {name for name in schema.names if schema.names.count(name) > 1}
    for field in wanted.fields:
        name = field if field in schema.names else field.partition(".")[0]
        if name not in schema.names:
            known = ", ".join(schema.names[:SHOWN_NAMES])
            raise ConfigError(
                f"{path}: no column {field!r}; set data.field or data.template to columns that it "
                f"has: {known or 'it has none'}"
            )
        if name in repeated:
            raise ConfigError(f"{path}: has several columns {name!r}; write it with one of them")
        kind = schema.field(name).type
        parts = () if name == field else tuple(field.split(".")[1:])
        for part in parts:
            if not pyarrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
                raise ConfigError(f"{path}: column {name!r} holds {kind}, which has no {part!r}")
            kind = kind.field(part).type
        if not _is_fitting(kind, pyarrow, with_numbers=bool(wanted.template)):
            expected = "texts or numbers" if wanted.template else "strings"
            raise ConfigError(
                f"{path}: column {field!r} holds {kind}, not {expected}; set data.field or "
                f"data.template to other columns: {', '.join(schema.names[:SHOWN_NAMES])}"
            )
        fields.append(_Field(field, name, parts, tables.as_written(tables.value_type(kind))))
    return fields


def _is_fitting(kind: Any, pyarrow: Any, *, with_numbers: bool) -> bool:
    kind = tables.value_type(kind)
    # Nulls without a type are no text in any row.
    is_text = tables.is_text(kind) and not pyarrow.types.is_null(kind)
    return is_text or (with_numbers and tables.is_number(kind))


def _units(num_rows: int) -> np.ndarray:
    return np.append(np.arange(0, num_rows, UNIT_ROWS, dtype=np.int64), num_rows)


def _take(
    columns: Mapping[str, Any], fields: Sequence[_Field], rows: np.ndarray
) -> list[Mapping[str, Any] | Fault]:
    """Returns the fields of rows; a Fault for a row with a text that is not UTF-8."""
    found: list[Mapping[str, Any] | Fault] = []
    for number in rows.tolist():
        try:
            # One value at a time: pyarrow's `take` has not all types.
            found.append({one.name: _value(columns[one.column][number], one) for one in fields})
        except UnicodeDecodeError as error:
            found.append(Fault(f"invalid UTF-8 at byte {error.start}"))
    return found


def _value(scalar: Any, field: _Field) -> Any:
    for part in field.parts:
        if not scalar.is_valid:
            return None
        scalar = scalar[part]
    value = scalar.as_py()
    if field.written is None or value is None:
        return value
    return value.decode() if isinstance(value, bytes) else field.written(value)


# ---- ArrayRecord ----


class _ArrayRecordFile:
    """Records that are texts, or objects in JSON; the first record shows which."""

    def __init__(self, path: Path, wanted: TextOf | AnyOf):
        module = import_optional("array_record.python.array_record_module", EXTRA)
        if not path.stat().st_size:
            raise ConfigError(f"{path}: is empty; leave it out")
        # Rows are read in any order: reading ahead would read what is not needed.
        self._reader = module.ArrayRecordReader(str(path), options="readahead_buffer_size:0")
        if not self._reader.ok():
            raise ConfigError(f"{path}: not a complete ArrayRecord file; copy it again")
        self._path = path
        self.num_rows = self._reader.num_records()
        self.units = _units(self.num_rows)
        self.bytes_per_read = 0
        first = self._reader.read([0])[0] if self.num_rows else b""
        if is_example(first):
            raise ConfigError(
                f"{path}: its records are tf.train.Example, which need TensorFlow; write their "
                f"text as UTF-8 or as objects in JSON instead"
            )
        self._is_json = formats.is_json_object(first)
        self._field = wanted.field if isinstance(wanted, TextOf) else ""
        has_fields = isinstance(wanted, AnyOf) or wanted.template
        if has_fields and self.num_rows and not self._is_json:
            raise ConfigError(
                f"{path}: its records are no objects in JSON, so they have no fields; leave "
                f"data.template out, or write objects"
            )

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any] | Fault]:
        try:
            records = self._reader.read([*map(int, numbers)])
        except RuntimeError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}; copy it again") from None
        return [self._parsed(record) for record in records]

    def _parsed(self, record: bytes) -> Mapping[str, Any] | Fault:
        if self._is_json:
            try:
                parsed = foreign.parse_json(record)
            except ValueError as error:
                return Fault(str(error))
            return parsed if isinstance(parsed, dict) else Fault("is no object")
        try:
            return {self._field: record.decode()}
        except UnicodeDecodeError as error:
            return Fault(
                f"invalid UTF-8 at byte {error.start}; records are read as texts, or as objects in "
                f"JSON"
            )
