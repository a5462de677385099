"""Files of rows with a column of text, in each format that training reads without preparing."""

import json

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra rows: pyarrow")
pytest.importorskip("pyarrow.parquet")

FORMATS = ("stream.arrow", "file.arrow", "compressed.arrow", "rows.parquet", "rows.array_record")


def texts(count=400, *, seed=0, longest=120):
    """Returns texts of random words with letters of one to three bytes."""
    rng = np.random.default_rng(seed)
    words = ["one", "zwölf", "drei", "三", "quatre", "été", "seven,", "eight.\n"]
    return [" ".join(rng.choice(words, rng.integers(1, longest // 6))) for _ in range(count)]


def write(folder, name, table):
    """Writes columns, a dict, as a file whose name says its format; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith(".array_record"):
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        names = list(table)
        for values in zip(*table.values(), strict=True):
            writer.write(json.dumps(dict(zip(names, values, strict=True))).encode())
        writer.close()
        return path
    table = table if isinstance(table, pyarrow.Table) else pyarrow.table(table)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, path, row_group_size=70)
        return path
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd" if "compressed" in name else None)
    new = pyarrow.ipc.new_stream if "stream" in name else pyarrow.ipc.new_file
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        new(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table, 33)
    return path
