"""The manifest of a checkpoint: written last, verified first.

A checkpoint is the folder `STEP`. It is written in four stages: the arrays go to `STEP.partial/`; all
files are flushed to disk (fsync); MANIFEST.json is written, which lists size and CRC-32 of every file;
the folder is renamed to `STEP`. A crash in any stage is harmless. Nothing here needs jax.
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

from isal import isal_zlib  # CRC-32 at the speed of memory

NAME = "MANIFEST.json"
PARTIAL = ".partial"
QUARANTINE = "quarantine"
FORMAT = 1
STEP_NAME = re.compile("0|[1-9][0-9]*")  # name of a checkpoint folder
BLOCK_BYTES = 256 << 10  # read at once; fits in a core's cache
MAX_BYTES = 256 << 20  # of a manifest; a larger file is not read


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint: the progress of training, the arrays and the files."""

    step: int  # steps taken, skipped steps included
    position: int  # index of the next sample to train on
    time: float  # seconds since 1970
    metrics: dict[str, float]  # of the last step; plus eval_loss if the held-out data was evaluated
    watch: dict[str, float]  # `LossMonitor.statistics`, see monitor/divergence.py
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]
    config: dict[str, Any]
    arrays: dict[str, str]  # path in the state -> "(shape) dtype"
    files: dict[str, tuple[int, str]]  # path in the folder -> size in bytes, CRC-32
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(size for size, _ in self.files.values())


def checksum(value: Any) -> str:
    """Returns the CRC-32 of a value as JSON."""
    return f"{isal_zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()):08x}"


def partial_folder(folder: Path, step: int) -> Path:
    """Returns the folder that a checkpoint is written to before it is committed."""
    return folder / f"{step}{PARTIAL}"


