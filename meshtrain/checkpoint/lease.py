"""The lock of a workdir on an object store: an object that its holder renews.

No kernel releases it when the holder dies. Another process takes it over if the holder was a process of its host
that has ended, or if it was not renewed for TERM seconds, by the clock of that process. Every write is
conditional, so only one process can take it over, and a holder that was suspended for longer notices it.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from meshtrain import console, storage

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
            generation = _write(self._lock, self._record, self._generation)
            self._generation = generation or self._generation
            return bool(generation)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            storage.write(self._lock, None, only_if=self._generation)


def _write(lock: Path, record: dict[str, Any], generation: bytes) -> bytes:
    """Writes the lock on a condition; returns its generation, or b"" if it is not this record's."""
    if written := storage.write(lock, json.dumps(record).encode(), only_if=generation):
        return written
    # Perhaps only the answer to this write, or to an earlier one, was lost.
    found, generation = storage.read(lock)
    return generation if found and _record(found).get("id") == record["id"] else b""


def acquire(lock: Path) -> str:
    """Acquires the lock; returns an error message if another run holds it, else an empty string.

    Waits for up to TERM seconds to see whether a lock is renewed. Raises OSError.
    """
    global _held
    workdir = storage.url(lock.parent)
    seen, generation = storage.read(lock)
    if seen is not None and not _is_dead(holder := _record(seen)):
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
        "kernel": _kernel(),
        "since": time.time(),
        "renewals": 0,
    }
    new = _write(lock, record, generation)
    if not new and storage.read(lock)[0] is None:
        raise OSError(None, "nothing can be written there; is there such a bucket?", workdir)
    if not new:
        return f"--workdir={workdir}: another run has just started in it; use another --workdir"
    _held = Lease(lock, record, new)
    return ""


def _record(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        return {}


def _kernel() -> str:
    """Returns what only processes with pids of the same table share; names of hosts are not unique. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that has ended, or had this pid."""
    is_here = holder.get("kernel") == _kernel() != ""
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


def confirm() -> None:
    """Raises OSError if this process held a lock and has lost it."""
    if _held and not _held.renew():
        raise OSError(None, "another run has taken over this workdir")


def is_held() -> bool:
    return _held is not None


def release() -> None:
    global _held
    if _held:
        _held.release()
        _held = None
