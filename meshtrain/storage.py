"""Workdirs on object stores: s3://BUCKET/RUN and gs://BUCKET/RUN.

Such a workdir has a scratch folder on the local disk. A run reads and writes its small files there, as in any
workdir, and uploads them with each checkpoint. The chunks of arrays are not copied: TensorStore, which writes
checkpoints to disks too, writes them to the store and reads them from there. Its client also transfers the small
files: one set of credentials and no other dependency, and it can replace an object on the condition that nobody
else did, which fsspec and etils.epath cannot.
"""

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

DRIVERS = {"s3": "s3", "gs": "gcs"}  # scheme of a URL -> driver of TensorStore

VARIABLE = "MESHTRAIN_SCRATCH"  # folder of all scratch folders; `launch` sets it for its processes

LOCAL = ("checkpoints", "logs", "LOCK")  # in a workdir: what `push` does not upload

# The folders STEP and arrays of a checkpoint, until they are renamed.
WRITING = re.compile(r"^(\d+|arrays)\.(partial|orbax-checkpoint-tmp)$")

RETRIES = {"max_retries": 5, "initial_delay": "200ms", "max_delay": "4s"}

# Of TensorStore's client, which otherwise waits forever for a server that does not answer.
TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

ABSENT = b"\x02"  # TensorStore's generation of an object that does not exist

_pushed: dict[Path, tuple[int, int]] = {}  # `_state` of the files that equal their objects


def is_url(path: Any) -> bool:
    """Whether `path` is the URL of an object store; pathlib makes one slash of its two."""
    return re.match(f"({'|'.join(DRIVERS)}):/", str(path)) is not None


def local(path: str | Path, process: int = 0) -> Path:
    """Returns the scratch folder of a URL for a process; any other path as it is."""
    if not is_url(path):
        return Path(path)
    scheme, _, rest = str(path).partition(":")
    return root() / str(process) / scheme / rest.strip("/")


@functools.cache
def root() -> Path:
    """Returns the folder of all scratch folders; if this process made it, it is removed at exit."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    made = Path(tempfile.mkdtemp(prefix="meshtrain-")).resolve()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def url(path: Path) -> str:
    """Returns the URL of a path in a scratch folder, and an empty string for any other path."""
    if not root.cache_info().currsize and VARIABLE not in os.environ:
        return ""
    try:
        _, scheme, *rest = Path(path).relative_to(root()).parts
    except ValueError:
        return ""
    place = "/".join(WRITING.sub(r"\1", part) for part in rest)
    return f"{scheme}://{place}" if place else ""


def readable(text: str) -> str:
    """Returns a text with URLs for the scratch folders that it names."""
    if not root.cache_info().currsize:
        return text
    return re.sub(rf"{re.escape(str(root()))}/\d+/({'|'.join(DRIVERS)})/", r"\1://", text)


def spec(folder: Path) -> dict[str, Any] | None:
    """Returns TensorStore's description of the objects under a scratch folder; None for any other folder."""
    scheme, _, rest = url(folder).partition("://")
    if not rest:
        return None
    for name, value in TIMEOUTS.items():
        os.environ.setdefault(name, value)
    bucket, _, key = rest.partition("/")
    found = {"driver": DRIVERS[scheme], "bucket": bucket, "path": f"{key}/" if key else ""}
    if scheme == "gs":
        if host := os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", host)
            os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        return {**found, "context": {"gcs_request_retries": RETRIES}}
    for names, member in (
        (("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "endpoint"),
        (("AWS_REGION", "AWS_DEFAULT_REGION"), "aws_region"),
    ):
        if value := next(filter(None, map(os.environ.get, names)), None):
            found[member] = value.rstrip("/")
    context: dict[str, Any] = {"s3_request_retries": RETRIES}
    # Otherwise the client tries one source after the other, and logs each failure.
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        context["aws_credentials"] = {"type": "environment"}
    return {**found, "context": context}


def _done(place: Path, work: Callable[[Any], Any]) -> Any:
    """Returns `work(store)`, with the objects under `place`. Raises OSError if the store reports an error."""
    import tensorstore  # here, since it takes a while and most runs do not need it

    try:
        return work(tensorstore.KvStore.open(spec(place)).result())
    except Exception as error:
        raise OSError(None, cause(str(error)), url(place)) from error


def cause(text: str) -> str:
    """Returns the last cause in an error message of TensorStore, without its details."""
    text = text.splitlines()[0] if "http_response_code=" not in text else text
    return re.sub(r"\s*\[[a-z_]+\W.*", "", text, flags=re.S).rpartition("Error reading ")[2][:300]


def names(folder: Path) -> list[str]:
    """Returns the names of all objects under a folder, relative to it."""
    return sorted(key.decode() for key in _done(folder, lambda store: store.list().result()))


def read(path: Path) -> tuple[bytes | None, bytes]:
    """Returns an object, None if it does not exist, and its generation."""
    found = _done(path.parent, lambda store: store.read(path.name).result())
    generation = found.stamp.generation
    return (found.value if found.state == "value" else None), generation if any(
        generation
    ) else None


def write(path: Path, data: bytes | None, *, only_if: bytes | None = None) -> bytes:
    """Writes an object, or removes it if `data` is None, and returns its generation.

    With `only_if` it is written only if this is its generation until now; otherwise b"" is returned.
    """
    done = _done(path.parent, lambda store: store.write(path.name, data, if_equal=only_if).result())
    return done.generation


def upload(path: Path) -> None:
    """Writes a file of a scratch folder to the store."""
    write(path, path.read_bytes())


def create(path: Path) -> None:
    """Writes a file to the store; raises OSError if there is an object of this name."""
    data = path.read_bytes()
    # After a lost answer the client tries again, and finds its own object.
    if not write(path, data, only_if=ABSENT) and read(path)[0] != data:
        raise OSError(None, "another run has written it", url(path))


def remove(folder: Path, first: str = "") -> None:
    """Removes all objects under a folder, and before them the object `first`."""
    found = names(folder)
    if first in found:
        write(folder / first, None)
    futures = _done(folder, lambda store: [store.write(name, None) for name in found])
    for future in futures:
        _done(folder, lambda _, future=future: future.result())


def copy(source: Path, target: Path, last: str) -> None:
    """Copies all objects under a folder to another one, the object `last` after the others."""
    for name in sorted(names(source), key=last.__eq__):
        data, _ = read(source / name)
        if data is not None:
            write(target / name, data)


def download(folder: Path, wanted: Iterable[str]) -> None:
    """Downloads objects under a folder, given by their names, but not over files that exist."""
    for name, data in _read_all(folder, [one for one in wanted if not (folder / one).exists()]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        _pushed[folder / name] = _state(folder / name)


def _read_all(folder: Path, found: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yields names and objects; the store reads them in parallel."""
    futures = _done(folder, lambda store: [(name, store.read(name)) for name in found])
    for name, future in futures:
        result = _done(folder, lambda _, future=future: future.result())
        if result.state == "value":
            yield name, result.value


def push(folder: Path) -> None:
    """Uploads the files of a workdir, or of one of its folders, that have changed; of a workdir all but LOCAL."""
    for path in sorted(folder.rglob("*")):
        if path.relative_to(folder).parts[0] in LOCAL or not path.is_file():
            continue
        state = _state(path)
        if _pushed.get(path) != state and path.suffix != ".new":
            upload(path)
            _pushed[path] = state


def _state(path: Path) -> tuple[int, int]:
    """Returns what changes when a file is written: its mtime and size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size
