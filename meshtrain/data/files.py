"""Find the files of a folder; report what cannot be read, instead of waiting or leaving it out."""

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from meshtrain.data.prepared import JOURNAL, MANIFEST, is_prepared
from meshtrain.errors import ConfigError

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MISSING = "no such file or folder"


def path_fault(path: str | Path) -> str:
    """Returns why nothing can be read from a path; "" for a file or a folder."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return f"is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file or folder"


@contextlib.contextmanager
def report_errors(name: str) -> Iterator[None]:
    """Raises an error of the file system as a ConfigError that begins with `name`."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(
            f"{name}: {where}{error.strerror or error}; make it readable, or leave it out"
        ) from error


def find(
    root: Path, pattern: str, *, key: str, exclude: Collection[str] = ()
) -> tuple[list[Path], list[Path]]:
    """Returns the files in a folder that match `pattern`, and the prepared folders with others.

    Both are sorted. Nothing in a prepared folder is returned, nor in a subfolder whose name is in
    `exclude`, nor what is hidden: a file or subfolder whose name begins with a dot. Symbolic links
    to folders are not followed. Raises OSError for a folder that cannot be read, ConfigError for an
    invalid pattern; `key` is its config key or flag.
    """
    searched = set()
    prepared_folders = []
    for name, subfolders, file_names in os.walk(root, onerror=_raise):
        folder = Path(name)
        if {MANIFEST, JOURNAL} & set(file_names) and is_prepared(folder):
            prepared_folders.append(folder)
            subfolders.clear()
            continue
        searched.add(folder)
        # In place: os.walk does not visit what is removed.
        subfolders[:] = [
            name for name in subfolders if not _is_hidden(name) and name not in exclude
        ]
    try:
        matching = list(root.rglob(pattern))
    except (ValueError, NotImplementedError):  # "**.txt", "/a/*.txt"
        raise ConfigError(f"{key}={pattern!r}: use a pattern of names, such as *.txt") from None
    paths = [
        path
        for path in matching
        if path.parent in searched and not _is_hidden(path.name) and path.is_file()
    ]
    left_out = [
        folder for folder in prepared_folders if any(folder in path.parents for path in matching)
    ]
    return sorted(paths), sorted(left_out)


def _is_hidden(name: str) -> bool:
    """Returns whether a file or folder is hidden, such as .git and macOS's .DS_Store."""
    return name.startswith(".")


def read(path: Path) -> bytes:
    """Returns the content of a file; an error names the file, even after it was opened."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _raise(error: OSError) -> None:
    raise error