def commit(folder: Path, step: int, **fields: Any) -> Manifest:
    """Commits the files in `partial_folder` as a checkpoint; `fields` are the manifest's other fields."""
    written = partial_folder(folder, step)
    files = _measure(written, list(_files(written)), sync=True)
    manifest = Manifest(step=step, files=files, **fields)
    record = json.loads(json.dumps(asdict(manifest), default=str))
    text = json.dumps({**record, "crc32": checksum(record)}, indent=1) + "\n"
    with open(written / NAME, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for directory in {written, *(path.parent for path in written.rglob("*"))}:
        _sync_folder(directory)
    if (folder / str(step)).exists():  # it is corrupt: a valid checkpoint is not written again
        quarantine(folder, step)
    os.rename(written, folder / str(step))
    _sync_folder(folder)
    return manifest


def read(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint; raises CorruptCheckpoint if it is invalid."""
    try:
        status = (directory / NAME).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise CorruptCheckpoint(f"{NAME} is not a file, or larger than {MAX_BYTES} bytes")
        fields = json.loads((directory / NAME).read_text())
        crc32 = fields.pop("crc32")
        if checksum(fields) != crc32:
            raise CorruptCheckpoint(f"{NAME} fails its checksum")
        if fields["format"] != FORMAT:
            raise CorruptCheckpoint(
                f"format {fields['format']} is not {FORMAT}, the only supported format"
            )
        fields.pop("config_crc32", None)  # in older manifests; nothing reads it
        files = {name: (size, crc) for name, (size, crc) in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
        if not isinstance(manifest.step, int) or not 0 <= operator.index(manifest.position):
            raise TypeError
        for numbers in (manifest.metrics, manifest.watch, manifest.mesh, {"": manifest.time}):
            if not all(isinstance(number, int | float) for number in numbers.values()):
                raise TypeError
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{NAME} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{NAME}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{NAME} is damaged") from error
    if str(manifest.step) != directory.name:
        raise CorruptCheckpoint(f"{NAME} belongs to step {manifest.step}")
    return manifest


def verify(directory: Path) -> Manifest:
    """Returns the manifest after verifying every byte of the files; raises CorruptCheckpoint."""
    manifest = read(directory)
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise CorruptCheckpoint(f"{name!r} points outside the checkpoint")
    try:
        found = {*_files(directory)} - {NAME}
        if missing := sorted(manifest.files.keys() - found):
            raise CorruptCheckpoint(f"{missing[0]} is missing")
        if extra := sorted(found - manifest.files.keys()):
            raise CorruptCheckpoint(f"{extra[0]} is not in the manifest")
        for name, (size, _) in manifest.files.items():
            if (actual := (directory / name).stat().st_size) != size:
                raise CorruptCheckpoint(f"{name} has {actual} bytes of {size}")
        for name, measured in _measure(directory, manifest.files, sync=False).items():
            if measured != manifest.files[name]:
                raise CorruptCheckpoint(f"{name} fails its checksum")
    except OSError as error:
        raise CorruptCheckpoint(f"{error.filename}: {error.strerror}") from error
    return manifest


def steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoint folders, valid or not, newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if STEP_NAME.fullmatch(name)), reverse=True)


def remove_partial(folder: Path) -> list[str]:
    """Removes the leftovers of interrupted saves and returns their names."""
    leftovers = [
        path
        for path in folder.iterdir()
        if path.name.endswith(PARTIAL) and STEP_NAME.fullmatch(path.name.removesuffix(PARTIAL))
    ]
    for path in leftovers:
        remove(path)
    return sorted(path.name for path in leftovers)


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that a partly removed folder is not a checkpoint."""
    if not path.name.endswith(PARTIAL):
        path = path.rename(path.with_name(path.name + PARTIAL))
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def quarantine(folder: Path, step: int) -> Path:
    """Moves a corrupt checkpoint to the quarantine folder and returns its new path."""
    (folder / QUARANTINE).mkdir(exist_ok=True)
    names = (
        folder / QUARANTINE / f"{step}{suffix}"
        for suffix in ("", *map(".{}".format, range(1, 10**6)))
    )
    target = next(path for path in names if not path.exists())
    os.rename(folder / str(step), target)
    _sync_folder(folder)
    return target


def steps_to_keep(
    manifests: Iterable[Manifest], *, keep: int, keep_every: int, keep_best: int, best_by: str
) -> set[int]:
    """Returns the steps to keep: the `keep` newest, the multiples of `keep_every`, the `keep_best` best.

    The best have the lowest metric `best_by`; values that are not finite are ignored.
    """
    manifests = sorted(manifests, key=lambda manifest: -manifest.step)
    selected = {manifest.step for manifest in manifests[:keep]}
    if keep_every:
        selected |= {manifest.step for manifest in manifests if manifest.step % keep_every == 0}
    ranked = [m for m in manifests if math.isfinite(m.metrics.get(best_by, math.nan))]
    best = sorted(ranked, key=lambda manifest: manifest.metrics[best_by])[:keep_best]
    return selected | {manifest.step for manifest in best}


def _files(directory: Path) -> Iterator[str]:
    """Yields the paths of all files; raises CorruptCheckpoint for anything else, such as a link."""
    for path in directory.rglob("*"):
        mode = path.lstat().st_mode
        name = path.relative_to(directory).as_posix()
        if stat.S_ISREG(mode):
            yield name
        elif not stat.S_ISDIR(mode):
            raise CorruptCheckpoint(f"{name} is neither a file nor a folder")


def _measure(directory: Path, names: Iterable[str], *, sync: bool) -> dict[str, tuple[int, str]]:
    """Returns size and CRC-32 of each file, read in parallel; `sync` flushes the files to disk first."""

    def measure(name: str) -> tuple[int, str]:
        size = crc = 0
        with open(directory / name, "rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := file.readinto(buffer):
                size, crc = size + count, isal_zlib.crc32(buffer[:count], crc)
        return size, f"{crc:08x}"

    # Largest first: otherwise one thread may still read a large file after all others have finished.
    names = sorted(names, key=lambda name: -(directory / name).stat().st_size)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(measure, names), strict=True))


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
