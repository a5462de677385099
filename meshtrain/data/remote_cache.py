"""Blocks of files on object stores, cached on the local disk for all processes of the host.

The cache is a folder of small files:

  blocks/SHA256/NUMBER   a block of the file with this hash, then the CRC-32 of the block
  folders/SHA256/        the small files of a prepared folder, by the hash of its manifest
  used                   the size of all, which its lock guards
  claims                 a byte for each block that a process is fetching, locked by it

Any process may die at any time, and any file may be removed at any time: what is missing or has
another checksum is fetched again.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, NamedTuple

from isal import isal_zlib

from meshtrain.data import prepared
from meshtrain.data.prepared import PART_BYTES, Checksums
from meshtrain.data.remote_store import Store, block_threads, log
from meshtrain.errors import ConfigError

BLOCK = 8 * PART_BYTES  # 2 MiB, fetched at once and cached in a file of its own
CLAIM_SECONDS = 5.0  # that another process may take to fetch a block before this one does, too
CORRUPT_ATTEMPTS = 3  # a transfer may be damaged, too
TOUCH_SECONDS = 600.0  # between two updates of the time when a block was used
KEPT_SECONDS = 3600.0  # small files and unfinished ones are not removed before
TRAILER = struct.Struct("<I")


class RemoteFile(NamedTuple):
    """A .bin on a store."""

    store: Store
    name: str
    size: int  # bytes
    sha256: str
    checksums: Checksums | None  # None: older manifests have none

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.name}"

    @property
    def part_bytes(self) -> int:
        """The smallest part that is fetched."""
        return self.checksums.part_bytes if self.checksums else PART_BYTES

    def fetch(self, start: int, end: int) -> bytes:
        """Returns bytes `start` ... `end` - 1; `start` is that of a part, `end` as well or `size`.

        Raises ConfigError if they do not have the checksums of the manifest, even repeatedly.
        """
        wrong: int | None = None
        for _ in range(CORRUPT_ATTEMPTS):
            try:
                data = self.store.read(self.name, start, end)
            except FileNotFoundError:
                raise ConfigError(
                    f"{self.url}: is missing, but {prepared.MANIFEST} lists it; upload it again"
                ) from None
            wrong = self._wrong_part(data, start)
            if wrong is None and len(data) == end - start:
                return data
        wrong = start if wrong is None else wrong
        raise ConfigError(
            f"{self.url}: at byte {wrong}: the bytes are not those that {prepared.MANIFEST} has a "
            f"checksum of; upload it again"
        )

    def _wrong_part(self, data: bytes, start: int) -> int | None:
        """Returns the offset in the file of the first part with another checksum."""
        if self.checksums is None:
            return None
        view = memoryview(data)
        part_bytes, crc32 = self.checksums
        for at in range(0, len(data), part_bytes):
            if isal_zlib.crc32(view[at : at + part_bytes]) != crc32[(start + at) // part_bytes]:
                return start + at
        return None


class Cache:
    """The folder of the cache, as this process uses it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._blocks = str(folder / "blocks")
        self._limit = 0  # bytes
        self._planned: dict[str, int] = {}  # SHA-256 of a file -> its first blocks that may be here
        self._planned_bytes = 0
        self._without_room: set[tuple[str, int]] = set()  # blocks that did not fit nevertheless
        self._present: dict[tuple[str, int], float] = {}  # verified blocks -> when it was touched
        self._fetching: dict[tuple[str, int], Future] = {}
        self._lock = threading.Lock()
        self._claims: int | None = None
        self.is_writable = False
        self._is_reported = False  # that it is not

    def open(self, cache_gb: float) -> None:
        """Creates the folder, and sets the bound. A folder that cannot be written is not used."""
        if not cache_gb:
            return
        try:
            (self.folder / "blocks").mkdir(parents=True, exist_ok=True)
            (self.folder / "folders").mkdir(exist_ok=True)
            with self._lock:
                if self._claims is None:
                    # Open until the process ends: to close it would release all claims.
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                    self._claims = os.open(self.folder / "claims", flags, 0o644)
            used = self._count()
            free = shutil.disk_usage(self.folder).free
            # A cache is no reason to fill a disk that others use.
            self._limit = int(min(cache_gb * 1e9, (used + free) / 2))
            self.is_writable = True
        except OSError as error:
            self.disable(error)

    def disable(self, error: OSError) -> None:
        with self._lock:
            self.is_writable = False
            is_known, self._is_reported = self._is_reported, True
        if not is_known:
            log(
                f"{self.folder}: {error.strerror or error}; nothing is cached, so that data is "
                f"fetched again in each epoch. XDG_CACHE_HOME names another folder"
            )

    def plan(self, file: RemoteFile) -> None:
        """Decides which blocks of a file may be cached: as many as fit the bound, with others."""
        with self._lock:
            if file.sha256 in self._planned:
                return
            room = max(0, self._limit - self._planned_bytes)
            whole = file.size + TRAILER.size * -(-file.size // BLOCK)
            if whole <= room:
                count = -(-file.size // BLOCK)
            else:
                count = room // (BLOCK + TRAILER.size)
            self._planned[file.sha256] = count
            self._planned_bytes += min(whole, count * (BLOCK + TRAILER.size))

    def is_planned(self, file: RemoteFile, block: int) -> bool:
        if not self.is_writable or (file.sha256, block) in self._without_room:
            return False
        return block < self._planned.get(file.sha256, 0)

    # ---- blocks ----

    def _path(self, file: RemoteFile, block: int) -> Path:
        return self.folder / "blocks" / file.sha256 / str(block)

    def is_present(self, file: RemoteFile, block: int) -> bool:
        return (file.sha256, block) in self._present

    def bring(self, file: RemoteFile, block: int) -> Future:
        """Returns the future of a block in the cache, None, or of its bytes if it is not there."""
        key = (file.sha256, block)
        with self._lock:
            future = self._fetching.get(key)
            if future is None:
                future = block_threads.submit(self._bring, file, block)
                self._fetching[key] = future
                future.add_done_callback(lambda _: self._fetching.pop(key, None))
        return future

    def _bring(self, file: RemoteFile, block: int) -> bytes | None:
        start = block * BLOCK
        end = min(start + BLOCK, file.size)
        path = self._path(file, block)
        key = (file.sha256, block)
        if self._is_valid(path, end - start):
            self._present[key] = 0.0
            return None
        with self._claimed(file, block, path):
            if self._is_valid(path, end - start):
                self._present[key] = 0.0
                return None
            data = file.fetch(start, end)
            if not self._put(path, data):
                self._without_room.add(key)  # from now on it is read in parts
                return data
        self._present[key] = time.monotonic()
        return None

    def _is_valid(self, path: Path, size: int) -> bool:
        """Returns whether a block is in the cache; removes one with another checksum."""
        try:
            content = path.read_bytes()
        except OSError:
            return False
        view = memoryview(content)
        body, trailer = view[: -TRAILER.size], view[-TRAILER.size :]
        if len(body) == size and TRAILER.unpack(trailer)[0] == isal_zlib.crc32(body):
            return True
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    @contextlib.contextmanager
    def _claimed(self, file: RemoteFile, block: int, path: Path) -> Iterator[None]:
        """Locks a byte of the file `claims`, so that other processes wait for this block.

        Waits if another one has done so, until the block is there, at most for CLAIM_SECONDS.
        The kernel releases the byte of a process that dies.
        """
        offset = (int(file.sha256[:8], 16) << 24) + block
        deadline = time.monotonic() + CLAIM_SECONDS
        is_claimed = False
        pause = 0.02  # seconds
        while self._claims is not None and time.monotonic() < deadline:
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                is_claimed = True
                break
            except OSError:
                if path.exists():
                    break
                time.sleep(pause)
                pause = min(0.2, 1.5 * pause)
        try:
            yield
        finally:
            if is_claimed and self._claims is not None:
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, offset)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """Returns bytes of one block, or None if it is no longer in the cache."""
        block = start // BLOCK
        key = (file.sha256, block)
        path = f"{self._blocks}/{file.sha256}/{block}"  # faster than a Path, for each row
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                data = os.pread(handle, end - start, start - block * BLOCK)
                now = time.monotonic()
                if now - self._present.get(key, now) > TOUCH_SECONDS or not self._present[key]:
                    self._present[key] = now
                    os.utime(path)
            finally:
                os.close(handle)
        except (OSError, KeyError):
            data = b""
        if len(data) < end - start:  # another process has removed it
            self._present.pop(key, None)
            return None
        return data

    # ---- the bound ----

    def _put(self, path: Path, data: bytes) -> bool:
        """Writes a block, if there is room; returns whether it is in the cache."""
        if not self.is_writable:
            return False
        size = len(data) + TRAILER.size
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
        try:
            # The file is counted and written under one lock, so that no other process counts the
            # files in between.
            with self._counter() as counter:
                used = self._make_room(counter, size)
                if used + size > self._limit:
                    return False
                path.parent.mkdir(exist_ok=True)
                with open(new, "wb") as file:
                    file.write(data)
                    file.write(TRAILER.pack(isal_zlib.crc32(data)))
                os.replace(new, path)
                self._write(counter, used + size)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self.disable(error)
            return False

    @contextlib.contextmanager
    def _counter(self) -> Iterator[BinaryIO]:
        """Opens the file with the size of the cache; no other thread or process changes it."""
        with open(self.folder / "used", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _make_room(self, counter: BinaryIO, size: int) -> int:
        """Returns the size of all files, after removing some if there is no room for another."""
        counter.seek(0)
        (used,) = struct.unpack("<q", counter.read(8).ljust(8, b"\0"))
        if used + size <= self._limit:
            return used
        used = self._evict(size)
        self._write(counter, used)
        return used

    def _write(self, file: BinaryIO, used: int) -> None:
        file.truncate(0)
        file.write(struct.pack("<q", used))
        file.flush()

    def _count(self) -> int:
        """Returns the size of all files, and records it: processes that died did not."""
        with self._counter() as file:
            used = sum(size for _, size, _ in self._files())
            self._write(file, used)
            return used

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        """Yields path, size and time of the last use of each file."""
        for kind in ("blocks", "folders"):
            for folder in os.scandir(self.folder / kind):
                with contextlib.suppress(OSError):  # removed by another process
                    for entry in os.scandir(folder):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            yield Path(entry.path), status.st_size, status.st_mtime

    def _evict(self, size: int) -> int:
        """Removes the files that were not used for the longest time; returns the size of the rest.

        A process that reads one of them keeps it open or mapped, or fetches it again. Some more are
        removed than `size`, so that it is not due again at once.
        """
        now = time.time()
        files = list(self._files())
        used = sum(size for _, size, _ in files)
        wanted = self._limit - max(size, self._limit // 20)
        for path, file_size, time_used in sorted(files, key=lambda file: file[2]):
            if used <= wanted:
                break
            is_block = path.parent.parent.name == "blocks" and not path.name.endswith(".new")
            if not is_block and now - time_used < KEPT_SECONDS:
                continue
            if self._is_own(path) and used + size <= self._limit:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                used -= file_size
        return used

    def _is_own(self, path: Path) -> bool:
        """Returns whether this run may use a block."""
        return path.name.isdecimal() and int(path.name) < self._planned.get(path.parent.name, 0)


@functools.cache
def open_cache(folder: Path) -> Cache:
    return Cache(folder)


def cache_folder() -> Path:
    """Returns the folder of the cache of this host."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):  # no home
        home = os.path.join(tempfile.gettempdir(), f"meshtrain-{os.getuid()}")
    return Path(home) / "meshtrain" / "data"
