"""Paths that are no data: each is reported in a line, at once, and none is left out silently."""

import errno
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import chat, corpus, indexed, tokenizer, tokens
from meshtrain.errors import ConfigError


def build(path, **changes):
    settings = {"dtype": "", "pattern": "*.txt", "exclude": (), "seq_len": 4, "vocab_size": 256}
    settings |= {"separator": -1, "heldout": 0.0, "seed": 0, "split": "train"}
    return tokens.build(path=str(path), **{**settings, **changes})


def prepare(*arguments):
    return app.main("prepare", ["--num_workers=1", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which holds one path of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.npy", "p.bin"):
        os.mkfifo(name)
    Path("p.idx").write_bytes(indexed.pack_index(np.array([9]), np.dtype("uint8")))
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nothing")
    for name in ("linked", "texts", "a.npy", "piped"):
        Path(name).mkdir()
    Path("linked/a.txt").symlink_to("/proc/kmsg")  # a file of size 0 that waits for its reader
    Path("linked/b.txt").symlink_to("/dev/zero")
    os.mkfifo("piped/a.txt")
    Path("texts/a.txt").write_text("some text " * 9)
    Path("words.npy").write_text("words")
    return tmp_path


PATHS = {
    "pipe": "is a pipe",
    "pipe.npy": "is a pipe",
    "p": "no such file",
    "p.bin": "is a pipe",
    "socket": "is a socket",
    "/dev/zero": "is a device",
    "/dev/null": "is a device",
    "/proc/kmsg": "0 bytes",
    "/proc/self/mem": "0 bytes",
    "loop": "Too many levels",
    "dangling": "no such file",
    "x" * 300: "File name too long",
    "nul\0": "no such file",
    "linked": "are empty",
    "piped": "no files match",
    "a.npy": "no files match",
    "words.npy": "not a .npy file",
    "texts/a.txt/b": "no such file",
    # In containers /proc has folders that even root cannot read, and processes that end during the
    # search.
    "/proc": "data.path=/proc",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_without_data_is_reported_at_once(folder, path):
    with pytest.raises(ConfigError) as error:
        build(path)
    assert f"data.path={path}" in str(error.value) and PATHS[path] in str(error.value)
    assert len(error.value.faults) == 1 and "\n" not in str(error.value)
    assert "pickle.load" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pipe"], "pipe: is a pipe"),
        (["/dev/zero"], "/dev/zero: is a device"),
        (["socket", "dangling"], "socket: is a socket"),
        (["x" * 300], "File name too long"),
        (["piped"], "piped: no files in it end in .txt"),
        (["linked"], "contain no document"),
        (["/proc/kmsg"], "contain no document"),
        (["texts", "--pattern=**.txt"], "--pattern='**.txt': use a pattern of names"),
        (["texts", "--pattern=/a/*.txt"], "--pattern='/a/*.txt': use a pattern of names"),
        (["texts", "--tokenizer=pipe"], "tokenizer pipe: is a pipe"),
        (["texts", "--tokenizer=/dev/zero"], "tokenizer /dev/zero: is a device"),
        (["texts", "--tokenizer=" + "x" * 300], "File name too long"),
    ],
)
def test_prepare_reports_a_path_without_text_at_once(folder, arguments, expected, capsys):
    code = prepare(*arguments, f"--output={folder / 'out'}")
    if arguments[-1] == "--pattern=**.txt" and code == 0:
        return  # a pattern like any other from Python 3.13
    err = capsys.readouterr().err
    assert code == 2 and expected in err and "Traceback" not in err


def test_hidden_files_of_a_folder_are_no_data_for_any_reader(tmp_path):
    root = tmp_path / ".cache" / "texts"  # the folder itself may lie in a hidden one
    names = ["a.txt", "deep/b.txt", ".DS_Store.txt", "deep/._b.txt", ".git/c.txt", "deep/.d/e.txt"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} is some text")
    visible = {f"{name} is some text" for name in names[:2]}
    assert prepare(root, f"--output={tmp_path / 'out'}") == 0
    settings = {"dtype": "", "vocab_size": 256, "pattern": "*", "exclude": ()}
    for path in (root, tmp_path / "out"):
        (read,) = corpus.load_corpus(str(path), **settings).file_tokens
        assert {*bytes(read).decode().split("\0")} == {*visible, ""}
    assert build(root, pattern="*.md").description == build(root, pattern="*.txt").description
    for name in (".hidden.jsonl", "shown.jsonl"):
        (root / name).write_text("{}\n")
    assert chat._find(str(root)) == [root / "shown.jsonl"]


@pytest.mark.parametrize("pattern", ["/a/*.txt", "", "**.txt"])
def test_an_invalid_pattern_is_reported(folder, pattern):
    if pattern == "**.txt" and build("texts", pattern="*.txt").size and hasattr(Path, "full_match"):
        return
    with pytest.raises(ConfigError, match="data.pattern="):
        build("texts", pattern=pattern)


def deny(monkeypatch, name):
    """Makes the file system deny to list or read what has this name, also for root."""
    listed, read = os.scandir, Path.read_bytes

    def scandir(path="."):
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    def read_bytes(path):
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")  # a failed read names no file
        return read(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def test_a_folder_or_file_that_cannot_be_read_is_an_error_not_left_out(folder, monkeypatch, capsys):
    Path("texts/closed").mkdir()
    Path("texts/closed/b.txt").write_text("more")
    assert build("texts").size > 20
    deny(monkeypatch, "closed")
    corpus._read_folder.cache_clear()
    with pytest.raises(ConfigError, match="data.path=texts: texts/closed: Permission denied"):
        build("texts")
    assert build("texts", exclude=("closed",)).size > 20
    assert prepare("texts", "--output=out") == 2
    assert "texts: texts/closed: Permission denied" in capsys.readouterr().err
    deny(monkeypatch, "a.txt")
    with pytest.raises(ConfigError, match="data.path=texts: texts/a.txt: Input/output error"):
        build("texts", exclude=("closed", "other"))


def test_text_that_does_not_fit_in_memory_is_not_read(folder):
    with open("texts/huge.txt", "wb") as file:
        file.truncate(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))  # takes no space
    with pytest.raises(ConfigError, match="data.path=texts: .* GB .* memory; .*meshtrain prepare"):
        build("texts")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("shards", value) for value in ([], [1], [[1]], {}, None, [{"name": "00000"}])],
        *[("tokenizer", value) for value in ([], None, "bytes", {"kind": "bytes"})],
        *[("tokens", value) for value in ("9", None)],
        *[("dtype", value) for value in (1, None)],
    ],
)
def test_a_manifest_with_values_of_another_type_is_reported(folder, key, value):
    assert prepare("texts", "--output=out") == 0
    path = folder / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=r"manifest.json.* prepare the folder again"):
        build("out")
    if key == "tokenizer" and value != {"kind": "bytes"}:
        with pytest.raises(ConfigError, match="manifest.json"):
            tokenizer.load("out")


