"""Formats that `meshtrain prepare` reads: the same texts give the same tokens from each of them."""

import bz2
import csv
import gzip
import json
import lzma
import struct

import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

from meshtrain.data.prepare import inputs, json_records, records, streams, tables
from tests.lib.prepare import content, prose, run, texts

array_record = pytest.importorskip(
    "array_record.python.array_record_module", reason="needs the extra `data`"
)
zstandard = pytest.importorskip("zstandard", reason="needs the extra `data`")

TEXTS = [
    "first\n",
    'quoted "text", with a comma\tand a tab',
    "two\r\nlines\n\nand more  ",
    "zweitens: äöü 日本語 👍🏽",
    "\\n {braces} [1, 2]",
    "b" * 5000,
    "last",
]


# ---- writers ----


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def json_array(path, rows):
    path.write_text(json.dumps(rows))


def pretty_array(path, rows):
    path.write_text("\ufeff\n " + json.dumps(rows, indent=2, ensure_ascii=False) + "\n\n")


def table_of(delimiter):
    def write(path, rows):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)

    return write


def arrow_stream(path, rows):
    with ipc.new_stream(path, pyarrow.Table.from_pylist(rows).schema) as writer:
        writer.write_table(pyarrow.Table.from_pylist(rows), max_chunksize=2)


def arrow_file(path, rows):
    with ipc.new_file(path, pyarrow.Table.from_pylist(rows).schema) as writer:
        writer.write_table(pyarrow.Table.from_pylist(rows), max_chunksize=3)


def array_records(path, rows, of_text=False):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:2")
    for row in rows:
        writer.write((row["text"] if of_text else json.dumps(row)).encode())
    writer.close()


def compressed(function, write):
    def write_compressed(path, rows):
        plain = path.with_name("plain" + path.suffixes[0])
        write(plain, rows)
        data = plain.read_bytes()
        plain.unlink()
        # Two streams, as parallel tools write them.
        path.write_bytes(function(data[:100]) + function(data[100:]))

    return write_compressed


COMPRESS = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
WRITERS = {
    "a.jsonl": json_lines,
    "a.json": json_array,
    "pretty.json": pretty_array,
    "a.csv": table_of(","),
    "a.tsv": table_of("\t"),
    "a.parquet": lambda path, rows: parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=2
    ),
    "stream.arrow": arrow_stream,
    "file.arrow": arrow_file,
    "a.feather": lambda path, rows: feather.write_feather(
        pyarrow.Table.from_pylist(rows), path, compression="lz4"
    ),
    "a.array_record": array_records,
    "text.array_record-00000-of-00001": lambda path, rows: array_records(path, rows, of_text=True),
    **{f"a.jsonl.{name}": compressed(one, json_lines) for name, one in COMPRESS.items()},
    **{f"a.json.{name}": compressed(one, pretty_array) for name, one in COMPRESS.items()},
    **{f"a.csv.{name}": compressed(one, table_of(",")) for name, one in COMPRESS.items()},
}


def write(folder, name, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    rows = [{"n": number, "text": text} for number, text in enumerate(texts)]
    WRITERS[name](folder / name, rows)
    return folder / name


def tokens_of(folder):
    """The shards and the index, without the manifest, which has a hash of the inputs."""
    return {name: data for name, data in content(folder).items() if name[0].isdigit()}


# ---- the same tokens from each format ----


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert run(write(folder / "in", "a.jsonl"), f"--output={folder / 'out'}", SHARDS) == 0
    return tokens_of(folder / "out")


SHARDS = "--shard_tokens=60"


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_tokens(tmp_path, monkeypatch, reference, name, chunk):
    monkeypatch.setattr(streams, "CHUNK", chunk)
    write(tmp_path / "in", name)
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}", SHARDS) == 0
    assert texts(tmp_path / "out") == TEXTS
    assert tokens_of(tmp_path / "out") == reference


