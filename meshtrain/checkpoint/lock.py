"""Creates the workdir of a run, and locks it, so that one run at a time uses it."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshtrain import checkpoint, console, storage
from meshtrain.checkpoint import lease, remote
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError

NAME = "LOCK"  # in the workdir
VISIBLE_WITHIN = 15.0  # seconds until a file written on one host must be visible on the others


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Holds the lock of a workdir until the context exits or the process dies, even by SIGKILL.

    Creates the folder. If the context fails before the run has written its config.json, removes what was
    created. Raises ConfigError if another run holds the lock, or if processes see different folders. For a workdir on
    an object store, `workdir` is the scratch folder of this process; its files are downloaded, and uploaded at the end.
    """
    handle, fault, created = None, "", []
    try:
        if distributed.process_id() == 0:
            created = [path for path in _contents(workdir) if not path.exists()]
            try:
                workdir.mkdir(parents=True, exist_ok=True)
                # Not through a link: the file at its end would be overwritten.
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                handle = os.open(workdir / NAME, flags, 0o644)
                fault = _acquire(handle, workdir)
                if (
                    storage.url(workdir)
                    and not fault
                    and not (fault := lease.acquire(workdir / NAME))
                ):
                    _download(workdir)
            except OSError as error:
                place = storage.url(workdir) or str(workdir)
                where = f"{error.filename}: " if error.filename not in (None, place) else ""
                fault = (
                    f"--workdir={place}: {where}{error.strerror}; use a folder that can be written"
                )
        if fault := distributed.broadcast(fault):
            raise ConfigError(fault)
        if not storage.url(workdir):
            _check_shared(workdir)
        yield
    except BaseException:
        if not (workdir / "config.json").exists():
            _remove(created)
        raise
    finally:
        _close(workdir)
        if handle is not None:
            # Closing alone is not enough: a forked child holds the file open too.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _download(workdir: Path) -> None:
    """Downloads what a run reads; what a supervisor left in the scratch folder is newer, but for the checkpoints."""
    shutil.rmtree(workdir / checkpoint.FOLDER, ignore_errors=True)
    remote.download(workdir, checkpoint.FOLDER, but=(NAME, "logs"))


def _close(workdir: Path) -> None:
    """Uploads the files of a run that has started, and releases the lease."""
    if storage.url(workdir) and (workdir / "config.json").exists() and lease.is_held():
        try:
            lease.confirm()
            storage.push(workdir)
        except OSError as error:
            place = storage.url(workdir)
            console.say(f"{place}: {error.strerror}; the last lines of the run are not there")
    lease.release()


def _contents(workdir: Path) -> list[Path]:
    """Returns the paths that the start of a run creates, the innermost first."""
    names = (NAME, checkpoint.FOLDER, "events.jsonl")
    return [*(workdir / name for name in names), workdir, *workdir.parents]


def _remove(created: list[Path]) -> None:
    for path in created:
        with contextlib.suppress(OSError):  # a folder that holds something else stays
            path.rmdir() if path.is_dir() else path.unlink()


def _check_shared(workdir: Path) -> None:
    """Raises ConfigError if a process sees another folder under this path than process 0."""
    expected = distributed.broadcast(_content(workdir) if distributed.process_id() == 0 else "")
    with distributed.raise_on_all_processes():
        deadline = time.monotonic() + VISIBLE_WITHIN
        while _content(workdir) != expected:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--workdir={workdir}: is not the folder of process 0; use one that all hosts share"
                )
            time.sleep(0.1)


def _content(workdir: Path) -> str:
    try:
        return (workdir / NAME).read_text()
    except OSError:
        return ""


def _acquire(handle: int, workdir: Path) -> str:
    """Acquires the lock; returns an error message if another run holds it, else an empty string."""
    try:
        # The kernel's lock decides whether the other run is alive, not the file's content.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            fields = json.loads(os.pread(handle, 1000, 0))
            holder = f"pid {fields['pid']} on {fields['host']}"
        except (ValueError, KeyError, TypeError):
            holder = "its pid is unknown"
        return f"--workdir={workdir}: another run is in it, {holder}; stop that run, or use another --workdir"
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, (json.dumps(record) + "\n").encode(), 0)
    return ""
