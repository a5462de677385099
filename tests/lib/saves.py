"""A run that saves, removes, quarantines and rolls back tiny checkpoints; it trains nothing.

  python -m tests.lib.saves WORKDIR MARKS

Opens a workdir as `run.open_run` does. Before and after each change it appends to MARKS what a
start must find from then on, as JSON. `Expected` describes it.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import storage
from meshtrain.checkpoint import find, lock, manifest, run_tokenizer
from meshtrain.checkpoint.saver import Saver
from meshtrain.cli import app
from meshtrain.config.schema import CheckpointConfig
from meshtrain.data import tokenizer
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


def arrays_of(step: int, position: int) -> dict[str, np.ndarray]:
    """Returns the arrays of the checkpoint of a state, by path."""
    one = state(step, position)
    w = {f"params/{name}": np.asarray(leaf) for name, leaf in one.params.items()}
    return {"step": np.asarray(one.step), **w}


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
def opened(place: Path, **changed):
    """Yields a run that holds the lock of its workdir."""
    workdir = storage.open_workdir(place)
    with lock.held(workdir) as confirm_lock:
        run = Run(workdir, confirm_lock, **changed)
        with contextlib.closing(run.saver):
            yield run


class Story:
    """What has been promised so far; the scenario tells it, and it writes the marks."""

    def __init__(self, marks: Path):
        self._marks = open(marks, "ab", buffering=0)
        self.kept: list[list[int]] = []  # the newest last
        self.corrupt: list[int] = []
        self.quarantined: list[int] = []

    def mark(self, *alternatives: list[list[int]], is_damaged: bool = False) -> None:
        """Promises `kept`, or one of the alternatives while a change is made."""
        choices = [self.kept, *alternatives]
        newest = [kept[-1] if kept else [] for kept in choices]
        certain = [one for one in self.kept if all(one in other for other in choices)]
        expected = Expected(newest, certain, self.corrupt, self.quarantined, is_damaged)
        self._marks.write(json.dumps(asdict(expected)).encode() + b"\n")


def main(place: Path, marks: Path) -> None:
    story = Story(marks)
    commit = manifest.commit

    def committed(folder, step, **fields):
        """Commits, and promises the checkpoint; those that retention does not keep may go."""
        saved = commit(folder, step, **fields)
        others = [one for one in story.kept if one[0] != step]
        story.kept = [*others, [step, saved.position]][-KEEP_LAST:]
        story.corrupt = [one for one in story.corrupt if one != step]
        story.mark()
        return saved

    manifest.commit = committed

    def save(run: Run, step: int, position: int, **metrics) -> None:
        story.mark([*story.kept, [step, position]])
        run.save(step, position, **metrics)

    @contextlib.contextmanager
    def damage(step: int) -> Iterator[Path]:
        """Yields the folder of a checkpoint, for a change that no run makes."""
        story.mark(is_damaged=True)
        folder = place / find.FOLDER / str(step)
        yield folder
        for path in (*folder.rglob("*"), folder, folder.parent):
            storage.sync(path)
        story.kept = [one for one in story.kept if one[0] != step]
        story.corrupt = [*story.corrupt, step]
        story.quarantined = [*story.quarantined, step]
        story.mark()

    story.mark()
    with opened(place) as run:
        run.start(FIRST_CONFIG)
        sources = {"data": {}, "checkpoint": {}}
        run_tokenizer.copy_tokenizer(place, sources, tokenizer.BYTES)
        save(run, 2, 16)
        save(run, 4, 32)
        save(run, 6, 48)  # retention removes step 2
        # An evaluation adds its metrics to the newest checkpoint.
        run.saver.add_metrics(6, {"eval_loss": 0.5})
        # A rollback: the checkpoint continues at another sample.
        rolled_back = [*story.kept[:-1], [6, 80]]
        story.mark(rolled_back)
        saved = run.saver.recover()
        run.saver.record_rollback(saved, 80, {}, tokens=1)
        story.kept = rolled_back
        story.mark()
    (place / find.FOLDER / "8.partial").mkdir()
    (place / find.FOLDER / "8.partial" / "arrays").write_bytes(b"of a save that was killed")
    with damage(6) as folder:
        (folder / manifest.NAME).write_bytes((folder / manifest.NAME).read_bytes()[:-9])
    # The next start has another config, and quarantines the corrupt checkpoint.
    with opened(place) as run:
        run.start(SECOND_CONFIG)
        # The same step again, with other data; then one that appeared during the run.
        save(run, 6, 96)
        with damage(8) as folder:
            folder.mkdir()
            (folder / "note").write_text("of the user")
        save(run, 8, 112)
        # A save that fails, and the next one.
        with_fault(run, 10)
        save(run, 12, 144)
    # `checkpoint prune` removes all but the newest.
    pruned = story.kept[-1:]
    story.mark(pruned)
    assert app.main("checkpoint", ["prune", str(place), "--keep=1"]) == 0
    story.kept = pruned
    story.mark()


def with_fault(run: Run, step: int) -> None:
    """Makes a save fail after its arrays are written."""
    wait = run.saver._arrays.wait

    def failing():
        wait()
        raise OSError(28, "No space left on device")

    run.saver._arrays.wait = failing
    run.save(step, 120)
    run.saver._arrays.wait = wait


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
