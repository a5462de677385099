"""Saves: when, how many are kept, and what happens if one fails or is killed."""

import gc
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshtrain
from meshtrain.checkpoint import arrays, find, manifest, saver
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.state import TrainState
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, saving
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick
from tests.lib.line_fit import line_fit, squares
from tests.lib.paths import ROOT
from tests.lib.rows import events, losses, rows


@pytest.mark.slow
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
    files = manifest.verify(checkpoints(workdir) / "8").files
    assert not {name for name in files if ".nfs" in name or "._" in name or name == "link"}
    (moved,) = events(workdir, "quarantine")
    assert moved["step"] == 8 and "appeared" in moved["why"]


def test_a_failing_data_source_loses_no_step(tmp_path):
    source = [{"x": np.ones((16, 4), "f"), "y": np.ones((16, 1), "f")}] * 5

    def five_batches():
        yield from source

    model = meshtrain.from_nnx(line_fit, squares)
    with pytest.raises(meshtrain.ConfigError, match="the iterable ended"):
        train(quick(steps=20), workdir=tmp_path, model=model, data=five_batches())
    assert find.steps(checkpoints(tmp_path)) == [5] and len(losses(tmp_path)) == 5


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
        c.optim.build = f"{__name__}:noisy"
        for key in ("b1", "b2", "epsilon", "weight_decay", "no_decay"):
            del c.optim[key]
    with pytest.raises(meshtrain.ConfigError, match="optim.build: opt_state.* is a typed PRNG key"):
        train(c, workdir=tmp_path)


@pytest.mark.parametrize(
    ("leaf", "fault"),
    [
        (lambda: jnp.zeros((0, 4)), r"params/w has shape \(0, 4\), no elements"),
        (lambda: jnp.ones(4, jnp.complex64), "params/w is complex64"),
        (lambda: jax.random.key(0), "params/w is a typed PRNG key"),
    ],
    ids=["empty", "complex", "key"],
)
def test_parameters_that_cannot_be_stored_are_rejected_before_step_0(leaf, fault):
    """Otherwise the run would find out when it saves, at its end."""
    state = TrainState(jnp.int32(0), {"bias": jnp.ones(4), "w": leaf()}, ())
    with pytest.raises(meshtrain.ConfigError, match=f"model.build: {fault}.*or .*no --workdir"):
        arrays.check_kinds(jax.eval_shape(lambda: state))
    arrays.check_kinds(jax.eval_shape(lambda: state._replace(params={"bias": jnp.ones(4)})))


@pytest.mark.slow
def test_a_checkpoint_saved_by_a_signal_at_an_evaluation_gets_its_held_out_loss(tmp_path):
    """The run evaluates when it resumes; then retention can keep this best checkpoint."""

    def stop(row):
        if row["step"] == 0:  # written after the next step was dispatched
            os.kill(os.getpid(), signal.SIGTERM)

    c = saving(4, every=1, keep_best=1)
    c.checkpoint.keep_last = 1
    c.eval.update(every=2, batches=1)
    c.checkpoint.every = 0
    stopped = train(c, workdir=tmp_path, on_metrics=stop)
    assert stopped.interrupted and stopped.step == 2
    assert "eval_loss" not in manifest.read(checkpoints(tmp_path) / "2").metrics
    c.checkpoint.every = 1
    c.train.steps = 5
    c.optim.learning_rate = 3.0  # the held-out loss rises
    train(c, workdir=tmp_path)
    measured = {row["step"]: row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row}
    assert min(measured, key=measured.get) == 2
    assert find.steps(checkpoints(tmp_path)) == [5, 2]
    saved = manifest.verify(checkpoints(tmp_path) / "2")
    assert saved.metrics["eval_loss"] == measured[2] and "loss" in saved.metrics


def test_an_error_of_the_arrays_is_not_blamed_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(saver.time, "sleep", lambda seconds: None)

    def save(*_):
        raise ValueError("cannot write such an array")

    monkeypatch.setattr(AsyncWriter, "save", save)
    with pytest.raises(meshtrain.ConfigError, match="neither the disk nor the store") as error:
        train(saving(1), workdir=tmp_path)
    assert "make room" not in str(error.value)
    for cause in (OSError(28, "full"), ValueError("x [os_error_code='28']")):
        wrapper = RuntimeError("of Orbax")
        wrapper.__cause__ = cause
        assert saver._is_of_storage(wrapper) and saver._is_of_storage(cause)


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


@pytest.mark.slow
def test_a_run_applies_retention_and_saves_every_few_minutes(tmp_path):
    c = saving(7, every=1, keep_every=3)
    c.checkpoint.keep_last = 1
    train(c, workdir=tmp_path / "a")
    assert find.steps(checkpoints(tmp_path / "a")) == [7, 6, 3]
    train(saving(3, every=0, every_minutes=1e-9), workdir=tmp_path / "b")
    assert find.steps(checkpoints(tmp_path / "b")) == [3, 2, 1, 0]
    c = saving(6, every=1, keep_best=1)
    c.checkpoint.keep_last = 1
    c.optim.learning_rate = 0.3  # so high that the held-out loss rises and falls
    c.eval.update(every=1, batches=1)
    result = train(c, workdir=tmp_path / "c")
    measured = {row["step"]: row["eval_loss"] for row in rows(tmp_path / "c") if "eval_loss" in row}
    measured[6] = result.eval_loss
    best = min(measured, key=measured.get)
    assert {*find.steps(checkpoints(tmp_path / "c"))} == {6, best}
    saved = manifest.read(checkpoints(tmp_path / "c") / str(best))
    assert saved.metrics["eval_loss"] == measured[best]


@pytest.mark.slow
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
        calls.append((step, find.steps(folder)))
        if step == 4:
            raise OSError(28, "No space left on device")
        return original(folder, step, **fields)

    monkeypatch.setattr(manifest, "commit", commit)
    c = saving(8, every=4)
    c.checkpoint.keep_last, c.train.steps = 1, 5
    train(saving(2), workdir=tmp_path)
    train(c, workdir=tmp_path)
    (failed,) = events(tmp_path, "save_failed")
    assert failed["step"] == 4 and "No space left" in failed["error"]
    assert calls == [(2, []), (4, [2]), (5, [2])] and find.steps(checkpoints(tmp_path)) == [5]


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
    assert find.steps(checkpoints(workdir)) == [6, 4, 2]


def test_an_unusable_folder_is_an_error_before_training(tmp_path, monkeypatch):
    (tmp_path / find.FOLDER).symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(meshtrain.ConfigError, match="--workdir: .*checkpoints: .*exist"):
        train(quick(), workdir=tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(meshtrain.ConfigError, match="MB needed, 0.0 MB free; make room"):
        train(quick(), workdir=tmp_path / "other")


@pytest.mark.slow
def test_a_run_killed_in_every_stage_of_a_save_ends_bit_equal_to_an_uninterrupted_run():
    script = [sys.executable, ROOT / "benchmarks" / "faults" / "crashes.py", "--kills=8"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0 and "bit-equal to the uninterrupted run" in done.stdout, done.stderr


@pytest.mark.slow
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
    """On a full disk, Orbax fails to write arrays and metadata, and raises one error per call."""
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