# ---- what prepare wrote is not read again ----


def written_text(output):
    return (output / "00000.bin").read_bytes().decode()


@pytest.mark.parametrize("flags", [[], ["--pattern=*"]], ids=str)
def test_prepare_does_not_read_what_it_wrote(folder, flags, capsys):
    assert prepare("texts", *flags, "--output=texts/one") == 0
    assert "ignored" not in capsys.readouterr().out
    assert prepare("texts", *flags, "--output=texts/one") == 0
    assert "already prepared" in capsys.readouterr().out
    # Into a second folder, also in the input: the first one is left out, and a line says so.
    assert prepare("texts", *flags, "--output=texts/two") == 0
    out = capsys.readouterr().out
    assert "ignored: texts/one, which `meshtrain prepare` wrote" in out
    assert written_text(folder / "texts/two") == "some text " * 9 + "\0"
    # A shell's texts/* names the output, and the files in it.
    inputs = ["texts/a.txt", "texts/one", *Path("texts/one").glob("*.json")]
    assert prepare(*inputs, *flags, "--output=texts/three") == 0
    assert written_text(folder / "texts/three") == "some text " * 9 + "\0"


def test_prepare_of_prepared_data_alone_is_an_error(folder, capsys):
    assert prepare("texts", "--output=one") == 0
    for inputs in (["one"], ["one/manifest.json"]):
        assert prepare(*inputs, "--output=two") == 2
        assert "written by `meshtrain prepare`; give the text" in capsys.readouterr().err
    assert not (folder / "two").exists()


def test_an_unfinished_output_in_the_input_is_not_read(folder):
    (folder / "texts/out").mkdir()
    # Killed at once, and before the first shard.
    for other, journal in (("one", ""), ("two", '{"settings": {}}\n')):
        (folder / "texts/out/progress.jsonl").write_text(journal)
        assert prepare("texts", f"--output={other}") == 0
        assert written_text(folder / other) == "some text " * 9 + "\0"
        assert prepare("texts", "--output=texts/out") == 0
        assert written_text(folder / "texts/out") == "some text " * 9 + "\0"
        (folder / "texts/out/manifest.json").unlink()


def test_the_manifest_of_somebody_else_is_an_input_like_others(folder):
    (folder / "texts/manifest.json").write_text('{"text": "theirs"}\n')
    assert prepare("texts", "--output=out") == 0
    assert sorted(written_text(folder / "out").split("\0")) == ["", "some text " * 9, "theirs"]


