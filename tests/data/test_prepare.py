"""`meshtrain prepare`: the same output for any number of workers, also if it is killed and resumed."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import indexed, prepared, split_points, tokenizer, tokens
from meshtrain.data.prepare import inputs, shards, tokenize
from meshtrain.errors import ConfigError

TEXTS = ["first\n", "zweitens: äöü\n\n  x", "third 3", "日本語\n", "a" * 300, "last\r\nline\r\n"]
WORDS = "the of and to in is it that was for über straße naïve 東京 123 4567 don't I'll (x) # -- \t"
WORDS = WORDS.split(" ")


def run(*arguments):
    """Returns the exit code of `meshtrain prepare`, in this process, with one worker by default."""
    return app.main("prepare", [*("--num_workers=1",), *map(str, arguments)])


def write_jsonl(folder, texts=TEXTS):
    """Writes a file of JSON lines with these texts, and returns its path."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text, "other": 1}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl"


def prose(seed, size):
    """Returns random text with lines, numbers, punctuation and several alphabets."""
    chosen = random.Random(seed)
    words = chosen.choices(WORDS, k=size)
    return "".join(
        word + chosen.choice([" ", " ", " ", "\n", "\n\n", "\r\n", ". "]) for word in words
    )


def documents(folder):
    """Returns the documents of a prepared folder as lists of ids, without their EOS."""
    found = prepared.read_manifest(Path(folder))
    loaded = [indexed.load(str(Path(folder) / entry["name"])) for entry in found["shards"]]
    split = [np.split(shard.tokens, shard.starts[1:-1]) for shard in loaded]
    assert all(doc[-1] == found["tokenizer"]["eos"] for docs in split for doc in docs)
    return [doc[:-1].tolist() for docs in split for doc in docs]


def texts(folder):
    loaded = tokenizer.load(folder)
    return [loaded.decode(document) for document in documents(folder)]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def hugging_face(path, text=None, eos="<|endoftext|>"):
    """Writes a small byte-level tokenizer.json."""
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    write_jsonl(path, [text or prose(0, 3000)])
    files = [path / "a.jsonl"]
    tokenize.train_bpe(files, inputs.ReadOptions("text", "", ""), 320, path / "tokenizer.json")
    if eos != tokenize.BPE_EOS:
        content = (path / "tokenizer.json").read_text().replace(tokenize.BPE_EOS, eos)
        (path / "tokenizer.json").write_text(content)
    return path / "tokenizer.json"


def sentence_piece(path, **options):
    """Writes a small SentencePiece model with a byte fallback and without normalization."""
    spm = pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
    path.mkdir(exist_ok=True)
    with open(path / "tokenizer.model", "wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(prose(0, 3000).split("\n")),
            model_writer=file,
            vocab_size=310,
            byte_fallback=True,
            minloglevel=2,
            **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
        )
    return path / "tokenizer.model"


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
        assert file == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    parquet.write_table(
        pyarrow.table({"n": range(len(texts)), "text": texts}), path, row_group_size=4
    )


KINDS = ["jsonl", "jsonl.gz", "crlf", "blank", "parquet", "separator", "files", "gz", "bom"]


