"""One run at a time in a workdir."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import meshtrain
from meshtrain import storage
from meshtrain.checkpoint import lock
from meshtrain.checkpoint.lock import FileLock
from meshtrain.object_store import LockLost
from meshtrain.train import train
from tests.lib.configs import quick
from tests.lib.paths import ROOT
from tests.lib.rows import events

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


def test_the_file_is_closed_if_another_run_has_the_lock(tmp_path):
    path = tmp_path / storage.LOCK
    first, second = (FileLock(path, name="runs/a", log=print) for _ in range(2))
    assert first.acquire() == ""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
        assert "another run is in it" in second.acquire()
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        first.release()


def no_locks(handle, operation):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=[no_locks, lambda handle, operation: None], ids=["none", "all accepted"])
def without_locks(request, monkeypatch):
    """A file system whose locks do not work, and fast renewals."""
    monkeypatch.setattr(fcntl, "flock", request.param)
    monkeypatch.setattr(lock, "CHECK_EVERY", 0.05)
    monkeypatch.setattr(lock, "SETTLE", 0.2)
    monkeypatch.setattr(lock, "TERM", 1.0)


def file_lock_of(folder, logged=None):
    log = print if logged is None else logged.append
    return FileLock(folder / storage.LOCK, name=str(folder), log=log)


def test_without_locks_of_the_file_system_a_second_run_is_rejected_too(without_locks, tmp_path):
    logged = []
    first, second = file_lock_of(tmp_path, logged), file_lock_of(tmp_path)
    assert first.acquire() == "" and "no locks that work" in logged[0]
    _pretend_another_host(tmp_path, first)
    assert f"another run is in it, pid {os.getpid()} on " in second.acquire()
    first.confirm()
    first.release()
    began = time.monotonic()
    assert second.acquire() == "" and time.monotonic() - began < lock.TERM
    second.release()


def test_without_locks_a_lock_that_is_not_renewed_is_taken_over(without_locks, tmp_path):
    first, second, logged = file_lock_of(tmp_path), file_lock_of(tmp_path), []
    assert first.acquire() == ""
    _pretend_another_host(tmp_path, first)
    first._released.set()  # its process is suspended
    first._thread.join()
    second = file_lock_of(tmp_path, logged)
    assert second.acquire() == "" and any("for a renewal" in line for line in logged)
    with pytest.raises(LockLost):
        first.confirm()
    first.release()
    second.confirm()
    second.release()


def _pretend_another_host(folder, held):
    held._record["kernel"] = "another"
    held.confirm()


@pytest.mark.parametrize("content", [None, b"", b"mine"])
def test_a_lock_that_was_removed_is_written_again(tmp_path, content):
    logged = []
    held, other = file_lock_of(tmp_path, logged), file_lock_of(tmp_path)
    assert held.acquire() == ""
    (tmp_path / "LOCK").unlink()
    if content is not None:
        (tmp_path / "LOCK").write_bytes(content)
    held.confirm()
    assert "was removed while this run holds it" in logged[0]
    assert "another run is in it" in other.acquire()
    (tmp_path / "LOCK").write_bytes(b"")  # the same file
    held.confirm()
    assert "another run is in it" in other.acquire()
    held.release()
    assert other.acquire() == ""
    other.release()


def test_a_run_whose_lock_another_has_saves_nothing_more(tmp_path):
    """The lock was removed, and another run has started in the workdir since."""
    other = file_lock_of(tmp_path)

    def take_over(row):
        if row["step"] == 1:
            (tmp_path / "LOCK").unlink()
            assert other.acquire() == ""

    config = quick(steps=4)
    config.checkpoint.update(every=2)
    with pytest.raises(meshtrain.ConfigError, match="not be saved: another run has taken over"):
        train(config, workdir=tmp_path, on_metrics=take_over)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))
    assert events(tmp_path, "save_failed") and not events(tmp_path, "save")
    assert json.loads((tmp_path / "LOCK").read_text())["id"] == other._record["id"]
    other.confirm()
    other.release()


def test_the_holder_looks_at_its_lock_from_time_to_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "CHECK_EVERY", 0.05)
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    held = file_lock_of(tmp_path)
    assert held.acquire() == ""
    (tmp_path / "LOCK").unlink()
    other = file_lock_of(tmp_path)
    fault = other.acquire()  # unless the holder was faster
    held._thread.join(0.5 if fault else 30)
    assert raised == ([] if fault else [signal.SIGTERM])
    held.release()
    other.release()
