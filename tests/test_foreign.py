"""Hostile files: what reads them says in one line what is wrong, and neither hangs nor crashes."""

import errno
import json
import os

import pytest

from meshtrain import console, foreign, object_store
from meshtrain.__main__ import main
from meshtrain.checkpoint import manifest, run_tokenizer
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.data import chat_template, prepared, tokenizer
from meshtrain.data.corpus import load_corpus
from meshtrain.data.prepare import inputs, outputs, shards
from meshtrain.data.prepare.records import text_of
from meshtrain.errors import ConfigError, disk_fault, memory_fault
from meshtrain.huggingface import config_json, convert, files
from meshtrain.inference import generate
from meshtrain.tools.plan import machine
from meshtrain.tools.report import read as report

# Contents that no file of JSON may have, and what is said about them.
NOT_JSON = {
    "empty": (b"", "not JSON: Expecting value"),
    "truncated": (b'{"a": [1, 2', "not JSON"),
    "binary": (b"\x89PNG\r\n\x1a\n\xff\xfe", "invalid UTF-8 at byte 0"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "invalid UTF-8 at byte 0"),
    "NUL": (b'{"a": 1}\0', "not JSON: Extra data"),
    "too deep for Python": (b'{"a":' + b"[" * 10**5, "nested more than 100 levels deep"),
    "too deep for others": (b"[" * 500 + b"]" * 500, "nested more than 100 levels deep"),
    "deep objects": (b'{"a":' * 500 + b"1" + b"}" * 500, "nested more than 100 levels deep"),
    "a number of a megabyte": (b"9" * 10**6, "holds an integer of more than 4,300 digits"),
    "half of a surrogate pair": (rb'{"a\uD800": 1}', "invalid UTF-8: half of a surrogate pair"),
    "a list": (b"[1, 2]", "not an object"),
    "a text": (b'"a"', "not an object"),
    "null": (b"null", "not an object"),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_a_file_that_is_no_json_object(tmp_path, case):
    content, fault = NOT_JSON[case]
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=fault) as caught:
        foreign.read_json(tmp_path / "file.json")
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_what_json_may_hold(tmp_path):
    """Also a byte-order mark, a pair of surrogates, and the infinity of config.json."""
    value = {"a": [1, 2.5, None, {"b": "\U0001f600"}], "é": "x\\ud800"}
    text = json.dumps(value)[:-1] + ', "infinite": 1e999}'
    (tmp_path / "file.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert foreign.read_json(tmp_path / "file.json") == value | {"infinite": float("inf")}
    (tmp_path / "list.json").write_text("[]")
    assert foreign.read_json(tmp_path / "list.json", list) == []
    nested = b"[" * 100 + b"]" * 100
    assert foreign.parse_json(nested)
    with pytest.raises(FileNotFoundError):
        foreign.read_json(tmp_path / "none.json")


def test_nothing_waits_for_a_pipe_or_reads_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    places = {tmp_path / "pipe": "a pipe", "/dev/zero": "a device", tmp_path: "a folder"}
    for path, kind in places.items():
        with pytest.raises(ValueError, match=f"{kind}, not a file"):
            foreign.read_bytes(path, max_bytes=10)


def test_no_more_than_the_limit_is_read(tmp_path):
    sparse = tmp_path / "file.json"
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than 67,108,864 bytes"):
        foreign.read_json(sparse)
    sparse.write_bytes(b"12345")
    assert foreign.read_bytes(sparse, max_bytes=5) == b"12345"
    # A file of /proc has a size of 0.
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        foreign.read_bytes("/proc/self/status", max_bytes=3)


# ---- text of others on a terminal ----

CODES = (
    "\x1b]0;title\x07 \x1b[2J\x1b[1;31m red \x9b31m \b\b\0 \u202e reversed \r over \ud800 \udcff"
)
SHOWN = (
    r"\x1b]0;title\x07 \x1b[2J\x1b[1;31m red \x9b31m \x08\x08\x00 \u202e reversed \r over "
    r"\ud800 \udcff"
)
TEXT = "naïve 日本 👩‍👩‍👧 שלום\n\tif x:\r\n"  # stays


def test_codes_of_a_terminal_are_written_out_and_text_stays(capsys):
    assert console.printable(CODES) == SHOWN
    assert console.printable(TEXT) == TEXT
    assert console.line_of(f"a: {CODES}\n  b\r\n") == rf"a: {SHOWN} b"
    assert len(console.line_of("x" * 10**6)) < 5000
    console.say(CODES, TEXT, stream="stderr")
    assert capsys.readouterr().err == f"{SHOWN}\n{TEXT}\n"


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_generated_text_keeps_its_lines_and_does_nothing_to_the_terminal(capsys, num_prompts):
    loaded = tokenizer.load("bytes")
    new = loaded.encode("é\x1b[2J\r\n\tok\r").tolist()
    steps = [[token] * num_prompts for token in [*new, None]]
    prompts = [loaded.encode("\x9b1").tolist()] * num_prompts
    pieces = generate.continue_texts(loaded, prompts, steps, set(), [])
    generate.print_texts(loaded, prompts, pieces, ["0", "1"][:num_prompts], replies_only=False)
    texts = "\\x9b1é\\x1b[2J\r\n\tok\\r\n"
    if num_prompts == 2:
        texts = f"--- 0\n{texts}--- 1\n{texts}"
    assert capsys.readouterr().out == texts


def test_the_name_of_a_file_is_one_harmless_line(tmp_path, capsys):
    name = tmp_path / "a\x1b[31m\n\u202eb"
    faults = {
        ("info", f"--config={name}"): "no such file",
        ("checkpoint", "ls", str(name)): "has no folder checkpoints",
        ("prepare", str(name), f"--output={tmp_path}/out"): "no such file or folder",
        ("report", str(name), f"--output={tmp_path}/out.html"): "not a run",
        ("generate", f"--workdir={name}"): "not a run",
        ("nothing\x1b[31m",): "unknown verb",
    }
    for arguments, fault in faults.items():
        assert main([*arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert fault in line and r"\x1b[31m" in line and line.isprintable()


# ---- errors ----


def test_a_full_disk_is_one_line(capsys):
    """Whatever writes; an error while a file is written has no name."""
    by_tensorstore = ValueError(f"Error writing \"a\" {'x' * 5000}\n[os_error_code='28']")
    wrapped = RuntimeError("of Orbax")
    wrapped.__cause__ = by_tensorstore
    errors = {
        OSError(errno.ENOSPC, "No space left on device"): "a file that is written: No space",
        OSError(errno.ENOSPC, "No space left on device", "/x/a"): "/x/a: No space",
        OSError(errno.EDQUOT, "Disk quota exceeded", "/x/a"): "/x/a: Disk quota exceeded; make",
        by_tensorstore: "a file that is written: No space",
        wrapped: "a file that is written: No space",
    }
    for error, line in errors.items():

        def fail(error=error):
            raise error

        assert app.report_errors(fail, "plan") == 2
        printed = capsys.readouterr().err
        assert printed.startswith(line) and printed.count("\n") == 1
    assert disk_fault(OSError(errno.ENOENT, "No such file or directory", "/x")) is None


def test_long_messages_are_searched_in_linear_time():
    """Each of these took the square of its length: hours."""
    size = 10**6
    memory_fault(MemoryError("allocat" * size))
    object_store.request_error("http_response_code=" + " " * size + "x", object_store.root())
    with pytest.raises(ValueError, match="Requested"), manifest.reading_chunks(object_store.root()):
        raise ValueError("Requested byte range " * (size // 20))


# ---- every reader, every hostile file ----


def manifest_of(folder):
    (folder / "5").mkdir()
    (folder / manifest.NAME).rename(folder / "5" / manifest.NAME)
    return manifest.read(folder / "5")


def report_of(folder):
    run = report.Run(folder)
    run.update()
    return run.notes()


# Name of the file -> what reads it, from the folder.
READERS = {
    "run.json": lambda folder: load.load_config(str(folder / "run.json")),
    "config.yaml": lambda folder: load.load_config(str(folder / "config.yaml")),
    "config.json": lambda folder: config_json.read(folder / "config.json"),
    "model.safetensors": files.tensors,
    "model.safetensors.index.json": files.tensors,
    "huggingface_dtypes.json": convert.original_dtypes,
    "manifest.json": prepared.read_manifest,
    "progress.jsonl": lambda folder: shards.Journal(outputs.LocalOutput(folder), {}).close(),
    "tokenizer.json": tokenizer.load,
    "tokenizer.model": tokenizer.load,
    "tokenizer_config.json": chat_template.load,
    "chat_template.jinja": chat_template.load,
    "generation_config.json": lambda folder: run_tokenizer.listed_end_tokens([folder]),
    "MANIFEST.json": manifest_of,
    "metrics.jsonl": report_of,
    "events.jsonl": report_of,
    "measured/metrics.jsonl": lambda folder: machine.measured_factor(folder / "measured"),
    "a.npy": lambda folder: load_corpus(
        str(folder / "a.npy"), dtype="", vocab_size=256, pattern="*", exclude=()
    ),
    "a.jsonl": lambda folder: prepare("a.jsonl", folder),
    "a.parquet": lambda folder: prepare("a.parquet", folder),
    "a.txt.gz": lambda folder: prepare("a.txt.gz", folder),
}
# What these may be read as: a template without Jinja, lines that are left out, no end tokens.
ACCEPT = ("chat_template.jinja", "generation_config.json", "metrics.jsonl", "events.jsonl")


def prepare(name, folder):
    options = inputs.ReadOptions("text", "", "")
    paths, _ = inputs.find_files([str(folder / name)], "", folder / "out")
    for record in inputs.read_records(paths, options, len):
        try:
            text_of(record, options)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def make_pipe(path):
    os.mkfifo(path)


def make_sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


PLACES = {
    "a pipe": make_pipe,
    "a folder": lambda path: path.mkdir(),
    "a terabyte of zeros": make_sparse,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
PLACES |= {
    case: lambda path, content=content: path.write_bytes(content)
    for case, (content, _) in NOT_JSON.items()
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_in_a_line_what_is_wrong(tmp_path, name, case):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    PLACES[case](path)
    try:
        READERS[name](tmp_path)
    except (ConfigError, CorruptCheckpoint) as error:
        text = str(error)
        line = console.line_of(text)
        assert path.name in text or str(tmp_path) in text
        assert len(text) < 1000 and line.isprintable()
    else:
        # An empty file of documents has none, and an empty journal is a new one.
        assert name in ACCEPT or case == "empty"
