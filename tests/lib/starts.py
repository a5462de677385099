"""Starts a run from each state that a disk may hold after a power loss, and checks what it finds.

  python -m tests.lib.starts [--quick]

prints how many moments and states were examined, and what a start did not find. The run whose power
is lost is that of `saves`.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.errors import ConfigError
from tests.lib import power_loss, saves, strace
from tests.lib.saves import Expected
from tests.lib.strace import Operation, Tree

WORKDIR = "runs/w"  # in the recorded folder: the folders that a run creates are recorded too
CHECKPOINTS = f"{WORKDIR}/{find.FOLDER}/"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder, in memory where that is possible: thousands of states are written."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        yield Path(scratch)


def record(scratch: Path) -> list[Operation]:
    """Returns the operations of the run of `saves`."""
    disk = scratch / "recorded"
    disk.mkdir()
    marks = scratch / "marks"
    arguments = ["-m", saves.__name__, str(disk / WORKDIR), str(marks)]
    return strace.record(arguments, disk, marks)


class Examined(NamedTuple):
    num_moments: int
    num_states: int  # different ones
    num_starts: int  # of them with a run that starts and saves
    faults: list[str]


MAX_FAULTS = 20


def examine(
    operations: Sequence[Operation], scratch: Path, *, each: bool, started: float, seed: int = 0
) -> Examined:
    """Returns what was examined.

    For `each` see `power_loss`. `started` is the fraction of the kinds of states from which a run
    starts and saves; states of a kind hold folders of the same names.
    """
    faults: dict[str, str] = {}  # each with the first state that has it
    checker = Checker(scratch / "state")
    rng = random.Random(seed)
    num_states = num_started = 0
    moments = list(_moments(operations))
    states = _different(operations, moments, each=each, seed=seed)
    kinds = set()
    for state, expected in states:
        num_states += 1
        found = checker.faults(state.tree, expected)
        kind = (str(expected), *sorted(name for name in state.tree if name.count("/") < 4))
        if not found and kind not in kinds and rng.random() < started:
            num_started += 1
            found = start_and_save(state.tree, scratch / f"start-{num_started}")
        kinds.add(kind)
        for fault in found:
            faults.setdefault(fault, _place(operations, state))
        if len(faults) >= MAX_FAULTS:
            break
    lines = [f"{fault}: {place}" for fault, place in faults.items()]
    return Examined(len(moments), num_states, num_started, lines)


def _moments(operations: Sequence[Operation]) -> Iterator[tuple[int, Expected]]:
    """Yields each moment after the first mark, with what a start must find."""
    expected = None
    for moment, operation in enumerate(operations, 1):
        if operation.kind == "mark":
            expected = Expected(**json.loads(operation.data))
        if expected and not expected.is_damaged:
            yield moment, expected


def _different(
    operations: Sequence[Operation],
    moments: Sequence[tuple[int, Expected]],
    *,
    each: bool,
    seed: int,
) -> Iterator[tuple[power_loss.State, Expected]]:
    seen = set()
    for moment, expected in moments:
        for state in power_loss.states_at(operations, moment, each=each, seed=seed):
            key = (str(expected), frozenset(state.tree.items()))
            if key not in seen:
                seen.add(key)
                yield state, expected


def _place(operations: Sequence[Operation], state: power_loss.State) -> str:
    last = operations[state.moment - 1]
    what = f"{last.kind} {last.new_name or last.name}".strip()
    return f"power loss after operation {state.moment} ({what}), {state.why}"


# ---- one state ----


class Checker:
    """Checks states in a folder, in which it replaces what differs from the last one."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self._folder = folder
        self._shown: Tree = {}
        # What is read of a checkpoint depends on its files alone, so each is read once.
        self._manifests: dict[frozenset, Manifest | Exception] = {}
        self._arrays: dict[frozenset, list[str]] = {}

    def faults(self, tree: Tree, expected: Expected) -> list[str]:
        """Returns what a start does not find, or what it finds and must not."""
        self._show(tree)
        folder = self._folder / CHECKPOINTS
        check = manifest.check
        manifest.check = self._check
        try:
            newest, corrupt = find.to_resume(folder, {}, from_scratch=False)
        except ConfigError as error:
            return [f"no start: {error}"]
        finally:
            manifest.check = check
        faults = []
        resumed = [newest.step, newest.position] if newest else []
        if resumed not in expected.newest:
            faults.append(f"resumes from {resumed}, not from one of {expected.newest}")
        if new := {*corrupt} - {*expected.corrupt}:
            faults.append(f"corrupt: {[f'step {step}: {corrupt[step]}' for step in new]}")
        faults += self._faults_of_all(folder, expected)
        if newest:
            faults += self._array_faults(folder / str(newest.step), newest)
        return faults + self._table_faults(newest)

    def _faults_of_all(self, folder: Path, expected: Expected) -> list[str]:
        """Returns the faults of all folders that look like checkpoints, and of what is missing."""
        faults = []
        valid = []
        for step in find.steps(folder):
            try:
                saved = self._check(folder / str(step))
                valid.append([saved.step, saved.position])
            except CorruptCheckpoint as error:
                if step not in expected.corrupt:
                    faults.append(f"step {step} looks like a checkpoint, and is corrupt: {error}")
        faults += [f"lost: {one}" for one in expected.kept if one not in valid]
        for step in expected.quarantined:
            places = [folder / find.QUARANTINE / str(step)]
            if step in expected.corrupt:
                places.append(folder / str(step))
            if not any(any(path.iterdir()) for path in places if path.exists()):
                faults.append(f"step {step} was corrupt, and is lost")
        return faults

    def _check(self, directory: Path) -> Manifest:
        """Does what `manifest.check` does, once for the same files."""
        key = self._files(directory)
        if key not in self._manifests:
            try:
                self._manifests[key] = check_of_package(directory)
            except (CorruptCheckpoint, ConfigError) as error:
                self._manifests[key] = error
        found = self._manifests[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _array_faults(self, directory: Path, saved: Manifest) -> list[str]:
        key = self._files(directory)
        if key not in self._arrays:
            self._arrays[key] = array_faults(directory, saved)
        return self._arrays[key]

    def _files(self, directory: Path) -> frozenset:
        """Returns name and files of a checkpoint."""
        prefix = f"{directory.relative_to(self._folder).as_posix()}/"
        files = {name for name in self._shown if name.startswith(prefix)}
        return frozenset((name, self._shown[name]) for name in files)

    def _table_faults(self, newest: Manifest | None) -> list[str]:
        """Returns the faults of config.json, and of the rows up to the checkpoint."""
        faults = []
        configs = {}
        for name, content in self._shown.items():
            is_leftover = ".new/" in name  # of a start that was killed
            is_file = content is not None and name.endswith(".json")
            if is_file and not is_leftover and find.FOLDER not in name:
                try:
                    configs[name.removeprefix(f"{WORKDIR}/")] = json.loads(content)
                except ValueError:
                    faults.append(f"{name} is damaged: {content[:40]!r}")
        config = configs.get("config.json")
        if config == saves.SECOND_CONFIG and saves.FIRST_CONFIG not in configs.values():
            faults.append("the config of the first start is lost")
        rows = []
        for line in (self._shown.get(f"{WORKDIR}/metrics.jsonl") or b"").splitlines():
            try:
                rows.append(json.loads(line)["step"])
            except ValueError:  # a part of a row
                continue
        steps = newest.step if newest else 0
        if [step for step in rows if step < steps] != [*range(steps)]:
            faults.append(f"rows of the steps {rows} of {steps}")
        return faults

    def _show(self, tree: Tree) -> None:
        """Makes the folder hold the files of `tree`."""
        for name in sorted(self._shown.keys() - tree.keys(), reverse=True):
            path = self._folder / name
            path.rmdir() if self._shown[name] is None else path.unlink()
        for name in sorted(tree):
            if name in self._shown and self._shown[name] == tree[name]:
                continue
            write(self._folder / name, tree[name])
        self._shown = tree


check_of_package = manifest.check


def write(path: Path, content: bytes | None) -> None:
    """Writes a file, or a folder if the content is None."""
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def array_faults(directory: Path, saved: Manifest) -> list[str]:
    """Returns a fault unless the arrays are those of the state that was saved, bit for bit."""
    expected = saves.arrays_of(saved.step, int(saved.metrics["saved_position"]))
    try:
        manifest.verify(directory)
        found = arrays.as_numpy(directory)
    except (CorruptCheckpoint, ConfigError) as error:
        return [f"{directory.name}: {error}"]
    same = found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )
    return [] if same else [f"{directory.name}: the arrays differ from those that were saved"]


