"""Files of known formats: data.path does not train on their bytes without saying so."""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess

import pytest

from meshtrain.data import formats
from meshtrain.errors import ConfigError
from tests.lib.prepare import run, texts, write_parquet
from tests.lib.token_files import all_tokens, build

LINES = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(100)).encode()
FILES = {
    "rows.jsonl": (LINES, "is JSON lines, not text; .*`meshtrain prepare`.* data.dtype=uint8"),
    "rows.ndjson": (LINES, "meshtrain prepare"),
    "rows.json": (LINES, "meshtrain prepare"),
    "rows.txt": (LINES, "is JSON lines"),
    "rows.jsonl.gz": (gzip.compress(LINES), "is JSON lines, .*meshtrain prepare"),
    "rows.txt.gz": (gzip.compress(LINES), "is compressed, .*meshtrain prepare"),
    "rows": (gzip.compress(LINES), "is compressed"),
    "rows.CSV": (b"text\none\n" * 9, "is a table, .*meshtrain prepare"),
    "rows.csv.gz": (gzip.compress(LINES), "is a table"),
    "rows.arrow": (b"\xff\xff\xff\xff\x78\x02\0\0" * 9, "is an Arrow file, .*meshtrain prepare"),
    "rows.bin": (b"ARROW1\0\0" * 9, "is an Arrow file"),
    "rows.parquet": (b"PAR1" * 9, "is a Parquet file, .*meshtrain prepare"),
    "rows.tok": (b"PAR1\x15\x04" * 9, "is a Parquet file"),
    "rows.txt.zst": (b"\x28\xb5\x2f\xfd" * 9, "is compressed, .*meshtrain prepare"),
    "rows.b": (bz2.compress(LINES), "is compressed, .*meshtrain prepare"),
    "rows.x": (lzma.compress(LINES), "is compressed, .*meshtrain prepare"),
    "array.json": (b'[\n{"text": "a"},\n', "is a JSON array, .*jq -c '.\\[\\]' .*array.json > "),
    "array.json.gz": (gzip.compress(b'[{"text": "a"}]'), "`gzip -dc .*array.json.gz . jq -c"),
    "texts.json": (b'["a", "b"]', "is a JSON array of texts, .*{text: .}"),
    "blank.json": (b'\xef\xbb\xbf\n [ \n{"text": "a"},\n', "is a JSON array, "),
    "object.json": (b'{\n "data": [', "is a JSON object over several lines, .*jq -c . "),
    "rows.lz4": (b"\x04\x22\x4d\x18" * 9, "is compressed, .*decompress it first: `lz4 -d "),
    "rows.array_record": (b"\x83\xaf" * 9, "is an ArrayRecord file, .*meshtrain prepare"),
    "rows.zip": (b"PK\x03\x04" * 9, "is an archive, .*unpack it"),
    "rows.dat": (b"\x93NUMPY\x01\0" * 9, "is a NumPy array, .*end in .npy"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_known_format_is_rejected_unless_its_dtype_is_given(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    for vocab_size in (256, 1000):
        with pytest.raises(ConfigError, match=f"data.path={tmp_path / name}: .*{message}"):
            build(tmp_path / name, dtype="", vocab_size=vocab_size)
    found = all_tokens(tmp_path / name, len(content), dtype="uint8", vocab_size=256)
    assert bytes(found) == content


# What `meshtrain prepare` says about them; it reads the others.
OF_PREPARE = {
    "rows.txt": "is JSON lines, not text; rename it to end in .jsonl",
    "rows": "is compressed, not text; rename it to end in .gz",
    "rows.bin": "is an Arrow file, not text; rename it to end in .arrow",
    "rows.tok": "is a Parquet file, not text; rename it to end in .parquet",
    "rows.b": "is compressed, not text; rename it to end in .bz2",
    "rows.x": "is compressed, not text; rename it to end in .xz",
    "object.json": "is a JSON object over several lines, not JSON lines; write each object",
    "rows.lz4": "is compressed, not text; decompress it first: `lz4 -d ",
    "rows.parquet.gz": "is a Parquet file that is compressed once more; decompress it",
    "rows.zip": "is an archive, not text; unpack it first: `unzip ",
    "rows.dat": "is a NumPy array, not text; if it holds token ids, set data.path to it",
}


@pytest.mark.parametrize("name", OF_PREPARE)
def test_prepare_names_the_format_that_it_does_not_read(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(FILES.get(name, (b"PAR1",))[0])
    (tmp_path / "good.txt").write_text("good")
    flags = [tmp_path / name, tmp_path / "good.txt", f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / name}: {OF_PREPARE[name]}" in error
    assert len(error.splitlines()) == 1 and error.endswith(", or leave it out\n")
    assert run(*flags, "--skip_bad") == 0
    assert f"skipped {tmp_path / name}: {OF_PREPARE[name]}" in capsys.readouterr().out
    assert texts(tmp_path / "out") == ["good"]


def test_a_folder_without_inputs_names_the_format_that_it_holds(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl.lz4").write_bytes(b"\x04\x22\x4d\x18")
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}") == 2
    assert "rows.jsonl.lz4 is compressed: decompress it first: `lz4" in capsys.readouterr().err


def test_the_command_converts_objects_over_several_lines_and_overwrites_nothing(tmp_path, capsys):
    if not shutil.which("jq"):
        pytest.skip("needs jq")
    for name in ("it's.json", "b.jsonl", "c.json.gz"):
        lines = "\n".join(json.dumps({"text": text}, indent=1) for text in ("one", "two"))
        data = lines.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        assert run(tmp_path / name, f"--output={tmp_path / 'out'}") == 2
        command = capsys.readouterr().err.split("`")[1]
        subprocess.run(command, shell=True, check=True)
    converted = [tmp_path / name for name in ("it's.jsonl", "b-lines.jsonl", "c.jsonl")]
    for number, path in enumerate(converted):
        assert run(path, f"--output={tmp_path / str(number)}") == 0
        assert texts(tmp_path / str(number)) == ["one", "two"]


def test_a_real_parquet_file_is_recognised(tmp_path):
    write_parquet(tmp_path / "rows", ["one", "two"])
    assert formats.of_file(tmp_path / "rows").name == "a Parquet file"


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.txt.gz", "rows.tok"])
def test_a_folder_of_text_does_not_hold_such_a_file(tmp_path, name):
    (tmp_path / "a.txt").write_text("text " * 20)
    (tmp_path / name).write_bytes(FILES[name][0])
    settings = {"dtype": "", "vocab_size": 256}
    assert build(tmp_path, **settings).size  # the default pattern leaves it out
    with pytest.raises(ConfigError, match=f"data.path={tmp_path}: .*{name} is .*data.pattern"):
        build(tmp_path, **settings, pattern="*")
    assert build(tmp_path, dtype="uint8", vocab_size=256, pattern="*").size


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "{not JSON\n"),
        ("a.txt", "[1, 2]\n"),
        ("a.txt", "{" * 100_000),
        ("a.txt", "ORCS and PARS\n"),
        ("a.bin", "BZh is no magic\n"),
        ("a.json", '{\n "a": 1\n}\n'),
        ("a.csv", "a,b\n1,2\n"),
    ],
)
def test_text_remains_text(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    if name in ("a.json", "a.csv"):  # in a folder of text
        assert build(tmp_path, dtype="", vocab_size=256, pattern="*").size
    else:
        assert build(tmp_path / name, dtype="", vocab_size=256).size
