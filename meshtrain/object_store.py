"""The client of object stores: URLs and scratch folders, transfers, and the lease of a workdir.

A workdir s3://BUCKET/RUN or gs://BUCKET/RUN has a scratch folder on the local disk. A run reads and
writes its small files there, as in any workdir, and uploads them with each checkpoint. The chunks
of arrays are not copied: TensorStore, which writes checkpoints to disks too, writes them to the
store and reads them from there. Its client also transfers the small files: one set of credentials
and no other dependency, and it can replace an object on the condition that nobody else did, which
fsspec and etils.epath cannot.

The functions take paths in scratch folders, and raise OSError for errors of the store. storage.py
says when a workdir has one.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

# ---- URLs and scratch folders ----

DRIVERS = {"s3": "s3", "gs": "gcs"}  # scheme of a URL -> driver of TensorStore
VARIABLE = "MESHTRAIN_SCRATCH"  # folder of all scratch folders; `launch` sets it for its processes

# The folders STEP and arrays of a checkpoint, until they are renamed.
WRITING = re.compile(r"^(\d+|arrays)\.(partial|orbax-checkpoint-tmp)$")


def is_url(place: str | Path) -> bool:
    """Returns whether `place` is the URL of an object store; pathlib makes one slash of its two."""
    return re.match(f"({'|'.join(DRIVERS)}):/", str(place)) is not None


def scratch_folder(place: str | Path, process: int = 0) -> Path:
    """Returns the scratch folder of a URL for a process."""
    scheme, _, rest = str(place).partition(":")
    return root() / str(process) / scheme / rest.strip("/")


@functools.cache
def root() -> Path:
    """Returns the folder of all scratch folders; a temporary one is removed at exit."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="meshtrain-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def url(path: Path) -> str:
    """Returns the URL of a path in a scratch folder, and an empty string for any other path."""
    if not root.cache_info().currsize and VARIABLE not in os.environ:
        return ""
    try:
        _, scheme, *parts = Path(path).relative_to(root()).parts
    except ValueError:
        return ""
    place = "/".join(WRITING.sub(r"\1", part) for part in parts)
    return f"{scheme}://{place}" if place else ""


# ---- the client ----

RETRIES = {"max_retries": 5, "initial_delay": "200ms", "max_delay": "4s"}

# Of TensorStore's client, which otherwise waits forever for a server that does not answer.
TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def spec(folder: Path) -> dict[str, Any]:
    """Returns TensorStore's description of the objects under a scratch folder."""
    scheme, _, place = url(folder).partition("://")
    for name, value in TIMEOUTS.items():
        os.environ.setdefault(name, value)
    bucket, _, key = place.partition("/")
    location = {"driver": DRIVERS[scheme], "bucket": bucket, "path": f"{key}/" if key else ""}
    return location | (_gcs_options() if scheme == "gs" else _s3_options())


READ_CONCURRENCY = 128  # requests of one process for data


def open_for_reading(folder: Path) -> Any:
    """Returns TensorStore's store of the objects under a scratch folder, for many reads.

    Its caller repeats failed reads itself: TensorStore's own attempts take a fixed time.
    """
    import tensorstore  # here, since it takes a while and most runs do not need it

    described = spec(folder)
    prefix = described["driver"]
    described["context"] |= {
        f"{prefix}_request_retries": {**RETRIES, "max_retries": 1},
        f"{prefix}_request_concurrency": {"limit": READ_CONCURRENCY},
    }
    return tensorstore.KvStore.open(described).result()


def _gcs_options() -> dict[str, Any]:
    if host := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", host)
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    return {"context": {"gcs_request_retries": RETRIES}}


def _s3_options() -> dict[str, Any]:
    """Returns what the variables of AWS say; TensorStore's client does not read all of them."""
    options: dict[str, Any] = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint.rstrip("/")
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["aws_region"] = region.rstrip("/")
    context: dict[str, Any] = {"s3_request_retries": RETRIES}
    # Otherwise the client tries one source after the other, and logs each failure.
    if os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true"):
        context["aws_credentials"] = {"type": "anonymous"}
    elif os.environ.get("AWS_ACCESS_KEY_ID"):
        context["aws_credentials"] = {"type": "environment"}
    return {**options, "context": context}


def _request(folder: Path, action: Callable[[Any], Any]) -> Any:
    """Returns `action(store)`, with the objects under `folder`. Raises OSError."""
    import tensorstore  # here, since it takes a while and most runs do not need it

    try:
        return action(tensorstore.KvStore.open(spec(folder)).result())
    except Exception as error:
        raise request_error(str(error), folder) from error


