"""Locks a workdir, so that one run at a time uses it."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError

NAME = "LOCK"  # in the workdir
VISIBLE_WITHIN = 15.0  # seconds until a file written on one host must be visible on the others


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Holds the lock of a workdir until the context exits or the process dies, even by SIGKILL.

    Raises ConfigError if another run holds it, or if processes see different folders.
    """
    handle, fault = None, ""
    try:
        if distributed.process_id() == 0:
            try:
                handle = os.open(workdir / NAME, os.O_RDWR | os.O_CREAT, 0o644)
                fault = _acquire(handle, workdir)
            except OSError as error:
                fault = f"--workdir={workdir}: {NAME}: {error.strerror}; use a folder that can be written"
        if fault := distributed.broadcast(fault):
            raise ConfigError(fault)
        _check_shared(workdir)
        yield
    finally:
        if handle is not None:
            # Closing alone is not enough: a forked child holds the file open too.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


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
