"""Checkpoints: manifests, corrupt checkpoints, failed saves, retention, and restores on other meshes."""

import builtins
import contextlib
import dataclasses
import errno
import gc
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT
from flax import traverse_util
from jax.sharding import SingleDeviceSharding
from test_train import assert_bit_equal, losses, quick, rows

import meshtrain
from meshtrain import __main__, errors, storage
from meshtrain.checkpoint import arrays, find, lock, manifest, saver
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.cli import app
from meshtrain.cluster import distributed
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.models import trees
from meshtrain.state import TrainState
from meshtrain.train import train
from tests.monitor.test_divergence import line_fit, squares

slow = pytest.mark.slow


def saving(steps, every=2, **settings):
    c = quick(steps=steps)
    c.checkpoint.update(every=every, keep=9, **settings)
    return c


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The workdir of a run of six steps with checkpoints of steps 2, 4 and 6; read-only."""
    workdir = tmp_path_factory.mktemp("finished_run")
    train(saving(6), workdir=workdir)
    return workdir


@pytest.fixture
def workdir(finished_run, tmp_path):
    """A copy of `finished_run` that a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")


def checkpoints(workdir):
    return workdir / find.FOLDER


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, at=None):
    """Flips a bit of the byte `at`, or of many bytes: nothing reads some bytes of the arrays' files."""
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 97) if at is None else [at]:
        data[position] ^= 1
    path.write_bytes(data)


def events(workdir, name):
    return [row for row in rows(workdir, "events.jsonl") if row["event"] == name]


def test_a_manifest_describes_its_checkpoint(finished_run):
    one = find.verify(checkpoints(finished_run) / "4")
    assert (one.step, one.position, one.processes, one.mesh["data"]) == (4, 64, 1, 8)
    assert one.metrics["loss"] == losses(finished_run)[3]
    assert one.config["model"]["d_model"] == 32 and one.versions["jax"] == jax.__version__
    assert one.arrays["params/final_norm/scale"] == "(32,) float32"
    on_disk = {
        p.relative_to(checkpoints(finished_run) / "4").as_posix()
        for p in (checkpoints(finished_run) / "4").rglob("*")
        if p.is_file()
    }
    assert on_disk == {*one.files, manifest.NAME}
    saves = events(finished_run, "save")
    assert [row["step"] for row in saves] == [2, 4, 6]
    assert all(0 < row["blocked_seconds"] <= row["seconds"] for row in saves)


def noise(path, draw):
    """Overwrites up to 64 bytes, so that decoding fails in other ways than for a flipped bit."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at : at + 64] = draw.randbytes(len(data[at : at + 64]))
    path.write_bytes(data)


def mutate(directory, draw):
    """Corrupts one file of a checkpoint; returns the kind of corruption and the file."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    path = draw.choice(files)
    kind = draw.choice(["flip", "noise", "truncate", "delete", "swap", "append"])
    if kind == "flip" and path.stat().st_size:
        flip(path, draw.randrange(path.stat().st_size))
    elif kind == "noise" and path.stat().st_size:
        noise(path, draw)
    elif kind == "truncate" and path.stat().st_size:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif kind == "swap":
        other = draw.choice([p for p in files if p.read_bytes() != path.read_bytes()])
        a, b = path.read_bytes(), other.read_bytes()
        path.write_bytes(b)
        other.write_bytes(a)
    elif kind == "append":
        path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 9)))
    else:
        path.unlink()
    return kind, path.relative_to(directory)


def test_300_random_corruptions_are_all_detected(finished_run, tmp_path):
    draw = random.Random(0)
    valid = checkpoints(finished_run) / "4"
    for trial in range(300):
        directory = shutil.copytree(valid, tmp_path / str(trial) / "4")
        corruption = mutate(directory, draw)
        try:
            found = find.verify(directory)
        except CorruptCheckpoint:
            continue
        # An undetected change is harmless only if all content is equal, as after adding a final space, or if
        # it is in bytes of the arrays' files that nothing reads.
        assert found == manifest.read(valid), corruption
        for path, (_, crc) in found.files.items():
            if (directory / path).read_bytes() != (valid / path).read_bytes():
                assert not crc, corruption
                assert_bit_equal(arrays.as_numpy(directory), arrays.as_numpy(valid))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: replace_by_link(largest_file(d)), "arrays/.* is not a file"),
        (lambda d: replace_by_link(d / manifest.NAME), "MANIFEST.json is not a file"),
        (lambda d: replace_by_link(d / "arrays" / "d"), "arrays/d is not a folder"),
        (lambda d: (d / manifest.NAME).unlink(), "MANIFEST.json is missing"),
        (lambda d: (d / manifest.NAME).write_text("{}"), "MANIFEST.json is damaged"),
        (lambda d: (d / manifest.NAME).write_text("[" * 10**5), "MANIFEST.json is damaged"),
        (lambda d: shutil.rmtree(d / "arrays"), "is missing"),
        (lambda d: rewrite(d, files={"../../../LOCK": [1, "0"]}), "points outside the checkpoint"),
        (lambda d: rewrite(d, files={"/etc/passwd": [1, "0"]}), "points outside the checkpoint"),
        (lambda d: rewrite(d, files={"a": 1}), "MANIFEST.json is damaged"),
        (lambda d: rewrite(d, position="x"), "MANIFEST.json is damaged"),
    ],
)
def test_a_corrupt_checkpoint_is_rejected_with_the_reason(workdir, change, message):
    directory = checkpoints(workdir) / "4"
    change(directory)
    with pytest.raises(CorruptCheckpoint, match=message):
        find.verify(directory)