def request_error(text: str, folder: Path) -> OSError:
    """Returns the last cause in an error message of TensorStore, without its details."""
    text = text.splitlines()[0] if "http_response_code=" not in text else text
    details = re.search(r"\[[a-z_]+\W", text)
    before = text[: details.start()].rstrip() if details else text
    cause = before.rpartition("Error reading ")[2]
    return OSError(None, cause[:300], url(folder))


# ---- one object ----

ABSENT = b"\x02"  # TensorStore's generation of an object that does not exist


def read(path: Path) -> tuple[bytes | None, bytes | None]:
    """Returns an object and its generation; None for the object if it does not exist."""
    result = _request(path.parent, lambda store: store.read(path.name).result())
    data = result.value if result.state == "value" else None
    generation = result.stamp.generation
    return data, generation if any(generation) else None


def read_range(path: Path, start: int, end: int) -> tuple[bytes, bytes]:
    """Returns the bytes from `start` up to `end` of an object, and its generation."""
    result = _request(
        path.parent,
        lambda store: store.read(path.name, byte_range=slice(start, end)).result(),
    )
    if result.state != "value":
        raise OSError(None, "the object was removed", url(path))
    return result.value, result.stamp.generation


def write(path: Path, data: bytes | None, *, only_if: bytes | None = None) -> bytes:
    """Writes an object, or removes it if `data` is None, and returns its generation.

    With `only_if` it is written only if this is its generation until now; otherwise b"" is
    returned.
    """
    stamp = _request(
        path.parent,
        lambda store: store.write(path.name, data, if_equal=only_if).result(),
    )
    return stamp.generation


def upload(path: Path) -> None:
    """Writes a file of a scratch folder to the store."""
    write(path, path.read_bytes())


def create(path: Path) -> None:
    """Writes a file to the store; raises OSError if there is an object of this name."""
    _write_new(path, path.read_bytes())


def _write_new(path: Path, data: bytes) -> None:
    # After a lost answer the client tries again, and finds its own object.
    if not write(path, data, only_if=ABSENT) and read(path)[0] != data:
        raise OSError(None, "another run has written it", url(path))


# ---- all objects under a folder ----


def names(folder: Path) -> list[str]:
    """Returns the names of all objects under a folder, relative to it."""
    keys = _request(folder, lambda store: store.list().result())
    return sorted(key.decode() for key in keys)


def remove(folder: Path, first: str = "") -> None:
    """Removes all objects under a folder, and before them the object `first`."""
    keys = names(folder)
    if first in keys:
        write(folder / first, None)
    futures = _request(folder, lambda store: [store.write(key, None) for key in keys])
    for future in futures:
        _request(folder, lambda _, future=future: future.result())


def copy(source: Path, target: Path, last: str) -> None:
    """Copies all objects under a folder to another one, the object `last` after the others.

    Raises OSError if one of them is there.
    """
    for name in sorted(names(source), key=last.__eq__):
        data, _ = read(source / name)
        if data is not None:
            _write_new(target / name, data)


_pushed: dict[Path, tuple[int, int]] = {}  # `_state` of the files that equal their objects


def download(folder: Path, wanted: Iterable[str]) -> None:
    """Downloads objects under a folder, given by their names, but not over files that exist."""
    missing = [name for name in wanted if not (folder / name).exists()]
    for name, data in _read_all(folder, missing):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        _pushed[path] = _state(path)


