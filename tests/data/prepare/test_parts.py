"""`meshtrain prepare --part=I/N` writes the same files as one process, in any order of events."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from meshtrain.data import prepared
from meshtrain.data.prepare import merge, outputs, parts, shards
from meshtrain.errors import ConfigError
from tests.lib.prepare import content, hugging_face, prose, run, write_jsonl


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Files of several sizes and formats, one of them with faults, and an empty one."""
    folder = tmp_path_factory.mktemp("parts") / "in"
    write_jsonl(folder, [prose(seed, 5 + seed % 60) for seed in range(100)])
    for number in range(6):
        (folder / f"{number}.txt").write_text(prose(number, 40 * number))
    lines = [json.dumps({"text": prose(seed, 30)}) + "\n" for seed in range(40)]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    faulty = [line if number % 2 else "no JSON\n" for number, line in enumerate(lines)]
    (folder / "c.jsonl").write_text("".join(faulty))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("t") / "t")


def flags_of(inputs, output, *flags):
    return [inputs, f"--output={output}", "--shard_tokens=900", "--skip_bad", *flags]


@pytest.fixture(scope="module")
def reference(inputs, tokenizer, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "out"
    assert run(*flags_of(inputs, output), f"--tokenizer={tokenizer}") == 0
    found = content(output)
    assert len(found) > 12
    return found


@pytest.mark.parametrize("order", [[0], [1, 0], [2, 0, 1], [3, 6, 0, 9, 1, 2, 8, 7, 5, 4]])
def test_parts_in_any_order_write_the_same_files_as_one_process(
    tmp_path, capsys, inputs, tokenizer, reference, order
):
    count = len(order)
    output = tmp_path / "out"
    for number, index in enumerate(order):
        flags = [f"--part={index}/{count}", f"--tokenizer={tokenizer}"]
        assert run(*flags_of(inputs, output), *flags) == 0
        if number < count - 1:
            missing = ", ".join(map(str, sorted(order[number + 1 :])))
            expected = f"{number + 1} of {count} parts are finished; missing: {missing}."
            assert expected in capsys.readouterr().out
            with pytest.raises(ConfigError):
                prepared.read_manifest(output)
    assert content(output) == reference
    assert run(*flags_of(inputs, output), *flags) == 0
    assert f"{output} is already prepared" in capsys.readouterr().out
    assert content(output) == reference


def test_the_parts_share_a_trained_tokenizer(tmp_path, inputs):
    flags = ["--train_bpe=300"]
    assert run(*flags_of(inputs, tmp_path / "reference"), *flags) == 0
    for index in range(2):
        assert run(*flags_of(inputs, tmp_path / "out"), *flags, f"--part={index}/2") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


def test_every_file_is_in_one_part_and_the_parts_have_about_the_same_bytes(tmp_path):
    paths = []
    for number in range(50):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(b"x" * ((number * 37) % 100))
        paths.append(path)
    for count in (1, 2, 7, 60):
        found = [part.files(paths) for part in parts.all_parts(count)]
        assert [path for files in found for path in files] == paths
    sizes = [sum(path.stat().st_size for path in files) for files in found]
    halves = [sum(path.stat().st_size for path in part.files(paths)) for part in parts.all_parts(2)]
    assert abs(halves[0] - halves[1]) < 150 and max(sizes) < 200
    assert parts.Part(0, 1).files(paths[:1]) == paths[:1]  # empty


def test_parts_without_files_are_finished_at_once(tmp_path):
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'reference'}") == 0
    for index in range(5):
        assert run(path, f"--output={tmp_path / 'out'}", f"--part={index}/5") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


def stopped_at(monkeypatch, module, name, call, *flags):
    """Runs `meshtrain prepare`, interrupted before call number `call` of a function."""
    function = getattr(module, name)
    calls = []

    def stop(*arguments, **options):
        calls.append(name)
        if len(calls) > call:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, stop)
        return run(*flags)


@pytest.mark.parametrize(
    "place",
    [
        (shards.Journal, "_append"),
        (os, "replace"),
        (prepared, "write_durably"),
        (merge, "clean"),
        (outputs.LocalOutput, "remove"),
        (outputs.LocalOutput, "create"),
        (shutil, "rmtree"),
    ],
)
def test_a_part_stopped_anywhere_resumes_to_the_same_files(
    tmp_path, monkeypatch, inputs, tokenizer, reference, place
):
    """Both parts are stopped at each of their calls, the second also while it copies."""
    flags = [f"--tokenizer={tokenizer}"]
    output = tmp_path / "out"
    stops = 0
    for index in (1, 0):
        part = [*flags_of(inputs, output), *flags, f"--part={index}/2"]
        for call in range(100):
            code = stopped_at(monkeypatch, *place, call % 4, *part)
            if code == 0:
                break
            assert code == 75
            stops += 1
    assert stops and run(*part) == 0
    assert content(output) == reference


