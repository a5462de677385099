"""The files that a run writes to its workdir: checked at the start, replaced atomically, flushed to disk."""

import contextlib
import errno
import os
from pathlib import Path

from meshtrain import console
from meshtrain.errors import ConfigError

TABLES = ("metrics.jsonl", "events.jsonl")


def check(folder: Path) -> None:
    """Raises ConfigError with a line for each output of an earlier run that this run cannot continue."""
    faults = []
    names = (*TABLES, "config.json", console.LOG)
    for path in filter(os.path.lexists, (folder / name for name in names)):
        try:
            # Opening a pipe would wait for its other end; a link may lead out of the workdir.
            if path.is_symlink() or not path.is_file():
                raise OSError(errno.EINVAL, "is not a file")
            open(path, "ab").close()
        except OSError as error:
            faults.append(f"{path}: {error.strerror}; move it away, or use another --workdir")
    if faults:
        raise ConfigError(*faults)


def replace(path: Path, text: str) -> None:
    """Replaces a file atomically. Raises ConfigError if it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(exist_ok=True)
        new.unlink(missing_ok=True)  # it may be a link
        new.write_text(text)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ConfigError(f"{path}: {error.strerror}; make room, or repair it") from error


def sync(folder: Path) -> None:
    """Flushes the tables and their folder to disk; one that cannot be flushed does not stop the run."""
    for path in (*(folder / name for name in TABLES), folder):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
