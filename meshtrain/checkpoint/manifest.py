"""What makes a folder of files a checkpoint: its manifest, written last and checked first.

A checkpoint is the folder `STEP`, made in four steps of which each leaves something harmless behind:
arrays are written to `STEP.partial/`, then everything is on disk (fsync), then MANIFEST.json lists
every file with size and CRC-32, then the folder gets its name. Nothing here needs jax.
"""

import json
import math
import operator
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from isal import isal_zlib  # zlib's CRC-32 as fast as memory is read

NAME = "MANIFEST.json"
PARTIAL = ".partial"
QUARANTINE = "quarantine"
FORMAT = 1
NUMBER = re.compile("0|[1-9][0-9]*")  # a step, as it names a folder
BLOCK = 256 << 10  # bytes read at once, few enough for a core's cache
LARGEST = 256 << 20  # bytes of a manifest; a larger one is none


class BadCheckpoint(Exception):
    """Why a checkpoint must not be used."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int  # batches seen
    position: int  # of the next sample to train on
    time: float  # seconds since 1970
    metrics: dict[str, float]  # of the last step before it, and of the held-out data if it was due
    watch: dict[str, float]  # of the losses so far, see divergence.py
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]
    config: dict[str, Any]
    config_crc32: str
    arrays: dict[str, str]  # path in the state -> "(shape) dtype"
    files: dict[str, tuple[int, str]]  # path in the folder -> size in bytes, CRC-32
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())


def checksum(value: Any) -> str:
    """Returns the CRC-32 of a value as JSON."""
    return f"{isal_zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()):08x}"


def partial(folder: Path, step: int) -> Path:
    """Returns where a checkpoint is written before it is one."""
    return folder / f"{step}{PARTIAL}"


def commit(folder: Path, step: int, **facts: Any) -> Manifest:
    """Makes a checkpoint of what lies in `partial`; `facts` are the manifest's other fields."""
    made = partial(folder, step)
    files = _measure(made, list(_files(made)), sync=True)
    config_crc32 = checksum(facts["config"])
    manifest = Manifest(step=step, files=files, config_crc32=config_crc32, **facts)
    fields = json.loads(json.dumps(asdict(manifest), default=str))
    text = json.dumps({**fields, "crc32": checksum(fields)}, indent=1) + "\n"
    with open(made / NAME, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for directory in {made, *(path.parent for path in made.rglob("*"))}:
        _sync_folder(directory)
    if (folder / str(step)).exists():  # one that was bad, or it would not be made again
        quarantine(folder, step)
    os.rename(made, folder / str(step))
    _sync_folder(folder)
    return manifest


def read(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint; raises BadCheckpoint where it cannot be trusted."""
    try:
        found = (directory / NAME).lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise BadCheckpoint(f"{NAME} is no file, or larger than {LARGEST} bytes")
        fields = json.loads((directory / NAME).read_text())
        crc32 = fields.pop("crc32")
        if checksum(fields) != crc32:
            raise BadCheckpoint(f"{NAME} fails its checksum")
        if fields["format"] != FORMAT:
            raise BadCheckpoint(f"format {fields['format']} is not {FORMAT}, the one known here")
        files = {name: (size, crc) for name, (size, crc) in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
        if not isinstance(manifest.step, int) or not 0 <= operator.index(manifest.position):
            raise TypeError
        for numbers in (manifest.metrics, manifest.watch, manifest.mesh, {"": manifest.time}):
            if not all(isinstance(number, int | float) for number in numbers.values()):
                raise TypeError
    except FileNotFoundError:
        raise BadCheckpoint(f"{NAME} is missing") from None
    except OSError as error:
        raise BadCheckpoint(f"{NAME}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{NAME} is damaged") from error
    if str(manifest.step) != directory.name:
        raise BadCheckpoint(f"{NAME} is that of step {manifest.step}")
    return manifest


def verify(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint that is good to the last byte; raises BadCheckpoint."""
    manifest = read(directory)
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise BadCheckpoint(f"{name!r} points out of the checkpoint")
    try:
        found = {*_files(directory)} - {NAME}
        if missing := sorted(manifest.files.keys() - found):
            raise BadCheckpoint(f"{missing[0]} is missing")
        if extra := sorted(found - manifest.files.keys()):
            raise BadCheckpoint(f"{extra[0]} is not in the manifest")
        for name, (size, _) in manifest.files.items():
            if (there := (directory / name).stat().st_size) != size:
                raise BadCheckpoint(f"{name} has {there} bytes of {size}")
        for name, measured in _measure(directory, manifest.files, sync=False).items():
            if measured != manifest.files[name]:
                raise BadCheckpoint(f"{name} fails its checksum")
    except OSError as error:
        raise BadCheckpoint(f"{error.filename}: {error.strerror}") from error
    return manifest


def steps(folder: Path) -> list[int]:
    """Returns the steps that claim to be checkpoints, the newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if NUMBER.fullmatch(name)), reverse=True)


def clean(folder: Path) -> list[str]:
    """Removes what a save that was cut off left behind, and returns the names."""
    left = [path for path in folder.iterdir() if NUMBER.fullmatch(path.name.removesuffix(PARTIAL))]
    left = [path for path in left if path.name.endswith(PARTIAL)]
    for path in left:
        remove(path)
    return sorted(path.name for path in left)


def remove(path: Path) -> None:
    """Removes a checkpoint; one that is removed in part is none."""
    if not path.name.endswith(PARTIAL):
        path = path.rename(path.with_name(path.name + PARTIAL))
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def quarantine(folder: Path, step: int) -> Path:
    """Moves a bad checkpoint out of the way, and returns where to."""
    (folder / QUARANTINE).mkdir(exist_ok=True)
    names = (
        folder / QUARANTINE / f"{step}{suffix}"
        for suffix in ("", *map(".{}".format, range(1, 10**6)))
    )
    place = next(path for path in names if not path.exists())
    os.rename(folder / str(step), place)
    _sync_folder(folder)
    return place


def retained(
    manifests: Iterable[Manifest], *, keep: int, keep_every: int, keep_best: int, best_by: str
) -> set[int]:
    """Returns the steps to keep: the newest, every n-th, and those with the lowest `best_by`."""
    manifests = sorted(manifests, key=lambda manifest: -manifest.step)
    kept = {manifest.step for manifest in manifests[:keep]}
    if keep_every:
        kept |= {manifest.step for manifest in manifests if manifest.step % keep_every == 0}
    rated = [m for m in manifests if math.isfinite(m.metrics.get(best_by, math.nan))]
    best = sorted(rated, key=lambda manifest: manifest.metrics[best_by])[:keep_best]
    return kept | {manifest.step for manifest in best}


def _files(directory: Path) -> Iterator[str]:
    """Yields the paths of all files; raises BadCheckpoint for anything else, such as links."""
    for path in directory.rglob("*"):
        mode = path.lstat().st_mode
        name = path.relative_to(directory).as_posix()
        if stat.S_ISREG(mode):
            yield name
        elif not stat.S_ISDIR(mode):
            raise BadCheckpoint(f"{name} is neither a file nor a folder")


def _measure(directory: Path, names: Iterable[str], *, sync: bool) -> dict[str, tuple[int, str]]:
    """Returns size and CRC-32 of each file, read in parallel; `sync` makes them outlast a power cut."""

    def measure(name: str) -> tuple[int, str]:
        size = crc = 0
        with open(directory / name, "rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            buffer = memoryview(bytearray(BLOCK))
            while count := file.readinto(buffer):
                size, crc = size + count, isal_zlib.crc32(buffer[:count], crc)
        return size, f"{crc:08x}"

    # The largest first, so that no thread is left alone with it at the end.
    names = sorted(names, key=lambda name: -(directory / name).stat().st_size)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(measure, names), strict=True))


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