def inputs_of(kind, folder):
    """Writes TEXTS as one kind of input, and returns the flags to read them."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    folder.mkdir()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "crlf":
        (folder / "a.jsonl").write_bytes(lines.replace(b"\n", b"\r\n"))
    elif kind == "blank":  # blank lines are ignored
        (folder / "a.jsonl").write_bytes(b"\n" + lines.replace(b"\n", b"\n \t\r\n\n"))
    elif kind == "bom":
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.rstrip())
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", TEXTS)
    elif kind == "separator":
        (folder / "a.txt").write_text("<|end|>".join(["", *TEXTS, "\n"]), newline="")
        return [str(folder), "--separator=<|end|>"]
    elif kind == "files":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text, newline="")
        (folder / "empty.txt").touch()
    elif kind == "gz":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return [str(folder)]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_documents(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(inputs, "CHUNK", chunk)
    assert run(*inputs_of(kind, tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    found = texts(tmp_path / "out")
    are_files = kind in ("files", "gz")  # files are shuffled
    assert (sorted(found) if are_files else found) == (sorted(TEXTS) if are_files else TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_after_any_shard_resumes_to_the_same_files(tmp_path, monkeypatch, kind):
    flags = [*inputs_of(kind, tmp_path / "in"), "--shard_tokens=10"]
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    num_shards = len(prepared.read_manifest(tmp_path / "reference")["shards"])
    assert num_shards >= 4
    add = shards.Journal.add

    def add_and_stop(journal, shard):
        add(journal, shard)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shards.Journal, "add", add_and_stop)
        for _ in range(num_shards):
            assert run(*flags, f"--output={tmp_path / 'out'}") == 75
    assert run(*flags, f"--output={tmp_path / 'out'}") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


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


def test_another_field_is_read_if_given(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "yes", "text": "no"}\n')
    assert run(tmp_path / "a.jsonl", f"--output={tmp_path / 'out'}", "--field=body") == 0
    assert texts(tmp_path / "out") == ["yes"]


# ---- the same output after any interruption ----


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three files of some MB, one of them a single text that is split into pieces."""
    folder = tmp_path_factory.mktemp("large")
    write_jsonl(folder / "in", [prose(seed, 40 + seed % 900) for seed in range(400)])
    (folder / "in" / "long.txt").write_text(prose(1, 400_000), newline="")
    lines = [json.dumps({"text": prose(seed, 300)}) + "\n" for seed in range(500)]
    (folder / "in" / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return folder


def flags_of(large, output, workers, tokenizer):
    where = [str(large / "in"), f"--output={output}", f"--num_workers={workers}"]
    return [*where, "--shard_tokens=60000", f"--tokenizer={tokenizer}"]


@pytest.mark.multiprocess
def test_workers_block_ctrl_c():
    """In a new process, in which Python has not yet started its process that tracks semaphores."""
    code = """
from functools import partial
from signal import SIG_BLOCK, SIGINT, pthread_sigmask
from meshtrain.data.prepare.tokenize import map_in_order

masks = list(map_in_order(partial(pthread_sigmask, SIG_BLOCK), [[], []], num_workers=2))
assert masks == [{SIGINT}] * 2, masks
assert pthread_sigmask(SIG_BLOCK, []) == set()"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.multiprocess
def test_two_workers_write_the_same_files_as_one_and_a_killed_run_resumes_to_the_same(
    large, tmp_path, monkeypatch
):
    tokenizer_file = hugging_face(tmp_path / "tokenizer")
    monkeypatch.setattr(tokenize, "UNIT_BYTES", 100_000)  # many units per worker
    for name, workers in (("one", 1), ("two", 2)):
        assert run(*flags_of(large, tmp_path / name, workers, tokenizer_file)) == 0
    reference = content(tmp_path / "one")
    assert len(reference) > 10 and content(tmp_path / "two") == reference
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "meshtrain", "prepare"]
    command += flags_of(large, killed, 2, tokenizer_file)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(killed.glob("*.idx"))) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (killed / "manifest.json").exists()
    lines = (killed / prepared.JOURNAL).read_text().splitlines()[1:]
    complete = [json.loads(line) for line in lines]
    paths = [killed / f"{one['name']}.{kind}" for one in complete for kind in one["files"]]
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert run(*flags_of(large, killed, 1, tokenizer_file)) == 0
    assert content(killed) == reference and before
    assert before == {path: path.stat().st_mtime_ns for path in before}  # not written again


def run_interrupted(monkeypatch, *flags):
    """Runs `meshtrain prepare`, and interrupts it just before it writes the manifest."""
    write = prepared.write_durably

    def stop(path, data):
        if path.name == prepared.MANIFEST:
            raise KeyboardInterrupt
        write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(prepared, "write_durably", stop)
        assert run(*flags) == 75


@pytest.mark.parametrize("missing", [0, 1, 7, 40, 2000])
def test_a_run_resumes_from_a_truncated_journal(tmp_path, monkeypatch, missing):
    flags = (write_jsonl(tmp_path / "in"), "--shard_tokens=9")
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    run_interrupted(monkeypatch, *flags, f"--output={tmp_path / 'out'}")
    journal = tmp_path / "out" / prepared.JOURNAL
    journal.write_bytes(journal.read_bytes()[: -missing or None])
    with pytest.raises(ConfigError, match="preparation is not finished"):
        build(tmp_path / "out")
    run_interrupted(monkeypatch, *flags, f"--output={tmp_path / 'out'}")
    assert run(*flags, f"--output={tmp_path / 'out'}") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


def build(path, **changes):
    settings = {"dtype": "", "pattern": "*", "exclude": (), "seq_len": 4, "vocab_size": 256}
    settings |= {"separator": -1, "heldout": 0.0, "seed": 0, "split": "train"}
    return tokens.build(path=str(path), **{**settings, **changes})


def test_an_incomplete_bin_is_written_again(tmp_path):
    flags = (write_jsonl(tmp_path / "in"), "--shard_tokens=9")
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    found = json.loads((tmp_path / "reference" / "manifest.json").read_text())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / prepared.JOURNAL).write_text(
        json.dumps({"settings": found["settings"]}) + "\n"
    )
    (tmp_path / "out" / "00000.bin.new").write_bytes(b"half")
    (tmp_path / "out" / "00000.bin").write_bytes(b"without its .idx, nor a line of the journal")
    assert run(*flags, f"--output={tmp_path / 'out'}") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("--shard_tokens=10", "shard_tokens was 9, now 10"),
        ("--field=other", "field was 'text', now 'other'"),
        ("--separator=x", "separator was '', now 'x'"),
        ("inputs", "the inputs have changed"),
    ],
)
@pytest.mark.parametrize("done", [True, False])
def test_other_settings_or_inputs_are_rejected(
    tmp_path, capsys, monkeypatch, change, expected, done
):
    flags = [write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}", "--shard_tokens=9"]
    if done:
        assert run(*flags) == 0
    else:
        run_interrupted(monkeypatch, *flags)
    if change == "inputs":
        write_jsonl(tmp_path / "in", TEXTS[:-1])
    else:
        flags.append(change)
    before = content(tmp_path / "out")
    assert run(*flags) == 2 and expected in capsys.readouterr().err
    assert {k: v for k, v in content(tmp_path / "out").items() if k in before} == before


def test_a_trained_tokenizer_is_not_reused_for_other_settings(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    flags = [write_jsonl(tmp_path / "in", [prose(0, 3000)]), f"--output={tmp_path / 'out'}"]
    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "tokenize_unit", None)
        with pytest.raises(TypeError):
            run(*flags, "--train_bpe=300")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert run(*flags, "--train_bpe=310") == 0
    assert tokenizer.load(tmp_path / "out").vocab_size == 310


def test_the_same_command_again_does_nothing(tmp_path, capsys):
    flags = [write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 0
    before = content(tmp_path / "out")
    assert run(*flags, "--num_workers=3") == 0 and "already prepared" in capsys.readouterr().out
    assert content(tmp_path / "out") == before


def test_a_second_run_in_the_same_folder_is_rejected(tmp_path, capsys):
    flags = [write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}"]
    journal = shards.Journal(tmp_path / "out", {})
    assert run(*flags) == 2 and "another `meshtrain prepare` is running" in capsys.readouterr().err
    journal.close()


def test_a_folder_with_other_files_is_rejected_and_unchanged(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.txt").write_text("text")
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 2
    assert "holds other files" in capsys.readouterr().err
    assert content(tmp_path / "out") == {"other.txt": b"text"}


@pytest.mark.multiprocess
def test_workers_of_a_killed_run_exit(large, tmp_path):
    command = [sys.executable, "-m", "meshtrain", "prepare", "--shard_tokens=20000"]
    command += flags_of(large, tmp_path / "o", 2, "bytes")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not list((tmp_path / "o").glob("*.idx")):
            time.sleep(0.01)
        workers = descendants(process.pid)
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert workers and [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def descendants(pid):
    """Returns the ids of all child processes of `pid`, and of their children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found] + [other for one in found for other in descendants(int(one))]


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
    *("2: not JSON", "3: no field 'text'", "4: text is int, not a string"),
    *("5: text is NoneType, not a string", "6: text is empty"),
    *("8: invalid UTF-8 at byte 10", "9: invalid UTF-8: half of a surrogate"),
    *("10: no field 'text'", "11: not JSON", "12: holds '\\x00'"),
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["missing.txt", "--output=o"], ["missing.txt: no such file or folder"]),
        (["--output=o"], ["no input; give files"]),
        (["x.txt"], ["--output is missing"]),
        (["x.txt", "--output=o", "--shard_tokens=0"], ["--shard_tokens=0: use 1 or more"]),
        (["x.txt", "--output=o", "--num_workers=0"], ["--num_workers=0"]),
        (["x.txt", "--output=o", "--train_bpe=10"], ["--train_bpe=10: use 257 or more"]),
        (["x.txt", "--output=o", "--tokenizer=nope.json"], ["tokenizer nope.json: no such file"]),
        (["x.txt", "--output=o", "--train_bpe=300", "--tokenizer=t"], ["give one of them"]),
        (["x.txt", "--output=o", "--eos=<s>"], ["--eos=<s>: tokenizer bytes has no such token"]),
        (["x.txt", "--output=o", "--bos"], ["--bos: --tokenizer=bytes has no token"]),
        (["empty.txt", "--output=o"], ["the inputs contain no document"]),
        (["empty", "--output=o"], ["empty: no files in it end in .txt"]),
        (["empty", "--output=o", "--pattern=*.x"], ["match --pattern=*.x"]),
        (["x.txt", "--output=x.txt"], ["--output=x.txt: "]),
        (
            ["x.txt", "--output=o", "--tokenizer=x.txt"],
            ["tokenizer x.txt is not a SentencePiece model"],
        ),
        (
            ["x.txt", "--output=o", "--tokenizer=bad.json"],
            ["tokenizer bad.json is not a tokenizer.json"],
        ),
        (["x.txt", "--output=o", "--what=1"], ["--what: unknown argument"]),
        (["--verify=empty"], ["--verify=empty: no manifest.json there"]),
    ],
)
def test_the_error_for_a_wrong_flag_names_it(tmp_path, capsys, monkeypatch, flags, expected):
    if "x.txt is not" in expected[0] or "bad.json" in expected[0]:
        pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
        pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert [part for part in expected if part not in error] == [] and "Traceback" not in error


