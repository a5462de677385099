"""Admits one run at a time to a workdir, which it creates.

The lock is the kernel's, on the file LOCK; it ends with its process. But not every file system has
locks that work, and anybody can remove the file. So LOCK also says who holds it, and the holder
looks at it every few seconds and before each commit. Where locks do not work, the holder renews it,
as the lease of a workdir on an object store (object_store.py).
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain import console, storage
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError
from meshtrain.object_store import LockLost, describe_holder, is_dead, new_record, parse_record
from meshtrain.storage import Workdir

VISIBLE_WITHIN = 15.0  # seconds until a file written on one host must be visible on the others


@contextlib.contextmanager
def held(workdir: Workdir) -> Iterator[Callable[[], None]]:
    """Holds the lock of a workdir until the context exits or the process dies, even by SIGKILL.

    Yields a function that raises LockLost if another run has it now: call it before each commit.
    Creates the folder. If the context fails before the run has written its config.json, removes
    what was created. Raises ConfigError if another run holds the lock, or if processes see
    different folders. The files of a workdir on an object store are downloaded, and uploaded at the
    end.
    """
    folder = workdir.folder
    file_lock = FileLock(folder / storage.LOCK, name=workdir.name, log=console.say)
    fault = ""
    created: list[Path] = []
    try:
        if distributed.process_id() == 0:
            created = [path for path in _contents(folder) if not path.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _sync_parents(folder)
                fault = file_lock.acquire() or workdir.acquire_lock(console.say)
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

        def confirm() -> None:
            file_lock.confirm()
            workdir.confirm_lock()

        yield confirm
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
        file_lock.release()


def _contents(folder: Path) -> list[Path]:
    """Returns the paths that the start of a run creates, the innermost first."""
    names = (storage.LOCK, storage.CHECKPOINTS, "events.jsonl")
    return [*(folder / name for name in names), folder, *folder.parents]


def _sync_parents(folder: Path) -> None:
    """Flushes the entries of a folder and its parents to disk; the supervisor may have made them.

    Otherwise a power loss would take all checkpoints, and the next start would begin at step 0.
    """
    for path in folder.absolute().parents:
        with contextlib.suppress(OSError):  # some can be passed, but not read
            storage.sync(path)


def _remove(created: list[Path]) -> None:
    for path in created:
        with contextlib.suppress(OSError):  # a folder that holds something else stays
            path.rmdir() if path.is_dir() else path.unlink()


def _check_shared(folder: Path) -> None:
    """Raises ConfigError if a process sees another folder under this path than process 0."""
    expected = distributed.broadcast(_holder(folder) if distributed.process_id() == 0 else "")
    with distributed.raise_on_all_processes():
        deadline = time.monotonic() + VISIBLE_WITHIN
        while _holder(folder) != expected:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--workdir={folder}: is not the folder of process 0; "
                    f"use one that all hosts share"
                )
            time.sleep(0.1)


def _holder(folder: Path) -> str:
    """Returns the id of the holder of the lock, "" if it cannot be read."""
    try:
        return parse_record((folder / storage.LOCK).read_bytes()).get("id", "")
    except OSError:
        return ""


# ---- the lock on the file ----

# What file systems without locks answer.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

MAX_BYTES = 4096  # of the file
CHECK_EVERY = 5.0  # seconds
TERM = 60.0  # seconds without a renewal after which a lock that the kernel does not hold has ended
SETTLE = 1.0  # seconds after which the last of those that have written it at the same time is seen


class FileLock:
    """The lock on the file `path`; `name` is its workdir in messages, which `log` gets."""

    def __init__(self, path: Path, *, name: str, log: Callable[[str], None]):
        self._path = path
        self._name = name
        self._log = log
        self._record = new_record()
        self._handle = -1
        self._kernel_locks = True
        self._one_at_a_time = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- acquire and release ----

    def acquire(self) -> str:
        """Acquires the lock; returns an error message if another run holds it, or ""."""
        self._handle = self._open()
        try:
            fault = self._acquire()
        except OSError:
            self._close()
            raise
        if fault:
            self._close()
            return f"--workdir={self._name}: {fault}, or use another --workdir"
        self._thread = threading.Thread(target=self._watch, name="lock", daemon=True)
        self._thread.start()
        return ""

    def _acquire(self) -> str:
        """Returns why the open file cannot be locked, or "" once it names this process."""
        try:
            self._kernel_locks = self._lock(self._handle) and self._is_exclusive()
        except BlockingIOError:
            holder = describe_holder(parse_record(self._read()))
            return f"another run is in it, {holder}; stop that run"
        if self._kernel_locks:
            self._write()
            return ""
        self._log(
            f"{self._path}: this file system has no locks that work; the run writes its name there "
            f"and renews it"
        )
        if fault := self._wait_for_renewal():
            return fault
        self._write()
        time.sleep(SETTLE)
        if not self._is_ours(self._read()):
            return "another run has just started in it; stop one of them"
        return ""

    def release(self) -> None:
        """Releases the lock, if this process has acquired it."""
        self._released.set()
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):
            if not self._kernel_locks and self._is_ours(self._read()):
                os.ftruncate(self._handle, 0)  # the next run need not wait
        self._close()

    # ---- while it is held ----

    def confirm(self) -> None:
        """Raises LockLost if another run has this lock; writes it again if somebody removed it.

        Does nothing if this process has not acquired it.
        """
        if self._handle < 0:
            return
        with self._one_at_a_time:
            try:
                found = self._read()
            except PermissionError:
                return  # some network file systems let nobody read what is locked
            if not parse_record(found):
                self._write_again()
            elif not self._is_ours(found):
                raise LockLost(None, "another run has taken over this workdir")
            elif not self._kernel_locks:
                self._record["renewals"] += 1
                self._write()

    def _watch(self) -> None:
        while not self._released.wait(CHECK_EVERY):
            try:
                self.confirm()
            except LockLost as error:
                self._log(f"{self._name}: {error.strerror}; this run stops")
                signal.raise_signal(signal.SIGTERM)  # ends the run, which cannot save
                return
            except OSError:
                continue  # the network may come back; a save reports it

    def _write_again(self) -> None:
        """Acquires the lock on a new file, unless the old one has only lost its content."""
        handle = self._open()
        if os.path.samestat(os.fstat(handle), os.fstat(self._handle)):
            os.close(handle)
        else:
            try:
                self._lock(handle)
            except BlockingIOError:
                os.close(handle)
                raise LockLost(None, "another run has taken over this workdir") from None
            self._close()
            self._handle = handle
        self._write()
        self._log(f"{self._path}: was removed while this run holds it; written again")

    # ---- the file ----

    def _open(self) -> int:
        # Not through a link: the file at its end would be overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(self._path, flags, 0o644)

    def _lock(self, handle: int) -> bool:
        """Locks an open file; returns whether the file system has locks.

        Raises BlockingIOError if another run holds the lock.
        """
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise
        return True

    def _is_exclusive(self) -> bool:
        """Returns whether the lock keeps others out: some file systems accept every lock."""
        other = self._open()
        try:
            return not self._lock(other)
        except (BlockingIOError, PermissionError):
            return True
        finally:
            os.close(other)

    def _wait_for_renewal(self) -> str:
        """Returns an error message if the lock is renewed within TERM seconds, or ""."""
        seen = self._read()
        record = parse_record(seen)
        if not record or is_dead(record):
            return ""
        holder = describe_holder(record)
        self._log(f"{self._path}: {holder}; waits {TERM:.0f} s for a renewal")
        deadline = time.monotonic() + TERM
        while time.monotonic() < deadline:
            time.sleep(min(1.0, TERM / 10))
            if self._read() != seen:
                return f"another run is in it, {holder}; stop that run"
        return ""

    def _is_ours(self, found: bytes | None) -> bool:
        return parse_record(found).get("id") == self._record["id"]

    def _read(self) -> bytes | None:
        """Returns what the file of this name has now; None if there is none."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return os.read(handle, MAX_BYTES)
        finally:
            os.close(handle)

    def _write(self) -> None:
        data = json.dumps(self._record).encode() + b"\n"
        os.pwrite(self._handle, data, 0)
        os.ftruncate(self._handle, len(data))
        os.fsync(self._handle)  # the processes on other hosts read it

    def _close(self) -> None:
        # Closing alone is not enough: a forked child holds the file open too.
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)
        self._handle = -1
