"""Input files of `meshtrain prepare`: on a local disk, or objects of a store (s3://, gs://).

An object is named by its path in a scratch folder (object_store.py), so that all who read inputs
have paths; the functions here alone ask which of the two it is. Objects are listed with pyarrow,
which has their sizes, as TensorStore's client has not; the latter reads them.
"""

import contextlib
import datetime
import functools
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain import object_store
from meshtrain.errors import ConfigError, import_optional

READ_AHEAD = 8 << 20  # bytes of a request; at 200 ms each, 40 MB/s
ATTEMPTS = 6  # of a request
CONNECT_TIMEOUT = 10  # seconds
REQUEST_TIMEOUT = 30  # seconds
RETRY_TIME = 60  # seconds, on Google Cloud Storage


class Stamp(NamedTuple):
    """What changes when a file is written."""

    size: int  # bytes
    mtime_ns: int


_stamps: dict[Path, Stamp] = {}  # of objects, as they were listed


def forget() -> None:
    """Forget the objects that were listed."""
    _stamps.clear()


def name_of(path: Path) -> str:
    """Returns the name of an input in messages: its path or its URL."""
    return object_store.url(path) or str(path)


def is_stored(path: Path) -> bool:
    """Returns whether an input is an object of a store."""
    return object_store.url(path) != ""


def stamp_of(path: Path) -> Stamp:
    if path in _stamps:
        return _stamps[path]
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns)


def size_of(path: Path) -> int:
    """Returns the size of an input in bytes, before decompression."""
    return stamp_of(path).size


def open_source(path: Path, *, read_ahead: int = READ_AHEAD) -> io.BufferedReader:
    """Returns a seekable file, an object in requests of `read_ahead` bytes; raises OSError."""
    if not is_stored(path):
        return open(path, "rb")
    return io.BufferedReader(open_stored(path), read_ahead)


class _Ranges(io.RawIOBase):
    """An object, each of whose reads is a request for a range."""

    def __init__(self, path: Path):
        self._path = path
        self._size = size_of(path)
        self._generation = b""  # until the first read
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._position)
        if size <= 0:
            return 0
        end = self._position + size
        data, generation = object_store.read_range(self._path, self._position, end)
        self._generation = self._generation or generation
        if generation != self._generation:
            raise _changed(self._path)
        buffer[:size] = data
        self._position = end
        return size


def open_stored(path: Path) -> io.RawIOBase:
    """Returns an object as a file, each of whose reads is a request; raises OSError.

    Raises ConfigError if the object was changed after it was listed.
    """
    store, key = _place(path)
    listed = stamp_of(path)
    with _errors_of(path):
        now = store.get_file_info(key)
    # Listings of S3 have milliseconds, answers about one object have seconds.
    if (now.size, (now.mtime_ns or 0) // 10**9) != (listed.size, listed.mtime_ns // 10**9):
        raise _changed(path)
    return _Ranges(path)


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{name_of(path)}: has changed since it was listed; use another --output, or remove what "
        f"was prepared"
    )


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields a local file: the input itself, or a copy of an object that is removed afterwards."""
    if not is_stored(path):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_source(path) as source, open(path, "wb") as copy:
            shutil.copyfileobj(source, copy, READ_AHEAD)
        yield path
    finally:
        path.unlink(missing_ok=True)


def list_objects(url: str) -> list[Path]:
    """Returns the objects that a URL names: one, those of a folder, or those with this prefix.

    They are sorted. Raises ConfigError if there are none or if the store cannot be read.
    """
    base = object_store.scratch_folder(url)
    store, key = _place(base)
    fs = import_optional("pyarrow.fs", "data")
    try:
        with _errors_of(base):
            named = store.get_file_info(key)
            if named.type == fs.FileType.File and not url.endswith("/"):
                infos = [named]
            else:
                selector = fs.FileSelector(key, recursive=True, allow_not_found=True)
                infos = store.get_file_info(selector)
            parent, _, prefix = key.rpartition("/")
            if not infos and parent and not url.endswith("/"):
                selector = fs.FileSelector(parent, recursive=False, allow_not_found=True)
                found = store.get_file_info(selector)
                infos = [info for info in found if info.base_name.startswith(prefix)]
    except OSError as error:
        raise ConfigError(
            f"{url}: cannot be read: {error.strerror}; check the name, the credentials, and "
            f"AWS_ENDPOINT_URL, AWS_REGION or STORAGE_EMULATOR_HOST"
        ) from None
    bucket = object_store.scratch_folder(url.partition("://")[0] + "://")
    paths = []
    for info in infos:
        if info.type == fs.FileType.File:
            path = bucket / info.path
            _stamps[path] = Stamp(info.size, info.mtime_ns or 0)
            paths.append(path)
    if not paths:
        raise ConfigError(f"{url}: no such object or folder")
    return sorted(paths)


def _place(path: Path) -> tuple[Any, str]:
    """Returns the file system of pyarrow that has an object, and its name there: BUCKET/KEY."""
    scheme, _, place = object_store.url(path).partition("://")
    return filesystem(scheme, place.partition("/")[0]), place


@functools.cache
def filesystem(scheme: str, bucket: str) -> Any:
    """Returns pyarrow's client for a bucket; it has the variables of TensorStore's."""
    fs = import_optional("pyarrow.fs", "data")
    if scheme == "gs":
        host = os.environ.get("STORAGE_EMULATOR_HOST", "")
        http, _, address = host.rpartition("://")
        address_options = {"endpoint_override": address, "scheme": http or "http"} if host else {}
        return fs.GcsFileSystem(
            anonymous=bool(host),
            retry_time_limit=datetime.timedelta(seconds=RETRY_TIME),
            **address_options,
        )
    options: dict[str, Any] = {}
    if os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true"):
        options["anonymous"] = True
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    elif not endpoint:
        with contextlib.suppress(OSError):
            options["region"] = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        connect_timeout=CONNECT_TIMEOUT,
        request_timeout=REQUEST_TIMEOUT,
        **options,
    )


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raises an error of pyarrow with the URL as its name, and with its first line."""
    try:
        yield
    except OSError as error:
        text = str(error).strip().partition("\n")[0]
        raise OSError(None, text[:300], name_of(path)) from error
