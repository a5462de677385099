"""Records the file-system operations of a program, with strace: those of its libraries in C++ too.

The recorder replays each operation on a model of the folder in memory, where files and folders are
numbered as inodes are. `record` compares the model with the folder that the program has left, byte
by byte, so that no operation is missed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT_NODE = 0  # the recorded folder

Tree = dict[str, bytes | None]  # path -> content of a file, None of a folder


class Operation(NamedTuple):
    """An operation that has changed the folder, or flushed something in it.

    link: `folder` gets the entry `name` of `node`, a new file or folder; unlink: the entry is
    removed; rename: the entry becomes `new_name` of `new_folder`; write: `node` gets `data` at
    `offset`; truncate: `node` gets the length `offset`; sync: what was done to `node` by the first
    `offset` operations is flushed to disk; mark: the program has written `data`.
    """

    kind: str
    node: int = -1
    folder: int = -1
    name: str = ""
    new_folder: int = -1
    new_name: str = ""
    offset: int = 0
    data: bytes = b""
    is_folder: bool = False  # of a link

    def touches(self) -> set[int]:
        """Returns the nodes whose flush to disk makes the operation durable."""
        if self.kind in ("write", "truncate"):
            return {self.node}
        if self.kind in ("link", "unlink"):
            return {self.folder}
        if self.kind == "rename":
            # A rename is atomic in every file system with a journal.
            return {self.folder, self.new_folder}
        return set()


@dataclass
class Disk:
    """Files and folders by their nodes."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT_NODE: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> "Disk":
        folders = {node: dict(entries) for node, entries in self.folders.items()}
        return Disk(folders, dict(self.files))

    def apply(self, operation: Operation) -> None:
        """Does what the operation does, as far as what it is done to is there."""
        kind, node, folder, name, new_folder, new_name, offset, data, is_folder = operation
        if kind == "link":
            self.create(node, is_folder=is_folder)
            self.folders[folder][name] = node
        elif kind == "unlink":
            self.folders[folder].pop(name, None)
        elif kind == "rename":
            if self.folders[folder].get(name) == node:
                del self.folders[folder][name]
            self.folders[new_folder][new_name] = node
        elif kind == "write":
            content = self.files[node].ljust(offset, b"\0")
            self.files[node] = content[:offset] + data + content[offset + len(data) :]
        elif kind == "truncate":
            self.files[node] = self.files[node].ljust(offset, b"\0")[:offset]

    def create(self, node: int, *, is_folder: bool) -> None:
        """Adds an empty file or folder, which has no entry yet."""
        if is_folder:
            self.folders.setdefault(node, {})
        else:
            self.files.setdefault(node, b"")

    def tree(self, folder: int = ROOT_NODE, prefix: str = "") -> Tree:
        """Returns what can be reached from the recorded folder."""
        found: Tree = {}
        for name, node in self.folders[folder].items():
            if node in self.files:
                found[prefix + name] = self.files[node]
            else:
                found[prefix + name] = None
                found |= self.tree(node, f"{prefix}{name}/")
        return found


