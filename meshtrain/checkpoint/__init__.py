"""Checkpoints that can be restored on any mesh; every byte is verified before it is used.

Orbax writes the arrays (arrays.py), and a manifest commits them as a checkpoint (manifest.py). A Saver
saves in the background (saver.py). A lock admits one run at a time (lock.py). This module selects the
checkpoint to read.
"""

from collections.abc import Callable
from pathlib import Path

from meshtrain.checkpoint import manifest, strays
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.errors import ConfigError

FOLDER = "checkpoints"  # in a workdir


def newest_valid(folder: Path) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the newest valid checkpoint, and by step the reasons why newer checkpoints are corrupt.

    Every byte is verified. The function only reads, so it is safe while a run writes to the folder.
    Raises ConfigError if a newer checkpoint may be valid, but cannot be read.
    """
    corrupt: dict[int, str] = {}
    steps = manifest.steps(folder)
    for step in steps:
        try:
            return manifest.verify(folder / str(step)), corrupt
        except CorruptCheckpoint as error:
            corrupt[step] = str(error)
        except ConfigError:
            if step in manifest.steps(folder):  # otherwise a run has removed it in the meantime
                raise
    # A run may have saved a newer checkpoint and removed the one that was read here, so look again.
    return newest_valid(folder) if manifest.steps(folder) != steps else (None, corrupt)


def workdir_of(path: Path) -> Path:
    """Returns the workdir of `path`: `path` itself, or W if it is a checkpoint W/checkpoints/STEP."""
    is_checkpoint = path.name.isdecimal() and path.parent.name == FOLDER
    return path.parent.parent if is_checkpoint else path


def find_valid(path: Path, *, log: Callable[[str], None] = print) -> tuple[Path, Manifest]:
    """Returns folder and manifest of `path`, or of its newest valid checkpoint if `path` is a workdir.

    Logs newer checkpoints that are corrupt, and files that the manifest does not list. Raises
    ConfigError if no checkpoint is valid.
    """
    try:
        if path.name.isdecimal() and not (path / FOLDER).is_dir():
            found = manifest.verify(path)
            if text := strays.note(path, found):
                log(f"{path}: {text}")
            return path, found
    except CorruptCheckpoint as error:
        raise ConfigError(f"{path}: {error}; use another checkpoint") from error
    folder = path / FOLDER
    newest, corrupt = newest_valid(folder)
    if newest is None:
        reasons = "".join(f"; step {step}: {reason}" for step, reason in corrupt.items())
        raise ConfigError(
            f"{path}: no valid checkpoint there{reasons}; use a run's workdir, or WORKDIR/{FOLDER}/STEP"
        )
    for step, reason in corrupt.items():
        log(f"{folder / str(step)}: {reason}; step {newest.step} is used")
    if text := strays.note(folder / str(newest.step), newest):
        log(f"{folder / str(newest.step)}: {text}")
    return folder / str(newest.step), newest
