"""Files that are computed from the data once, and cached: in the folder of the data, or elsewhere.

A process that computes them holds a lock; others wait for it, and read what it has written. What a
killed process has committed is not computed again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import isal_zlib

from meshtrain import foreign, storage
from meshtrain.data import prepared
from meshtrain.errors import ConfigError

FOLDER = ".meshtrain"  # next to the data; hidden, so that it is not read as data
DONE = "index.json"  # written last
PROGRESS = "progress.json"
LOCK = "lock"
COMMIT_SECONDS = 15.0  # between two commits
CHUNK = 1 << 22  # numbers, or bytes, that are handled together


def fingerprint(paths: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """Returns name, size and modification time of files; names are relative to a folder."""
    found = []
    for path in paths:
        status = path.stat()
        found.append((os.path.relpath(path, root), status.st_size, status.st_mtime_ns))
    return found


def key_of(parts: Any) -> str:
    """Returns a short digest of what the cached files depend on, which JSON can spell."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def folder_for(data: Path, configured: str, name: str) -> Path:
    """Returns the folder `name` of the cache, which exists.

    It is in `configured`, else in the folder of the data, else, if nothing can be written there, in
    the user's cache. Raises ConfigError if that cannot be written either.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshtrain"
    roots = [Path(configured)] if configured else [data / FOLDER, user_cache]
    reasons = []
    for root in roots:
        folder = root / name
        # Also in a folder that is read-only by now, what is complete can be read.
        if (folder / DONE).is_file():
            return folder
    for root in roots:
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / LOCK, "ab"):
                return folder
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise ConfigError(
        f"data.index_path={configured!r}: {'; '.join(reasons)}; set it to a folder for the index "
        f"of the data, on a disk with room"
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Holds the lock of a folder; waits while another process does.

    Yields the folder for files that are not complete: this one. On a file system without locks it
    is one of this process, since others compute the same at the same time.
    """
    with open(folder / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            own = folder / f"{socket.gethostname()}-{os.getpid()}"
            own.mkdir(exist_ok=True)
            try:
                yield own
            finally:
                shutil.rmtree(own, ignore_errors=True)
        else:
            yield folder


def load_or_build(
    folder: Path, load: Callable[[Path, dict[str, Any]], Any], build: Callable[[Path, Path], None]
) -> Any:
    """Returns what `load(folder, index)` makes of the complete files in a folder.

    If they are missing, or `load` raises ValueError since they are damaged, `build(folder, parts)`
    writes them, with `finish` at the end; `parts` is the folder for what is not complete.
    """
    loaded = _load(folder, load)
    if loaded is not None:
        return loaded
    with locked(folder) as parts:
        loaded = _load(folder, load)  # of the process that held the lock
        if loaded is not None:
            return loaded
        with contextlib.suppress(FileNotFoundError):
            (folder / DONE).unlink()
        try:
            build(folder, parts)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            raise ConfigError(
                f"data.index_path: {folder}: {error.strerror}; set it to a folder on a disk with "
                f"room for the index of the data"
            ) from error
        loaded = _load(folder, load)
    if loaded is None:
        raise ConfigError(f"{folder}: changes while it is read; use another data.index_path")
    return loaded


def _load(folder: Path, load: Callable[[Path, dict[str, Any]], Any]) -> Any:
    try:
        index = foreign.read_json(folder / DONE)
        for name, (size, crc) in index["files"].items():
            if not foreign.is_file_name(name) or size_and_crc(folder / name) != (size, crc):
                return None
        return load(folder, index)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def size_and_crc(path: Path) -> tuple[int, int]:
    """Returns size and CRC-32 of a file; its pages do not become memory of this process."""
    crc = 0
    size = 0
    with foreign.open_file(path) as file:
        while chunk := file.read(CHUNK):
            crc = isal_zlib.crc32(chunk, crc)
            size += len(chunk)
    return size, crc


def finish(folder: Path, names: Sequence[str], index: Mapping[str, Any]) -> None:
    """Makes the files of a folder valid: they are on the disk, and the index lists them."""
    listed = {}
    for name in names:
        storage.sync(folder / name)
        listed[name] = size_and_crc(folder / name)
    prepared.write_durably(folder / DONE, json.dumps({**index, "files": listed}) + "\n")


class Growing:
    """Arrays that grow in files of a folder, and a state. What follows the last commit is lost."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self._folder = folder
        self.state: Any = None  # of the last commit; None: there is none
        sizes = dict.fromkeys(names, 0)
        try:
            progress = foreign.read_json(folder / PROGRESS)
            found = {name: progress["sizes"][name] for name in names}
            if all((folder / name).stat().st_size >= size for name, size in found.items()):
                self.state, sizes = progress["state"], found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._files: dict[str, BinaryIO] = {}
        for name, size in sizes.items():
            file = self._files[name] = open(folder / name, "ab")
            file.truncate(size)
            file.seek(0, os.SEEK_END)
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def append(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(np.ascontiguousarray(array).data)

    def is_due(self) -> bool:
        """Returns whether the last commit is COMMIT_SECONDS ago."""
        return time.monotonic() >= self._next_commit

    def commit(self, state: Any) -> None:
        """Keeps what was appended, and the state, even if the machine fails."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        text = json.dumps({"sizes": sizes, "state": state})
        prepared.write_durably(self._folder / PROGRESS, text)
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def size(self, name: str) -> int:
        """Returns the bytes of an array."""
        return self._files[name].tell()

    def close(self) -> None:
        """Closes the files; an array is in the file of its name."""
        for file in self._files.values():
            file.close()


def remove_parts(folder: Path, names: Sequence[str]) -> None:
    """Removes the files of Growing, of which something else was made."""
    for name in (PROGRESS, *names):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()


def write_starts(lengths: np.ndarray, path: Path) -> int:
    """Writes 0 and the cumulative lengths as a .npy of int64, part by part; returns their sum."""
    # A process that has mapped an older file keeps its pages.
    new = path.with_name(path.name + ".new")
    starts = np.lib.format.open_memmap(new, "w+", np.int64, (len(lengths) + 1,))
    starts[0] = total = 0
    for first in range(0, len(lengths), CHUNK):
        part = np.cumsum(lengths[first : first + CHUNK], dtype=np.int64)
        starts[first + 1 : first + 1 + len(part)] = total + part
        total += int(part[-1])
    starts.flush()
    os.replace(new, path)
    return total


def map_file(path: Path, dtype: str) -> np.ndarray:
    """Returns the numbers in a file as a mapped array; it may be empty."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
