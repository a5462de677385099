"""Reads files that others wrote, such as downloads, in bounded time and memory.

A file that cannot be opened raises OSError, one that is not what it should be ValueError with one
line that says why; the caller adds the name of the file and what to do. Nothing waits for a pipe.
"""

import codecs
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAX_JSON_BYTES = 64 << 20
MAX_TEXT_BYTES = 16 << 20  # of other texts that are read at once, such as templates
# Of JSON values. Python reads about 1000 levels, but then its other functions fail on them.
MAX_DEPTH = 100

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_file(path: str | Path) -> BinaryIO:
    """Returns a regular file, opened for reading; raises ValueError for a pipe or a folder."""
    # Without O_NONBLOCK, opening a pipe waits for a process that writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(f"{kind}, not a file")
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, *, max_bytes: int) -> bytes:
    """Returns the content of a file; raises ValueError if it is larger than `max_bytes`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Not only its size: that of a file of /proc is 0, and another file may grow.
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
    if size > max_bytes or len(content) > max_bytes:
        raise ValueError(f"larger than {max_bytes:,} bytes")
    return content


def read_utf8(path: str | Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a file in UTF-8, without a byte-order mark."""
    return _decoded(read_bytes(path, max_bytes=max_bytes))


def read_json(
    path: str | Path, kind: type | None = dict, *, max_bytes: int = MAX_JSON_BYTES
) -> Any:
    """Returns the value in a JSON file; raises ValueError if it is not a `kind`. None: any kind."""
    content = read_bytes(path, max_bytes=max_bytes)
    value = parse_json(content)
    if b"\\ud" in content.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("invalid UTF-8: half of a surrogate pair") from None
    if kind is not None and not isinstance(value, kind):
        names = {dict: "an object", list: "a list"}
        raise ValueError(f"not {names[kind]}")
    return value


def map_npy(path: str | Path) -> np.ndarray:
    """Returns the array of a .npy file, memory-mapped: its header may claim more than is there.

    Raises OSError, and ValueError if it is not such a file.
    """
    open_file(path).close()  # raises ValueError for a pipe, whose opening would wait
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python, which may fail in any way
        reason = str(error).partition(".")[0]  # without numpy's unsafe advice
        raise ValueError(f"not a .npy file: {reason}") from None


def parse_json(
    content: bytes, *, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Returns the value of a JSON text in UTF-8; raises ValueError that says what is wrong.

    `make_object` makes an object of its names and values; None: a dict, in which the last of equal
    names counts.
    """
    text = _decoded(content)
    try:
        value = json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise ValueError(f"holds an integer of more than {limit:,} digits") from None
    _check_depth(value)
    return value


def is_file_name(value: Any) -> bool:
    """Returns whether a value is a plain file name, which cannot lead out of a folder."""
    if not isinstance(value, str) or value in ("", ".", ".."):
        return False
    return not any(letter in value for letter in "/\0")


def _decoded(content: bytes) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from None


def _check_depth(value: Any) -> None:
    """Raises ValueError for values in more than MAX_DEPTH others; a loop, since it may be many."""
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        below = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            below += [one for one in values if isinstance(one, dict | list)]
        level = below
