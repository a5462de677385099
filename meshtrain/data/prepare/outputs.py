"""Where `meshtrain prepare` writes: a folder on a disk, or one of an object store.

`open_output` alone looks at a place to see which of the two it is. All others ask the output: it
has a folder on a local disk either way. On a store each file is uploaded when it is complete.
"""

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from meshtrain import console, object_store, storage
from meshtrain.data import prepared
from meshtrain.errors import ConfigError

MAX_OBJECT_BYTES = 4 << 30  # S3 accepts 5 GB in one request
LOCK = "LOCK"  # an object, of a store
# What a run downloads when it starts: all files but the shards.
SMALL_FILES = (
    prepared.JOURNAL,
    prepared.MANIFEST,
    prepared.TOKEN_BYTES,
    "tokenizer.json",
    "tokenizer.model",
)


class Locked(ConfigError):
    """Another process writes there."""


class Output(Protocol):
    """A folder that is written; the names of files are relative to it. Methods raise OSError."""

    folder: Path  # the folder itself, or a scratch folder
    name: str  # in messages: path or URL
    is_stored: bool  # whether its files are objects of a store

    def subfolder(self, name: str) -> "Output": ...

    def acquire(self) -> None:
        """Raises Locked if another process holds the lock, besides the one on the journal."""
        ...

    def release(self) -> None: ...

    def fetch(self, names: Iterable[str] = SMALL_FILES) -> None:
        """Downloads these files if they exist, over those in `folder`."""
        ...

    def names(self) -> list[str]:
        """Returns the names of the files and subfolders; on a store, of all objects."""
        ...

    def missing(self, sizes: Mapping[str, int | None]) -> list[str]:
        """Returns which of these files do not exist, or on a disk have another size than given."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file; returns False if it exists, also if another process just wrote it."""
        ...

    def publish(self, names: Iterable[str]) -> None:
        """Uploads files that are complete in `folder`, over older ones."""
        ...

    def discard(self, names: Iterable[str]) -> None:
        """Removes local copies of files that were published or fetched."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file or a subfolder, if it exists."""
        ...


def open_output(place: str | Path) -> Output:
    if object_store.is_url(place):
        return StoredOutput(object_store.scratch_folder(place))
    return LocalOutput(Path(place))


class LocalOutput:
    """A folder on a disk: its files are where they are written."""

    is_stored = False

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = str(folder)

    def subfolder(self, name: str) -> Output:
        return LocalOutput(self.folder / name)

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def fetch(self, names: Iterable[str] = SMALL_FILES) -> None:
        pass

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        return [path.name for path in self.folder.iterdir()]

    def missing(self, sizes: Mapping[str, int | None]) -> list[str]:
        found = []
        for name, size in sizes.items():
            path = self.folder / name
            if not path.is_file() or size not in (None, path.stat().st_size):
                found.append(name)
        return found

    def create(self, name: str, data: bytes) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{name}.{uuid.uuid4().hex}"
        try:
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(new, self.folder / name)  # fails if it exists, also on NFS
        except FileExistsError:
            return False
        finally:
            new.unlink(missing_ok=True)
        storage.sync(self.folder)
        return True

    def publish(self, names: Iterable[str]) -> None:
        pass

    def discard(self, names: Iterable[str]) -> None:
        pass

    def remove(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # another process may remove it too
        else:
            path.unlink(missing_ok=True)


class StoredOutput:
    """A folder of an object store, with the same names as on a disk, and the object LOCK."""

    is_stored = True

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = object_store.url(folder)

    def subfolder(self, name: str) -> Output:
        return StoredOutput(self.folder / name)

    def acquire(self) -> None:
        fault = object_store.acquire_lease(self.folder / LOCK, log=console.say, key="--output")
        if fault:
            raise Locked(fault)

    def release(self) -> None:
        object_store.release_lease()

    def fetch(self, names: Iterable[str] = SMALL_FILES) -> None:
        for name in names:
            data, _ = object_store.read(self.folder / name)
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)

    def names(self) -> list[str]:
        return object_store.names(self.folder)

    def missing(self, sizes: Mapping[str, int | None]) -> list[str]:
        existing = {*self.names()}
        return [name for name in sizes if name not in existing]

    def create(self, name: str, data: bytes) -> bool:
        written = object_store.write(self.folder / name, data, only_if=object_store.ABSENT)
        # After a lost answer the client tries again, and finds its own object.
        return bool(written) or object_store.read(self.folder / name)[0] == data

    def publish(self, names: Iterable[str]) -> None:
        object_store.confirm_lease()  # otherwise another run writes them
        for name in names:
            object_store.upload(self.folder / name)

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        object_store.write(path, None)
        object_store.remove(path)