NEXT_STEP = 30


def start_and_save(tree: Tree, folder: Path) -> list[str]:
    """Starts a run from a state, and saves; returns a fault unless the new checkpoint is found."""
    for name in sorted(tree):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, tree[name])
    place = folder / WORKDIR
    try:
        with saves.opened(place) as run:
            run.start(saves.SECOND_CONFIG)
            run.save(NEXT_STEP, 480)
        newest, corrupt = find.newest_valid(place / find.FOLDER)
        leftovers = [*(place / find.FOLDER).glob(f"*{manifest.PARTIAL}")]
        if newest is None or newest.step != NEXT_STEP or corrupt or leftovers:
            return [f"after the next save: {newest and newest.step}, {corrupt}, {leftovers}"]
        return array_faults(place / find.FOLDER / str(NEXT_STEP), newest)
    except (ConfigError, OSError) as error:
        return [f"the next run fails: {error}"]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="what the default tests examine")
    args = parser.parse_args()
    began = time.monotonic()
    with scratch_folder() as scratch:
        operations = record(scratch)
        print(f"{len(operations)} operations in {time.monotonic() - began:.0f} s")
        examined = examine(operations, scratch, **(QUICK if args.quick else FULL))
    print(
        f"{examined.num_moments} moments, {examined.num_states:,} states, "
        f"{examined.num_starts} runs started, {len(examined.faults)} faults "
        f"in {time.monotonic() - began:.0f} s"
    )
    print("\n".join(examined.faults))


QUICK = dict(each=False, started=0.05)
FULL = dict(each=True, started=1.0)

if __name__ == "__main__":
    main()
