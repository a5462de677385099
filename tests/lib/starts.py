"""Starts a run from each state that a disk may hold after a power loss, and checks what it finds.

  python -m tests.lib.starts [--quick]

prints how many moments and states were examined, and what a start did not find. The run whose power
is lost is that of `saves`, in a folder and on an object store. A store loses nothing of what it has
confirmed; of the requests that were on their way, any subset may have arrived.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from meshtrain import object_store
from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.errors import ConfigError
from tests.lib import power_loss, s3_server, saves, strace
from tests.lib.s3_server import Store
from tests.lib.saves import Expected, Story
from tests.lib.strace import Operation, Tree

WORKDIR = "runs/w"  # in the recorded folder: the folders that a run creates are recorded too
URL = f"s3://bucket/{WORKDIR}"


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


def examine_disk(
    operations: Sequence[Operation], scratch: Path, *, each: bool, start_every: int, seed: int = 0
) -> Examined:
    """Returns what was examined in a folder; for `each` see `power_loss`, for others `_examine`."""
    moments = list(_moments([one.data if one.kind == "mark" else None for one in operations]))

    def states() -> Iterator[tuple[power_loss.State, Expected]]:
        for moment, expected in moments:
            for state in power_loss.states_at(operations, moment, each=each, seed=seed):
                yield state, expected

    def describe(state: power_loss.State) -> str:
        last = operations[state.moment - 1]
        what = f"{last.kind} {last.new_name or last.name}".strip()
        return f"power loss after operation {state.moment} ({what}), {state.why}"

    def start(tree: Tree, expected: Expected, number: int) -> list[str]:
        folder = scratch / f"start-{number}"
        for name in sorted(tree):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, tree[name])
        found = start_and_save(folder / WORKDIR, expected, lambda: folder / WORKDIR)
        shutil.rmtree(folder)
        return found

    checker = Checker(ShownFolder(scratch / "state"))
    return _examine(states(), checker, start, describe, len(moments), start_every=start_every)


def examine_store(server: Store, *, each: bool, start_every: int) -> Examined:
    """Returns what was examined on a store, after a run of `saves` there.

    Without `each`, requests on their way arrive only one alone, or not. For others see `_examine`.
    """
    changes = [*server.changes]
    moments = list(_moments([None if one.name else one.data for one in changes]))

    def states() -> Iterator[tuple[power_loss.State, Expected]]:
        objects: Tree = {}
        expected_at = dict(moments)
        for moment, change in enumerate(changes, 1):
            s3_server.apply(objects, change)
            if moment not in expected_at:
                continue
            coming = [one for one in changes[moment:] if one.name and one.began <= moment]
            limit = len(coming) if each and len(coming) <= MAX_EXHAUSTIVE else 1
            for size in range(limit + 1):
                for chosen in itertools.combinations(coming, size):
                    tree = dict(objects)
                    for one in chosen:
                        s3_server.apply(tree, one)
                    why = f"and {[one.name for one in chosen]}"
                    yield power_loss.State(moment, why, tree), expected_at[moment]

    def describe(state: power_loss.State) -> str:
        last = changes[state.moment - 1]
        what = "removal" if last.data is None else "write"
        return f"crash after change {state.moment} ({what} of {last.name}) {state.why}"

    def download() -> Path:
        new_host()
        return find.download_metadata(Path(URL))

    def show(tree: Tree) -> Path:
        server.objects = dict(tree)
        if not tree:  # before the run has written anything
            new_host()
            return object_store.scratch_folder(URL)
        return download()

    def start(tree: Tree, expected: Expected, number: int) -> list[str]:
        server.objects = dict(tree)
        new_host()
        return start_and_save(URL, expected, download)

    checker = Checker(show)
    with _read_directly(server):
        return _examine(states(), checker, start, describe, len(moments), start_every=start_every)


@contextlib.contextmanager
def _read_directly(server: Store) -> Iterator[None]:
    """Lists and downloads the objects of a server without its protocol, which takes a while."""

    def prefix(folder: Path) -> str:
        return f"{object_store.url(folder).removeprefix('s3://bucket/')}/"

    def names(folder: Path) -> list[str]:
        start = prefix(folder)
        return sorted(name.removeprefix(start) for name in server.objects if name.startswith(start))

    def read_all(folder: Path, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        found = ((key, server.objects.get(prefix(folder) + key)) for key in keys)
        yield from ((key, data) for key, data in found if data is not None)

    with (
        mock.patch.object(object_store, "names", names),
        mock.patch.object(object_store, "_read_all", read_all),
    ):
        yield


MAX_EXHAUSTIVE = 6  # requests on their way of which all subsets may have arrived


def new_host() -> None:
    """Makes this process one that has nothing of a store's workdirs."""
    object_store.release_lease()
    if object_store.root.cache_info().currsize:
        shutil.rmtree(object_store.root(), ignore_errors=True)
    object_store.root.cache_clear()
    object_store._pushed.clear()