def test_the_same_part_twice_is_refused_and_two_that_finish_at_once_write_once(
    tmp_path, capsys, inputs, tokenizer, reference
):
    output = tmp_path / "out"
    flags = [*flags_of(inputs, output), f"--tokenizer={tokenizer}"]
    first = outputs.LocalOutput(output)
    held = shards.Journal(first.subfolder(parts.Part(0, 2).folder), {})
    (output / prepared.JOURNAL).unlink(missing_ok=True)
    assert run(*flags, "--part=0/2") == 2
    error = capsys.readouterr().err
    assert "00000-of-00002: another `meshtrain prepare` is running in it" in error
    held.close()
    shutil.rmtree(output)
    assert run(*flags, "--part=0/2") == 0
    # Another process has the lock of the output, since it found all parts finished too.
    settings = json.loads((output / prepared.JOURNAL).read_text())["settings"]
    held = shards.Journal(first, settings)
    assert run(*flags, "--part=1/2") == 0
    assert "all parts are finished; another process writes the output" in capsys.readouterr().out
    held.close()
    assert run(*flags, "--part=0/2") == 0
    assert content(output) == reference


@pytest.mark.parametrize(
    "case",
    [
        ("--part=0/2", "--part=0/3", "with --part=I/2, now --part=I/3"),
        ("--part=0/2", "--pattern=", "with --part=I/2, now no --part"),
        ("--part=0/2", "--shard_tokens=7", "shard_tokens was 900, now 7"),
        ("--pattern=", "--part=0/2", "with no --part, now --part=I/2"),
    ],
)
def test_other_settings_than_those_of_the_first_part_are_rejected(
    tmp_path, capsys, monkeypatch, inputs, case
):
    before, after, fault = case
    flags = flags_of(inputs, tmp_path / "out")
    if before == "--pattern=":
        assert stopped_at(monkeypatch, shards.Journal, "add", 1, *flags) == 75
    else:
        assert run(*flags, before) == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    extra = [before, after] if after.startswith("--shard") else [after]
    assert run(*flags, *extra) == 2
    assert fault in capsys.readouterr().err
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_finished_output_is_that_of_one_process_too(tmp_path, capsys, inputs):
    flags = flags_of(inputs, tmp_path / "out")
    assert run(*flags) == 0
    before = content(tmp_path / "out")
    assert run(*flags, "--part=3/4") == 0
    assert "is already prepared" in capsys.readouterr().out
    assert content(tmp_path / "out") == before


def test_a_folder_with_other_files_is_rejected_and_unchanged(tmp_path, capsys, inputs):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.txt").write_text("text")
    assert run(*flags_of(inputs, tmp_path / "out"), "--part=0/2") == 2
    assert "holds other files" in capsys.readouterr().err
    assert content(tmp_path / "out") == {"other.txt": b"text"}


@pytest.mark.parametrize("part", ["8/8", "1", "-1/8", "0/0", "a/b"])
def test_a_part_that_is_none_is_rejected(tmp_path, capsys, inputs, part):
    assert run(*flags_of(inputs, tmp_path / "out"), f"--part={part}") == 2
    assert f"--part={part}: " in capsys.readouterr().err


def test_documents_are_needed_in_all_parts_together_only(tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    flags = [tmp_path / "a.txt", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--part=0/2") == 0
    assert run(*flags, "--part=1/2") == 2
    assert "the inputs contain no document" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_killed_processes_of_parts_are_started_again(tmp_path, inputs, tokenizer, reference):
    output = tmp_path / "out"
    common = [*map(str, flags_of(inputs, output)), f"--tokenizer={tokenizer}", "--num_workers=1"]
    command = [sys.executable, "-m", "meshtrain", "prepare", *common]
    null = subprocess.DEVNULL
    for seconds in (0.3, 1.0, 1.5, 2.0):
        processes = [
            subprocess.Popen([*command, f"--part={index}/3"], stdout=null, stderr=null)
            for index in range(3)
        ]
        for process in processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
    processes = [subprocess.Popen([*command, f"--part={index}/3"]) for index in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert content(output) == reference
