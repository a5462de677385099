"""Enumerates what a disk may hold after a power loss, from the operations of a recorded program.

As ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018) do. A file system
promises no more than this: what was flushed is there; what was not may be there or not, in any
order, and a write may be there in part. Each prefix of the record is one moment of the power
loss, at which every subset of the operations that are not flushed may have reached the disk:

- entries of folders: created, removed and renamed ones are flushed by the fsync of their folder;
- content of files: by the fsync of the file. What was written may be missing, torn at any length,
  or zeros of the right length.

A rename is atomic, and what is flushed stays so. These are the rules of a disk that does not lie.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.lib.strace import ROOT_NODE, Disk, Operation, Tree

MAX_EXHAUSTIVE = 5  # unflushed operations of which all subsets are examined
NUM_RANDOM = 12  # random subsets of more


class State(NamedTuple):
    """What a disk may hold after a power loss."""

    moment: int  # number of operations that were made
    why: str
    tree: Tree


def unflushed(operations: Sequence[Operation], moment: int) -> list[int]:
    """Returns the operations before a moment that no fsync has flushed, by their indices."""
    flushed: set[int] = set()
    waiting: dict[int, list[int]] = {}  # node -> operations that its fsync flushes
    for index, operation in enumerate(operations[:moment]):
        if operation.kind != "sync":
            for node in operation.touches():
                waiting.setdefault(node, []).append(index)
            continue
        pending = waiting.get(operation.node, [])
        flushed.update(one for one in pending if one < operation.offset)
        waiting[operation.node] = [one for one in pending if one >= operation.offset]
    return [
        index
        for index, operation in enumerate(operations[:moment])
        if operation.touches() and index not in flushed
    ]


def _subsets(
    operations: Sequence[Operation],
    pending: Sequence[int],
    rng: random.Random,
    *,
    each: bool,
) -> Iterator[tuple[str, set[int]]]:
    """Yields subsets of the pending operations: those that have reached the disk.

    All of them, if there are few. Otherwise those that bugs are known for, and random ones; with
    `each` also every operation alone, and all but it.
    """
    if len(pending) <= MAX_EXHAUSTIVE:
        for size in range(len(pending) + 1):
            for chosen in itertools.combinations(pending, size):
                yield f"{size} of {len(pending)} unflushed operations", {*chosen}
        return
    yield "none of the unflushed operations", set()
    yield "all operations", {*pending}
    of_files = {one for one in pending if operations[one].kind in ("write", "truncate")}
    removals = {one for one in pending if operations[one].kind == "unlink"}
    yield "entries of folders without the content of files", {*pending} - of_files
    yield "content of files without the entries of folders", of_files
    yield "removals before all others", removals
    yield "all but removals", {*pending} - removals
    for number in range(NUM_RANDOM if each else 1):
        chosen = {one for one in pending if rng.random() < rng.random()}
        yield f"random subset {number} of {len(pending)} unflushed operations", chosen
    for one in pending if each else ():
        yield f"all but {_described(operations[one])}", {*pending} - {one}
        yield f"only {_described(operations[one])}", {one}


def _described(operation: Operation) -> str:
    name = operation.new_name or operation.name or f"node {operation.node}"
    return f"the {operation.kind} of {name}"


def _zeros(write: Operation) -> Operation:
    """Returns a write of which the disk has the length alone."""
    return write._replace(data=bytes(len(write.data)))


def _torn(write: Operation) -> Iterator[tuple[str, Operation]]:
    """Yields the parts of a write that alone may have reached the disk."""
    size = len(write.data)
    yield "zeros", _zeros(write)
    for length in sorted({1, size // 2, size - 1} & {*range(1, size)}):
        yield f"{length} of {size} bytes", write._replace(data=write.data[:length])


def _reachable(disk: Disk, pending: Iterable[Operation]) -> set[int]:
    """Returns the nodes that a subset of the pending operations may put on a path of `disk`.

    `disk` has none of them. What was removed for good is on none: no subset shows it.
    """
    entries = {folder: {*names.values()} for folder, names in disk.folders.items()}
    for operation in pending:
        if operation.kind == "link":
            entries.setdefault(operation.folder, set()).add(operation.node)
        elif operation.kind == "rename":
            entries.setdefault(operation.folder, set()).add(operation.node)
            entries.setdefault(operation.new_folder, set()).add(operation.node)
    found, waiting = {ROOT_NODE}, [ROOT_NODE]
    while waiting:
        new = entries.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _disk(operations: Sequence[Operation], base: Disk, kept: Callable[[int], bool]) -> Disk:
    """Returns a copy of `base` after the operations whose indices are kept."""
    disk = base.copy()
    for index, operation in enumerate(operations):
        if kept(index):
            disk.apply(operation)
        elif operation.kind == "link":  # what is flushed may be in it
            disk.create(operation.node, is_folder=operation.is_folder)
    return disk


def states_at(
    operations: Sequence[Operation], moment: int, *, each: bool, seed: int = 0
) -> Iterator[State]:
    """Yields what the disk may hold after a power loss at a moment; some states may be equal.

    For `each` see `_subsets`; without it each write is torn only where few are not flushed.
    """
    pending = unflushed(operations, moment)
    without = {*pending}
    flushed = _disk(operations[:moment], Disk(), lambda index: index not in without)
    reachable = _reachable(flushed, [operations[index] for index in pending])
    pending = [index for index in pending if operations[index].touches() & reachable]
    # Everything before the first of them has reached the disk.
    first = min(pending, default=moment)
    base = _disk(operations[:first], Disk(), lambda index: True)
    later = operations[first:moment]
    rng = random.Random(f"{seed} {moment}")
    for why, chosen in _subsets(operations, pending, rng, each=each):
        dropped = {index - first for index in pending if index not in chosen}
        disk = _disk(later, base, lambda index, dropped=dropped: index not in dropped)
        yield State(moment, why, disk.tree())
    writes = [index for index in pending if operations[index].kind == "write"]
    torn = [*later]
    for index in writes:
        torn[index - first] = _zeros(operations[index])
    yield State(moment, "zeros for all content", _disk(torn, base, lambda index: True).tree())
    for index in writes if each or len(pending) <= MAX_EXHAUSTIVE else ():
        for part, changed in _torn(operations[index]):
            torn = [*later]
            torn[index - first] = changed
            why = f"{_described(operations[index])} torn: {part}"
            yield State(moment, why, _disk(torn, base, lambda index: True).tree())
