"""Checkpoints that can be restored on any mesh; every byte is verified when it is read.

Orbax writes the arrays (arrays.py), and a manifest commits them as a checkpoint (manifest.py). A Saver
saves in the background (saver.py). A lock admits one run at a time (lock.py). `meshtrain checkpoint verify`
reads every chunk (chunks.py). This module selects the checkpoint to read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from meshtrain import storage
from meshtrain.checkpoint import chunks, manifest, quarantine, remote, strays
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.config import checks
from meshtrain.errors import ConfigError, TransientError

FOLDER = "checkpoints"  # in a workdir


def newest_valid(
    folder: Path, verify: Callable[[Path], Manifest] = chunks.verify
) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the newest valid checkpoint, and by step the reasons why newer checkpoints are corrupt.

    Every byte is verified; with `manifest.check` all but the chunks of arrays, which are verified when they are
    read. The function only reads, so it is safe while a run writes to the folder. Raises ConfigError if a newer
    checkpoint may be valid, but cannot be read.
    """
    corrupt: dict[int, str] = {}
    steps = manifest.steps(folder)
    for step in steps:
        try:
            return verify(folder / str(step)), corrupt
        except CorruptCheckpoint as error:
            corrupt[step] = str(error)
        except ConfigError:
            if step in manifest.steps(folder):  # otherwise a run has removed it in the meantime
                raise
    # A run may have saved a newer checkpoint and removed the one that was read here, so look again.
    return newest_valid(folder, verify) if manifest.steps(folder) != steps else (None, corrupt)


def to_resume(
    folder: Path, damaged: Mapping[int, str], *, from_scratch: bool
) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the checkpoint to resume from, and by step the reasons why newer checkpoints are corrupt.

    Its chunks are verified when they are read; `damaged` has the checkpoints for which that failed, with the reasons.
    Raises ConfigError if there are checkpoints but none is valid, unless `from_scratch`; see also `newest_valid`.
    """

    def verify(directory: Path) -> Manifest:
        if why := damaged.get(int(directory.name)):
            raise CorruptCheckpoint(why)
        return manifest.check(directory)

    newest, corrupt = newest_valid(folder, verify)
    quarantined = quarantine.paths(folder)
    if newest or from_scratch or not (corrupt or quarantined):
        return newest, corrupt
    raise ConfigError(
        f"{folder}: no checkpoint is valid; --from_scratch quarantines them and starts at step 0",
        *(f"  step {step}: {why}" for step, why in corrupt.items()),
        *(f"  {path}: quarantined before" for path in quarantined),
    )


def opened(path: Path) -> Path:
    """Returns the scratch folder of a run, or of one of its checkpoints, on an object store, with all but the chunks.

    Another path is returned as it is. Raises ConfigError if there is nothing, or if the store cannot be read.
    """
    if not storage.is_url(path):
        return path
    folder = storage.local(path)
    workdir = workdir_of(folder)
    if faults := checks.store_faults(storage.url(workdir) or str(path)):
        raise ConfigError(*(fault.removeprefix("--workdir=") for fault in faults))
    try:
        remote.download(workdir, FOLDER)
    except OSError as error:
        raise TransientError(f"{error.filename}: {error.strerror}") from error
    if not workdir.is_dir():
        raise ConfigError(f"{storage.url(workdir)}: there are no objects under this name")
    return folder


def workdir_of(path: Path) -> Path:
    """Returns the workdir of `path`: `path` itself, or W if it is a checkpoint W/checkpoints/STEP."""
    is_checkpoint = path.name.isdecimal() and path.parent.name == FOLDER
    return path.parent.parent if is_checkpoint else path


def find_valid(
    path: Path,
    *,
    log: Callable[[str], None] = print,
    verify: Callable[[Path], Manifest] = chunks.verify,
) -> tuple[Path, Manifest]:
    """Returns folder and manifest of `path`, or of its newest valid checkpoint if `path` is a workdir.

    Logs newer checkpoints that are corrupt, and files that the manifest does not list. For `verify` see
    `newest_valid`. Raises ConfigError if no checkpoint is valid.
    """
    try:
        if path.name.isdecimal() and not (path / FOLDER).is_dir():
            found = verify(path)
            if text := strays.note(path, found):
                log(f"{path}: {text}")
            return path, found
    except CorruptCheckpoint as error:
        raise ConfigError(f"{path}: {error}; use another checkpoint") from error
    folder = path / FOLDER
    newest, corrupt = newest_valid(folder, verify)
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