def _examine(
    states: Iterable[tuple[power_loss.State, Expected]],
    checker: "Checker",
    start: Callable[[Tree, Expected, int], list[str]],
    describe: Callable[[power_loss.State], str],
    num_moments: int,
    *,
    start_every: int,
) -> Examined:
    """Returns what was examined.

    From a state of every `start_every`-th kind, `start` starts a run and saves; states of a kind
    hold folders of the same names.
    """
    faults: dict[str, str] = {}  # each with the first state that has it
    num_states = num_started = 0
    kinds = set()
    seen = set()
    for state, expected in states:
        key = (str(expected), frozenset(state.tree.items()))
        if key in seen:
            continue
        seen.add(key)
        num_states += 1
        found = checker.faults(state.tree, expected)
        kind = (str(expected), *sorted({"/".join(name.split("/")[:4]) for name in state.tree}))
        if not found and kind not in kinds and len(kinds) % start_every == 0:
            num_started += 1
            found = start(state.tree, expected, num_started)
        kinds.add(kind)
        for fault in found:
            faults.setdefault(fault, describe(state))
        if len(faults) >= MAX_FAULTS:
            break
    lines = [f"{fault}: {place}" for fault, place in faults.items()]
    return Examined(num_moments, num_states, num_started, lines)


def _moments(marks: Sequence[bytes | None]) -> Iterator[tuple[int, Expected]]:
    """Yields each moment after the first mark, with what a start must find."""
    expected = None
    for moment, mark in enumerate(marks, 1):
        if mark is not None:
            expected = Expected(**json.loads(mark))
        if expected and not expected.is_damaged:
            yield moment, expected


# ---- one state ----


class Checker:
    """Checks states, which `show` makes those of a workdir: it returns its folder."""

    def __init__(self, show: Callable[[Tree], Path]):
        self._show = show
        self._workdir = Path()
        self._shown: Tree = {}  # of the workdir
        # What is read of a checkpoint depends on its files alone, so each is read once.
        self._manifests: dict[frozenset, Manifest | Exception] = {}
        self._arrays: dict[frozenset, list[str]] = {}

    def faults(self, tree: Tree, expected: Expected) -> list[str]:
        """Returns what a start does not find, or what it finds and must not."""
        prefix = f"{WORKDIR}/"
        self._shown = {
            name.removeprefix(prefix): content
            for name, content in tree.items()
            if name.startswith(prefix)
        }
        self._workdir = self._show(tree)
        folder = self._workdir / find.FOLDER
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
        prefix = f"{directory.relative_to(self._workdir).as_posix()}/"
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
                    configs[name] = json.loads(content)
                except ValueError:
                    faults.append(f"{name} is damaged: {content[:40]!r}")
        config = configs.get("config.json")
        if config == saves.SECOND_CONFIG and saves.FIRST_CONFIG not in configs.values():
            faults.append("the config of the first start is lost")
        rows = []
        for line in (self._shown.get("metrics.jsonl") or b"").splitlines():
            try:
                rows.append(json.loads(line)["step"])
            except ValueError:  # a part of a row
                continue
        steps = newest.step if newest else 0
        if [step for step in rows if step < steps] != [*range(steps)]:
            faults.append(f"rows of the steps {rows} of {steps}")
        return faults


