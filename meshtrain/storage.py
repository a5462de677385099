"""Workdirs: a folder on a disk, or a folder of an object store (s3://BUCKET/RUN, gs://BUCKET/RUN).

`open_workdir` alone looks at a place to see which of the two it is; `workdir_at` does so for what
has only a path. All others ask the workdir: it has a folder on a local disk either way, and knows
which of its files are elsewhere.
"""

import contextlib
import errno
import fnmatch
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from meshtrain import object_store

# What a workdir holds, on either kind of place.
CHECKPOINTS, LOGS, LOCK = "checkpoints", "logs", "LOCK"
MEMORY = "memory"  # profiles of the memory of devices
MODELS = "model"  # exports, see checkpoint/export.py

MANIFEST = "MANIFEST.json"  # in a checkpoint; one without it is an unfinished save

# What a run itself writes and removes in its workdir.
RUN_FOLDERS = (CHECKPOINTS, "tokenizer", "config_history", LOGS, MEMORY, MODELS)

Spec = dict[str, Any]  # of TensorStore


class Workdir(Protocol):
    """A workdir as one process of its run sees it; paths given to its methods are in `folder`.

    Methods that transfer objects raise OSError, with the URL as its `filename`. On a disk they do
    nothing.
    """

    folder: Path  # the folder itself, or the scratch folder of this process
    name: str  # in messages: path or URL
    shared: bool  # whether all processes have the same folder

    def name_faults(self, key: str) -> list[str]:
        """Returns the faults of a URL that names no run, or of a path that checkpoints cannot have.

        `key` is a flag, such as --workdir=.
        """
        ...

    def place_faults(self, data: Iterable[str]) -> list[str]:
        """Returns the faults of the root, another run's folder, or one in or around `data`."""
        ...

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that other processes of this host need."""
        ...

    # ---- the lock, besides the one of the kernel on the file LOCK in `folder` ----

    def acquire_lock(self, log: Callable[[str], None]) -> str:
        """Acquires the lock and downloads what a run reads; returns an error message, or ""."""
        ...

    def confirm_lock(self) -> None:
        """Raises LockLost if this process held the lock and has lost it."""
        ...

    def release_lock(self) -> None:
        """Uploads the files of a run that has started, if this process holds the lock.

        The lock is released even if the upload fails.
        """
        ...

    def begin_upload(self, log: Callable[[str], None], *, exclusive: bool) -> str:
        """Returns an error message if another run holds the lock now, or "".

        With `exclusive` acquires it, until `release_lock`.
        """
        ...

    # ---- small files ----

    def download_run(self) -> None:
        """Downloads the small files of a run; raises FileNotFoundError if there are none."""
        ...

    def download(self, names: Collection[str]) -> None:
        """Downloads these files, if they exist in the store and not in `folder`."""
        ...

    def upload(self, path: Path) -> None:
        """Uploads a file, over an older one."""
        ...

    def push(self, subfolder: str = "") -> None:
        """Uploads what has changed in a subfolder, or in `folder` but checkpoints and logs."""
        ...

    # ---- checkpoints: folders STEP, or STEP.partial while they are written ----

    def chunk_names(self, directory: Path) -> list[str]:
        """Returns the files of a checkpoint that are only in the store: chunks of arrays."""
        ...

    def fetch(self, directory: Path) -> list[str]:
        """Downloads the small files of a checkpoint, and returns the others: `chunk_names`."""
        ...

    def refresh(self, directory: Path) -> None:
        """Downloads the small files of a checkpoint again: another process has changed some."""
        ...

    def was_removed(self, directory: Path) -> bool:
        """Returns whether a run has removed a checkpoint of this workdir since it was listed.

        Then downloads what the run has saved since.
        """
        ...

    def publish(self, directory: Path, names: Collection[str]) -> None:
        """Uploads the small files among `names`, then the manifest if there is none yet.

        If that fails, removes the folder.
        """
        ...

    def remove_objects(self, directory: Path, *, unless_committed: bool) -> None:
        """Removes the objects of a checkpoint, its manifest first.

        With `unless_committed` only if there is no manifest.
        """
        ...

    def move_objects(self, source: Path, target: Path) -> None:
        """Moves the objects of a checkpoint: copies the manifest last, and removes it first.

        Raises OSError if this process has lost the lock, or if one of them is there.
        """
        ...

    def remove_unfinished(self, folder: Path, finished: Collection[int]) -> None:
        """Removes the objects of all other steps than `finished`."""
        ...

    def free_bytes(self, folder: Path) -> float:
        """Returns the space for checkpoints."""
        ...

    def array_store(self, spec: Spec) -> Spec:
        """Returns the OCDBT database `spec`, whose base is a folder, where its files are."""
        ...

    def only(
        self, directory: Path, names: Collection[str]
    ) -> contextlib.AbstractContextManager[Path]:
        """Yields a folder with only these files of a checkpoint; it ends with the context."""
        ...


def open_workdir(place: str | Path, *, process: int = 0) -> Workdir:
    """Returns the workdir at a path or URL, as process number `process` of its run sees it."""
    if object_store.is_url(place):
        return ObjectStore(object_store.scratch_folder(place, process), place)
    return LocalFolder(place)


def workdir_at(path: Path) -> Workdir:
    """Returns the workdir that holds a path.

    For what has only the path of a checkpoint: functions below Orbax, and those that verify it.
    """
    return ObjectStore(path) if object_store.url(path) else LocalFolder(path)


def absolute(path: Path) -> Path:
    """Returns the absolute path of a folder for TensorStore, which rejects `..` in it."""
    return path.resolve() if ".." in path.parts else path.absolute()


def readable(text: str) -> str:
    """Returns a text with URLs for the scratch folders that it names."""
    if not object_store.root.cache_info().currsize:
        return text
    scratch, schemes = re.escape(str(object_store.root())), "|".join(object_store.DRIVERS)
    return re.sub(rf"{scratch}/\d+/({schemes})/", r"\1://", text)


class LocalFolder:
    """A workdir on a disk: its files are where they are written."""

    shared = True

    def __init__(self, place: str | Path):
        self.folder = Path(os.path.expanduser(place))
        self.name = str(self.folder)
        self._given = str(place)

    def name_faults(self, key: str) -> list[str]:
        fault = url_fault(key, self._given) or _unreadable_name(key, self.folder)
        return [fault] if fault else []

    def place_faults(self, data: Iterable[str]) -> list[str]:
        key = f"--workdir={self._given}"
        if url := re.match(rf"({'|'.join(object_store.DRIVERS)}):(?!/)", self._given):
            return [f"{key}: write {url[1]}://BUCKET/RUN; for a folder, its absolute path"]
        place = self.folder.resolve()
        if place == Path(place.root):
            return [f"{key}: use a folder of its own, such as runs/NAME"]
        for folder in (place, *place.parents):
            if folder.name in RUN_FOLDERS and (folder.parent / "config.json").is_file():
                return [
                    f"{key}: belongs to the run in {folder.parent}; use --workdir={folder.parent} "
                    f"to resume it, or another folder"
                ]
        for path in filter(None, data):
            if object_store.is_url(path):
                continue
            other = Path(path).resolve()
            if place == other or place in other.parents or other in place.parents:
                relation = "contains" if place in other.parents else "is in"
                return [
                    f"{key}: {relation} data.path={path}; "
                    f"keep the run and its data in separate folders"
                ]
        return []

    def variables(self) -> dict[str, str]:
        return {}

    def acquire_lock(self, log: Callable[[str], None]) -> str:
        return ""

    def confirm_lock(self) -> None:
        pass

    def release_lock(self) -> None:
        pass

    def begin_upload(self, log: Callable[[str], None], *, exclusive: bool) -> str:
        return ""

    def download_run(self) -> None:
        pass

    def download(self, names: Collection[str]) -> None:
        pass

    def upload(self, path: Path) -> None:
        pass

    def push(self, subfolder: str = "") -> None:
        pass

    def chunk_names(self, directory: Path) -> list[str]:
        return []

    def fetch(self, directory: Path) -> list[str]:
        return []

    def refresh(self, directory: Path) -> None:
        pass

    def was_removed(self, directory: Path) -> bool:
        return not os.path.lexists(directory)

    def publish(self, directory: Path, names: Collection[str]) -> None:
        pass

    def remove_objects(self, directory: Path, *, unless_committed: bool) -> None:
        pass

    def move_objects(self, source: Path, target: Path) -> None:
        pass

    def remove_unfinished(self, folder: Path, finished: Collection[int]) -> None:
        pass

    def free_bytes(self, folder: Path) -> float:
        return shutil.disk_usage(folder).free

    def array_store(self, spec: Spec) -> Spec:
        return spec

    @contextlib.contextmanager
    def only(self, directory: Path, names: Collection[str]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as links:
            for name in names:
                link = Path(links, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((directory / name).absolute())
            yield Path(links)


# Objects that one process writes: chunks, which have checksums, and its index, which nothing reads
# once process 0 has merged all. So the late writes of a run that was suspended change nothing that
# another one has committed. They are never in a scratch folder.
OF_PROCESSES = "arrays/ocdbt.process_*/*"  # in a checkpoint


class ObjectStore:
    """A workdir on an object store, with the same names as on a disk.

    The manifest is written last, on the condition that there is none, and removed first. What has
    no manifest is an unfinished save. The scratch folder of a process holds all of a checkpoint but
    the chunks of arrays.
    """

    shared = False

    def __init__(self, folder: Path, given: str | Path = ""):
        self.folder = folder
        self.name = object_store.url(folder)
        self._given = _with_two_slashes(given) or self.name

    def name_faults(self, key: str) -> list[str]:
        scheme, _, rest = self._given.partition(":")
        bucket, *parts = rest.strip("/").split("/")
        if not bucket or not parts or {"", ".", ".."} & {bucket, *parts}:
            return [
                f"{key}{self._given}: use a bucket and a folder of its own in it, "
                f"such as {scheme}://BUCKET/RUN"
            ]
        if parts[-2:-1] == [CHECKPOINTS] and parts[-1].isdecimal():
            run = "/".join(parts[:-2])
            return [
                f"{key}{self._given}: is a checkpoint; use --workdir={scheme}://{bucket}/{run} "
                f"to resume its run, or another folder"
            ]
        return []

    def place_faults(self, data: Iterable[str]) -> list[str]:
        for path in filter(object_store.is_url, data):
            place, other = f"{self.name}/", f"{path.rstrip('/')}/"
            if place.startswith(other) or other.startswith(place):
                return [
                    f"--workdir={self._given}: holds data.path={path}, or is in it; "
                    f"keep the run and its data in separate folders"
                ]
        return []

    def variables(self) -> dict[str, str]:
        return {object_store.VARIABLE: str(object_store.root())}

    def acquire_lock(self, log: Callable[[str], None]) -> str:
        fault = object_store.acquire_lease(self.folder / LOCK, log=log)
        if not fault:
            # What a supervisor has left in the scratch folder is newer, but for the checkpoints.
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
            self._download_all(but=(LOCK, LOGS))
        return fault

    def confirm_lock(self) -> None:
        object_store.confirm_lease()

    def release_lock(self) -> None:
        try:
            if object_store.is_lease_held() and (self.folder / "config.json").exists():
                self.confirm_lock()
                self.push()
        finally:
            object_store.release_lease()

    def begin_upload(self, log: Callable[[str], None], *, exclusive: bool) -> str:
        lock = self.folder / LOCK
        if exclusive:
            return object_store.acquire_lease(lock, log=log)
        return object_store.lease_fault(lock, log=log)

    def download_run(self) -> None:
        self._download_all()
        if not self.folder.is_dir():
            raise FileNotFoundError(None, "there are no objects under this name", self.name)

    def _download_all(self, but: Collection[str] = ()) -> None:
        """Downloads the small files of a run, `but` for some, without unfinished saves."""
        names = object_store.names(self.folder)
        finished = {name.removesuffix(f"/{MANIFEST}") for name in names}

        def is_wanted(name: str) -> bool:
            first, second = [*name.split("/"), ""][:2]
            is_save = first == CHECKPOINTS and second.isdecimal()
            is_unfinished = is_save and f"{first}/{second}" not in finished
            return first not in but and not is_unfinished and not _is_of_process(name)

        object_store.download(self.folder, filter(is_wanted, names))

    def download(self, names: Collection[str]) -> None:
        object_store.download(self.folder, {*names} & {*object_store.names(self.folder)})

    def upload(self, path: Path) -> None:
        object_store.upload(path)

    def push(self, subfolder: str = "") -> None:
        object_store.push(self.folder / subfolder, but=(CHECKPOINTS, LOGS, LOCK))

    def chunk_names(self, directory: Path) -> list[str]:
        return list(filter(_is_of_process, object_store.names(directory)))

    def fetch(self, directory: Path) -> list[str]:
        names = object_store.names(directory)
        object_store.download(directory, [name for name in names if not _is_of_process(name)])
        return list(filter(_is_of_process, names))

    def refresh(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self.fetch(directory)

    def was_removed(self, directory: Path) -> bool:
        try:
            if MANIFEST in object_store.names(directory):
                return False
            shutil.rmtree(directory, ignore_errors=True)
            self._download_all(but=(LOCK, LOGS))
        except OSError:
            return False  # nobody knows; what was found stands
        return True

    def publish(self, directory: Path, names: Collection[str]) -> None:
        try:
            for name in {*names} - {*object_store.names(directory)}:
                object_store.upload(directory / name)
            object_store.create(directory / MANIFEST)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def remove_objects(self, directory: Path, *, unless_committed: bool) -> None:
        if not (unless_committed and MANIFEST in object_store.names(directory)):
            object_store.remove(directory, first=MANIFEST)

    def move_objects(self, source: Path, target: Path) -> None:
        self.confirm_lock()  # otherwise they may be those of another run
        object_store.copy(source, target, last=MANIFEST)
        self.confirm_lock()  # a large checkpoint takes a while
        object_store.remove(source, first=MANIFEST)

    def remove_unfinished(self, folder: Path, finished: Collection[int]) -> None:
        begun = {name.partition("/")[0] for name in object_store.names(folder)}
        for step in begun - {*map(str, finished)}:
            if step.isdecimal():
                object_store.remove(folder / step)

    def free_bytes(self, folder: Path) -> float:
        return math.inf

    def array_store(self, spec: Spec) -> Spec:
        base = object_store.spec(Path(spec["base"]["path"]))
        # Without `manifest`: on a disk it is written in another way than the data.
        return {name: value for name, value in spec.items() if name != "manifest"} | {"base": base}

    @contextlib.contextmanager
    def only(self, directory: Path, names: Collection[str]) -> Iterator[Path]:
        yield absolute(directory)  # a link cannot stand for an object


def _is_of_process(name: str) -> bool:
    """Returns whether an object is one of OF_PROCESSES; the name is in a checkpoint or workdir."""
    return any(fnmatch.fnmatchcase(name, f"{prefix}{OF_PROCESSES}") for prefix in ("", "*/"))


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Appends lines, each with its newline, to a file; raises OSError, and adds none, if it fails.

    If a crash has left a part of a line at the end of the file, only that part is lost.
    """
    data = "".join(lines).encode()
    with open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                data = b"\n" + data
        try:
            # One call: another process may append to the same file.
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def sync(path: Path) -> None:
    """Flushes to disk the content of a file, or the entries of a folder, such as a renamed file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def url_fault(key: str, path: str | Path) -> str:
    """Returns the fault of a path that is a URL: it would be a local folder `gs:`."""
    url = re.match(r"(\w{2,}):/", str(path))
    if not url:
        return ""
    return (
        f"{key}{_with_two_slashes(path)}: this version does not read or write {url[1]} storage; "
        f"use a folder, such as one of a mounted file system"
    )


def _unreadable_name(key: str, folder: Path) -> str:
    """Returns the fault of a folder that TensorStore would misread, or an empty string.

    It reads and writes checkpoints. A backslash is a slash to it, and names that end with .__lock
    are its own.
    """
    path = os.path.abspath(folder)
    what = ""
    if "\\" in path:
        what = "a backslash"
    elif "\0" in path:
        what = "a NUL character"
    elif any(name.endswith(".__lock") for name in path.split("/")):
        what = ".__lock at the end of a name"
    elif any("\ud800" <= letter <= "\udfff" for letter in path):  # as Python decodes such bytes
        what = "bytes that are not UTF-8"
    if not what:
        return ""
    return f"{key}{ascii(path)}: has {what}, which checkpoints cannot have; use another folder"


def _with_two_slashes(url: str | Path) -> str:
    """Returns a URL as it was given: pathlib makes one slash of its two."""
    return re.sub("(?<=:)/(?!/)", "//", str(url), count=1)
