"""A run that saves, removes, quarantines and rolls back tiny checkpoints; it trains nothing.

  python -m tests.lib.saves WORKDIR MARKS

Opens a workdir as `run.open_run` does. Before and after each change it appends to MARKS what a
start must find from then on, as JSON. `Expected` describes it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import storage
from meshtrain.checkpoint import arrays, find, lock, manifest, run_tokenizer
from meshtrain.checkpoint.saver import Saver
from meshtrain.cli import app
from meshtrain.config.schema import CheckpointConfig
from meshtrain.data import tokenizer
from meshtrain.models import trees
from meshtrain.monitor.writer import Writer
from meshtrain.state import TrainState

KEEP_LAST = 2
FIRST_CONFIG, SECOND_CONFIG = {"train": {"steps": 1}}, {"train": {"steps": 2}}


@dataclass
class Expected:
    """What a start must find; a checkpoint is its step and the position of its data."""

    newest: list[list[int]]  # one of these is what the run resumes from
    kept: list[list[int]]  # all of these are there and valid
    corrupt: list[int]  # steps that may be there and corrupt
    quarantined: list[int]  # steps that are in quarantine, or still to be moved there
    is_damaged: bool = False  # the disk is damaged until the next mark: no power loss there


def state(step: int, position: int) -> TrainState:
    """Returns the state of a step; each element says which one it is."""
    w = jnp.arange(12.0).reshape(3, 4) + 100 * step + position / 128
    return TrainState(jnp.int32(step), {"b": 2 * w[0], "w": w}, ())


def flat(state: TrainState) -> dict[str, np.ndarray]:
    """Returns the arrays of a state by path, as `arrays.as_numpy` does those of its checkpoint."""
    leaves = jax.tree.leaves_with_path(arrays.fields(state))
    return {trees.name_of(path): np.asarray(leaf) for path, leaf in leaves}


def settings(**changed) -> CheckpointConfig:
    values = dict(every=1, every_minutes=0.0, keep_last=KEEP_LAST, keep_every=0, keep_best=0)
    values |= dict(best_by="eval_loss", allow_cast=False, allow_change="", init_from="")
    return CheckpointConfig(**{**values, "init_only": "*", **changed})


class Run:
    """A run that has its workdir open; `start` finds its newest checkpoint."""

    def __init__(self, workdir: storage.Workdir, confirm_lock, **changed):
        self.workdir = workdir
        self.writer = Writer(workdir, leader=True)
        self.saver = Saver(
            workdir,
            settings(**changed),
            config={"checkpoint": {}},
            mesh={},
            identity={},
            event=self.writer.event,
            log=lambda text: None,
            sync=self.writer.sync,
            confirm_lock=confirm_lock,
        )

    def start(self, config: dict) -> manifest.Manifest | None:
        """Returns the checkpoint that the run resumes from, after reading its state."""
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state(0, 0),
        )
        self.saver.prepare(abstract)
        saved, self.state = self.saver.restore(abstract)
        self.writer.write_config(config)
        self.writer._remove_rows_from(saved.step if saved else 0)
        self.writer.event("start", step=saved.step if saved else 0)
        return saved

    def save(self, step: int, position: int, **metrics: float) -> None:
        """Takes the steps up to `step`, and saves the state."""
        path = self.workdir.folder / "metrics.jsonl"
        for row in range(num_rows(path), step):
            storage.append_lines(path, [json.dumps({"step": row, "loss": 1.0}) + "\n"])
        fields = dict(metrics={"saved_position": position, **metrics}, loss_statistics={})
        self.saver.save(step, state(step, position), position=position, **fields)
        self.saver.wait_for_newest()


def num_rows(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextlib.contextmanager
def opened(place: str | Path, **changed):
    """Yields a run that holds the lock of its workdir."""
    workdir = storage.open_workdir(place)
    with lock.held(workdir) as confirm_lock:
        run = Run(workdir, confirm_lock, **changed)
        with contextlib.closing(run.saver):
            yield run


class Story:
    """What a run does in a workdir, and what has been promised so far; `say` gets the marks."""

    def __init__(self, place: str | Path, say: Callable[[bytes], Any]):
        self._place = place
        self._say = say
        self.kept: list[list[int]] = []  # the newest last
        self.corrupt: list[int] = []
        self.quarantined: list[int] = []

    def mark(self, *alternatives: list[list[int]], is_damaged: bool = False) -> None:
        """Promises `kept`, or one of the alternatives while a change is made."""
        choices = [self.kept, *alternatives]
        newest = [kept[-1] if kept else [] for kept in choices]
        certain = [one for one in self.kept if all(one in other for other in choices)]
        expected = Expected(newest, certain, self.corrupt, self.quarantined, is_damaged)
        self._say(json.dumps(asdict(expected)).encode() + b"\n")

    @contextlib.contextmanager
    def changing(self, kept: list[list[int]]) -> Iterator[None]:
        """Promises `kept` when the context ends; until then the old ones or these."""
        self.mark(kept)
        yield
        self.kept = kept
        self.mark()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Promises each checkpoint when it is committed; retention may remove others then."""
        commit = manifest.commit

        def committed(folder, step, **fields):
            saved = commit(folder, step, **fields)
            others = [one for one in self.kept if one[0] != step]
            self.kept = [*others, [step, saved.position]][-KEEP_LAST:]
            self.corrupt = [one for one in self.corrupt if one != step]
            self.mark()
            return saved

        self.mark()
        manifest.commit = committed
        try:
            yield
        finally:
            manifest.commit = commit

    def save(self, run: Run, step: int, position: int) -> None:
        self.mark([*self.kept, [step, position]])
        run.save(step, position)

    def first_run(self) -> None:
        """Saves three times, evaluates, and rolls back."""
        with opened(self._place) as run:
            run.start(FIRST_CONFIG)
            sources = {"data": {}, "checkpoint": {}}
            run_tokenizer.copy_tokenizer(run.workdir.folder, sources, tokenizer.BYTES)
            self.save(run, 2, 16)
            self.save(run, 4, 32)
            self.save(run, 6, 48)  # retention removes step 2
            # An evaluation adds its metrics to the newest checkpoint.
            run.saver.add_metrics(6, {"eval_loss": 0.5})
            # A rollback: the checkpoint continues at another sample.
            with self.changing([*self.kept[:-1], [6, 80]]):
                saved = run.saver.recover()
                run.saver.record_rollback(saved, 80, {}, tokens=1)

    def second_run(self, disturb: Callable[[], None] = lambda: None) -> None:
        """Quarantines step 6, and saves it again; calls `disturb`; then a save fails."""
        with opened(self._place) as run:
            run.start(SECOND_CONFIG)
            self.save(run, 6, 96)
            disturb()
            self.save(run, 8, 112)
            fail(run, 10)
            self.save(run, 12, 144)

    @contextlib.contextmanager
    def damage(self, step: int) -> Iterator[None]:
        """Makes a checkpoint corrupt; until the context ends, nothing is promised."""
        self.mark(is_damaged=True)
        yield
        self.kept = [one for one in self.kept if one[0] != step]
        self.corrupt = [*self.corrupt, step]
        self.quarantined = [*self.quarantined, step]
        self.mark()

    def prune(self) -> None:
        """Removes all checkpoints but the newest."""
        with self.changing(self.kept[-1:]):
            assert app.main("checkpoint", ["prune", str(self._place), "--keep=1"]) == 0


def fail(run: Run, step: int) -> None:
    """Makes a save fail after its arrays are written."""
    wait = run.saver._arrays.wait

    def failing():
        wait()
        raise OSError(28, "No space left on device")

    run.saver._arrays.wait = failing
    run.save(step, 120)
    run.saver._arrays.wait = wait


def main(place: Path, marks: Path) -> None:
    checkpoints = place / find.FOLDER

    def flush() -> None:
        for path in (*checkpoints.rglob("*"), checkpoints):
            storage.sync(path)

    def disturb() -> None:
        """Puts a folder where the next checkpoint is to be."""
        with story.damage(8):
            (checkpoints / "8").mkdir()
            (checkpoints / "8" / "note").write_text("of the user")
            flush()

    with open(marks, "ab", buffering=0) as file:
        story = Story(place, file.write)
        with story.told():
            story.first_run()
            (checkpoints / "8.partial").mkdir()
            (checkpoints / "8.partial" / "arrays").write_bytes(b"of a save that was killed")
            with story.damage(6):
                path = checkpoints / "6" / manifest.NAME
                path.write_bytes(path.read_bytes()[:-9])
                flush()
            story.second_run(disturb)
            story.prune()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