def replace_by_link(path):
    """Moves a file or folder elsewhere, and leaves a link to it."""
    path.symlink_to(path.rename(path.parents[3] / f"moved {path.name}"))


STRAYS = ".DS_Store ._{} .nfs000000000012 {}~ .{}.swp {}.bak Thumbs.db #{}# process_1 ocdbt.process_7".split()


def add_strays(directory):
    """Leaves junk of all kinds in each folder of a checkpoint, named after each of its files."""
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for folder in folders:
        names = [path.name for path in folder.iterdir()]
        for stray in {stray.format(name) for stray in STRAYS for name in names}:
            if not (folder / stray).exists():
                (folder / stray).write_text("junk")
        (folder / "empty").mkdir()
        (folder / "folder" / "inner").mkdir(parents=True)
        (folder / "folder" / "inner" / "file").write_text("junk")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / "dangling").symlink_to(folder / "nowhere")
        (folder / "loop").symlink_to("loop")
        (folder / "up").symlink_to("..")


def test_stray_files_do_not_make_a_checkpoint_corrupt_and_are_reported_once(
    workdir, finished_run, capsys
):
    for step in (2, 4, 6):
        add_strays(checkpoints(workdir) / str(step))
    for stray in (".DS_Store", "6~", "._6", "12", ".nfs000000000034", "quarantine"):
        (checkpoints(workdir) / stray).write_text("junk")
    assert app.main("checkpoint", ["verify", str(workdir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("valid" in x and "ignores #MANIFEST.json#" in x for x in lines)
    assert app.main("checkpoint", ["diff", str(workdir), str(finished_run)]) == 0
    assert capsys.readouterr().out.count(": not in the manifest\n") == 1
    result = train(saving(8), workdir=workdir)
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "not in the manifest" in x)
    assert line.startswith("checkpoint of step 6: ignores #MANIFEST.json#, ")
    assert result.step == 8 and not events(workdir, "quarantine")
    (stray_files,) = events(workdir, "stray_files")
    assert stray_files["step"] == 6 and ".DS_Store" in stray_files["files"]
    assert_bit_equal(
        params_of(checkpoints(finished_run) / "6"), params_of(checkpoints(workdir) / "6")
    )
    assert app.main("checkpoint", ["prune", str(workdir), "--keep=1"]) == 0
    assert manifest.steps(checkpoints(workdir)) == [8] and (checkpoints(workdir) / "6~").exists()
    assert not (checkpoints(workdir) / "6").exists()


def test_a_save_lists_no_files_that_come_and_go_and_writes_where_something_stands(
    workdir, monkeypatch
):
    """A file system may leave .nfs files in a folder that is removed, and put them in a new one."""
    (checkpoints(workdir) / "8").write_text("a note of the user")
    partial, original = checkpoints(workdir) / "8.partial", AsyncWriter.wait

    def wait(self):
        original(self)
        for name in (".nfs000000000012", "arrays/.nfs000000000034", "arrays/._d"):
            (partial / name).write_text("junk")
        (partial / "link").symlink_to("/etc/passwd")

    monkeypatch.setattr(AsyncWriter, "wait", wait)
    train(saving(8, every=0), workdir=workdir)
    files = find.verify(checkpoints(workdir) / "8").files
    assert not {name for name in files if ".nfs" in name or "._" in name or name == "link"}
    (moved,) = events(workdir, "quarantine")
    assert moved["step"] == 8 and "appeared" in moved["why"]


def foreign(directory, **fields):
    """Writes the manifest of another format, which has another checksum too."""
    path = directory / manifest.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: rewrite(d, format=3), "format 3 is not 1 or 2, .* use the version"),
        (lambda d: foreign(d, format=0, crc32="?"), "format 0 is not 1 or 2"),
        (lambda d: rewrite(d, step=7), "MANIFEST.json belongs to step 7; rename"),
        (
            lambda d: shutil.move(d, d.parent.parent / "disk") and d.symlink_to("away"),
            "does not exist",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_never_quarantined(workdir, change, message, capsys):
    directory = checkpoints(workdir) / "6"
    change(directory)
    flip(largest_file(checkpoints(workdir) / "4"))
    before = sorted(checkpoints(workdir).rglob("*"))
    for from_scratch in (False, True):
        with pytest.raises(meshtrain.ConfigError, match=message):
            train(saving(8), workdir=workdir, from_scratch=from_scratch)
    with pytest.raises(meshtrain.ConfigError, match=message):
        find.find_valid(workdir)
    assert app.main("checkpoint", ["verify", str(workdir)]) == 1
    output = capsys.readouterr().out
    assert "6  unreadable  " in output and "4  corrupt  " in output and "2  valid" in output
    assert app.main("checkpoint", ["prune", str(workdir), "--keep=1"]) == 0
    assert "neither counted nor removed: step 6: " in capsys.readouterr().out
    assert sorted(checkpoints(workdir).rglob("*")) == before and not events(workdir, "quarantine")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("where", ["MANIFEST.json", "manifest.ocdbt", "checkpoints"])
def test_an_error_of_the_disk_is_not_corruption(workdir, monkeypatch, where, code):
    def failing(original):
        def call(path, *args, **options):
            if not isinstance(path, int) and Path(path).name == where:
                raise OSError(code, os.strerror(code), str(path))
            return original(path, *args, **options)

        return call

    for module, name in ((io, "open"), (builtins, "open"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    with pytest.raises(errors.TransientError, match=f"{where}: {os.strerror(code)}; .* valid"):
        find.find_valid(workdir)
    with pytest.raises(meshtrain.ConfigError, match=os.strerror(code)):
        train(saving(8), workdir=workdir, from_scratch=True)
    monkeypatch.undo()
    assert manifest.steps(checkpoints(workdir)) == [6, 4, 2] and not events(workdir, "quarantine")
    assert find.find_valid(workdir)[1].step == 6


def rewrite(directory, **fields):
    """Changes fields of a manifest and updates its checksum."""
    path = directory / manifest.NAME
    changed = {**json.loads(path.read_text()), **fields}
    del changed["crc32"]
    path.write_text(json.dumps({**changed, "crc32": manifest.checksum(changed)}))


def of_format_1(directory):
    """Writes the arrays of a checkpoint again as versions before format 2 did: without checksums of chunks."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        folder = (directory / "arrays").absolute()
        saved = orbax.metadata(folder).item_metadata.tree
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        state = orbax.restore(folder, args=ocp.args.PyTreeRestore(restore_args=on_host))
        orbax.save(folder, args=ocp.args.PyTreeSave(state), force=True)
    found = manifest.read(directory)
    files = manifest._measure(directory, [*manifest._files(directory)], sync=False)
    del files[manifest.NAME]
    manifest.write(directory, dataclasses.replace(found, files=files, format=1))


def test_checkpoints_of_format_1_are_read_and_verified(workdir):
    before = arrays.as_numpy(checkpoints(workdir) / "6")
    for step in (4, 6):
        of_format_1(checkpoints(workdir) / str(step))
    assert_bit_equal(before, arrays.as_numpy(checkpoints(workdir) / "6"))
    assert train(saving(6), workdir=workdir).step == 6
    assert events(workdir, "restore")[-1]["step"] == 6
    flip(largest_file(checkpoints(workdir) / "6"))
    with pytest.raises(CorruptCheckpoint, match="arrays/.* fails its checksum"):
        find.verify(checkpoints(workdir) / "6")
    assert train(saving(5), workdir=workdir).step == 5
    assert events(workdir, "restore")[-1]["step"] == 4
    assert find.verify(checkpoints(workdir) / "5").format == manifest.FORMAT


def test_a_restore_finds_damage_in_any_file_of_the_arrays(finished_run, tmp_path):
    """An index too: its arrays cannot be opened."""
    draw = random.Random(0)
    valid, saved = find.find_valid(finished_run)
    expected = {
        path: jnp.asarray(value)
        for path, value in arrays.as_numpy(valid).items()
        if path.startswith("params/")
    }
    params = traverse_util.unflatten_dict(expected, sep="/")["params"]
    faults = []
    for trial, file in enumerate(5 * sorted(valid.glob("arrays/**/d/*"))):
        directory = shutil.copytree(valid, tmp_path / str(trial) / valid.name)
        noise(directory / file.relative_to(valid), draw)
        try:
            found, *_ = arrays.restore_params(directory, saved.arrays, params)
        except errors.ConfigError as error:
            faults.append(str(error))
        else:  # only in bytes that nothing reads, or of other arrays
            assert jax.tree.all(jax.tree.map(np.array_equal, found, params))
    assert all("fails its checksum" in fault for fault in faults)
    assert any("a chunk of arrays" in fault for fault in faults)


# Messages of TensorStore: of damage, then errors of the disk and of a store, and mistakes of the caller.
SHARD = 'Error reading shard entry {0} in "params.w/c/0/1" in OCDBT database at x: '
DAMAGED = f"DATA_LOSS: {SHARD}Digest mismatch"
CUT = f"FAILED_PRECONDITION: {SHARD}Truncated Zstd-compressed stream; at byte 1944"
NODE = "Error reading x: Error decoding b-tree node: End of data expected; remaining length: 23; at byte 9"
SHORT = (
    "OUT_OF_RANGE: Error reading x: Requested byte range [0, 9) is not valid for value of size 8"
)
UNREADABLE = "UNKNOWN: Error reading x: Input/output error [os_error_code='5']"
REFUSED = "Error reading x: HTTP response code: 400 [http_response_code='400']"


@pytest.mark.parametrize(
    ("message", "kind", "fault"),
    [
        (DAMAGED, CorruptCheckpoint, "^arrays/params.w/c/0/1 fails its checksum$"),
        (CUT, CorruptCheckpoint, "^arrays/params.w/c/0/1 fails its checksum$"),
        (NODE, CorruptCheckpoint, "^a chunk of arrays fails"),
        (SHORT, CorruptCheckpoint, "^a chunk of arrays fails"),
        (UNREADABLE, errors.TransientError, "Input/output error; the checkpoint may be valid"),
        (REFUSED, errors.TransientError, "the checkpoint may be valid"),
        (REFUSED.replace("400", "404"), CorruptCheckpoint, "^a chunk of arrays fails"),
        ("FAILED_PRECONDITION: Error reading x: no credentials", ValueError, "no credentials"),
        ("INVALID_ARGUMENT: no such field", ValueError, "no such field"),
    ],
)
def test_only_damaged_bytes_make_a_checkpoint_corrupt(message, kind, fault, tmp_path):
    with pytest.raises(kind, match=fault), manifest.reading_chunks(tmp_path):
        try:
            raise ValueError(message)
        except ValueError as error:
            if kind is ValueError:
                raise
            raise RuntimeError("a message of Orbax") from error


def test_a_checkpoint_that_one_process_cannot_read_may_be_valid_whatever_another_found(monkeypatch):
    found = [None, [1, "damaged"], [0, "unreadable"]]
    monkeypatch.setattr(distributed, "gather", lambda value: found)
    with pytest.raises(errors.TransientError, match="^unreadable$"):
        distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))
    found.pop()
    with pytest.raises(CorruptCheckpoint, match="^damaged$"):
        distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))
    found[1] = None
    distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))


def bytes_read():
    """Returns the bytes that this process has read from files."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts bytes with /proc")
def test_a_save_reads_no_array_and_a_restore_reads_each_once(tmp_path):
    size = 4 << 20
    state = TrainState(jnp.int32(0), {"w": jax.random.normal(jax.random.key(0), (size // 4,))}, ())
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )
    described = dict.fromkeys(("metrics", "loss_statistics", "mesh", "versions", "config"), {})
    described |= dict(position=0, time=0.0, processes=1, arrays=arrays.shapes_of(state))
    with contextlib.closing(AsyncWriter()) as writer:
        for step in range(2):  # the first one loads libraries
            before = bytes_read()
            folder = manifest.partial_folder(tmp_path, step) / arrays.FOLDER
            writer.save(folder, arrays.fields(state))
            writer.wait()
            manifest.commit(tmp_path, step, **described)
            saved = bytes_read() - before
    before = bytes_read()
    read = arrays.restore(tmp_path / "1", arrays.shapes_of(state), abstract)
    restored = bytes_read() - before
    assert_bit_equal(read.params, state.params)
    assert saved < size / 20 and 0.8 * size < restored < 1.1 * size


def test_a_manifest_of_an_older_or_newer_version_is_read(workdir):
    """Manifests had a field `config_crc32` until it was removed, without a new format number."""
    directory = checkpoints(workdir) / "6"
    expected = find.verify(directory)
    assert "config_crc32" not in json.loads((directory / manifest.NAME).read_text())
    rewrite(directory, config_crc32=manifest.checksum(expected.config), a_field_of_the_future=[1])
    assert "config_crc32" in json.loads((directory / manifest.NAME).read_text())
    assert find.verify(directory) == expected
    assert train(saving(6), workdir=workdir).step == 6
    assert events(workdir, "restore")[-1]["step"] == 6 and not events(workdir, "quarantine")


def test_a_run_resumes_from_the_newest_valid_checkpoint_and_quarantines_corrupt_ones(
    workdir, finished_run, capsys
):
    flip(largest_file(checkpoints(workdir) / "6"))
    result = train(saving(6), workdir=workdir)
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "fails its checksum" in line
    )
    assert line.startswith("checkpoint of step 6: ") and line.endswith("quarantine/6")
    assert (checkpoints(workdir) / "quarantine" / "6").is_dir()
    assert events(workdir, "restore")[-1]["step"] == 4 and result.step == 6
    directory, _ = find.find_valid(finished_run)
    expected, actual = arrays.as_numpy(directory), arrays.as_numpy(checkpoints(workdir) / "6")
    assert_bit_equal(expected, actual)


def test_without_a_valid_checkpoint_a_run_starts_only_with_from_scratch(workdir, capsys):
    for step in (2, 4, 6):
        flip(largest_file(checkpoints(workdir) / str(step)))
    for _ in range(2):
        with pytest.raises(meshtrain.ConfigError, match="--from_scratch") as error:
            train(saving(6), workdir=workdir)
        assert len(error.value.faults) == 4 and manifest.steps(checkpoints(workdir)) == [6, 4, 2]
    result = train(saving(2), workdir=workdir, from_scratch=True)
    assert result.step == 2 and events(workdir, "start")[-1]["step"] == 0
    quarantined = {path.name for path in (checkpoints(workdir) / "quarantine").iterdir()}
    assert quarantined == {"2", "4", "6"}
    shutil.rmtree(checkpoints(workdir) / "2")
    with pytest.raises(meshtrain.ConfigError, match="quarantined before"):
        train(saving(2), workdir=workdir)


def test_after_damage_was_found_no_read_is_left_behind(workdir, monkeypatch):
    """Python would print a traceback for each."""
    left = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    directory = checkpoints(workdir) / "6"
    flip(largest_file(directory))
    for _ in range(3):
        with pytest.raises(CorruptCheckpoint), manifest.reading_chunks(directory):
            arrays.as_numpy(directory)
        gc.collect()
    assert not left


def test_leftovers_of_an_interrupted_save_are_ignored_and_removed(workdir):
    leftover = checkpoints(workdir) / "8.partial" / "arrays.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints(workdir) / "6", leftover)
    (checkpoints(workdir) / "9.partial").write_text("")
    others = [checkpoints(workdir) / name for name in ("notes.partial.txt", "007", "old.partial")]
    for path in others:
        path.mkdir()
    assert manifest.steps(checkpoints(workdir)) == [6, 4, 2]
    train(saving(6), workdir=workdir)
    assert not [*checkpoints(workdir).glob("[0-9].partial")] and not events(workdir, "quarantine")
    assert all(path.is_dir() for path in others)


def test_finding_a_checkpoint_changes_nothing_on_disk(workdir):
    flip(largest_file(checkpoints(workdir) / "6"))
    (checkpoints(workdir) / "8.partial").mkdir()
    before = sorted(workdir.rglob("*"))
    lines = []
    directory, found = find.find_valid(workdir, log=lines.append)
    assert found.step == 4 and sorted(workdir.rglob("*")) == before
    assert len(lines) == 1 and lines[0].endswith("fails its checksum; step 4 is used")


def test_a_workdir_whose_name_is_a_number_is_not_a_checkpoint(workdir):
    job = workdir.rename(workdir.with_name("12345"))
    assert find.find_valid(job)[0] == checkpoints(job) / "6"
    assert find.find_valid(checkpoints(job) / "4")[1].step == 4


def test_a_failing_data_source_loses_no_step(tmp_path):
    source = [{"x": np.ones((16, 4), "f"), "y": np.ones((16, 1), "f")}] * 5

    def five_batches():
        yield from source

    model = meshtrain.from_nnx(line_fit, squares)
    with pytest.raises(meshtrain.ConfigError, match="the iterable ended"):
        train(quick(steps=20), workdir=tmp_path, model=model, data=five_batches())
    assert manifest.steps(checkpoints(tmp_path)) == [5] and len(losses(tmp_path)) == 5


def test_after_its_data_failed_a_run_resumes_with_the_batch_that_could_not_be_read(tmp_path):
    source = build(parse(quick(), num_devices=8)).train_data

    def read(indices):
        if indices[0] == 16 * 3:
            raise OSError("not now")
        return source.read(indices)

    with pytest.raises(OSError, match="not now"):
        train(quick(steps=5), workdir=tmp_path, data=Source(read))
    assert manifest.read(checkpoints(tmp_path) / "3").position == 16 * 3
    resumed = train(quick(steps=5), workdir=tmp_path, data=source)
    assert_bit_equal(resumed.state, train(quick(steps=5)).state)


def test_an_optimizer_whose_state_cannot_be_stored_is_rejected(tmp_path):
    c = quick(steps=1)
    with c.unlocked():
        c.optim.build = "test_checkpoint:noisy"
        for key in ("b1", "b2", "epsilon", "weight_decay", "no_decay"):
            del c.optim[key]
    with pytest.raises(meshtrain.ConfigError, match="optim.build: opt_state.* is a typed PRNG key"):
        train(c, workdir=tmp_path)


def noisy(learning_rate):
    return optax.noisy_sgd(learning_rate, key=jax.random.key(0))


def test_retention_keeps_the_newest_every_nth_and_the_best(finished_run):
    found = [
        manifest.Manifest(
            **{
                **vars(manifest.read(checkpoints(finished_run) / "2")),
                "step": step,
                "metrics": metrics,
            }
        )
        for step, metrics in [
            (1, {"e": 0.1}),
            (2, {"e": float("nan")}),
            (3, {}),
            (4, {"e": 0.5}),
            (5, {"e": 0.9}),
        ]
    ]

    def steps(keep, keep_every=0, keep_best=0):
        return find.steps_to_keep(
            found, keep=keep, keep_every=keep_every, keep_best=keep_best, best_by="e"
        )

    assert steps(1) == {5} and steps(2) == {4, 5}
    assert steps(1, keep_every=2) == {2, 4, 5}
    assert steps(1, keep_best=1) == {1, 5} and steps(1, keep_best=2) == {1, 4, 5}


def test_a_run_applies_retention_and_saves_every_few_minutes(tmp_path):
    c = saving(7, every=1, keep_every=3)
    c.checkpoint.keep = 1
    train(c, workdir=tmp_path / "a")
    assert manifest.steps(checkpoints(tmp_path / "a")) == [7, 6, 3]
    train(saving(3, every=0, every_minutes=1e-9), workdir=tmp_path / "b")
    assert manifest.steps(checkpoints(tmp_path / "b")) == [3, 2, 1, 0]
    c = saving(6, every=1, keep_best=1)
    c.checkpoint.keep = 1
    c.optim.learning_rate = 0.3  # so high that the held-out loss rises and falls
    c.eval.update(every=1, batches=1)
    result = train(c, workdir=tmp_path / "c")
    measured = {row["step"]: row["eval_loss"] for row in rows(tmp_path / "c") if "eval_loss" in row}
    measured[6] = result.eval_loss
    best = min(measured, key=measured.get)
    assert {*manifest.steps(checkpoints(tmp_path / "c"))} == {6, best}
    saved = manifest.read(checkpoints(tmp_path / "c") / str(best))
    assert saved.metrics["eval_loss"] == measured[best]


@slow
def test_a_failed_save_is_logged_and_retried_while_training_continues(
    tmp_path, monkeypatch, capsys
):
    """The disk is full for the second save and its first retry."""
    original, calls = shutil.disk_usage, []

    def full(path):
        calls.append(path)
        return original(path)._replace(free=10 if len(calls) in (3, 4) else 10**12)

    monkeypatch.setattr(shutil, "disk_usage", full)
    monkeypatch.setattr(saver, "FIRST_WAIT", 1e-3)
    result = train(saving(8, every=2), workdir=tmp_path)
    assert result.step == 8 and len(losses(tmp_path)) == 8
    failed = events(tmp_path, "save_failed")
    assert [row["step"] for row in failed] == [4, 5] and "MB needed" in failed[0]["error"]
    assert failed[1]["retry_seconds"] == 2 * failed[0]["retry_seconds"]
    assert [row["step"] for row in events(tmp_path, "save")][:2] == [2, 6]
    assert "step 4 could not be saved: OSError" in capsys.readouterr().out
    assert not list(checkpoints(tmp_path).glob("*.partial"))


def test_after_a_write_error_the_newest_valid_checkpoint_is_kept(tmp_path, monkeypatch):
    original, calls = manifest.commit, []

    def commit(folder, step, **fields):
        calls.append((step, manifest.steps(folder)))
        if step == 4:
            raise OSError(28, "No space left on device")
        return original(folder, step, **fields)

    monkeypatch.setattr(manifest, "commit", commit)
    c = saving(8, every=4)
    c.checkpoint.keep, c.train.steps = 1, 5
    train(saving(2), workdir=tmp_path)
    train(c, workdir=tmp_path)
    (failed,) = events(tmp_path, "save_failed")
    assert failed["step"] == 4 and "No space left" in failed["error"]
    assert calls == [(2, []), (4, [2]), (5, [2])] and manifest.steps(checkpoints(tmp_path)) == [5]


def test_a_final_save_that_always_fails_is_an_error_and_keeps_earlier_checkpoints(
    workdir, monkeypatch
):
    monkeypatch.setattr(saver, "LAST_TRIES", 2)
    monkeypatch.setattr(saver.time, "sleep", lambda seconds: None)

    def commit(*args, **fields):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "commit", commit)
    with pytest.raises(meshtrain.ConfigError, match="step 7 could not be saved in 2 tries"):
        train(saving(7, every=0), workdir=workdir)
    assert manifest.steps(checkpoints(workdir)) == [6, 4, 2]


def test_an_unusable_folder_is_an_error_before_training(tmp_path, monkeypatch):
    (tmp_path / find.FOLDER).symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(meshtrain.ConfigError, match="--workdir: .*checkpoints: .*exist"):
        train(quick(), workdir=tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(meshtrain.ConfigError, match="MB needed, 0.0 MB free; make room"):
        train(quick(), workdir=tmp_path / "other")


HOLD = """
import sys, time
from meshtrain import storage
from meshtrain.checkpoint import lock
with lock.held(storage.open_workdir(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


def test_a_second_run_in_a_workdir_is_rejected_while_the_first_is_alive(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(
            meshtrain.ConfigError, match=f"another run is in it, pid {first.pid} on "
        ):
            train(quick(steps=1), workdir=tmp_path)
        assert not (tmp_path / "events.jsonl").exists()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    with lock.held(storage.open_workdir(tmp_path)):  # the lock of a dead process is released
        pass


def test_a_checkpoint_of_another_model_is_rejected_with_a_table_of_arrays(workdir):
    c = saving(8)
    c.model.d_ff, c.checkpoint.allow_change = 128, "model.d_ff"
    with pytest.raises(meshtrain.ConfigError) as error:
        train(c, workdir=workdir)
    head, *table = error.value.faults
    assert head.endswith(
        "9 arrays do not match this model and optimizer; use its config, or another --workdir"
    )
    assert (
        "params/layers/mlp/down/kernel" in table[0]
        and "(2, 64, 32) float32 in the checkpoint, (2, 128, 32) float32 here" in table[0]
    )


def test_a_checkpoint_of_another_optimizer_is_rejected_but_can_initialise_parameters(
    workdir, tmp_path, capsys
):
    c = saving(7)
    with c.unlocked():
        c.optim.build = "test_checkpoint:momentum"
        for key in ("b1", "b2", "epsilon", "weight_decay", "no_decay"):
            del c.optim[key]
    with pytest.raises(meshtrain.ConfigError, match="checkpoint.init_from"):
        train(c, workdir=workdir)
    c.checkpoint.init_from, c.train.steps = str(workdir), 0
    result = train(c, workdir=tmp_path / "new")
    assert_bit_equal(flat(result.state.params), params_of(checkpoints(workdir) / "6"))
    assert result.step == 0 and "parameters of" in capsys.readouterr().out


def momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.9)


def flat(params):
    return {trees.name_of(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def params_of(directory):
    prefix = "params/"
    saved = arrays.as_numpy(directory)
    return {p.removeprefix(prefix): x for p, x in saved.items() if p.startswith(prefix)}


def test_parameters_are_initialised_by_pattern_and_the_others_are_logged(workdir, tmp_path, capsys):
    c = quick(steps=0)
    c.checkpoint.update(
        init_from=str(checkpoints(workdir) / "4"), init_only="layers/*,final_norm/*"
    )
    c.model.vocab_size = 32  # another shape of the embedding
    params = flat(train(c, workdir=tmp_path / "new").state.params)
    saved = params_of(checkpoints(workdir) / "4")
    for path, value in params.items():
        assert np.array_equal(value, saved[path]) == path.startswith(("layers", "final_norm")), path
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("parameters of"))
    assert "new here: output/kernel, tokens/embedding" in line and "not used: output/kernel" in line
    c.checkpoint.init_only = "layers/*, nothing"
    with pytest.raises(meshtrain.ConfigError, match="no parameter has such a name"):
        train(c, workdir=tmp_path / "other")
    c.checkpoint.init_from, c.checkpoint.init_only = str(tmp_path), "*"
    with pytest.raises(
        meshtrain.ConfigError, match="checkpoint.init_from=.*no valid checkpoint there"
    ):
        train(c, workdir=tmp_path / "third")


def test_another_dtype_is_rejected_without_allow_cast(workdir, finished_run):
    directory, saved = find.find_valid(finished_run)
    state = train(saving(6), workdir=workdir).state
    in_bfloat16 = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, "bfloat16" if x.dtype == "float32" else x.dtype, sharding=x.sharding
        ),
        state,
    )
    with pytest.raises(meshtrain.ConfigError, match="checkpoint.allow_cast=True"):
        arrays.restore(directory, saved.arrays, in_bfloat16)
    read = arrays.restore(directory, saved.arrays, in_bfloat16, allow_cast=True)
    assert_bit_equal(read, jax.tree.map(lambda x, to: x.astype(to.dtype), state, in_bfloat16))
    with jax.enable_x64(True):
        c = saving(6)
        c.train.param_dtype = "float64"
        with pytest.raises(meshtrain.ConfigError, match="checkpoint.allow_cast=True"):
            train(c, workdir=workdir)
        c.checkpoint.allow_cast = True
        in_float64 = train(c, workdir=workdir).state.params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(in_float64)} == {"float64"}
    assert_bit_equal(
        in_float64, jax.tree.map(lambda x: np.float64(x), jax.device_get(state.params))
    )
    c = saving(7)
    c.train.param_dtype = "bfloat16"  # the optimizer state then has other arrays
    with pytest.raises(meshtrain.ConfigError, match="load only the parameters"):
        train(c, workdir=workdir)


LAYOUTS = [
    {"data": 1, "fsdp": 8},
    pytest.param({"data": 1, "tensor": 4}, marks=slow),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=slow),
    pytest.param({"data": 1, "pipeline": 4}, marks=slow),
    pytest.param({"data": 2, "fsdp": 2, "pipeline": 2, "slices": 2}, marks=slow),
    pytest.param({"data": 1}, marks=slow),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_is_restored_bit_equal_on_any_mesh(tmp_path, layout, monkeypatch):
    def run(workdir, steps, **sizes):
        c = quick(steps=steps)
        c.model.num_layers = 4
        c.train.num_microbatches = 4 if "pipeline" in sizes else 1
        c.mesh.update(sizes)
        num_devices = math.prod(size for axis, size in sizes.items() if axis != "slices")
        with monkeypatch.context() as patch:
            devices = jax.devices()[:num_devices]
            patch.setattr(jax, "devices", lambda: devices)
            patch.setattr(jax, "device_count", lambda: num_devices)
            return train(c, workdir=workdir)

    first = run(tmp_path / "a", 2, data=8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    restored = run(tmp_path / "b", 2, **layout)  # no step is trained
    assert_bit_equal(restored.state, first.state)
    run(tmp_path / "b", 3, **layout)  # saved on this mesh, then restored on the first
    back = run(tmp_path / "b", 3, data=8)
    assert_bit_equal(flat(back.state.params), params_of(checkpoints(tmp_path / "b") / "3"))
    run(tmp_path / "a", 4, data=8)
    run(tmp_path / "b", 4, data=8)
    actual, expected = losses(tmp_path / "b"), losses(tmp_path / "a")
    np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)
    np.testing.assert_allclose(actual[3], expected[3], rtol=1e-5)


def test_the_command_lists_verifies_compares_and_prunes(workdir, capsys, monkeypatch):
    def run(*arguments):
        code = app.main("checkpoint", [*map(str, arguments)])
        return code, capsys.readouterr()

    monkeypatch.setattr(sys, "argv", ["meshtrain", "checkpoint", "ls", str(workdir)])
    code, output = __main__.main(), capsys.readouterr()
    assert code == 0 and [line.split()[:2] for line in output.out.splitlines()] == [
        [s, "valid"] for s in "246"
    ]
    assert "data 8" in output.out and "loss" in output.out and "sample 96" in output.out
    code, output = run("diff", checkpoints(workdir) / "6", workdir)
    assert code == 0 and output.out.startswith("0 of ")
    code, output = run("diff", checkpoints(workdir) / "4", workdir)
    assert code == 1 and "params/final_norm/scale: 32 of 32 differ, by" in output.out
    flip(largest_file(checkpoints(workdir) / "4"))
    code, output = run("verify", workdir)
    assert code == 1 and "4  corrupt  arrays/" in output.out
    assert run("ls", workdir)[0] == 0
    code, output = run("prune", workdir, "--keep=1")
    # Checkpoint 4 is corrupt, so it is not removed.
    assert code == 0 and manifest.steps(checkpoints(workdir)) == [6, 4]
    for wrong in (
        ["prune", workdir],
        ["ls", workdir / "x"],
        ["diff", workdir],
        ["sl", workdir],
        ["prune", workdir, "--keep=0"],
        ["ls", workdir, "--keep=3"],
    ):
        code, output = run(*wrong)
        assert code == 2 and output.err.count("\n") == 1, wrong


@slow
def test_a_run_killed_in_every_stage_of_a_save_ends_bit_equal_to_an_uninterrupted_run():
    script = [sys.executable, ROOT / "benchmarks" / "crashes.py", "--kills=8"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0 and "bit-equal to the uninterrupted run" in done.stdout, done.stderr


@slow
# Tasks of Orbax raise this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_to_a_full_disk_fails_and_keeps_the_newest_valid_checkpoint(
    tmp_path, monkeypatch, capsys
):
    """Mounts a small file system, which gets full in the middle of a save."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        monkeypatch.setattr(saver, "SPACE_FACTOR", 0.0)  # so that only the write itself fails
        monkeypatch.setattr(saver.time, "sleep", lambda seconds: None)
        train(saving(1, every=1), workdir=disk / "run")
        other = disk / "other"  # leaves less space than a save needs, 321 kB of random floats
        other.write_bytes(bytes(shutil.disk_usage(disk).free - 150_000))
        with pytest.raises(meshtrain.ConfigError, match="step 30 could not be saved"):
            train(saving(30, every=1), workdir=disk / "run")
        assert "could not be saved: ValueError: RESOURCE_EXHAUSTED" in capsys.readouterr().out
        newest, corrupt = find.newest_valid(checkpoints(disk / "run"))
        assert newest.step == 1 and not corrupt
        other.unlink()  # free space again: the run resumes
        assert train(saving(31, every=0), workdir=disk / "run").step == 31
    finally:
        subprocess.run(["umount", disk], check=True)
        gc.collect()  # here, so that Orbax's tasks do not warn in another test


def test_a_second_error_of_a_save_is_not_raised_later(monkeypatch):
    """On a full disk, Orbax fails to write the arrays and its metadata, and raises one error per call."""
    writer = AsyncWriter()
    failures = iter([OSError("arrays"), OSError("metadata")])

    def wait():
        if error := next(failures, None):
            raise error

    monkeypatch.setattr(writer._orbax, "wait_until_finished", wait)
    with pytest.raises(OSError, match="arrays"):
        writer.wait()
    writer.close()


def test_the_line_of_a_failed_save_tells_when_it_is_tried_again(workdir, monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(saver, "LAST_TRIES", 3)
    monkeypatch.setattr(saver.time, "sleep", waits.append)

    def commit(*args, **fields):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "commit", commit)
    with pytest.raises(meshtrain.ConfigError, match="step 9 could not be saved in 3 tries"):
        train(saving(9, every=8), workdir=workdir)
    lines = capsys.readouterr().out.splitlines()
    ends = [line.rpartition("; ")[2] for line in lines if "could not be saved" in line]
    in_training, *last = ends
    assert in_training == "next try at the first step after 5 s, or when the run ends"
    assert last == ["next try in 1 s", "next try in 2 s", "no more tries"] and waits[:2] == [1, 2]
    assert [row["retry_seconds"] for row in events(workdir, "save_failed")] == [5, 1, 2, None]


def test_a_checksum_covers_all_blocks_of_a_file(tmp_path):
    content = random.Random(0).randbytes(2 * manifest.BLOCK_BYTES + 1)
    (tmp_path / "a").write_bytes(content)
    measured = manifest._measure(tmp_path, ["a"], sync=False)
    assert measured == {"a": (len(content), f"{zlib.crc32(content):08x}")}


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100, 20):
        (tmp_path / str(step)).mkdir()
    assert manifest.steps(tmp_path) == [100, 20, 10, 9]
