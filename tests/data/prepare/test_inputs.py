"""Inputs of `meshtrain prepare`: every kind gives the same documents; a faulty one is named."""

import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest

from meshtrain.data import prepared
from meshtrain.data.prepare import inputs, records, streams, tables
from tests.lib.prepare import (
    KINDS,
    TEXTS,
    inputs_of,
    prose,
    run,
    sentence_piece,
    texts,
    write_jsonl,
    write_parquet,
)

# ---- kinds of input ----


def test_prepared_tokens_decode_to_the_text_and_the_manifest_has_the_counts(tmp_path):
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    assert texts(tmp_path / "out") == TEXTS
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())
    size = sum(len(text.encode()) for text in TEXTS)
    assert (found["documents"], found["tokens"], found["text_bytes"]) == (6, size + 6, size)
    assert found["dtype"] == "uint8" and found["skipped"] == {"count": 0, "first": []}
    assert found["tokenizer"] == {
        **{"kind": "bytes", "file": None, "sha256": "bytes", "vocab_size": 256},
        **{"eos": 0, "bos": None},
    }
    for kind, file in found["shards"][0]["files"].items():
        data = (tmp_path / "out" / f"00000.{kind}").read_bytes()
        expected = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if kind == "bin":  # less than a part of it
            expected |= {"part_bytes": prepared.PART_BYTES, "crc32": f"{zlib.crc32(data):08x}"}
        assert file == expected


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_documents(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(streams, "CHUNK", chunk)
    assert run(*inputs_of(kind, tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    found = texts(tmp_path / "out")
    are_files = kind in ("files", "gz")  # files are shuffled
    assert (sorted(found) if are_files else found) == (sorted(TEXTS) if are_files else TEXTS)


def test_a_folder_is_its_known_files_except_hidden_ones_and_the_output(tmp_path):
    for name in ("a.txt", "deep/b.txt", "c.py", ".git/d.txt", ".e.txt", "f.bin", "out"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name != "out":
            (tmp_path / name).write_text(name)
    for _ in range(2):
        assert run(tmp_path, f"--output={tmp_path / 'out'}") == 0
    assert sorted(texts(tmp_path / "out")) == ["a.txt", "deep/b.txt"]
    assert run(tmp_path, f"--output={tmp_path / 'py'}", "--pattern=*.py") == 0
    assert texts(tmp_path / "py") == ["c.py"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.txt").write_text("a")
    Path("in/b.txt").write_text("b")
    Path("link.txt").symlink_to("in/a.txt")
    os.link("in/a.txt", "hard.txt")
    Path("folder").symlink_to("in")
    names = ["in/a.txt", "./in/a.txt", tmp_path / "in/a.txt", "link.txt", "hard.txt", "in"]
    assert run(*names, "folder", "in/b.txt", "--output=out") == 0
    assert sorted(texts("out")) == ["a", "b"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "ignored: in/a.txt, which is named twice"
    assert printed[1] == f"ignored: {tmp_path / 'in/a.txt'}, the same file as in/a.txt"
    assert printed[2] == "ignored: link.txt, the same file as in/a.txt"
    assert printed[5] == "and 3 more"


def test_a_separator_that_never_occurs_is_rejected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK", 7)
    (tmp_path / "a.txt").write_text("one\n\ntwo<|end|>three")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    lines = write_jsonl(tmp_path / "in")
    for flags, fault in [
        (["--separator=<|END|>"], "does not occur in the inputs, of which 2 are text files; give"),
        ([r"--separator=\n\n"], r"2 are text files; in bash, $'\n' is a newline; give the text"),
    ]:
        assert run(tmp_path, f"--output={tmp_path / 'out'}", *flags) == 2
        error = capsys.readouterr().err
        assert f"--separator={flags[0].partition('=')[2]!r}: " in error and fault in error
    assert run(lines, f"--output={tmp_path / 'out'}", "--separator=|") == 2
    assert "--separator='|': only text files are split" in capsys.readouterr().err
    for number, separator in enumerate(["<|end|>", "\n\n"]):
        output = tmp_path / ("out", "new")[number]  # a rejected run does not block its folder
        assert run(*tmp_path.glob("?.txt*"), f"--output={output}", f"--separator={separator}") == 0


def test_another_field_is_read_if_given(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "yes", "text": "no"}\n')
    assert run(tmp_path / "a.jsonl", f"--output={tmp_path / 'out'}", "--field=body") == 0
    assert texts(tmp_path / "out") == ["yes"]


# ---- faulty documents ----


FAULTY_LINES = [
    b'{"text": "good"}',
    b"no json",
    b'{"body": 1}',
    b'{"text": 7}',
    b'{"text": null}',
    b'{"text": ""}',
    b"",
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b'["text"]',
    b"[" * 100_000,
    b'{"text": "nul \\u0000"}',
    b'{"text": "good too"}',
]
FAULTS = [
    *("2: not JSON", "3: no field 'text' among 'body'", "4: text is int, not a string"),
    *("5: text is NoneType, not a string", "6: text is empty"),
    *("8: invalid UTF-8 at byte 10", "9: invalid UTF-8: half of a surrogate"),
    *("10: no field 'text'", "11: nested more than 100 levels", "12: holds '\\x00'"),
]


def test_faulty_lines_are_reported_and_stop_the_run_or_are_skipped(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(FAULTY_LINES))
    flags = [tmp_path / "a.jsonl", f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, expected in zip(lines[:5], FAULTS, strict=False):
        assert line.startswith(f"{tmp_path / 'a.jsonl'}:{expected}")
    assert lines[5:] == ["and at least 5 more", "repair them, or skip them with --skip_bad"]
    assert run(*flags, "--skip_bad") == 0
    printed = capsys.readouterr()
    for expected in FAULTS:
        assert f"skipped {tmp_path / 'a.jsonl'}:{expected}" in printed.err
    assert texts(tmp_path / "out") == ["good", "good too"]
    assert "skipped: 10" in printed.out
    skipped = json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"]
    assert skipped["count"] == 10 and len(skipped["first"]) == 10


@pytest.mark.parametrize("size", [10, 3_000_000])
@pytest.mark.parametrize("wrong", [b"\xff", b"\0", b"\xe4\xb8"])
def test_the_error_for_invalid_utf_8_names_the_byte(tmp_path, capsys, size, wrong):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"x" * size + wrong)
    (tmp_path / "in" / "b.txt").write_text("fine")
    flags = [tmp_path / "in", f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    expected = "a.txt:1: " + (
        "holds '\\x00'" if wrong == b"\0" else f"invalid UTF-8 at byte {size}"
    )
    assert expected in capsys.readouterr().err
    assert run(*flags, "--skip_bad") == 0 and texts(tmp_path / "out") == ["fine"]


@pytest.mark.parametrize("values", ["string", "large_string"])
@pytest.mark.parametrize("index", ["int8", "int64"])
def test_a_dictionary_column_of_parquet_is_read_like_its_strings(tmp_path, values, index):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    (tmp_path / "in").mkdir()
    repeated = [TEXTS[i] for i in (0, 1, 0, 2, 2, 2, 3, 1, 4)]
    kind = pyarrow.dictionary(getattr(pyarrow, index)(), getattr(pyarrow, values)())
    table = pyarrow.table({"text": pyarrow.array(repeated).cast(kind)})
    parquet.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=4)
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}", "--shard_tokens=20") == 0
    assert texts(tmp_path / "out") == repeated


def test_the_error_for_a_row_of_parquet_names_its_number(tmp_path, capsys):
    write_parquet(tmp_path / "a.parquet", ["one", None, "", "four", "five", None])
    flags = [tmp_path / "a.parquet", f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert "a.parquet:2: text is NoneType, not a string" in error
    assert "a.parquet:3: text is empty" in error
    assert run(*flags, "--skip_bad") == 0 and texts(tmp_path / "out") == ["one", "four", "five"]
    assert run(tmp_path / "a.parquet", f"--output={tmp_path / 'n'}", "--field=n") == 2
    assert "column 'n' holds int64" in capsys.readouterr().err
    assert run(tmp_path / "a.parquet", f"--output={tmp_path / 'x'}", "--field=x") == 2
    assert "a column 'x'" in capsys.readouterr().err


def test_a_truncated_or_mislabelled_file_is_rejected_in_one_line(tmp_path, capsys):
    compressed = gzip.compress(write_jsonl(tmp_path / "in", [prose(0, 9000)]).read_bytes())
    (tmp_path / "truncated.jsonl.gz").write_bytes(compressed[:-2000])
    (tmp_path / "text.txt.gz").write_text("not compressed")
    write_parquet(tmp_path / "truncated.parquet", ["a"])
    with open(tmp_path / "truncated.parquet", "r+b") as file:
        file.truncate(50)
    for name in ("truncated.jsonl.gz", "text.txt.gz", "truncated.parquet"):
        assert run(tmp_path / name, f"--output={tmp_path / (name + '-out')}", "--skip_bad") == 2
        error = capsys.readouterr().err
        assert name in error and len(error.splitlines()) == 1


# ---- tokenizers ----


def test_ignored_files_are_counted(tmp_path, capsys):
    write_jsonl(tmp_path / "in")
    (tmp_path / "in" / "README.md").touch()
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}") == 0
    assert "ignored: 1 files" in capsys.readouterr().out


# ---- small files of large texts ----


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "--separator=#"])
def test_a_small_compressed_file_of_a_huge_document_is_rejected(tmp_path, capsys, name):
    path = tmp_path / (name if "." in name else "a.txt.gz")
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(40):
            file.write(b"a" * (1 << 20))
    # A tokenizer of SentencePiece cannot split a text.
    tokenizer = sentence_piece(tmp_path / "t")
    separator = name if "." not in name else "--separator="
    flags = [f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer}", separator]
    assert run(path, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}:1: is larger than 16,777,216 bytes, in a file of " in line


def test_a_text_that_parquet_stores_once_is_in_memory_once(tmp_path, capsys, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")

    def write(name, texts):
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name, compression="zstd")
        return tmp_path / name

    # The first texts of a column make its dictionary.
    path = write("a.parquet", ["a" * (1 << 20)] * 300 + [f"{n}" for n in range(3000)])
    chunk = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    with pyarrow.OSFile(str(path)) as file:
        size = tables.dictionary_bytes(file, chunk)
    assert 1 << 20 <= size < 1.1 * (1 << 20)
    assert chunk.total_uncompressed_size < 2 << 20 and path.stat().st_size < 1 << 16
    monkeypatch.setattr(tables, "MAX_COLUMN_BYTES", 8 << 20)
    monkeypatch.setattr(records, "MAX_DOCUMENT_BYTES", 8 << 20)
    counts = []
    file_type = parquet.ParquetFile

    class Counting(file_type):
        def iter_batches(self, count, **options):
            counts.append(count)
            return super().iter_batches(count, **options)

    monkeypatch.setattr(parquet, "ParquetFile", Counting)
    options = inputs.ReadOptions("text", "", "")
    values = [row["text"] for _, _, row in tables.parquet_rows(path, options, 0)]
    assert values[299:302] == [b"a" * (1 << 20), b"0", b"1"] and len(values) == 3300
    assert counts == [7]  # texts of 1 MiB and a little fit into 8 MiB

    path = write("b.parquet", ["a" * (9 << 20)])
    assert run(path, f"--output={tmp_path / 'out'}") == 2
    assert f"{path}:1: is larger than 8,388,608 bytes" in capsys.readouterr().err
