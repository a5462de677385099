"""`meshtrain prepare` writes the same files for any number of workers, also when resumed."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.data import prepared
from meshtrain.data.prepare import outputs, shards, tokenize
from meshtrain.errors import ConfigError
from tests.lib.prepare import (
    KINDS,
    TEXTS,
    build,
    content,
    hugging_face,
    inputs_of,
    prose,
    run,
    write_jsonl,
)

# ---- kinds of input ----


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
@pytest.mark.slow
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


def test_the_same_command_again_does_nothing(tmp_path, capsys):
    flags = [write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}"]
    assert run(*flags) == 0
    before = content(tmp_path / "out")
    assert run(*flags, "--num_workers=3") == 0 and "already prepared" in capsys.readouterr().out
    assert content(tmp_path / "out") == before


def test_a_second_run_in_the_same_folder_is_rejected(tmp_path, capsys):
    flags = [write_jsonl(tmp_path / "in"), f"--output={tmp_path / 'out'}"]
    journal = shards.Journal(outputs.LocalOutput(tmp_path / "out"), {})
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
