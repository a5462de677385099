"""Tokens of prepared folders on object stores (data.path=s3://BUCKET/FOLDER), read as local ones.

A sample is a few KB anywhere in the data, and a request takes as long for a few KB as for a few MB.
So files are fetched in blocks of 2 MiB, and each block once for all processes of the host: the
first process that needs it puts it into the cache (remote_cache.py). Data that does not fit the
bound of the cache is fetched in parts, the smallest that manifest.json has a checksum of, and stays
in memory until the sample is read.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import object_store
from meshtrain.data import indexed, prepared
from meshtrain.data.remote_cache import BLOCK, Cache, RemoteFile, cache_folder, open_cache
from meshtrain.data.remote_store import BLOCK_THREADS, Store, part_threads
from meshtrain.errors import ConfigError

CACHE_GB = 100.0  # the default of data.cache_gb, for those who have no config
SEQUENTIAL_BLOCKS = 2 * BLOCK_THREADS  # read ahead when many tokens are read in order
HELD_BYTES = 64 << 20  # of tokens that were read ahead and are not on the disk
STALE_SECONDS = 120.0  # after which they make room: other samples were read, after a rollback
NO_MANIFEST = (
    f"has no {prepared.MANIFEST}; give the bucket and the folder of data that `meshtrain prepare` "
    f"wrote"
)


class RemoteTokens:
    """The tokens of a .bin, or a range of them. It is read as an array: `tokens[start:end]`."""

    ndim = 1

    def __init__(
        self,
        file: RemoteFile,
        cache: Cache,
        dtype: np.dtype,
        *,
        first: int = 0,
        last: int | None = None,
        in_order: bool = False,
    ):
        self._file = file
        self._cache = cache
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self._first = first
        self._last = file.size // dtype.itemsize if last is None else last
        self._in_order = in_order  # whether ranges are read one after the other

    def __len__(self) -> int:
        return self._last - self._first

    @property
    def size(self) -> int:
        return len(self)

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def range(self, start: int, stop: int) -> "RemoteTokens":
        """Returns tokens `start` ... `stop` - 1, to be read from the first to the last in parts."""
        start, stop, _ = slice(start, stop).indices(len(self))
        return RemoteTokens(
            self._file,
            self._cache,
            self.dtype,
            first=self._first + start,
            last=self._first + stop,
            in_order=True,
        )

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(len(self))
        assert step == 1, "a range of tokens"
        stop = max(start, stop)
        if self._in_order:
            self._read_ahead(stop)
        return self.gather(np.array([start]), np.array([stop - start]))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the tokens of ranges, one after the other."""
        pieces = self._pieces(starts, lengths)
        # All requests first, so that they overlap.
        arriving = [self._request(*piece) for piece in pieces]
        result = bytearray(sum(end - start for start, end in pieces))
        at = 0
        for (start, end), future in zip(pieces, arriving, strict=True):
            result[at : at + end - start] = self._receive(start, end, future)
            at += end - start
        return np.frombuffer(result, self.dtype)

    def prefetch(self, starts: np.ndarray, lengths: np.ndarray) -> list[Future]:
        """Returns futures that are done when these ranges are on this machine."""
        futures = []
        for start, end in self._pieces(starts, lengths):
            block = start // BLOCK
            if self._cache.is_planned(self._file, block):
                if not self._cache.is_present(self._file, block):
                    futures.append(self._cache.bring(self._file, block))
            elif future := _held.put(self._file.sha256, start, end, self._fetch_part):
                futures.append(future)
        return futures

    def _pieces(self, starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Returns the bytes (start, end) of ranges of tokens; none crosses a block or a part."""
        pieces = []
        first_bytes = (np.asarray(starts, np.int64) + self._first) * self.itemsize
        end_bytes = first_bytes + np.asarray(lengths, np.int64) * self.itemsize
        for start, end in zip(first_bytes.tolist(), end_bytes.tolist(), strict=True):
            while start < end:
                is_planned = self._cache.is_planned(self._file, start // BLOCK)
                unit = BLOCK if is_planned else self._file.part_bytes
                stop = min(end, (start // unit + 1) * unit)
                pieces.append((start, stop))
                start = stop
        return pieces

    def _request(self, start: int, end: int) -> Future | None:
        """Returns the future of bytes that are not on this machine; None if they are cached."""
        block = start // BLOCK
        if not self._cache.is_planned(self._file, block):
            held = _held.take(self._file.sha256, start, end)
            return held or part_threads.submit(self._fetch_part, start, end)
        if self._cache.is_present(self._file, block):
            return None
        return self._cache.bring(self._file, block)

    def _receive(self, start: int, end: int, future: Future | None) -> bytes:
        block = start // BLOCK
        while True:
            if future is not None:
                data = future.result()
                if data is not None and len(data) == end - start:
                    return data
                if data is not None:  # a block that could not be stored
                    return data[start - block * BLOCK : end - block * BLOCK]
            data = self._cache.read(self._file, start, end)
            if data is not None:
                return data
            future = self._cache.bring(self._file, block)

    def _fetch_part(self, start: int, end: int) -> bytes:
        """Returns bytes inside a block, after checking the parts that they are in."""
        part_bytes = self._file.part_bytes
        first = start // part_bytes * part_bytes
        last = min(self._file.size, -(-end // part_bytes) * part_bytes)
        return self._file.fetch(first, last)[start - first : end - first]

    def _read_ahead(self, stop: int) -> None:
        """Requests the blocks after a range that is read in order."""
        first = (self._first + stop) * self.itemsize // BLOCK
        last = min(first + SEQUENTIAL_BLOCKS, -(-self._last * self.itemsize // BLOCK))
        for block in range(first, last):
            is_planned = self._cache.is_planned(self._file, block)
            if is_planned and not self._cache.is_present(self._file, block):
                self._cache.bring(self._file, block)


class _Held:
    """Ranges of files that were read ahead into memory, until they are read."""

    def __init__(self):
        self._futures: dict[tuple[str, int, int], tuple[Future, float]] = {}  # oldest first
        self._total = 0  # bytes
        self._lock = threading.Lock()

    def put(
        self, name: str, start: int, end: int, fetch: Callable[[int, int], bytes]
    ) -> Future | None:
        """Returns the future of bytes that are fetched now; None if there is no room for them."""
        now = time.monotonic()
        with self._lock:
            if known := self._futures.get((name, start, end)):
                return known[0]
            while self._total + end - start > HELD_BYTES:
                oldest = next(iter(self._futures), None)
                if oldest is None or now - self._futures[oldest][1] < STALE_SECONDS:
                    return None
                self._pop(oldest)
            future = part_threads.submit(fetch, start, end)
            self._futures[name, start, end] = future, now
            self._total += end - start
            return future

    def take(self, name: str, start: int, end: int) -> Future | None:
        """Returns the future of bytes that were read ahead, and forgets it; None if none were.

        Those that could not be read are forgotten too: the store may answer again.
        """
        with self._lock:
            if (name, start, end) not in self._futures:
                return None
            future = self._pop((name, start, end))
            return None if future.done() and future.exception() else future

    def _pop(self, key: tuple[str, int, int]) -> Future:
        self._total -= key[2] - key[1]
        return self._futures.pop(key)[0]


_held = _Held()


# ---- a prepared folder ----


class RemoteFolder(NamedTuple):
    folder: Path  # local: manifest, tokenizer and the index of each shard
    manifest: dict[str, Any]
    shards: list[indexed.Shard]
    warnings: tuple[str, ...]


_folders: dict[str, Path] = {}  # URL -> the local folder with its small files


def local_folder(path: str | Path) -> Path:
    """Returns the local folder with the tokenizer of data that this process has opened."""
    url = str(path)
    if object_store.is_url(url) and url.rstrip("/") in _folders:
        return _folders[url.rstrip("/")]
    return Path(path)


def url_fault(url: str) -> str:
    """Returns why no prepared data can be read from a URL, or "": whether it has a manifest."""
    try:
        Store(url).read(prepared.MANIFEST, 0, 1)
    except FileNotFoundError:
        return NO_MANIFEST
    except ConfigError as error:
        return str(error).removeprefix(f"{url.rstrip('/')}/{prepared.MANIFEST}: ")
    return ""


def open_folder(url: str, cache_gb: float) -> RemoteFolder:
    """Returns a prepared folder on a store, whose tokens are fetched when they are read.

    Manifest, tokenizer and indices are fetched now, once for all processes of this host. Raises
    ConfigError if one is missing or corrupt, TransientError if the store does not answer.
    """
    store = Store(url)
    cache = open_cache(cache_folder())
    cache.open(cache_gb)
    try:
        store.read(prepared.MANIFEST, 0, 1)  # it may be large, and a first answer should be quick
        content = store.read(prepared.MANIFEST)
    except FileNotFoundError as error:
        raise ConfigError(f"data.path={url}: {NO_MANIFEST}") from error
    digest = hashlib.sha256(content).hexdigest()
    folder = cache.folder / "folders" / digest
    if cache.is_writable:
        try:
            folder.mkdir(exist_ok=True)
            with open(folder / ".lock", "wb") as lock:
                # One process fetches, the others find the files.
                fcntl.flock(lock, fcntl.LOCK_EX)
                return _open_folder(store, cache, folder, content)
        except OSError as error:
            cache.disable(error)
    folder = Path(tempfile.mkdtemp(prefix="meshtrain-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _open_folder(store, cache, folder, content)


def _open_folder(store: Store, cache: Cache, folder: Path, content: bytes) -> RemoteFolder:
    path = folder / prepared.MANIFEST
    if not path.exists():
        prepared.write_durably(path, content)
    manifest = prepared.parse_manifest(path)
    faults = _missing(store, manifest)
    if faults:
        raise ConfigError(*faults[:10])
    _fetch_file(store, folder, prepared.TOKEN_BYTES, sha256="")
    tokenizer = manifest["tokenizer"]
    if tokenizer["file"]:
        _fetch_file(store, folder, tokenizer["file"], sha256=tokenizer["sha256"])
    indices = [(f"{shard['name']}.idx", shard["files"]["idx"]) for shard in manifest["shards"]]
    fetching = [
        part_threads.submit(_fetch_file, store, folder, name, file["sha256"], file["size"])
        for name, file in indices
    ]
    for future in fetching:
        future.result()
    shards = []
    has_checksums = True
    for entry in manifest["shards"]:
        file = entry["files"]["bin"]
        name = f"{entry['name']}.bin"
        checksums = prepared.checksums_of(file)
        has_checksums &= checksums is not None
        if checksums and BLOCK % checksums.part_bytes:
            raise ConfigError(
                f"{store.url}/{prepared.MANIFEST}: part_bytes={checksums.part_bytes} does not "
                f"divide {BLOCK}; prepare the folder again"
            )
        remote = RemoteFile(store, name, file["size"], file["sha256"], checksums)
        cache.plan(remote)
        dtype, index = indexed.load_index(
            str(folder / f"{entry['name']}.idx"), remote.url, file["size"]
        )
        shards.append(indexed.Shard(remote.url, RemoteTokens(remote, cache, dtype), index))
    _folders[store.url] = folder
    warnings = (
        ()
        if has_checksums
        else (
            f"data.path={store.url}: an older meshtrain prepared it, without checksums of parts, "
            f"so that damage in the store is not found; prepare it again, or check a copy with "
            f"`meshtrain prepare --verify`",
        )
    )
    return RemoteFolder(folder, manifest, shards, warnings)


def _missing(store: Store, manifest: dict[str, Any]) -> list[str]:
    """Returns a fault for each file of the manifest that is not in the store."""
    found = store.names()
    if found is None:
        return []
    names = set(found)
    listed = [f"{shard['name']}.{kind}" for shard in manifest["shards"] for kind in shard["files"]]
    listed.append(prepared.TOKEN_BYTES)
    return [
        f"{store.url}/{name} is missing, but {prepared.MANIFEST} lists it; upload it again"
        for name in listed
        if name not in names
    ]


def _fetch_file(store: Store, folder: Path, name: str, sha256: str, size: int = 0) -> None:
    """Fetches a file, unless the folder has it with this hash; `size` 0: it is a small one."""
    path = folder / name
    if path.exists() and (not sha256 or _sha256(path) == sha256):
        os.utime(path)
        return
    new = path.with_name(path.name + ".new")
    digest = hashlib.sha256()
    with open(new, "wb") as file:
        for start in range(0, max(size, 1), BLOCK):
            end = min(start + BLOCK, size) if size else None
            try:
                data = store.read(name, start, end)
            except FileNotFoundError:
                raise ConfigError(f"{store.url}/{name}: is missing; upload it again") from None
            digest.update(data)
            file.write(data)
    if sha256 and digest.hexdigest() != sha256:
        raise ConfigError(
            f"{store.url}/{name}: is not the file that {prepared.MANIFEST} lists (sha256); "
            f"upload it again"
        )
    os.replace(new, path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wait_for(futures: Iterable[Future]) -> None:
    """Waits until all are done. Errors are raised by the read that needs the bytes."""
    for future in futures:
        with contextlib.suppress(Exception):
            future.result()
