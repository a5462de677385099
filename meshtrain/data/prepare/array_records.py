"""Reads ArrayRecord files, whose records are bytes: JSON objects, or texts.

They are JSON objects if the first one is.
"""

from collections.abc import Iterator
from pathlib import Path

from meshtrain import foreign
from meshtrain.data.prepare import sources
from meshtrain.data.prepare.records import (
    Position,
    ReadOptions,
    Record,
    check_size,
    decode,
    max_document_bytes,
)
from meshtrain.errors import ConfigError, import_optional

RECORDS = 64  # read at a time


def read(path: Path, options: ReadOptions, begin: Position) -> Iterator[Record]:
    """Yields the records of a file; an object of a store is copied to the local disk first."""
    library = import_optional("array_record.python.array_record_module", "data")
    name = sources.name_of(path)
    size = sources.size_of(path)
    limit = max_document_bytes(path)
    with sources.local_copy(path) as local:
        reader = library.ArrayRecordReader(str(local))
        try:
            if not reader.ok():
                reader.close()  # raises the error
            total = reader.num_records()
            is_json = total > 0 and _is_object(name, reader.read(0, 1)[0])
            if options.template and total and not is_json:
                raise ConfigError(
                    f"{name}: its records are texts, which have no fields for --template; leave it "
                    f"out"
                )
            for start in range(begin.number, total, RECORDS):
                found = reader.read(start, min(total, start + RECORDS))
                for number, data in enumerate(found, start + 1):
                    check_size(path, len(data), limit, number)
                    text, fault = (data, "") if is_json else decode(data, 0)
                    after = Position(begin.file, number, number)
                    # An estimate: records have about the same size.
                    yield Record(text, after, size * number // total, fault=fault)
        except (RuntimeError, IndexError) as error:
            cause = str(error).partition("\n")[0][:300]
            raise ConfigError(
                f"{name}: cannot be read: {cause}; repair it or leave it out"
            ) from None


def _is_object(name: str, data: bytes) -> bool:
    """Returns whether a record is a JSON object; raises ConfigError if it is one of TensorFlow."""
    if is_example(data):
        raise ConfigError(
            f"{name}: its records are tf.train.Example, which need TensorFlow; write their text as "
            f"UTF-8 or as JSON objects instead"
        )
    try:
        return isinstance(foreign.parse_json(data), dict)
    except ValueError:
        return False


def is_example(data: bytes) -> bool:
    """Returns whether a record looks like tf.train.Example.

    That is one message of Protocol Buffers, field 1: the byte 10 and the size of the rest, 7 bits
    in each byte, the lowest first.
    """
    if not data.startswith(b"\n"):
        return False
    size = 0
    for count, byte in enumerate(data[1:6]):
        size |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return size == len(data) - count - 2 > 0
    return False
