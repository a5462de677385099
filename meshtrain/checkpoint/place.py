"""Where a run saves its checkpoints: a folder that can be written, with space for them."""

import shutil
from pathlib import Path

from meshtrain import storage
from meshtrain.checkpoint import manifest, remote
from meshtrain.errors import ConfigError

SPACE_FACTOR = 1.2  # free disk space that a save needs, as a multiple of the state's bytes


def prepare(folder: Path, size: int) -> None:
    """Creates the folder and removes unfinished saves.

    Raises ConfigError if it is not writable, or has no space for a state of `size` bytes.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A test that the folder is writable; the next line removes the new folder.
        manifest.partial_folder(folder, 0).mkdir(exist_ok=True)
        manifest.remove_partial(folder)
        remote.remove_unfinished(folder)
        fault = space_fault(folder, size)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"--workdir: {folder}: {why}; use a folder that can be written"
        ) from error
    if fault:
        raise ConfigError(f"--workdir: {folder}: {fault}; make room, or use another folder")


def space_fault(folder: Path, size: int) -> str:
    """Returns an error message if the disk has no space for a state of `size` bytes, else an empty string."""
    if storage.url(folder):
        return ""
    needed, free = SPACE_FACTOR * size, shutil.disk_usage(folder).free
    return f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free" if free < needed else ""
