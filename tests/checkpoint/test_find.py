"""A run resumes from its newest valid checkpoint; corrupt, not unreadable ones are quarantined."""

import builtins
import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest

import meshtrain
from meshtrain import errors
from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.cli import app
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flip, largest_file, params_of, rewrite, saving
from tests.lib.compare import assert_bit_equal
from tests.lib.rows import events

STRAYS = (
    ".DS_Store ._{} .nfs000000000012 {}~ .{}.swp {}.bak Thumbs.db #{}# process_1 ocdbt.process_7"
).split()


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
    assert find.steps(checkpoints(workdir)) == [8] and (checkpoints(workdir) / "6~").exists()
    assert not (checkpoints(workdir) / "6").exists()


def foreign(directory, **fields):
    """Writes the manifest of another format, which has another checksum too."""
    path = directory / manifest.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: rewrite(d, format=4), "format 4 is not one of 1 to 3, .* use the version"),
        (lambda d: foreign(d, format=0, crc32="?"), "format 0 is not one of 1 to 3"),
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

    for module, name in (
        (io, "open"),
        (builtins, "open"),
        (os, "open"),
        (os, "listdir"),
        (os, "scandir"),
    ):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    with pytest.raises(errors.TransientError, match=f"{where}: {os.strerror(code)}; .* valid"):
        find.find_valid(workdir)
    with pytest.raises(meshtrain.ConfigError, match=os.strerror(code)):
        train(saving(8), workdir=workdir, from_scratch=True)
    monkeypatch.undo()
    assert find.steps(checkpoints(workdir)) == [6, 4, 2] and not events(workdir, "quarantine")
    assert find.find_valid(workdir)[1].step == 6


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
        assert len(error.value.faults) == 4 and find.steps(checkpoints(workdir)) == [6, 4, 2]
    result = train(saving(2), workdir=workdir, from_scratch=True)
    assert result.step == 2 and events(workdir, "start")[-1]["step"] == 0
    quarantined = {path.name for path in (checkpoints(workdir) / "quarantine").iterdir()}
    assert quarantined == {"2", "4", "6"}
    shutil.rmtree(checkpoints(workdir) / "2")
    with pytest.raises(meshtrain.ConfigError, match="quarantined before"):
        train(saving(2), workdir=workdir)


def test_leftovers_of_an_interrupted_save_are_ignored_and_removed(workdir):
    leftover = checkpoints(workdir) / "8.partial" / "arrays.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints(workdir) / "6", leftover)
    (checkpoints(workdir) / "9.partial").write_text("")
    others = [checkpoints(workdir) / name for name in ("notes.partial.txt", "007", "old.partial")]
    for path in others:
        path.mkdir()
    assert find.steps(checkpoints(workdir)) == [6, 4, 2]
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


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100, 20):
        (tmp_path / str(step)).mkdir()
    assert find.steps(tmp_path) == [100, 20, 10, 9]


def test_of_a_run_that_saves_and_removes_the_newest_checkpoint_is_found(workdir):
    """One that the settings keep for longer, such as the best, is not the newest one."""
    folder = checkpoints(workdir)

    def verify(directory):
        if directory.name == "6":  # the run saves 7 while this reads, and keeps 2 and 7
            shutil.copytree(folder / "4", folder / "7")
            rewrite(folder / "7", step=7)
            for step in (4, 6):
                find.remove(folder / str(step))
        return manifest.check(directory)

    newest, corrupt = find.newest_valid(folder, verify)
    assert newest.step == 7 and not corrupt
    assert find.steps(folder) == [7, 2]


@pytest.mark.slow
def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_used(workdir):
    folder = checkpoints(workdir)
    seen = []

    def read(directory, saved):
        seen.append(saved.step)
        if saved.step == 6:
            find.remove(directory)
        return arrays.as_numpy(directory)

    assert_bit_equal(find.read_valid(workdir, read), arrays.as_numpy(folder / "4"))
    assert seen == [6, 4]

    def always_remove(directory, saved):
        later = directory.with_name(str(saved.step + 1))
        shutil.copytree(directory, later)
        rewrite(later, step=saved.step + 1)
        find.remove(directory)
        raise errors.ConfigError("cannot be read")

    with pytest.raises(errors.ConfigError, match="removes each checkpoint before it is read; .*"):
        find.read_valid(workdir, always_remove)

    def fail(directory, saved):
        raise CorruptCheckpoint("damaged")

    with pytest.raises(errors.ConfigError, match="/checkpoints/24: damaged; use another"):
        find.read_valid(workdir, fail)
