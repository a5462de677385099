"""Checkpoints on an object store: the same names as on a disk, committed by their manifest.

The manifest is written last, on the condition that there is none, and removed first. What has no manifest is an
unfinished save. The scratch folder of a process holds all of a checkpoint but the chunks of arrays.
"""

import fnmatch
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from meshtrain import storage
from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import NAME, Manifest

# Objects that one process writes: chunks, which have checksums, and its index, which nothing reads once process 0 has
# merged all. So the late writes of a run that was suspended change nothing that another one has committed.
OF_PROCESSES = "arrays/ocdbt.process_*/*"


def _is_of_process(name: str) -> bool:
    """Whether an object is one of OF_PROCESSES, by its path in a checkpoint or in a workdir."""
    return any(fnmatch.fnmatchcase(name, f"{prefix}{OF_PROCESSES}") for prefix in ("", "*/"))


def download(workdir: Path, folder: str, but: Collection[str] = ()) -> None:
    """Downloads the small files of a run, with its checkpoints in `folder`, `but` for some files and folders.

    Files that exist are kept, unfinished saves are left out. Raises OSError.
    """
    names = storage.names(workdir)
    finished = {name.removesuffix(f"/{NAME}") for name in names}

    def wanted(name: str) -> bool:
        first, second = [*name.split("/"), ""][:2]
        is_unfinished = (
            first == folder and second.isdecimal() and f"{first}/{second}" not in finished
        )
        return first not in but and not is_unfinished and not _is_of_process(name)

    storage.download(workdir, filter(wanted, names))


def fetch(directory: Path) -> list[str]:
    """Downloads the small files of a checkpoint, and returns the names of its other objects. Raises OSError."""
    names = storage.names(directory)
    storage.download(directory, [name for name in names if not _is_of_process(name)])
    return [name for name in names if _is_of_process(name)]


def commit(folder: Path, step: int, **fields: Any) -> Manifest:
    """Does what `manifest.commit` does, also on an object store. Raises OSError."""
    if not storage.url(folder):
        return manifest.commit(folder, step, **fields)
    objects = fetch(manifest.partial_folder(folder, step))
    saved = manifest.commit(folder, step, remote=objects, **fields)
    directory = folder / str(step)
    try:
        for name in saved.files.keys() - {*storage.names(directory)}:
            storage.upload(directory / name)
        storage.create(directory / NAME)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return saved


def remove_unfinished(folder: Path) -> None:
    """Removes what has no manifest. Raises OSError."""
    if not storage.url(folder):
        return
    begun = {name.partition("/")[0] for name in storage.names(folder)}
    for step in begun - {*map(str, manifest.steps(folder))}:
        if step.isdecimal():
            storage.remove(folder / step)