@pytest.mark.parametrize("name", WRITERS)
def test_reading_resumes_after_any_record(tmp_path, monkeypatch, name):
    monkeypatch.setattr(streams, "CHUNK", 50)
    path = write(tmp_path, name)
    options = inputs.ReadOptions("text", "", "")
    found = list(inputs.read_records([path], options, len))
    assert [records.text_of(one, options) for one in found] == TEXTS
    for number, record in enumerate(found, 1):
        rest = list(inputs.read_records([path], options, len, record.next_position))
        assert [one.data for one in rest] == [one.data for one in found[number:]]
        assert [one.next_position for one in rest] == [one.next_position for one in found[number:]]


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("separator", ["", "<|end|>"])
def test_compressed_text_is_read(tmp_path, compress, separator):
    path = tmp_path / f"a.txt.{compress}"
    text = f"one{separator}zwei ä{separator}three" * 2
    path.write_bytes(COMPRESS[compress](text.encode()))
    flags = [path, f"--output={tmp_path / 'out'}", f"--separator={separator}"]
    assert run(*flags) == 0
    assert texts(tmp_path / "out") == (text.split(separator) if separator else [text])


# ---- compressed files ----


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("damage", ["truncated", "not compressed"])
def test_a_damaged_compressed_file_is_an_error_of_one_line(tmp_path, capsys, compress, damage):
    path = tmp_path / f"a.jsonl.{compress}"
    lines = [json.dumps({"text": prose(number, 9)}) + "\n" for number in range(999)]
    data = COMPRESS[compress]("".join(lines).encode())
    path.write_bytes(data[:-200] if damage == "truncated" else b"not compressed")
    assert run(path, f"--output={tmp_path / 'out'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: cannot be read: " in line


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("damage", ["header", "cut header", "text", "last byte cut"])
def test_what_follows_a_stream_is_another_stream_or_an_error(tmp_path, capsys, compress, damage):
    path = tmp_path / f"a.jsonl.{compress}"
    first, second = (COMPRESS[compress](b'{"text": "%s"}\n' % name) for name in (b"a", b"b"))
    after = {
        "header": bytes([second[0] ^ 1]) + second[1:],
        "cut header": second[:3],
        "text": b"garbage",
        "last byte cut": second[:-1],
    }
    path.write_bytes(first + after[damage])
    assert run(path, f"--output={tmp_path / 'out'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: cannot be read: " in line


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("zeros", [0, 4, 8, 20_000])
def test_padding_of_xz_is_no_damage(tmp_path, monkeypatch, chunk, zeros):
    monkeypatch.setattr(streams, "CHUNK", chunk)
    path = tmp_path / "a.txt.xz"
    part = lzma.compress(prose(1, 99).encode()) + bytes(zeros)
    path.write_bytes(part * 3)
    with streams.open_at(path, 0) as (file, _):
        assert file.read().decode() == prose(1, 99) * 3


@pytest.mark.parametrize("zeros", [1, 3, 20_001])
def test_zeros_that_are_no_padding_of_xz_are_an_error(tmp_path, capsys, zeros):
    path = tmp_path / "a.txt.xz"
    for data in (lzma.compress(b"a") + bytes(zeros) + lzma.compress(b"b"), bytes(400)):
        path.write_bytes(data)
        assert run(path, f"--output={tmp_path / 'out'}") == 2
        assert f"{path}: cannot be read: zero bytes where" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.txt"])
@pytest.mark.parametrize("compress", COMPRESS)
def test_a_bomb_is_rejected_before_it_fills_the_memory(tmp_path, capsys, compress, name):
    path = tmp_path / f"{name}.{compress}"
    begin = {"a.jsonl": b'{"text": "', "a.csv": b'text\n"', "a.json": b'[{"text": "', "a.txt": b""}
    data = begin[name] + b"a" * (40 << 20)
    path.write_bytes(COMPRESS[compress](data))
    tokenizer = "--separator=#" if name == "a.txt" else "--separator="
    assert run(path, f"--output={tmp_path / 'out'}", tokenizer) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is larger than 16,777,216 bytes, in a file of " in line


def test_output_of_zstd_is_made_in_parts(tmp_path):
    """A few bytes of a frame may become many megabytes."""
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(bytes(400 << 20)))
    assert path.stat().st_size < 1 << 16
    with streams.open_at(path, 0) as (file, _):
        assert len(file.raw.read(1 << 20)) == 1 << 20
        assert len(file.raw._output) < 40 << 20


# ---- JSON arrays ----


@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 20])
def test_an_array_of_texts_is_documents(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(streams, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(json.dumps(TEXTS[:5]))
    assert run(tmp_path / "a.json", f"--output={tmp_path / 'out'}", "--shard_tokens=20") == 0
    assert texts(tmp_path / "out") == TEXTS[:5]


@pytest.mark.parametrize("text", ["[]", " [ ] \n"])
def test_an_empty_array_has_no_documents(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    options = inputs.ReadOptions("text", "", "")
    assert list(json_records.read(tmp_path / "a.json", options, records.START)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[{"text": "a"}, {"text"', "at byte 23: not JSON: "),
        ('[{"text": "a"}', "at byte 14: ends within the array"),
        ('[{"text": "a"},', "at byte 15: ends within the array"),
        ('[{"text": "a"} {"text": "b"}]', "at byte 15: expected , or ], not '{'"),
        ('[{"text": "ä"}, nothing, {"text": "b"}]' + " " * 100, "at byte 17: not JSON: Expecting"),
        ('[{"text": "a"}] {"text": "b"}', "at byte 16: more text after the end of the array"),
        ("[" * 200_000, "nested more than 100 levels deep"),
    ],
)
def test_a_damaged_array_is_an_error_that_names_the_byte(tmp_path, capsys, text, fault):
    (tmp_path / "a.json").write_text(text)
    assert run(tmp_path / "a.json", f"--output={tmp_path / 'out'}", "--skip_bad") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'a.json'}: not a JSON array: " in error and fault in error


def test_faulty_elements_of_an_array_are_named_by_their_number(tmp_path, capsys):
    data = b'[{"text": "good"}, 7, {"body": 1}, {"text": "\xff"}, null, 12.5, {"text": "too"}]'
    (tmp_path / "a.json").write_bytes(data)
    assert run(tmp_path / "a.json", f"--output={tmp_path / 'out'}", "--skip_bad") == 0
    error = capsys.readouterr().err
    for fault in (
        *("2: no field 'text'", "3: no field 'text' among 'body'", "4: invalid UTF-8 at byte 10"),
        *("5: no field 'text'", "6: no field 'text'"),
    ):
        assert f"skipped {tmp_path / 'a.json'}:{fault}" in error
    assert texts(tmp_path / "out") == ["good", "too"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_integer_that_python_does_not_read_is_a_fault_of_its_row(tmp_path, capsys, name):
    rows = [b'{"text": "good"}', b'{"text": "bad", "n": ' + b"9" * 5000 + b"}", b'{"text": "too"}']
    lines = name == "a.jsonl"
    (tmp_path / name).write_bytes(b"\n".join(rows) if lines else b"[" + b", ".join(rows) + b"]")
    flags = [tmp_path / name, f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    line = f"{tmp_path / name}:2: holds an integer of more than 4,300 digits"
    assert line in capsys.readouterr().err.splitlines()
    assert run(*flags, "--skip_bad") == 0
    assert texts(tmp_path / "out") == ["good", "too"]


@pytest.mark.parametrize("chunk", range(1, 12))
def test_an_element_at_the_end_of_a_chunk_is_complete(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(streams, "CHUNK", chunk)
    (tmp_path / "a.json").write_text('[123456, 7.25, {"text": "a"}]')
    options = inputs.ReadOptions("text", "", "")
    found = list(json_records.read(tmp_path / "a.json", options, records.START))
    assert [one.data for one in found] == [b"123456", b"7.25", b'{"text": "a"}']


def test_an_array_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK", 1000)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 100}] * 3000))
    sizes = []
    element = json_records._Text.element

    def measured(text, *arguments):
        sizes.append(len(text._buffer))
        return element(text, *arguments)

    monkeypatch.setattr(json_records._Text, "element", measured)
    options = inputs.ReadOptions("text", "", "")
    found = list(json_records.read(tmp_path / "a.json", options, records.START))
    assert len(found) == 3000 and max(sizes) < 4000


# ---- tables of text ----


def test_faulty_rows_of_csv_are_named_and_the_others_read(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(
        b'n,text\r\n1,good\r\n2\r\n3,"two\r\nlines"\r\n\r\n4,"quoted"wrong\r\n5,\xff\r\n6,\r\n7,too\r\n'
    )
    flags = [tmp_path / "a.csv", f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    capsys.readouterr()
    assert run(*flags, "--skip_bad") == 0
    error = capsys.readouterr().err
    for fault in (
        "3: has 1 fields, but the first row has 2",
        "6: not a row of a table: ',' expected after '\"'",
        "7: invalid UTF-8 at byte 56",
        "8: text is empty",
    ):
        assert f"skipped {tmp_path / 'a.csv'}:{fault}" in error
    assert texts(tmp_path / "out") == ["good", "two\r\nlines", "too"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (
            "a;text\n1;x\n",
            "no column 'text' among 'a;text', the names in its first row; set --field",
        ),
        ("text,text\n1,x\n", "2 columns are named 'text'; rename them"),
        ('"text\n1,x\n', ":1: not a row of a table: unexpected end of data"),
    ],
)
def test_a_table_without_the_column_is_rejected(tmp_path, capsys, data, fault):
    (tmp_path / "a.csv").write_text(data)
    assert run(tmp_path / "a.csv", f"--output={tmp_path / 'out'}") == 2
    assert f"{tmp_path / 'a.csv'}" in (error := capsys.readouterr().err) and fault in error


def test_long_fields_and_a_header_alone_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
    (tmp_path / "b.csv").write_text("text\n")
    assert run(tmp_path, f"--output={tmp_path / 'out'}") == 0
    assert texts(tmp_path / "out") == ["x" * 300_000]


# ---- columns ----


def columns():
    """Columns with the same texts, of each type that holds them."""
    plain = pyarrow.array(TEXTS)
    yield "large_string", plain.cast(pyarrow.large_string())
    yield "string_view", plain.cast(pyarrow.string_view())
    yield "binary", plain.cast(pyarrow.binary())
    yield "large_binary", plain.cast(pyarrow.large_binary())
    yield "dictionary", plain.dictionary_encode()
    yield "chunks", pyarrow.chunked_array([TEXTS[:2], [], TEXTS[2:]])


@pytest.mark.parametrize("write", [parquet.write_table, feather.write_feather])
@pytest.mark.parametrize("name", [name for name, _ in columns()])
def test_a_column_of_any_type_of_text_is_read(tmp_path, reference, write, name):
    path = tmp_path / ("a.parquet" if write is parquet.write_table else "a.arrow")
    write(pyarrow.table({"x": range(len(TEXTS)), "text": dict(columns())[name]}), path)
    assert run(path, f"--output={tmp_path / 'out'}", SHARDS) == 0
    assert tokens_of(tmp_path / "out") == reference


def test_a_run_length_encoded_column_of_arrow_is_read(tmp_path):
    encoded = pyarrow.compute.run_end_encode(pyarrow.array(["a", "a", None, "b"]))
    table = pyarrow.table({"text": encoded})
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert run(tmp_path / "a.arrow", f"--output={tmp_path / 'out'}", "--skip_bad") == 0
    assert texts(tmp_path / "out") == ["a", "a", "b"]


NESTED = [
    {"a": {"b": {"c": "deep"}, "x": 1}, "a.b": "dotted"},
    {"a": {"b": None, "x": 2}, "a.b": "also"},
    {"a": None, "a.b": "too"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "stream.arrow", "a.feather"])
def test_a_field_within_a_struct_is_read_and_a_null_on_the_way_is_named(tmp_path, capsys, name):
    WRITERS[name](tmp_path / name, NESTED)
    flags = [tmp_path / name, "--skip_bad"]
    assert run(*flags, f"--output={tmp_path / 'c'}", "--field=a.b.c") == 0
    assert texts(tmp_path / "c") == ["deep"]
    assert capsys.readouterr().err.count("skipped ") == 2
    assert run(*flags, f"--output={tmp_path / 'b'}", "--field=a.b") == 0
    assert texts(tmp_path / "b") == ["dotted", "also", "too"]  # the column of this name comes first
    assert run(*flags, f"--output={tmp_path / 'd'}", "--field=a.b.d") == 2
    assert "a.b.d" in capsys.readouterr().err


@pytest.mark.parametrize("write", [parquet.write_table, feather.write_feather])
def test_nulls_and_columns_without_text_are_named(tmp_path, capsys, write):
    path = tmp_path / ("a.parquet" if write is parquet.write_table else "a.arrow")
    table = {
        "text": ["one", None, "", "four"],
        "nothing": pyarrow.nulls(4),
        "list": [["a"]] * 4,
        "day": pyarrow.array([0] * 4, pyarrow.date32()),
    }
    write(pyarrow.table(table), path)
    assert run(path, f"--output={tmp_path / 'out'}", "--skip_bad") == 0
    error = capsys.readouterr().err
    assert f"{path}:2: text is NoneType, not a string" in error
    assert f"{path}:3: text is empty" in error
    assert texts(tmp_path / "out") == ["one", "four"]
    for field, fault in [
        ("nothing", ":1: nothing is NoneType, not a string"),
        ("list", ": column 'list' holds list<"),
        ("day", ": column 'day' holds date32[day], not strings; set --field"),
        ("other", ": not a file with a column 'other' among 'text', 'nothing', 'list', 'day'; set"),
    ]:
        assert run(path, f"--output={tmp_path / field}", f"--field={field}") == 2
        assert f"{path}{fault}" in capsys.readouterr().err
    assert run(path, f"--output={tmp_path / 't'}", "--template={text} {day}") == 2
    assert "column 'day' holds date32[day], not texts or numbers" in capsys.readouterr().err


def test_invalid_utf_8_in_a_column_is_the_fault_of_its_row(tmp_path, capsys):
    table = pyarrow.table({"text": pyarrow.array([b"good", b"ba\xff", b"too"])})
    feather.write_feather(table, tmp_path / "a.arrow")
    assert run(tmp_path / "a.arrow", f"--output={tmp_path / 'out'}", "--skip_bad") == 0
    assert "a.arrow:2: invalid UTF-8 at byte 2" in capsys.readouterr().err
    assert texts(tmp_path / "out") == ["good", "too"]


def test_equal_names_of_columns_are_rejected(tmp_path, capsys):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert run(tmp_path / "a.arrow", f"--output={tmp_path / 'out'}") == 2
    assert "2 columns are named 'text'; rename them" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "a.array_record"])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, capsys, name):
    path = write(tmp_path / "in", name, ["text" * 1000] * 20)
    data = path.read_bytes()
    for number, damaged in enumerate(
        [data[:40], data[: len(data) // 2], b"\0" * 100, b"text\n" * 9]
    ):
        path.write_bytes(damaged)
        assert run(path, f"--output={tmp_path / str(number)}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_version_1_of_feather_is_named(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    assert run(tmp_path / name, f"--output={tmp_path / 'out'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / name}: is a Feather file of version 1; write its table" in line


def test_a_large_batch_of_arrow_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SLICE_BYTES", 1000)
    values = ["x" * 900, "y" * 900, "z" * 5000, "", "a", "b"] * 9
    feather.write_feather(pyarrow.table({"text": values}), tmp_path / "a.arrow", chunksize=1000)
    sizes = []
    rows = tables._rows

    def measured(batch, columns):
        sizes.append(batch.nbytes if batch.num_rows > 1 else 0)
        return rows(batch, columns)

    monkeypatch.setattr(tables, "_rows", measured)
    options = inputs.ReadOptions("text", "", "")
    found = [
        row["text"].decode() for _, _, row in tables.arrow_rows(tmp_path / "a.arrow", options, 0)
    ]
    assert found == values and max(sizes) <= 1000


# ---- ArrayRecord ----


def test_records_of_tensorflow_are_named(tmp_path, capsys):
    features = b"\n\x0c\n\x04text\x12\x04\n\x02\n\x00"
    example = b"\n" + struct.pack("B", len(features)) + features
    writer = array_record.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    writer.write(example)
    writer.close()
    assert run(tmp_path / "a.array_record", f"--output={tmp_path / 'out'}") == 2
    assert "its records are tf.train.Example, which need TensorFlow" in capsys.readouterr().err


def test_a_text_that_begins_with_a_newline_is_none_of_tensorflow(tmp_path):
    found = ["\ntext", "{not JSON", "", '{"text": 1}']
    array_records(tmp_path / "a.array_record", [{"text": text} for text in found], of_text=True)
    assert run(tmp_path / "a.array_record", f"--output={tmp_path / 'out'}", "--skip_bad") == 0
    assert texts(tmp_path / "out") == ["\ntext", "{not JSON", '{"text": 1}']


# ---- templates ----


ROWS = [
    {"q": "What?\n", "a": {"text": "That."}, "n": 7, "x": 0.1, "ok": True},
    {"q": "", "a": {"text": "ä {b}"}, "n": -1, "x": 2.0, "ok": False},
]
TEMPLATE = r"--template=Q: {q}\nA:\t{a.text} {{{n}}} {x} {ok} \\n"
FILLED = [
    "Q: What?\n\nA:\tThat. {7} 0.1 true \\n",
    "Q: \nA:\tä {b} {-1} 2.0 false \\n",
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.feather", "a.array_record"])
def test_a_template_joins_fields(tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    assert run(tmp_path / name, f"--output={tmp_path / 'out'}", TEMPLATE) == 0
    assert texts(tmp_path / "out") == FILLED


def test_a_template_joins_the_columns_of_csv(tmp_path):
    (tmp_path / "a.csv").write_text('q,n,a\n"What,\nwhy?",07,yes\n')
    flags = [tmp_path / "a.csv", f"--output={tmp_path / 'out'}"]
    assert run(*flags, r"--template={q}\n{n}{a}") == 0
    assert texts(tmp_path / "out") == ["What,\nwhy?\n07yes"]


def test_numbers_of_half_precision_and_decimals_are_written_with_their_own_digits(tmp_path):
    table = pyarrow.table(
        {
            "f": pyarrow.array([0.1], pyarrow.float32()),
            "h": pyarrow.array([0.1], pyarrow.float16()),
            "d": pyarrow.array([12], pyarrow.decimal128(10, 2)),
            "i": pyarrow.array([2**63], pyarrow.uint64()),
        }
    )
    feather.write_feather(table, tmp_path / "a.arrow")
    flags = [tmp_path / "a.arrow", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--template={f} {h} {d} {i}") == 0
    assert texts(tmp_path / "out") == ["0.1 0.1 12.00 9223372036854775808"]


def test_faults_of_a_template_are_errors_of_one_line(tmp_path, capsys):
    json_lines(tmp_path / "a.jsonl", [{"q": None, "list": [1], "s": {"x": 1}}])
    flags = [tmp_path / "a.jsonl", f"--output={tmp_path / 'out'}"]
    for template, fault in [
        (r"{q}\d", r"has \d, which is no escape"),
        ("{q", "has a { without"),
        ("text", "names no field"),
        ("{q}", "a.jsonl:1: q is NoneType, not a text or a number"),
        ("{list}", "a.jsonl:1: list is list, not a text or a number"),
        ("{s}", "a.jsonl:1: s is dict, not a text or a number"),
        ("{other}", "a.jsonl:1: no field 'other' among 'q', 'list', 's'"),
    ]:
        assert run(*flags, f"--template={template}") == 2
        assert fault in capsys.readouterr().err
    assert run(*flags, "--template={q}", "--field=q") == 2
    assert "--template='{q}' and --field=q: give one of them" in capsys.readouterr().err


def test_a_template_for_text_is_rejected(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    array_records(tmp_path / "b.array_record", [{"text": "x"}], of_text=True)
    assert run(tmp_path / "a.txt", f"--output={tmp_path / 'out'}", "--template={q}") == 2
    assert "a.txt is text, which has no fields" in capsys.readouterr().err
    assert run(tmp_path / "b.array_record", f"--output={tmp_path / 'o'}", "--template={q}") == 2
    assert "its records are texts, which have no fields" in capsys.readouterr().err


def test_another_template_does_not_resume_a_folder(tmp_path, capsys):
    json_lines(tmp_path / "a.jsonl", ROWS)
    flags = [tmp_path / "a.jsonl", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--template={q}{n}") == 0
    assert run(*flags, "--template={n}{q}") == 2
    assert "template was '{q}{n}', now '{n}{q}'" in capsys.readouterr().err


# ---- folders that the library datasets wrote ----


def saved(folder, texts, num_shards=1, **options):
    datasets = pytest.importorskip("datasets", reason="needs the extra `data`")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}, **options).save_to_disk(
        folder, num_shards=num_shards
    )


def saved_dict(folder, **splits):
    datasets = pytest.importorskip("datasets", reason="needs the extra `data`")
    datasets.disable_progress_bars()
    found = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(found).save_to_disk(folder)


def test_a_saved_dataset_is_read_in_the_order_of_its_rows(tmp_path, reference):
    saved(tmp_path / "in", TEXTS, num_shards=5)
    assert len([*(tmp_path / "in").glob("*.arrow")]) == 5
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}", SHARDS) == 0
    assert tokens_of(tmp_path / "out") == reference


def test_one_split_of_a_saved_dict_is_read(tmp_path, capsys):
    saved_dict(tmp_path / "in", train=["a", "b"], test=["c"])
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}") == 2
    expected = f"{tmp_path / 'in'}: has the splits test, train; choose one with --split=NAME"
    assert expected in capsys.readouterr().err
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}", "--split=valid") == 2
    assert f"--split=valid: {tmp_path / 'in'} has test, train" in capsys.readouterr().err
    for number, (name, found) in enumerate([("train", ["a", "b"]), ("test", ["c"])]):
        output = tmp_path / str(number)
        assert run(tmp_path / "in", f"--output={output}", f"--split={name}") == 0
        assert texts(output) == found
    assert run(tmp_path / "in" / "test", f"--output={tmp_path / 'named'}") == 0
    assert texts(tmp_path / "named") == ["c"]
    saved_dict(tmp_path / "one", only=["d"])
    assert run(tmp_path / "one", f"--output={tmp_path / 'single'}") == 0
    assert texts(tmp_path / "single") == ["d"]


def test_a_split_of_a_saved_dataset_without_splits_is_rejected(tmp_path, capsys):
    saved(tmp_path / "in", ["a"])
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}", "--split=train") == 2
    expected = f"--split=train: {tmp_path / 'in'} has no splits; leave --split out"
    assert expected in capsys.readouterr().err.splitlines()


def test_a_saved_dataset_without_rows_has_no_document(tmp_path, capsys):
    saved(tmp_path / "in" / "zero", [], num_shards=None)  # without files
    saved_dict(tmp_path / "dict", train=["a"], test=[])
    for name, *flags in (["in"], ["in/zero"], ["dict", "--split=test"], ["dict/test"]):
        assert run(tmp_path / name, f"--output={tmp_path / 'none'}", *flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / name}: the inputs contain no document" in line
    saved(tmp_path / "in" / "some", ["b"])
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}") == 0
    assert texts(tmp_path / "out") == ["b"]


def test_splits_in_the_cache_of_datasets_are_told_by_the_names_of_its_files(tmp_path, capsys):
    for name in ("x-train-00000-of-00002", "x-train-00001-of-00002", "x-test", "cache-x-train"):
        arrow_stream(tmp_path / f"{name}.arrow", [{"text": name}])
    info = {"splits": {"train": {"name": "train"}, "test": {"name": "test"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info, indent=1))
    assert run(tmp_path, f"--output={tmp_path / 'out'}") == 2
    assert "has the splits test, train" in capsys.readouterr().err
    assert run(tmp_path, f"--output={tmp_path / 'out'}", "--split=train") == 0
    assert texts(tmp_path / "out") == ["x-train-00000-of-00002", "x-train-00001-of-00002"]


def test_a_split_of_other_inputs_is_rejected(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path / "a.txt", f"--output={tmp_path / 'out'}", "--split=train") == 2
    assert "--split=train: no input is a folder with splits" in capsys.readouterr().err
