"""Checkpoints that fit any mesh and are checked to the last byte before they are used.

Orbax writes arrays (arrays.py), our manifest makes a checkpoint of them (manifest.py), a Saver saves
beside the training (saver.py), one run at a time (lock.py). Here: which one to read.
"""

from collections.abc import Callable
from pathlib import Path

from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import BadCheckpoint, Manifest
from meshtrain.errors import ConfigError

FOLDER = "checkpoints"  # in a workdir


def newest_good(folder: Path) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the newest checkpoint that is good to the last byte, and what is wrong with newer ones.

    Reads only, so it may be used beside a run that writes.
    """
    bad: dict[int, str] = {}
    steps = manifest.steps(folder)
    for step in steps:
        try:
            return manifest.verify(folder / str(step)), bad
        except BadCheckpoint as error:
            bad[step] = str(error)
    # Where a run went on meanwhile, the one looked at may have made room for a newer one.
    return newest_good(folder) if manifest.steps(folder) != steps else (None, bad)


def workdir_of(path: Path) -> Path:
    """Returns the workdir that `path` is, or is a checkpoint in: WORKDIR/checkpoints/STEP."""
    inside = path.name.isdecimal() and path.parent.name == FOLDER
    return path.parent.parent if inside else path


def find(path: Path, *, tell: Callable[[str], None] = print) -> tuple[Path, Manifest]:
    """Returns the folder and manifest of a checkpoint: `path` itself, or the newest good one of a run.

    Newer ones that are bad are told. Raises ConfigError where there is none, or it is bad.
    """
    try:
        if path.name.isdecimal() and not (path / FOLDER).is_dir():
            return path, manifest.verify(path)
    except BadCheckpoint as error:
        raise ConfigError(f"{path}: {error}; use another checkpoint") from error
    folder = path / FOLDER
    found, bad = newest_good(folder)
    if found is None:
        why = "".join(f"; step {step}: {why}" for step, why in bad.items())
        raise ConfigError(
            f"{path}: no good checkpoint there{why}; use a run's workdir, or WORKDIR/{FOLDER}/STEP"
        )
    for step, why in bad.items():
        tell(f"{folder / str(step)}: {why}; step {found.step} is used")
    return folder / str(found.step), found