@pytest.mark.parametrize("inputs", ["texts", "texts/a.txt"])
@pytest.mark.parametrize("output", ["texts", "."])
def test_an_output_that_holds_the_inputs_is_an_error(folder, inputs, output, capsys):
    before = sorted(folder.rglob("*"))
    assert prepare(inputs, f"--output={output}") == 2
    assert f"--output={output}: holds texts/a.txt, an input" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_of_text_with_a_prepared_folder_in_it_is_read_only_without(folder):
    assert prepare("texts", "--output=texts/out") == 0
    assert build("texts").size == 22  # *.txt
    with pytest.raises(ConfigError, match="wrote texts/out, .*set data.path=texts/out, or data.ex"):
        build("texts", pattern="*")
    assert build("texts", pattern="*", exclude=("out",)).size == 22


# ---- prepare does not touch what it has not written ----


def write_text(folder):
    (folder / "in.txt").write_text("text\n")
    return folder / "in.txt"


def test_prepare_leaves_a_journal_of_somebody_else_alone(tmp_path, capsys):
    text, output = write_text(tmp_path), tmp_path / "out"
    output.mkdir()
    (output / "progress.jsonl").write_text('{"epoch": 1}\n')
    for name in ("", "tokenizer.json"):
        if name:
            (output / name).write_text("mine")
        before = {path.name: path.read_bytes() for path in output.iterdir()}
        assert prepare(text, f"--output={output}") == 2
        assert "holds other files" in capsys.readouterr().err
        assert before == {path.name: path.read_bytes() for path in output.iterdir()}


@pytest.mark.parametrize("line", ["garbage", "[1]", "{}", '{"files": [], "next": [0, 0, 0]}'])
def test_a_damaged_journal_or_settings_are_one_line(tmp_path, capsys, line):
    arguments = write_text(tmp_path), f"--output={tmp_path / 'out'}"
    assert prepare(*arguments) == 0
    manifest = tmp_path / "out" / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "settings": [1]}))
    assert prepare(*arguments) == 2
    assert "was started with different settings" in capsys.readouterr().err
    manifest.unlink()
    settings = json.dumps({"settings": found["settings"]})
    (tmp_path / "out" / "progress.jsonl").write_text(f"{settings}\n{line}\n")
    assert prepare(*arguments) == 2
    assert "progress.jsonl: is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("exclude", [("a/one",), ("on*",), ("",), ("tesst",)])
def test_an_excluded_name_that_cannot_match_is_rejected(tmp_path, exclude):
    for name in ("one", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match=f"data.exclude={re.escape(exclude[0])}: .*subfolder"):
        build(tmp_path, exclude=exclude)
    assert build(tmp_path, exclude=("test", "node_modules")).size == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.parquet", b"PAR1" + bytes(50), "is a Parquet file; tokenize it with `meshtrain"),
        ("data-00000-of-00001.arrow", b"ARROW1" + bytes(50), "is an Arrow file; "),
        ("rows.jsonl", b'{"text": "a"}', "is JSON lines; tokenize it with `meshtrain prepare`"),
        ("rows.csv", b"text\n" + b"a row\n" * 100, "is a table; "),
        ("all.json", b'[{"text": "a row"}]' * 20, "is JSON; tokenize it with `meshtrain prepare`"),
    ],
)
def test_a_note_next_to_data_of_another_format_is_not_read_for_it(
    name, content, expected, tmp_path
):
    (tmp_path / "README.md").write_text("# A data set\n\nWhat it has.\n")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        build(tmp_path, pattern="*.py")
    assert f"{name} {expected}" in str(error.value) and len(error.value.faults) == 1
    assert build(tmp_path, pattern="*.md").size


def test_a_small_table_among_texts_does_not_keep_them_from_being_read(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "a"}')
    for number in range(3):
        (tmp_path / f"{number}.md").write_text("some text of a page\n" * 5)
    (warning,) = build(tmp_path, pattern="*.py").warnings
    assert "it has most of *.md" in warning


def test_where_a_pattern_matches_nothing_the_texts_are_read_with_a_warning(folder):
    (folder / "texts" / "image.png").write_bytes(bytes(range(256)) * 8)
    source, expected = build("texts", pattern="*.py"), build("texts", pattern="*.txt")
    assert source.read(np.arange(2)).tokens.tolist() == expected.read(np.arange(2)).tokens.tolist()
    assert source.warnings == [
        "data.path=texts: no files match data.pattern=*.py; it has most of *.txt, which are read "
        "instead"
    ]
    assert expected.warnings == []
