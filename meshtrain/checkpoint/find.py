"""The folder of a run's checkpoints: which there are, which to read, and which to keep.

Every byte is verified when it is read: by `manifest.verify`, as `meshtrain checkpoint verify` does,
or by `manifest.check`, and the chunks of arrays when a run reads them (arrays.py).
"""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from meshtrain import storage
from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError, TransientError

T = TypeVar("T")

FOLDER = storage.CHECKPOINTS

STEP_NAME = re.compile("0|[1-9][0-9]*")  # name of a checkpoint folder
QUARANTINE = "quarantine"  # a folder beside the checkpoints


# ---- which to read ----


def steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoint folders, valid or not, newest first."""
    try:
        names = [name for name in os.listdir(folder) if STEP_NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise manifest.unreadable(folder, error) from error
    return sorted((int(name) for name in names if not (folder / name).is_file()), reverse=True)


MAX_LOOKS = 20  # at a run that removes what was just found


def newest_valid(
    folder: Path, verify: Callable[[Path], Manifest] = manifest.verify
) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the newest valid checkpoint, and by step why newer ones are corrupt.

    Every byte is verified; with `manifest.check` all but the chunks of arrays, which are verified
    when they are read. The function only reads, so it is safe while a run writes to the folder: if
    the run has removed a checkpoint in the meantime, it looks again. Raises ConfigError if a newer
    checkpoint may be valid, but cannot be read.
    """
    for _ in range(MAX_LOOKS):
        corrupt: dict[int, str] = {}
        newest = None
        found_steps = steps(folder)
        is_removed = False
        for step in found_steps:
            try:
                newest = verify(folder / str(step))
                break
            except CorruptCheckpoint as error:
                corrupt[step] = str(error)
                is_removed |= was_removed(folder / str(step))
            except ConfigError:
                if not was_removed(folder / str(step)):
                    raise
                is_removed = True
        if not is_removed and (newest or steps(folder) == found_steps):
            return newest, corrupt
    raise too_fast(folder)


def was_removed(directory: Path) -> bool:
    """Returns whether a run has removed a checkpoint since it was listed."""
    return storage.workdir_at(workdir_of(directory)).was_removed(directory)


def too_fast(folder: Path) -> ConfigError:
    """Returns the error of a reader that has looked MAX_LOOKS times."""
    return ConfigError(
        f"{folder}: the run there removes each checkpoint before it is read; "
        f"use a larger checkpoint.keep_last, or wait until the run has ended"
    )