def _read_all(folder: Path, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yields names and objects; the store reads them in parallel."""
    futures = _request(folder, lambda store: [(key, store.read(key)) for key in keys])
    for key, future in futures:
        result = _request(folder, lambda _, future=future: future.result())
        if result.state == "value":
            yield key, result.value


def push(folder: Path, but: Collection[str] = ()) -> None:
    """Uploads the files of a folder that have changed, except the files and folders `but` in it.

    Those of subfolders come first: config_history has what a new config.json replaces.
    """
    for path in sorted(folder.rglob("*"), key=lambda path: (-len(path.parts), path)):
        if path.relative_to(folder).parts[0] in but or not path.is_file():
            continue
        state = _state(path)
        if _pushed.get(path) != state and path.suffix != ".new":
            upload(path)
            _pushed[path] = state


def _state(path: Path) -> tuple[int, int]:
    """Returns what changes when a file is written: its mtime and size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


# ---- the lease ----
#
# The lock of a workdir on a store is an object that its holder renews, since no kernel releases it
# when the holder dies. Another process takes it over if the holder was a process of its host that
# has ended, or if it was not renewed for TERM seconds, by the clock of that process. Every write is
# conditional, so only one process can take it over, and a holder that was suspended for longer
# notices it.

TERM = 60.0  # seconds
RENEWALS = 4  # in a term
_held: "Lease | None" = None  # by this process


class Lease:
    """Renews the lock in a thread until `release`."""

    def __init__(self, lock: Path, record: dict[str, Any], generation: bytes):
        self._lock = lock
        self._record = record
        self._generation = generation
        self._one_at_a_time = threading.Lock()
        self._released = threading.Event()
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
            write(self._lock, None, only_if=self._generation)


def acquire_lease(lock: Path, *, log: Callable[[str], None], key: str = "--workdir") -> str:
    """Acquires the lock; returns an error message if another run holds it, else an empty string.

    Waits for up to TERM seconds to see whether a lock is renewed, and logs that it does. `key` is
    the flag that named the folder.
    """
    global _held
    workdir = url(lock.parent)
    fault, generation = _wait_until_free(lock, log, key)
    if fault:
        return fault
    record = new_record()
    acquired = _write_lease(lock, record, generation)
    if acquired:
        _held = Lease(lock, record, acquired)
        return ""
    if read(lock)[0] is None:
        raise OSError(None, "nothing can be written there; is there such a bucket?", workdir)
    return f"{key}={workdir}: another run has just started in it; use another {key}"


def lease_fault(lock: Path, *, log: Callable[[str], None]) -> str:
    """Returns what `acquire_lease` would return, without acquiring the lock."""
    fault, _ = _wait_until_free(lock, log, "--workdir")
    return fault


def _wait_until_free(lock: Path, log: Callable[[str], None], key: str) -> tuple[str, bytes | None]:
    """Returns an error message if another run holds the lock, or "", and the lock's generation."""
    workdir = url(lock.parent)
    seen, generation = read(lock)
    if seen is None or is_dead(holder := parse_record(seen)):
        return "", generation
    who = describe_holder(holder)
    log(f"{workdir}: locked by {who}; waits {TERM:.0f} s for a renewal of the lock")
    deadline = time.monotonic() + TERM
    while time.monotonic() < deadline and seen is not None:
        time.sleep(min(1.0, TERM / 10))
        now, generation = read(lock)
        if now not in (seen, None):
            fault = (
                f"{key}={workdir}: another run is in it, {who}; stop that run, or use another {key}"
            )
            return fault, generation
        seen = now
    return "", generation


def confirm_lease() -> None:
    """Raises LockLost if this process held a lock and has lost it."""
    if _held and not _held.renew():
        raise LockLost(None, "another run has taken over this workdir")


def is_lease_held() -> bool:
    return _held is not None


def release_lease() -> None:
    global _held
    if _held:
        _held.release()
        _held = None


def _write_lease(lock: Path, record: dict[str, Any], generation: bytes | None) -> bytes:
    """Writes the lock on a condition; returns its generation, or b"" if it is not this record's."""
    if written := write(lock, json.dumps(record).encode(), only_if=generation):
        return written
    # Perhaps only the answer to this write, or to an earlier one, was lost.
    now, generation = read(lock)
    if not now or generation is None or parse_record(now).get("id") != record["id"]:
        return b""
    return generation


# ---- what LOCK says about its holder, here and on a disk (checkpoint/lock.py) ----


class LockLost(OSError):
    """Another run has taken over the workdir of this one."""


def new_record() -> dict[str, Any]:
    """Returns the record of this process."""
    return {
        "id": uuid.uuid4().hex,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "kernel": _kernel_id(),
        "since": time.time(),
        "renewals": 0,
    }


def parse_record(data: bytes | None) -> dict[str, Any]:
    """Returns the record in the content of LOCK; {} if there is none."""
    try:
        return dict(json.loads(data or b""))
    except (ValueError, TypeError, RecursionError):
        return {}


def describe_holder(holder: dict[str, Any]) -> str:
    if "pid" not in holder or "host" not in holder:
        return "its pid is unknown"
    return f"pid {holder['pid']} on {holder['host']}"


def _kernel_id() -> str:
    """Returns an id of this kernel and pid namespace, or "": host names are not unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_dead(holder: dict[str, Any]) -> bool:
    """Returns whether the holder was a process of this host that has ended, or had this pid."""
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
