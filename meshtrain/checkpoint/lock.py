"""One run at a time in a workdir."""

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
VISIBLE = 15.0  # seconds until what one host wrote must be seen by the others


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of a workdir until it is left or the process is dead, however it died.

    Raises ConfigError where another run is in it.
    """
    handle, fault = None, ""
    try:
        if distributed.process_id() == 0:
            try:
                handle = os.open(workdir / NAME, os.O_RDWR | os.O_CREAT, 0o644)
                fault = _take(handle, workdir)
            except OSError as error:
                fault = f"--workdir={workdir}: {NAME}: {error.strerror}; use a folder that can be written"
        if fault := distributed.broadcast(fault):
            raise ConfigError(fault)
        _check_shared(workdir)
        yield
    finally:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked has it open as well
            os.close(handle)


def _check_shared(workdir: Path) -> None:
    """Raises ConfigError where a process sees another folder under this name than the first one."""
    ours = distributed.broadcast(_content(workdir) if distributed.process_id() == 0 else "")
    with distributed.raise_on_all_processes():
        until = time.monotonic() + VISIBLE
        while _content(workdir) != ours:
            if time.monotonic() > until:
                raise ConfigError(
                    f"--workdir={workdir}: is not the folder of process 0; use one that all hosts share"
                )
            time.sleep(0.1)


def _content(workdir: Path) -> str:
    try:
        return (workdir / NAME).read_text()
    except OSError:
        return ""


def _take(handle: int, workdir: Path) -> str:
    """Returns who has the lock, or nothing: then it is ours."""
    try:
        # The kernel's lock, not what the file says, tells whether the other run is alive.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            fields = json.loads(os.pread(handle, 1000, 0))
            who = f"pid {fields['pid']} on {fields['host']}"
        except (ValueError, KeyError, TypeError):
            who = "one that has not said which"
        return f"--workdir={workdir}: another run is in it, {who}; stop that one, or use another --workdir"
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, (json.dumps(record) + "\n").encode(), 0)
    return ""