class ShownFolder:
    """Shows states in a folder, in which it replaces what differs from the last one."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self._folder = folder
        self._shown: Tree = {}

    def __call__(self, tree: Tree) -> Path:
        for name in sorted(self._shown.keys() - tree.keys(), reverse=True):
            path = self._folder / name
            path.rmdir() if self._shown[name] is None else path.unlink()
        for name in sorted(tree):
            if name not in self._shown or self._shown[name] != tree[name]:
                write(self._folder / name, tree[name])
        self._shown = tree
        return self._folder / WORKDIR


check_of_package = manifest.check


def write(path: Path, content: bytes | None) -> None:
    """Writes a file, or a folder if the content is None."""
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def array_faults(directory: Path, saved: Manifest) -> list[str]:
    """Returns a fault unless the arrays are those of the state that was saved, bit for bit."""
    try:
        manifest.verify(directory)
        found = arrays.as_numpy(directory)
    except (CorruptCheckpoint, ConfigError) as error:
        return [f"{directory.name}: {error}"]
    if has_arrays(found, saved):
        return []
    return [f"{directory.name}: the arrays differ from those that were saved"]


def has_arrays(found: Mapping[str, np.ndarray], saved: Manifest) -> bool:
    """Returns whether the arrays are those of the state that was saved as this checkpoint."""
    expected = saves.flat(saves.state(saved.step, int(saved.metrics["saved_position"])))
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


NEXT_STEP = 30


def start_and_save(place: str | Path, expected: Expected, found: Callable[[], Path]) -> list[str]:
    """Starts a run and saves; returns what is wrong with its state, or with the checkpoints then.

    `found` returns the folder of the workdir as another process finds it.
    """
    try:
        with saves.opened(place) as run:
            saved = run.start(saves.SECOND_CONFIG)
            if ([saved.step, saved.position] if saved else []) not in expected.newest:
                return [f"a run starts from {saved and saved.step}, not from {expected.newest}"]
            if saved and not has_arrays(saves.flat(run.state), saved):
                return [f"a run starts with another state than that of step {saved.step}"]
            run.save(NEXT_STEP, 480)
        folder = found() / find.FOLDER
        newest, corrupt = find.newest_valid(folder)
        leftovers = [*folder.glob(f"*{manifest.PARTIAL}")]
        if newest is None or newest.step != NEXT_STEP or corrupt or leftovers:
            return [f"after the next save: {newest and newest.step}, {corrupt}, {leftovers}"]
        before = [manifest.verify(folder / str(saved.step))] if saved else []
        faults = [array_faults(folder / str(one.step), one) for one in (*before, newest)]
        return [*itertools.chain(*faults)]
    except (CorruptCheckpoint, ConfigError, OSError) as error:
        return [f"the next run fails: {error}"]


# ---- both kinds of workdir ----


def record_store(server: Store) -> None:
    """Makes the run of `saves` on a store, which records it; sets what clients find it by."""
    new_host()
    story = Story(URL, server.mark)
    with story.told():
        story.first_run()
        new_host()
        with story.damage(6):
            path = object_store.scratch_folder(URL) / find.FOLDER / "6" / manifest.NAME
            data, _ = object_store.read(path)
            assert data
            object_store.write(path, data[:-9])
        story.second_run()
        new_host()
        story.prune()


@contextlib.contextmanager
def store() -> Iterator[Store]:
    """Yields a running store, which the client of this process finds."""
    with scratch_folder() as scratch, s3_server.running() as server:
        variables = {
            object_store.VARIABLE: str(scratch / "host"),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.address,
        }
        with mock.patch.dict(os.environ, variables):
            object_store.root.cache_clear()
            try:
                yield server
            finally:
                new_host()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="what the default tests examine")
    parser.add_argument("--only", choices=("disk", "store"))
    args = parser.parse_args()
    thoroughness = QUICK if args.quick else FULL

    def report(what: str, began: float, num_changes: int, examined: Examined) -> None:
        print(
            f"{what}: {num_changes} operations, {examined.num_moments} moments, "
            f"{examined.num_states:,} states, {examined.num_starts} runs started and saved, "
            f"{len(examined.faults)} faults, in {time.monotonic() - began:.0f} s",
            *examined.faults,
            sep="\n  ",
        )

    if args.only != "store":
        began = time.monotonic()
        with scratch_folder() as scratch:
            operations = record(scratch)
            examined = examine_disk(operations, scratch, **thoroughness)
        report("disk", began, len(operations), examined)
    if args.only != "disk":
        began = time.monotonic()
        with store() as server:
            record_store(server)
            num_changes = len(server.changes)
            examined = examine_store(server, **thoroughness)
        report("object store", began, num_changes, examined)


QUICK = dict(each=False, start_every=20)
FULL = dict(each=True, start_every=1)

if __name__ == "__main__":
    main()