def to_resume(
    folder: Path, damaged: Mapping[int, str], *, from_scratch: bool
) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the checkpoint to resume from, and by step why newer ones are corrupt.

    Its chunks are verified when they are read; `damaged` has the checkpoints for which that failed,
    with the reasons. Raises ConfigError if there are checkpoints but none is valid, unless
    `from_scratch`; see also `newest_valid`.
    """

    def verify(directory: Path) -> Manifest:
        if why := damaged.get(int(directory.name)):
            raise CorruptCheckpoint(why)
        return manifest.check(directory)

    newest, corrupt = newest_valid(folder, verify)
    quarantined = quarantined_paths(folder)
    if newest or from_scratch or not (corrupt or quarantined):
        return newest, corrupt
    raise ConfigError(
        f"{folder}: no checkpoint is valid; --from_scratch quarantines them and starts at step 0",
        *(f"  step {step}: {why}" for step, why in corrupt.items()),
        *(f"  {path}: quarantined before" for path in quarantined),
    )


def download_metadata(path: Path) -> Path:
    """Returns the folder of a run or of one of its checkpoints, `path`, which may be a URL.

    For a URL it is a scratch folder with all files but the chunks of arrays. Raises ConfigError if
    there is nothing, or if the store cannot be read.
    """
    run = workdir_of(path)
    workdir = storage.open_workdir(run)
    if faults := workdir.name_faults(""):
        raise ConfigError(*faults)
    try:
        workdir.download_run()
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    except OSError as error:
        raise TransientError(f"{error.filename}: {error.strerror}") from error
    return workdir.folder / path.relative_to(run)


def workdir_of(path: Path) -> Path:
    """Returns the workdir of `path`: W of a checkpoint W/checkpoints/STEP, else `path` itself."""
    is_checkpoint = path.name.isdecimal() and path.parent.name == FOLDER
    return path.parent.parent if is_checkpoint else path


def find_valid(
    path: Path,
    *,
    log: Callable[[str], None] = print,
    verify: Callable[[Path], Manifest] = manifest.verify,
) -> tuple[Path, Manifest]:
    """Returns folder and manifest of `path`, or, of a workdir, of its newest valid checkpoint.

    Logs newer checkpoints that are corrupt, and files that the manifest does not list. For `verify`
    see `newest_valid`. Raises ConfigError if no checkpoint is valid.
    """
    if path.name.isdecimal() and not (path / FOLDER).is_dir():
        try:
            saved = verify(path)
        except CorruptCheckpoint as error:
            raise ConfigError(f"{path}: {error}; use another checkpoint") from error
        if text := manifest.describe_unlisted_files(path, saved):
            log(f"{path}: {text}")
        return path, saved
    folder = path / FOLDER
    newest, corrupt = newest_valid(folder, verify)
    if newest is None:
        reasons = "".join(f"; step {step}: {reason}" for step, reason in corrupt.items())
        raise ConfigError(
            f"{path}: no valid checkpoint there{reasons}; "
            f"use a run's workdir, or WORKDIR/{FOLDER}/STEP"
        )
    for step, reason in corrupt.items():
        log(f"{folder / str(step)}: {reason}; step {newest.step} is used")
    if text := manifest.describe_unlisted_files(folder / str(newest.step), newest):
        log(f"{folder / str(newest.step)}: {text}")
    return folder / str(newest.step), newest


def read_valid(
    path: Path,
    read: Callable[[Path, Manifest], T],
    *,
    log: Callable[[str], None] = print,
    verify: Callable[[Path], Manifest] = manifest.verify,
) -> T:
    """Returns `read(directory, manifest)` of the checkpoint that `find_valid` finds.

    If a run removes it in the meantime, the checkpoint that is then the newest is read. Raises
    ConfigError, also if the checkpoint is damaged.
    """
    for _ in range(MAX_LOOKS):
        directory, saved = find_valid(path, log=log, verify=verify)
        try:
            return read(directory, saved)
        except (CorruptCheckpoint, ConfigError, OSError) as error:
            if directory == path or not was_removed(directory):
                if isinstance(error, CorruptCheckpoint):
                    raise ConfigError(f"{directory}: {error}; use another checkpoint") from error
                raise
    raise too_fast(path)


# ---- which to keep ----


def remove_old_checkpoints(
    folder: Path, settings: CheckpointConfig, *, kept: Collection[int] = ()
) -> None:
    """Removes the checkpoints that the settings do not keep, but for the steps in `kept`."""
    checkpoints = []
    for step in steps(folder):
        try:
            checkpoints.append(manifest.check_sizes(folder / str(step)))
        except (CorruptCheckpoint, ConfigError):
            continue  # left as it is, and not counted; the next start reports it
    kept_steps = steps_to_keep(
        checkpoints,
        keep=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=settings.keep_best,
        best_by=settings.best_by,
    )
    for checkpoint in checkpoints:
        if checkpoint.step not in kept_steps and checkpoint.step not in kept:
            with contextlib.suppress(OSError):  # the next save tries again
                remove(folder / str(checkpoint.step))


def steps_to_keep(
    manifests: Iterable[Manifest], *, keep: int, keep_every: int, keep_best: int, best_by: str
) -> set[int]:
    """Returns the `keep` newest steps, the multiples of `keep_every`, and the `keep_best` best.

    The best have the lowest metric `best_by`; values that are not finite are ignored.
    """
    manifests = sorted(manifests, key=lambda manifest: -manifest.step)
    selected = {manifest.step for manifest in manifests[:keep]}
    if keep_every:
        selected |= {manifest.step for manifest in manifests if manifest.step % keep_every == 0}
    ranked = [m for m in manifests if math.isfinite(m.metrics.get(best_by, math.nan))]
    best = sorted(ranked, key=lambda manifest: manifest.metrics[best_by])[:keep_best]
    return selected | {manifest.step for manifest in best}


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that a partly removed folder is not a checkpoint.

    In an object store the manifest is removed first; the path of an unfinished save removes no
    checkpoint.
    """
    is_unfinished = path.name.endswith(manifest.PARTIAL)
    storage.workdir_at(path).remove_objects(path, unless_committed=is_unfinished)
    if not is_unfinished:
        leftover = path.with_name(path.name + manifest.PARTIAL)
        shutil.rmtree(leftover, ignore_errors=True)  # a folder can only replace an empty one
        path = path.rename(leftover)
        # Otherwise a power loss may undo the rename, and not the removal of the files.
        storage.sync(path.parent)
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def remove_partial(folder: Path) -> list[str]:
    """Removes the leftovers of interrupted saves and returns their names."""
    leftovers = [
        path
        for path in folder.iterdir()
        if path.name.endswith(manifest.PARTIAL)
        and STEP_NAME.fullmatch(path.name.removesuffix(manifest.PARTIAL))
    ]
    for path in leftovers:
        remove(path)
    return sorted(path.name for path in leftovers)


def quarantine(folder: Path, step: int) -> Path:
    """Moves a corrupt checkpoint to the quarantine folder and returns its new path."""
    (folder / QUARANTINE).mkdir(exist_ok=True)
    storage.sync(folder)  # otherwise a power loss may keep the move to it alone
    source = folder / str(step)
    target = folder / QUARANTINE / str(step)
    number = 0
    while os.path.lexists(target):
        number += 1
        target = folder / QUARANTINE / f"{step}.{number}"
    storage.workdir_at(source).move_objects(source, target)
    os.rename(source, target)
    storage.sync(target.parent)
    storage.sync(folder)
    return target


def quarantined_paths(folder: Path) -> list[Path]:
    """Returns the checkpoints in the quarantine folder."""
    return sorted(
        path
        for path in (folder / QUARANTINE).glob("*")
        if STEP_NAME.fullmatch(path.name.partition(".")[0])
    )
