"""What is read from the inputs, record by record, and the text of a record."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain import foreign
from meshtrain.data import template
from meshtrain.data.prepare import sources
from meshtrain.data.template import Template
from meshtrain.errors import ConfigError

# The largest document has MAX_DOCUMENT_BYTES or MAX_RATIO times the size of its file, whichever is
# more. Text is compressed to a tenth, so a larger one was made to fill the memory.
MAX_DOCUMENT_BYTES = 16 << 20
MAX_RATIO = 32
MAX_LINE_BYTES = 256 << 20  # of JSON lines: a file with holes has a large size of its own


class Position(NamedTuple):
    """The start of a document in the inputs; the journal of a prepared folder stores it."""

    file: int = 0  # index in the list of inputs
    offset: int = 0  # bytes after decompression; rows of a Parquet, Arrow or ArrayRecord file
    number: int = 0  # lines, documents or rows before it


START = Position()


class Record(NamedTuple):
    """A document, or a piece of a long one, as read from a file."""

    # JSON: an object as bytes. A row of a table: its values by the names of the fields that are
    # read, texts as bytes or str. Other files: the text.
    data: bytes | str | dict[str, Any]
    # Where the next document begins. Its `number` is the number of this document, counted from 1.
    next_position: Position
    bytes_read: int  # read from the file so far, before decompression
    starts_document: bool = True  # False for a piece after the first
    ends_document: bool = True  # False for a piece before the last
    fault: str = ""  # why the record cannot be used; "": it can


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read from the files."""

    field: str  # the field (JSON) or column (tables) with the text, without a template
    separator: str  # between the documents of a text file; "": one document per file
    forbidden: str  # a character that documents must not contain; "": none
    template: str = ""  # the text of a document with {NAME} for its fields; "": none

    @cached_property
    def parsed_template(self) -> Template | None:
        return template.parse(self.template) if self.template else None

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that are read."""
        return self.parsed_template.fields if self.parsed_template else (self.field,)


def max_document_bytes(path: Path) -> int:
    """Returns how large a document of a file may be: small compressed files may be bombs."""
    return max(MAX_DOCUMENT_BYTES, MAX_RATIO * sources.size_of(path))


def check_size(path: Path, size: int, limit: int, number: int) -> None:
    if size > limit:
        raise ConfigError(
            f"{sources.name_of(path)}:{number}: is larger than {limit:,} bytes, in a file of "
            f"{sources.size_of(path):,}; leave the file out, or decompress it"
        )


def decode(data: bytes, offset: int) -> tuple[str, str]:
    """Returns the text of bytes at an offset of the file, and its fault or ""."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8 at byte {offset + error.start}"


def size_of(record: Record) -> int:
    """Returns about how large a record is, in bytes."""
    if isinstance(record.data, dict):
        return sum(len(one) if isinstance(one, bytes | str) else 8 for one in record.data.values())
    return len(record.data)


def text_of(record: Record, options: ReadOptions) -> str:
    """Returns the text of a record; raises ValueError if it has none or the text is faulty."""
    if record.fault:
        raise ValueError(record.fault)
    data: Any = record.data
    if isinstance(data, bytes):
        data = foreign.parse_json(data)
    elif isinstance(data, dict):
        data = {name: _decoded(value) for name, value in data.items()}
    name = options.field
    if options.parsed_template:
        name = "the text of --template"
        text = options.parsed_template.render(data)
    elif isinstance(record.data, str):
        text = record.data
    else:
        text = template.field_of(data, options.field)
    if not isinstance(text, str):
        raise ValueError(f"{name} is {type(text).__name__}, not a string")
    if not text:
        raise ValueError(f"{name} is empty")
    if options.forbidden and options.forbidden in text:
        raise ValueError(f"holds {options.forbidden!r}, which ends documents")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise ValueError("invalid UTF-8: half of a surrogate pair") from None
    return text


def _decoded(value: Any) -> Any:
    """Returns the text of the bytes in a row of a table."""
    if not isinstance(value, bytes):
        return value
    text, fault = decode(value, 0)
    if fault:
        raise ValueError(fault)
    return text