def tree_of(folder: Path) -> Tree:
    """Returns the files and folders of a folder."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


# ---- the program ----

CALLS = (
    "open openat creat mkdir mkdirat write pwrite64 writev pwritev pwritev2 truncate ftruncate "
    "fsync fdatasync rename renameat renameat2 unlink unlinkat rmdir link linkat symlink symlinkat "
    "fallocate copy_file_range sendfile"
).split()


def fault() -> str:
    """Returns why programs cannot be recorded here, or an empty string."""
    try:
        command = ["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"needs strace: {error.strerror}"
    return f"strace cannot trace here: {done.stderr.strip()}" if done.returncode else ""


def record(arguments: Sequence[str], folder: Path, marks: Path) -> list[Operation]:
    """Returns the operations of a Python program on `folder`, which must be empty.

    What it appends to the file `marks` becomes marks.
    """
    folder, marks = folder.resolve(), marks.resolve()
    marks.touch()
    trace = marks.with_suffix(".strace")
    # All strings are in hex, so that nothing in them is taken for syntax.
    strings = ["-y", "-xx", "-s", str(1 << 24)]
    options = ["-f", "--seccomp-bpf", *strings, "-e", f"trace={','.join(CALLS)}"]
    command = ["strace", *options, "-o", str(trace), sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
    operations, disk = parse(trace.read_text(), folder, marks)
    assert disk.tree() == tree_of(folder), "operations are missing in the record"
    return operations


# ---- its trace ----

LINE = re.compile(r"(\d+) +(.*)")
UNFINISHED = " <unfinished ...>"
RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)")
CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?)(?:<([^>]*)>)?")
ARGUMENT = re.compile(
    r'"(?P<text>[^"]*)"|(?:AT_FDCWD|\d+)<(?P<place>[^>]*)>|(?P<other>[\w|.=\[\]{}\-]+)'
)
IOV_BASE = re.compile(r'iov_base="([^"]*)"')


def _decode(text: str) -> bytes:
    """Returns the bytes that strace has written in hex."""
    return bytes.fromhex(text.replace("\\x", ""))


class _Call(NamedTuple):
    name: str
    texts: list[bytes]  # its strings
    places: list[str]  # paths of its open files and folders
    words: list[str]  # its other arguments
    result: int
    new_place: str  # path of the file that was opened
    began: int  # number of operations before it began


def parse(text: str, folder: Path, marks: Path) -> tuple[list[Operation], Disk]:
    """Returns the operations in a trace, in the order in which they ended, and their result."""
    disk = Disk()
    recorder = _Recorder(str(folder), str(marks), disk)
    begun: dict[str, tuple[str, int]] = {}  # of each thread: its call, and what was done before it
    for line in text.splitlines():
        match = LINE.match(line)
        assert match, line
        thread, rest = match.groups()
        began = len(recorder.operations)
        if rest.endswith(UNFINISHED):
            begun[thread] = rest.removesuffix(UNFINISHED), began
            continue
        if resumed := RESUMED.match(rest):
            start, began = begun.pop(thread)
            rest = start + resumed[2]
        call = CALL.match(rest)
        if call and call[3] != "?" and int(call[3]) >= 0:
            recorder.add(_parsed(call, began))
    return recorder.operations, disk


def _parsed(call: re.Match, began: int) -> _Call:
    texts, places, words = [], [], []
    for argument in ARGUMENT.finditer(call[2]):
        if argument["text"] is not None:
            texts.append(_decode(argument["text"]))
        elif argument["place"] is not None:
            places.append(_decode(argument["place"]).decode())
        else:
            words.append(argument["other"])
    if call[1] in ("writev", "pwritev", "pwritev2"):
        texts = [b"".join(map(_decode, IOV_BASE.findall(call[2])))]
    new_place = _decode(call[4] or "").decode()
    return _Call(call[1], texts, places, words, int(call[3]), new_place, began)


class _Recorder:
    """Turns system calls into operations, and applies them to `disk`."""

    def __init__(self, folder: str, marks: str, disk: Disk):
        self._folder = folder
        self._marks = marks
        self._disk = disk
        self._num_nodes = ROOT_NODE + 1
        self.operations: list[Operation] = []

    def add(self, call: _Call) -> None:
        if call.name in ("open", "openat", "creat"):
            self._open(call)
        elif call.name in ("mkdir", "mkdirat"):
            self._link(self._path(call, 0), is_folder=True)
        elif call.name in ("write", "pwrite64", "writev", "pwritev", "pwritev2"):
            self._write(call)
        elif call.name in ("fsync", "fdatasync"):
            if (node := self._node(call.places[0])) is not None:
                self._done(Operation("sync", node, offset=call.began))
        elif call.name in ("rename", "renameat", "renameat2"):
            self._rename(self._path(call, 0), self._path(call, 1))
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            if found := self._entry(self._path(call, 0)):
                self._done(Operation("unlink", folder=found[0], name=found[1]))
        elif call.name in ("truncate", "ftruncate"):
            place = call.places[0] if call.places else self._path(call, 0)
            if (node := self._node(place)) is not None:
                self._done(Operation("truncate", node, offset=int(call.words[-1])))
        else:
            paths = [*call.places, *(text.decode(errors="replace") for text in call.texts)]
            inside = [path for path in paths if path.startswith(self._folder + "/")]
            assert not inside, f"{call.name} is not recorded: {inside}"

    def _done(self, operation: Operation) -> None:
        self._disk.apply(operation)
        self.operations.append(operation)

    def _path(self, call: _Call, number: int) -> str:
        """Returns the path of a call's argument; it may be relative to an open folder."""
        path = call.texts[number].decode()
        base = call.places[min(number, len(call.places) - 1)] if call.places else os.getcwd()
        return os.path.normpath(os.path.join(base, path))

    def _entry(self, path: str) -> tuple[int, str] | None:
        """Returns the node of a path's folder and the name in it; None if it is elsewhere."""
        if not path.startswith(self._folder + "/"):
            return None
        *parents, name = path.removeprefix(self._folder + "/").split("/")
        folder = ROOT_NODE
        for parent in parents:
            folder = self._disk.folders[folder][parent]
        return folder, name

    def _node(self, path: str) -> int | None:
        """Returns the node of a path; None if it is elsewhere, or was removed."""
        if path == self._folder:
            return ROOT_NODE
        try:
            found = self._entry(path)
            return None if found is None else self._disk.folders[found[0]].get(found[1])
        except KeyError:
            return None

    def _link(self, path: str, *, is_folder: bool) -> None:
        if found := self._entry(path):
            self._done(Operation("link", self._num_nodes, *found, is_folder=is_folder))
            self._num_nodes += 1

    def _rename(self, old: str, new: str) -> None:
        source, target = self._entry(old), self._entry(new)
        if source is None and target is None:
            return
        assert source and target, f"{old} moves to {new}, which is not recorded"
        node = self._disk.folders[source[0]][source[1]]
        self._done(Operation("rename", node, *source, *target))

    def _open(self, call: _Call) -> None:
        flags = next((word for word in call.words if "O_" in word), "O_WRONLY|O_CREAT|O_TRUNC")
        path = call.new_place
        if "O_CREAT" not in flags and "O_TRUNC" not in flags:
            return
        node = self._node(path)
        if node is None:
            self._link(path, is_folder=False)
        elif "O_TRUNC" in flags and self._disk.files[node]:
            self._done(Operation("truncate", node, offset=0))

    def _write(self, call: _Call) -> None:
        path = call.places[0]
        data = call.texts[0][: call.result]
        if path == self._marks:
            self._done(Operation("mark", data=data))
            return
        if (node := self._node(path)) is None or node not in self._disk.files:
            return
        # Without an offset: each file is written from its beginning by one thread, or appended to.
        is_placed = call.name.startswith("pwrite")
        offset = int(call.words[-1]) if is_placed else len(self._disk.files[node])
        self._done(Operation("write", node, offset=offset, data=data))