def test_the_error_for_a_missing_package_has_the_install_command(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run(path, f"--output={tmp_path / 'out'}", "--train_bpe=300") == 2
    assert "tokenizers is missing; pip install 'meshtrain[tokenizers]'" in capsys.readouterr().err


# ---- tokenizers ----

LLAMA = min(split_points.SAFE_PATTERNS, key=len)


@pytest.mark.parametrize("kind", ["bytes", "huggingface", "sentencepiece"])
def test_a_text_survives_a_round_trip_and_token_bytes_add_up_to_its_size(tmp_path, kind):
    make = {"huggingface": hugging_face, "sentencepiece": sentence_piece}.get(kind)
    loaded = tokenizer.load(make(tmp_path / "t") if make else "bytes")
    sizes = loaded.token_bytes()
    assert loaded.kind == kind and sizes.shape == (loaded.vocab_size,)
    assert sizes[loaded.eos] == 0
    for text in [
        *TEXTS,
        prose(7, 500),
        "🙂 \u0001\t x",
        "</s><|endoftext|><s><unk>",
        " two  spaces ",
    ]:
        ids = loaded.encode(text)
        assert ids.dtype == np.int32 and ids.max() < loaded.vocab_size
        assert loaded.eos not in ids and loaded.bos not in ids.tolist()
        # SentencePiece adds a space before the text.
        assert sizes[ids].sum() == len(text.encode()) + (kind == "sentencepiece")
        assert loaded.decode(ids) == text
        assert loaded.decode([*ids, loaded.eos]) == text
    assert loaded.encode("").shape == (0,) and loaded.decode([]) == ""
    batch = loaded.encode_batch(TEXTS)
    assert [one.tolist() for one in batch] == [loaded.encode(text).tolist() for text in TEXTS]


def test_the_bytes_tokenizer_rejects_nul_and_marks_invalid_utf_8():
    loaded = tokenizer.load("bytes")
    with pytest.raises(ConfigError, match="NUL"):
        loaded.encode("a\0b")
    assert loaded.decode([0xE4, 0xB8, 65]) == "\N{REPLACEMENT CHARACTER}A"


@pytest.mark.parametrize(
    ("eos", "flag"),
    [
        ("<|endoftext|>", ""),
        ("</s>", ""),
        ("<|end_of_text|>", ""),
        ("<eos>", ""),
        ("<END>", "<END>"),
    ],
)
def test_the_eos_token_is_detected_or_given(tmp_path, capsys, eos, flag):
    file = hugging_face(tmp_path / "t", eos=eos)
    flags = [
        write_jsonl(tmp_path / "in"),
        f"--output={tmp_path / 'out'}",
        f"--tokenizer={file.parent}",
    ]
    if flag:
        assert run(*flags) == 2 and "--eos=TEXT" in capsys.readouterr().err
        assert run(*flags, "--eos=nope") == 2 and "no such token" in capsys.readouterr().err
        flags.append(f"--eos={flag}")
    assert run(*flags) == 0 and texts(tmp_path / "out") == TEXTS
    loaded = tokenizer.load(tmp_path / "out")
    assert loaded.decode([loaded.eos]) == "" and loaded.eos == 0
    flags = [flags[0], f"--output={tmp_path / 'two'}", f"--tokenizer={tmp_path / 'out'}"]
    # The EOS token of a prepared folder is reused.
    assert run(*flags) == 0 and texts(tmp_path / "two") == TEXTS
    other = next(token for token in range(1, 99) if loaded.decode([token]).isalpha())
    spelled = loaded.decode([other])
    assert tokenizer.load(tmp_path / "out", eos=spelled).eos == other  # `eos` overrides it
    assert run(flags[0], f"--output={tmp_path / 'bytes'}") == 0
    with pytest.raises(ConfigError, match="no such token"):
        tokenizer.load(tmp_path / "bytes", eos="<s>")


def test_ignored_files_are_counted(tmp_path, capsys):
    write_jsonl(tmp_path / "in")
    (tmp_path / "in" / "README.md").touch()
    assert run(tmp_path / "in", f"--output={tmp_path / 'out'}") == 0
    assert "ignored: 1 files" in capsys.readouterr().out


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    described["truncation"] = {
        "max_length": 5,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    described["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    described["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    expected = tokenizer.load(file).encode(TEXTS[1])
    file.write_text(json.dumps(described))
    assert tokenizer.load(file).encode(TEXTS[1]).tolist() == expected.tolist()


def test_a_long_text_in_pieces_has_the_same_tokens(tmp_path, monkeypatch):
    loaded = tokenizer.load(hugging_face(tmp_path / "t"))
    text = prose(3, 30_000)
    expected = loaded.encode_batch([text])[0].tolist()
    for size in (50, 777, 20_000):
        monkeypatch.setattr(tokenizer, "PIECE_CHARS", size)
        assert len(loaded.pieces(text)) > len(text) // (4 * size)
        assert "".join(loaded.pieces(text)) == text
        assert loaded.encode(text).tolist() == expected
    monkeypatch.setattr(inputs, "CHUNK", 1000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "long.txt").write_text(text, newline="")
    flags = [f"--output={tmp_path / 'out'}", f"--tokenizer={tmp_path / 't'}"]
    assert run(tmp_path / "in", *flags) == 0
    assert documents(tmp_path / "out") == [expected]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d.update(pre_tokenizer=sequence(["[^a]+"], d)),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA, d, behavior="MergedWithNext")),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA, d, invert=True)),
        lambda d: d.update(pre_tokenizer=sequence(LLAMA * 2, d)),
        lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        lambda d: d["pre_tokenizer"].update(use_regex=False),
        lambda d: d.update(normalizer={"type": "Lowercase"}),
        lambda d: d.update(pre_tokenizer={"type": "Whitespace"}),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d["added_tokens"].append(
            {**d["added_tokens"][0], "content": "a\nb", "special": False}
        ),
        lambda d: d["added_tokens"].append(
            {**d["added_tokens"][0], "content": "ab", "special": False, "rstrip": True}
        ),
    ],
)
def test_a_text_is_not_split_if_that_could_change_its_tokens(tmp_path, change):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    assert split_points.can_split(described)
    change(described)
    assert not split_points.can_split(described)


