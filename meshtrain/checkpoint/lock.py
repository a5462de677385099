"""Admits one run at a time to a workdir, which it creates.

The lock is the kernel's, on the file LOCK; it ends with its process. A workdir on an object store
also has a lease, see object_store.py.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshtrain import console, storage
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError
from meshtrain.storage import Workdir

VISIBLE_WITHIN = 15.0  # seconds until a file written on one host must be visible on the others


@contextlib.contextmanager
def held(workdir: Workdir) -> Iterator[None]:
    """Holds the lock of a workdir until the context exits or the process dies, even by SIGKILL.

    Creates the folder. If the context fails before the run has written its config.json, removes
    what was created. Raises ConfigError if another run holds the lock, or if processes see
    different folders. The files of a workdir on an object store are downloaded, and uploaded at the
    end.
    """
    folder = workdir.folder
    handle = None
    fault = ""
    created: list[Path] = []
    try:
        if distributed.process_id() == 0:
            created = [path for path in _contents(folder) if not path.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # Not through a link: the file at its end would be overwritten.
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                handle = os.open(folder / storage.LOCK, flags, 0o644)
                fault = _acquire(handle, workdir) or workdir.acquire_lock(console.say)
            except OSError as error:
                is_named = error.filename not in (None, workdir.name)
                where = f"{error.filename}: " if is_named else ""
                fault = (
                    f"--workdir={workdir.name}: {where}{error.strerror}; "
                    f"use a folder that can be written"
                )
        if fault := distributed.broadcast(fault):
            raise ConfigError(fault)
        if workdir.shared:
            _check_shared(folder)
        yield
    except BaseException:
        if not (folder / "config.json").exists():
            _remove(created)
        raise
    finally:
        try:
            workdir.release_lock()
        except OSError as error:
            console.say(
                f"{workdir.name}: {error.strerror}; the last lines of the run are not there"
            )
        if handle is not None:
            # Closing alone is not enough: a forked child holds the file open too.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _acquire(handle: int, workdir: Workdir) -> str:
    """Acquires the kernel's lock; returns an error message, or "" if this run has it now."""
    try:
        # The kernel's lock decides whether the other run is alive, not the file's content.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            fields = json.loads(os.pread(handle, 1000, 0))
            holder = f"pid {fields['pid']} on {fields['host']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            holder = "its pid is unknown"
        return (
            f"--workdir={workdir.name}: another run is in it, {holder}; "
            f"stop that run, or use another --workdir"
        )
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, (json.dumps(record) + "\n").encode(), 0)
    return ""


def _contents(folder: Path) -> list[Path]:
    """Returns the paths that the start of a run creates, the innermost first."""
    names = (storage.LOCK, storage.CHECKPOINTS, "events.jsonl")
    return [*(folder / name for name in names), folder, *folder.parents]


def _remove(created: list[Path]) -> None:
    for path in created:
        with contextlib.suppress(OSError):  # a folder that holds something else stays
            path.rmdir() if path.is_dir() else path.unlink()


def _check_shared(folder: Path) -> None:
    """Raises ConfigError if a process sees another folder under this path than process 0."""
    expected = distributed.broadcast(_content(folder) if distributed.process_id() == 0 else "")
    with distributed.raise_on_all_processes():
        deadline = time.monotonic() + VISIBLE_WITHIN
        while _content(folder) != expected:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--workdir={folder}: is not the folder of process 0; "
                    f"use one that all hosts share"
                )
            time.sleep(0.1)


def _content(folder: Path) -> str:
    try:
        return (folder / storage.LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""
