"""Finds the checkpoint to read: the newest valid one, or the one to resume from.

Every byte is verified when it is read. `verify` reads every chunk of the arrays, as `meshtrain
checkpoint verify` does, and needs no jax; a run verifies only the chunks that it reads (arrays.py).
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshtrain import console, storage
from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError, TransientError

FOLDER = storage.CHECKPOINTS

MAX_VERIFY_THREADS = 4  # each holds one chunk, which may be as large as the shard of a device


# ---- one checkpoint ----


def verify(directory: Path) -> Manifest:
    """Returns the manifest after verifying every byte that a run can read.

    Raises CorruptCheckpoint, and ConfigError if the checkpoint may be valid but cannot be read.
    """
    saved = manifest.check(directory)
    if all(crc for _, crc in saved.files.values()):
        return saved
    with manifest.reading_chunks(directory):
        arrays = _open_arrays(directory)
        size = sum(array.size * array.dtype.numpy_dtype.itemsize for array in arrays)
        num_threads = min(MAX_VERIFY_THREADS, os.cpu_count() or 1)
        with (
            console.progress(f"reading {directory}", size) as advance,
            ThreadPoolExecutor(num_threads) as threads,
        ):
            chunks = (array[box] for array in arrays for box in _chunk_boxes(array))
            for num_bytes in threads.map(lambda chunk: chunk.read().result().nbytes, chunks):
                advance(num_bytes)
    return saved


def _open_arrays(directory: Path) -> list[Any]:
    """Returns a TensorStore for each array of a checkpoint; they are opened in parallel."""
    import tensorstore  # here, since it takes a while and a run does not need it

    folder = {"driver": "file", "path": f"{directory.absolute()}/arrays/"}
    store = storage.workdir_at(directory).array_store({"driver": "ocdbt", "base": folder})
    futures = []
    for key in tensorstore.KvStore.open(store).result().list().result():
        if key.endswith(b"/zarr.json"):
            spec = {
                "driver": "zarr3",
                "kvstore": {**store, "path": key.decode().removesuffix("zarr.json")},
                # Otherwise a missing chunk would be read as zeros.
                "fill_missing_data_reads": False,
            }
            futures.append(tensorstore.open(spec, read=True))
    return [future.result() for future in futures]


def _chunk_boxes(array: Any) -> Iterator[tuple[slice, ...]]:
    """Yields the index of each chunk of an array."""
    chunk_shape = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    sizes = list(zip(array.shape, chunk_shape, strict=True))
    for corner in itertools.product(*(range(0, size, length) for size, length in sizes)):
        yield tuple(
            slice(start, min(start + length, size))
            for start, (size, length) in zip(corner, sizes, strict=True)
        )


# ---- one of many ----


def newest_valid(
    folder: Path, verify: Callable[[Path], Manifest] = verify
) -> tuple[Manifest | None, dict[int, str]]:
    """Returns the newest valid checkpoint, and by step why newer ones are corrupt.

    Every byte is verified; with `manifest.check` all but the chunks of arrays, which are verified
    when they are read. The function only reads, so it is safe while a run writes to the folder.
    Raises ConfigError if a newer checkpoint may be valid, but cannot be read.
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
    if manifest.steps(folder) == steps:
        return None, corrupt
    # A run has saved a newer checkpoint and removed the one that was read, so look again.
    return newest_valid(folder, verify)


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
    quarantined = manifest.quarantined_paths(folder)
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
    if faults := workdir.url_faults(""):
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
    verify: Callable[[Path], Manifest] = verify,
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


def remove_old_checkpoints(folder: Path, settings: CheckpointConfig) -> None:
    """Removes the checkpoints that the settings do not keep."""
    checkpoints = []
    for step in manifest.steps(folder):
        try:
            checkpoints.append(manifest.read(folder / str(step)))
        except (CorruptCheckpoint, ConfigError):
            continue  # left as it is; the next start reports it
    kept_steps = steps_to_keep(
        checkpoints,
        keep=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=settings.keep_best,
        best_by=settings.best_by,
    )
    for checkpoint in checkpoints:
        if checkpoint.step not in kept_steps:
            with contextlib.suppress(OSError):  # the next save tries again
                manifest.remove(folder / str(checkpoint.step))


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
