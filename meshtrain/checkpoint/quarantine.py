"""Keeps corrupt checkpoints apart, so that they can be examined."""

import os
from pathlib import Path

from meshtrain import storage
from meshtrain.checkpoint.manifest import NAME as MANIFEST
from meshtrain.checkpoint.manifest import STEP_NAME, sync_folder

NAME = "quarantine"  # a folder beside the checkpoints


def move(folder: Path, step: int) -> Path:
    """Moves a corrupt checkpoint to the quarantine folder and returns its new path."""
    (folder / NAME).mkdir(exist_ok=True)
    names = (
        folder / NAME / f"{step}{suffix}" for suffix in ("", *map(".{}".format, range(1, 10**6)))
    )
    target = next(path for path in names if not os.path.lexists(path))
    if storage.url(source := folder / str(step)):
        storage.copy(source, target, last=MANIFEST)
        storage.remove(source, first=MANIFEST)
    os.rename(source, target)
    sync_folder(folder)
    return target


def paths(folder: Path) -> list[Path]:
    """Returns the checkpoints in the quarantine folder."""
    return sorted(
        path
        for path in (folder / NAME).glob("*")
        if STEP_NAME.fullmatch(path.name.partition(".")[0])
    )
