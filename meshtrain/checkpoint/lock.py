"""Admits one run at a time to a workdir, which it creates.

On a disk the lock is the kernel's, on the file LOCK; it ends with its process. On an object store it is a lease: an
object that its holder renews. No kernel releases it when the holder dies. Another process takes it over if the holder
was a process of its host that has ended, or if it was not renewed for TERM seconds, by the clock of that process. Every
write is conditional, so only one process can take it over, and a holder that was suspended for longer notices it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshtrain import console, storage
from meshtrain.checkpoint import find, remote
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
                    and not (fault := acquire_lease(workdir / NAME))
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
    shutil.rmtree(workdir / find.FOLDER, ignore_errors=True)
    remote.download(workdir, find.FOLDER, but=(NAME, "logs"))


def _close(workdir: Path) -> None:
    """Uploads the files of a run that has started, and releases the lease."""
    if storage.url(workdir) and (workdir / "config.json").exists() and is_lease_held():
        try:
            confirm_lease()
            storage.push(workdir)
        except OSError as error:
            place = storage.url(workdir)
            console.say(f"{place}: {error.strerror}; the last lines of the run are not there")
    release_lease()


def _contents(workdir: Path) -> list[Path]:
    """Returns the paths that the start of a run creates, the innermost first."""
    names = (NAME, find.FOLDER, "events.jsonl")
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


TERM = 60.0  # seconds

RENEWALS = 4  # in a term

_held: "Lease | None" = None  # by this process


class Lease:
    """Renews the lock in a thread until `release`."""

    def __init__(self, lock: Path, record: dict[str, Any], generation: bytes):
        self._lock, self._record, self._generation = lock, record, generation
        self._one_at_a_time, self._released = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._released.wait(TERM / RENEWALS):
            with contextlib.suppress(OSError):  # the network may come back
                if not self.renew():
                    signal.raise_signal(signal.SIGTERM)  # ends the run, which cannot save
                    return

    def renew(self) -> bool:
        """Returns whether this process still holds the lock."""
        with self._one_at_a_time:
            self._record["renewals"] += 1
            generation = _write_lease(self._lock, self._record, self._generation)
            self._generation = generation or self._generation
            return bool(generation)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            storage.write(self._lock, None, only_if=self._generation)


def _write_lease(lock: Path, record: dict[str, Any], generation: bytes) -> bytes:
    """Writes the lock on a condition; returns its generation, or b"" if it is not this record's."""
    if written := storage.write(lock, json.dumps(record).encode(), only_if=generation):
        return written
    # Perhaps only the answer to this write, or to an earlier one, was lost.
    found, generation = storage.read(lock)
    return generation if found and _parse_record(found).get("id") == record["id"] else b""


def acquire_lease(lock: Path) -> str:
    """Acquires the lock; returns an error message if another run holds it, else an empty string.

    Waits for up to TERM seconds to see whether a lock is renewed. Raises OSError.
    """
    global _held
    workdir = storage.url(lock.parent)
    seen, generation = storage.read(lock)
    if seen is not None and not _is_dead(holder := _parse_record(seen)):
        who = f"pid {holder.get('pid')} on {holder.get('host')}"
        console.say(f"{workdir}: locked by {who}; waits {TERM:.0f} s for a renewal of the lock")
        deadline = time.monotonic() + TERM
        while time.monotonic() < deadline and seen is not None:
            time.sleep(min(1.0, TERM / 10))
            found, generation = storage.read(lock)
            if found not in (seen, None):
                return f"--workdir={workdir}: another run is in it, {who}; stop that run, or use another --workdir"
            seen = found
    record = {
        "id": uuid.uuid4().hex,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "kernel": _kernel_id(),
        "since": time.time(),
        "renewals": 0,
    }
    new = _write_lease(lock, record, generation)
    if not new and storage.read(lock)[0] is None:
        raise OSError(None, "nothing can be written there; is there such a bucket?", workdir)
    if not new:
        return f"--workdir={workdir}: another run has just started in it; use another --workdir"
    _held = Lease(lock, record, new)
    return ""


def _parse_record(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        return {}


def _kernel_id() -> str:
    """Returns what only processes with pids of the same table share; names of hosts are not unique. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that has ended, or had this pid."""
    is_here = holder.get("kernel") == _kernel_id() != ""
    if not is_here or not isinstance(holder.get("pid"), int):
        return False
    if holder["pid"] == os.getpid():
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def confirm_lease() -> None:
    """Raises OSError if this process held a lock and has lost it."""
    if _held and not _held.renew():
        raise OSError(None, "another run has taken over this workdir")


def is_lease_held() -> bool:
    return _held is not None


def release_lease() -> None:
    global _held
    if _held:
        _held.release()
        _held = None
