"""Read a column of text from a Parquet file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshtrain.data.tokenizer import import_optional
from meshtrain.errors import ConfigError

ROWS = 256  # rows read at a time


def read_column(path: Path, field: str, start: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields the rows of a column, beginning at row `start`: the row + 1, the number of rows, and the text or None."""
    parquet, pyarrow = (import_optional(name, "parquet") for name in ("pyarrow.parquet", "pyarrow"))
    try:
        table = parquet.ParquetFile(path)
        column = table.schema_arrow.field(field).type
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not a Parquet file with a column {field!r}: {error}") from None
    if not _is_text(column, pyarrow):
        raise ConfigError(f"{path}: column {field!r} holds {column}, not strings; set --field")
    row = 0
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if row + num_rows <= start:
            row += num_rows
            continue
        for batch in table.iter_batches(ROWS, row_groups=[group], columns=[field]):
            found = batch.column(0)
            if pyarrow.types.is_dictionary(column):
                found = found.dictionary_decode()
            for value in found.cast(pyarrow.large_binary()).to_pylist():
                row += 1
                if row > start:
                    yield row, table.metadata.num_rows, value


def _is_text(column: Any, pyarrow: Any) -> bool:
    """Returns True for strings, also if the file stores each different one once, in a dictionary."""
    if pyarrow.types.is_dictionary(column):
        column = column.value_type
    return column in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