@pytest.mark.parametrize("patterns", sorted(split_points.SAFE_PATTERNS))
def test_texts_are_split_for_well_known_tokenizers(tmp_path, monkeypatch, patterns):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    described["pre_tokenizer"] = sequence(patterns, described)
    file.write_text(json.dumps(described))
    loaded, text = tokenizer.load(file), prose(4, 10_000)
    expected = loaded.encode_batch([text])[0].tolist()
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    assert len(loaded.pieces(text)) > 100 and loaded.encode(text).tolist() == expected


def sequence(patterns, described, **changes):
    split = {"type": "Split", "behavior": "Isolated", "invert": False, **changes}
    splits = [{**split, "pattern": {"Regex": one}} for one in patterns]
    level = {**described["pre_tokenizer"], "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def test_a_text_of_one_line_is_not_split(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    loaded = tokenizer.load(hugging_face(tmp_path / "t"))
    assert loaded.pieces("no newline " * 500) == ["no newline " * 500]
    assert [len(one) for one in tokenizer.load("bytes").pieces("x" * 250)] == [100, 100, 50]


def test_a_trained_tokenizer_is_stored_used_and_reproducible(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    path = write_jsonl(tmp_path / "in", [prose(seed, 300) for seed in range(40)])
    for name in ("a", "b"):
        assert run(path, f"--output={tmp_path / name}", "--train_bpe=360") == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    loaded = tokenizer.load(tmp_path / "a")
    assert loaded.vocab_size == 360 and loaded.eos == 0
    assert texts(tmp_path / "a") == [prose(seed, 300) for seed in range(40)]
    found = prepared.read_manifest(tmp_path / "a")
    assert found["dtype"] == "uint16"
    digest = hashlib.sha256((tmp_path / "a" / "tokenizer.json").read_bytes()).hexdigest()
    assert found["tokenizer"]["sha256"] == digest


def test_a_text_too_short_for_the_vocabulary_is_rejected(tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--train_bpe=5000") == 2
    assert "--train_bpe=5000: the text is enough for only" in capsys.readouterr().err


def test_documents_begin_with_bos_if_requested(tmp_path):
    file = sentence_piece(tmp_path / "t")
    for name, flags in (("without", []), ("with", ["--bos"])):
        path = write_jsonl(tmp_path / "in")
        assert run(path, f"--output={tmp_path / name}", f"--tokenizer={file}", *flags) == 0
    bos = tokenizer.load(file).bos
    assert [[bos, *doc] for doc in documents(tmp_path / "without")] == documents(tmp_path / "with")
    for name in ("with", "without"):
        assert tokenizer.load(tmp_path / name).bos == bos
        assert tokenizer.has_bos(tmp_path / name) == (name == "with")
    assert texts(tmp_path / "with") == TEXTS


# ---- reading a prepared folder ----


def test_a_prepared_folder_is_a_source_with_token_bytes(tmp_path):
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--shard_tokens=20") == 0
    source = build(tmp_path / "out")
    assert len(prepared.read_manifest(tmp_path / "out")["shards"]) > 2
    assert source.token_bytes.tolist() == [0] + [1] * 255 and "6 documents" in source.description
    rows = source.read(np.arange(source.size))
    stream = b"".join(text.encode() + b"\0" for text in TEXTS)
    assert sorted(bytes(row.astype(np.uint8)) for row in rows.tokens) == sorted(
        stream[at : at + 4] for at in range(0, 4 * source.size, 4)
    )


def test_a_small_vocabulary_and_different_tokenizers_are_rejected_at_once(tmp_path):
    path = write_jsonl(tmp_path / "in", [prose(1, 2000)])
    assert run(path, f"--output={tmp_path / 'a'}") == 0
    file = hugging_face(tmp_path / "t")
    assert run(path, f"--output={tmp_path / 'b'}", f"--tokenizer={file}") == 0
    with pytest.raises(
        ConfigError, match="data.vocab_size=256 is less than the 320.*model.vocab_size=320"
    ):
        build(tmp_path / "b")
    pairs = ((str(tmp_path / "a"), 1), (str(tmp_path / "b"), 1))
    with pytest.raises(ConfigError, match="data.mixture: .*b has another tokenizer than .*a"):
        build("", mixture=pairs, vocab_size=320)


@pytest.mark.parametrize("file", ["00000.bin", "00001.idx"])
def test_verify_finds_a_changed_byte_and_loading_a_changed_size(tmp_path, capsys, file):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}", "--shard_tokens=20") == 0
    assert run(f"--verify={out}") == 0 and "all 362 tokens are valid" in capsys.readouterr().out
    valid = (out / file).read_bytes()
    (out / file).write_bytes(valid[:-1] + bytes([valid[-1] ^ 1]))
    assert run(f"--verify={out}") == 2 and f"{file}: was changed" in capsys.readouterr().err
    (out / file).write_bytes(valid + b"x")
    with pytest.raises(ConfigError, match=f"{file} has {len(valid) + 1} bytes"):
        build(out)
    (out / file).unlink()
    with pytest.raises(ConfigError, match=f"{file} is missing"):
        build(out)


@pytest.mark.parametrize("damage", ["truncated", "wrong shape", "missing"])
def test_a_corrupt_token_bytes_file_is_rejected(tmp_path, capsys, damage):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    path = out / "token_bytes.npy"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "missing":
        path.unlink()
    else:
        np.save(path, np.ones(255, np.int32))
    with pytest.raises(ConfigError, match="token_bytes.npy: cannot be read: .*; copy it again"):
        build(out)
    assert run(f"--verify={out}") == 2 and "token_bytes.npy: cannot" in capsys.readouterr().err


def test_an_empty_tokenizer_json_is_not_read_as_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer.json"):
        tokenizer.load(tmp_path)


def test_verify_finds_another_tokenizer(tmp_path, capsys):
    out = tmp_path / "out"
    path, file = write_jsonl(tmp_path / "in"), hugging_face(tmp_path / "t")
    assert run(path, f"--output={out}", f"--tokenizer={file}") == 0
    assert run(f"--verify={out}") == 0
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    assert run(f"--verify={out}") == 2 and "tokenizer.json: was changed" in capsys.readouterr().err


def test_an_empty_path_does_not_read_the_manifest_of_the_working_directory(tmp_path, monkeypatch):
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="data.path=: no such file"):
        build("")


def test_verify_checks_tokens_and_the_ends_of_documents(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(write_jsonl(tmp_path / "in"), f"--output={out}") == 0
    found = json.loads((out / "manifest.json").read_text())
    found["tokenizer"] |= {"vocab_size": 200, "eos": 3}
    found["tokens"] += 1
    (out / "manifest.json").write_text(json.dumps(found))
    assert run(f"--verify={out}") == 2
    error = capsys.readouterr().err
    for part in (
        "00000.bin: at byte 37: token 230",
        "vocab_size 200",
        "document 0 ends with 0, not 3",
        "tokens=",
    ):
        assert part in error


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9}', '{"version": 1}', "[]", "\0"])
def test_a_corrupt_manifest_is_rejected(tmp_path, text):
    assert run(write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}") == 0
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="manifest.json"):
        build(tmp_path / "out")


def test_work_units_have_a_limited_size():
    record = inputs.Record("x" * (tokenize.UNIT_BYTES // 4), inputs.Position(), 0)
    assert [len(unit) for unit in tokenize.work_units([record] * 9)] == [4, 4, 1]
    assert os.environ.get("TOKENIZERS_PARALLELISM") in (None, "false")
