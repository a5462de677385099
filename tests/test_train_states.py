"""The loop of a run as a state machine: spikes, skips, saves, stops, crashes, and their mixtures.

The real loop, monitor of losses, writer and saver run with a program in numpy, whose state holds
the batches that it has seen; `tests/lib/run_states.py` is what the pages promise.
"""

import builtins
import contextlib
import errno
import os
import shutil
import tempfile
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)

from meshtrain import console
from meshtrain import state as states
from meshtrain import train as trainer
from meshtrain.checkpoint import find, manifest, saver
from meshtrain.cluster import progress
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.monitor import divergence, health
from meshtrain.monitor.divergence import LossMonitor
from meshtrain.monitor.writer import Units, Writer
from meshtrain.run import Run
from meshtrain.storage import open_workdir
from meshtrain.train import Result
from tests.lib import run_states
from tests.lib.configs import tiny_config
from tests.lib.machines import run_machine
from tests.lib.rows import rows
from tests.lib.run_states import BATCH, NUM_BATCHES, Batch, PromisedRun, Settings, Start, State

NOTHING = -1  # after the last batch of a list


class Killed(BaseException):
    """The end of a process by SIGKILL: nothing runs after it."""


class DataError(Exception):
    """The data cannot be read."""


# ---- a program in numpy ----


class Array(np.ndarray):
    """An array of a state: it is ready at once, and unusable after `delete`."""

    def is_ready(self) -> bool:
        return True

    def delete(self) -> None:
        self[...] = -99


def array(values, dtype):
    return np.array(values, dtype).view(Array)


def padded(numbers):
    return array([*numbers, *[NOTHING] * (NUM_BATCHES - len(numbers))], np.int32)


def to_arrays(state: State, *, float16: bool) -> states.TrainState:
    """Returns a state as the trainer has it."""
    scale = states.LossScale(array(state.scale, np.float32), array(0, np.int32))
    return states.TrainState(
        step=array(state.step, np.int32),
        params={"applied": padded(state.applied)},
        opt_state={"num_updates": array(len(state.applied), np.int32)},
        loss_scale=scale if float16 else None,
        residual={"seen": padded(state.seen)},
    )


def numbers(values):
    return tuple(values[values != NOTHING].tolist())


def from_arrays(state: states.TrainState) -> State:
    """Returns what a state of the trainer says; its parts must agree."""
    seen, applied = numbers(state.residual["seen"]), numbers(state.params["applied"])
    assert int(state.step) == len(seen)
    assert int(state.opt_state["num_updates"]) == len(applied)
    scale = run_states.FIRST_SCALE if state.loss_scale is None else float(state.loss_scale.scale)
    return State(seen, applied, scale)


def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


class FileWriter:
    """Stands in for Orbax: writes a state to one file."""

    def __init__(self, start: "RealStart"):
        self.start = start

    def save(self, folder, tree):
        self.start.num_saves += 1
        if self.start.num_saves in self.start.plan.failing_saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        folder.mkdir()
        with open(folder / "_METADATA", "wb") as file:
            np.savez(
                file, **{jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(tree)}
            )
        (folder / "manifest.ocdbt").touch()

    def wait(self):
        pass

    def close(self):
        pass


def read_state(directory, *, float16):
    template = saver.arrays.fields(to_arrays(State(), float16=float16))
    with np.load(directory / "arrays" / "_METADATA") as file:
        leaves = {path: leaf.view(Array) for path, leaf in file.items()}
    tree = jax.tree.map_with_path(lambda path, leaf: leaves[jax.tree_util.keystr(path)], template)
    return states.TrainState(**tree)


class Commit:
    """Stands in for the thread of a commit: runs at once, or when it is waited for."""

    def __init__(self, start: "RealStart", target, args, name):
        self.target, self.args, self.is_slow = target, args, start.plan.slow_saves
        self.has_run = False

    def start(self):
        if not self.is_slow:
            self.join()

    def join(self):
        if not self.has_run:
            self.has_run = True
            self.target(*self.args)

    def is_alive(self):
        return not self.has_run


class Loader:
    """Batches by number."""

    num_samples = BATCH

    def __init__(self, position, fails_at):
        self.position, self.fails_at = position, fails_at

    def peek(self):
        return self.position // BATCH

    def __next__(self):
        if self.peek() == self.fails_at:
            raise DataError
        self.position += BATCH
        return self.position // BATCH - 1


class ReplicaCheck(health.ReplicaCheck):
    """Compares no replicas, but says when it would."""

    def __init__(self, start, every):
        self.start, self._every, self.checked = start, every, []

    def run(self, step, state):
        if len(self.checked) + 1 == self.start.plan.differs_at_check:
            raise health.CorruptState("replicas differ")
        assert from_arrays(state).step == step
        self.checked.append(step)


class RealStart:
    """A start of a run, with everything that happens to it."""

    def __init__(self, folder, config, promised, plan, monkeypatch):
        self.folder, self.settings, self.plan = folder, promised.settings, plan
        self.batch = promised.batch
        self.checkpoints = folder / find.FOLDER
        self.num_steps = self.num_saves = self.num_evaluations = 0
        self.now = 0.0
        self.is_stopping = plan.stop_before
        self.replica_check = ReplicaCheck(self, self.settings.health_every)
        s = self.settings
        self.cfg = replace(
            config,
            train=replace(config.train, steps=plan.steps),
            eval=replace(config.eval, every=s.eval_every),
            checkpoint=replace(
                config.checkpoint,
                every=s.every,
                keep_last=s.keep_last,
                keep_every=s.keep_every,
                keep_best=s.keep_best,
                best_by=s.best_by,
            ),
            divergence=divergence.DivergenceConfig(s.max_skips, 8.0, s.rollback),
        )
        time = types.SimpleNamespace(
            monotonic=lambda: self.now,
            perf_counter=lambda: self.now,
            time=lambda: 1e9,
            sleep=lambda seconds: None,
        )
        commit = manifest.commit
        for module, name, value in [
            (divergence, "WARMUP_STEPS", run_states.WARM_UP),
            (saver, "time", time),
            (saver, "threading", types.SimpleNamespace(Thread=partial(Commit, self))),
            (saver.arrays, "restore", self.restore),
            (saver, "AsyncWriter", lambda barriers: FileWriter(self)),
            (saver.distributed, "versions", dict),
            (saver.resume, "check", lambda *args, **fields: {}),
            (manifest, "_chunk_checksums", lambda directory, shapes: dict.fromkeys(shapes, {})),
            (manifest, "ThreadPoolExecutor", lambda count: contextlib.nullcontext(builtins)),
            (manifest, "commit", lambda *args, **fields: self.commit(commit, *args, **fields)),
            (os, "fsync", lambda handle: None),
            (console, "say", lambda line, **options: None),
        ]:
            monkeypatch.setattr(module, name, value)

    def commit(self, commit, *args, **fields):
        is_killed = self.num_saves == self.plan.kill_in_save
        if is_killed and not self.plan.is_killed_after_commit:
            raise Killed
        found = commit(*args, **fields)
        if is_killed:
            raise Killed
        return found

    def restore(self, directory, saved, abstract, **options):
        return read_state(directory, float16=self.settings.float16)

    def step(self, state, batch):
        self.num_steps += 1
        if self.num_steps == self.plan.kill_in_step:
            raise Killed
        self.now += 1.0
        if self.num_steps == self.plan.damage_in_step and (found := find.steps(self.checkpoints)):
            os.truncate(self.checkpoints / str(found[0]) / "arrays" / "_METADATA", 10)
        if self.num_steps == self.plan.stop_in_step:
            self.is_stopping = True
        before, kind = from_arrays(state), self.batch(batch)
        is_skipped = kind.is_skipped()
        after = State(
            seen=(*before.seen, batch),
            applied=before.applied if is_skipped else (*before.applied, batch),
            scale=before.scale / (2 if is_skipped and self.settings.float16 else 1),
        )
        report = {
            "loss": array(kind.loss(batch), np.float64),
            "grad_norm": array(np.nan if is_skipped else 1.0, np.float64),
            "learning_rate": array(0.1, np.float64),
            "skipped": array(is_skipped, np.int32),
        }
        if self.settings.float16:
            report["loss_scale"] = array(before.scale, np.float64)
        new_state = to_arrays(after, float16=self.settings.float16)
        jax.tree.map(lambda leaf: leaf.delete(), state)  # a step is given the buffers of its state
        return new_state, report

    def evaluate(self, state):
        self.num_evaluations += 1
        if self.num_evaluations == self.plan.stop_in_evaluation:
            self.is_stopping = True
            if self.plan.is_evaluation_cut:
                return None
        return {"eval_loss": run_states.eval_loss(from_arrays(state))}

    def open(self, stack):
        """Returns a run as `open_run` does, and its first state."""
        workdir = open_workdir(self.folder)
        writer = Writer(workdir, leader=True)
        stack.callback(writer.close)
        clock = stack.enter_context(contextlib.closing(progress.Clock()))
        own_saver = saver.Saver(
            workdir,
            self.cfg.checkpoint,
            config={"checkpoint": {}},
            mesh={},
            identity={},
            event=writer.event,
            log=writer.log,
            sync=writer.sync,
            confirm_lock=lambda: None,
        )
        stack.enter_context(contextlib.closing(own_saver))
        empty = to_arrays(State(), float16=self.settings.float16)
        own_saver.prepare(empty)
        saved, state = own_saver.restore(empty)
        position = saved.position if saved else 0
        if saved:
            writer.resume_from(saved.metrics, tokens=int(saved.metrics["tokens"]))
        monitor = LossMonitor(
            self.cfg.divergence,
            saved.loss_statistics if saved else {},
            event=writer.event,
            log=writer.log,
        )
        program = types.SimpleNamespace(
            compile=lambda batch: self.step,
            abstract_state=empty,
            model=types.SimpleNamespace(cached_block=None),
        )
        run = Run(
            cfg=self.cfg,
            program=program,
            data=None,
            heldout_metrics=self.evaluate if self.settings.eval_every else None,
            task_metrics=None,
            folder=self.folder,
            writer=writer,
            saver=own_saver,
            loss_monitor=monitor,
            replica_check=self.replica_check,
            loader=Loader(position, self.plan.data_fails_at),
            units=Units("examples", 1, None),
            save_memory_profile=lambda step: None,  # not asked for by the settings
            memory_advice=types.SimpleNamespace(memory_lines=lambda step: []),
            stop_requested=lambda: self.is_stopping,
            clock=clock,
            first_step=saved.step if saved else 0,
        )
        return run, state or empty

    def run(self) -> tuple[str, Result | None]:
        """Returns how the start ends, and its result."""
        with contextlib.ExitStack() as stack:
            try:
                result = trainer._train(*self.open(stack))
                how = "stopped" if result.interrupted else "done"
            except Killed:
                stack.pop_all()  # nothing is closed
                how, result = "killed", None
            except (DataError, ConfigError, FloatingPointError, health.CorruptState) as error:
                how, result = type(error).__name__, None
        return how, result


# ---- the machine ----

KINDS = ("spike", "spike", "nan", "overflow", "empty")
SETTINGS = st.builds(
    Settings,
    every=st.sampled_from([0, 1, 2, 3, 5]),
    keep_last=st.integers(1, 3),
    keep_every=st.sampled_from([0, 0, 6]),
    keep_best=st.integers(0, 2),
    best_by=st.sampled_from(["eval_loss", "loss"]),
    eval_every=st.sampled_from([0, 2, 3, 5]),
    health_every=st.sampled_from([0, 2, 7]),
    max_skips=st.integers(1, 3),
    rollback=st.sampled_from([True, True, False]),
    float16=st.booleans(),
)
# Batches that are close together, so that their effects meet.
BATCHES = st.dictionaries(st.integers(2, 30), st.sampled_from(KINDS), max_size=12)
INCIDENTS = {
    "stop_before": st.just(True),
    "stop_in_evaluation": st.integers(1, 3),
    "is_evaluation_cut": st.booleans(),
    "kill_in_save": st.integers(1, 4),
    "is_killed_after_commit": st.booleans(),
    "failing_saves": st.frozensets(st.integers(1, 6), min_size=1),
    "slow_saves": st.just(True),
    "differs_at_check": st.integers(1, 4),
}
INCIDENTS_IN_STEPS = ("stop_in_step", "kill_in_step", "damage_in_step", "data_fails_at")


class TrainingStates(RuleBasedStateMachine):
    """Starts a run in one workdir again and again, beside one that keeps the promises."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="states-", dir=SHARED_MEMORY))

    @initialize(own=SETTINGS, kinds=BATCHES, change=st.none() | st.integers(5, 30))
    def open(self, own, kinds, change):
        batches = {number: Batch(kind) for number, kind in kinds.items()}
        if change is not None:  # from here on other data, with a higher loss
            for number in range(change, NUM_BATCHES):
                batches[number] = Batch(kinds.get(number, "usual"), level=100.0)
        self.promised = PromisedRun(own, batches)
        self.steps = 0

    @rule(
        more=st.integers(0, 12),
        names=st.lists(
            st.sampled_from([*INCIDENTS, *INCIDENTS_IN_STEPS, *INCIDENTS_IN_STEPS]),
            max_size=3,
            unique=True,
        ),
        data=st.data(),
    )
    def start(self, more, names, data):
        """Makes a start with some incidents."""
        self.steps = max(self.steps + more, 1)
        position = self.promised.position_to_resume()
        fields = {}
        for name in names:
            if name in INCIDENTS:
                fields[name] = data.draw(INCIDENTS[name], label=name)
                continue
            batch = data.draw(self.batches_near_trouble(position), label=f"batch: {name}")
            fields[name] = batch if name == "data_fails_at" else batch - position + 1
        plan = Start(self.steps, **fields)
        note(str(fields | {"steps": self.steps}))
        self.play(plan)

    def play(self, plan):
        """Makes a start, and compares it with the promises."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            (self.folder / "events.jsonl").unlink(missing_ok=True)
            real = RealStart(self.folder, CONFIG, self.promised, plan, monkeypatch)
            how, result = real.run()
        promised = self.promised.run(plan)
        assert how == promised.how
        self.compare_disk()
        assert real.replica_check.checked == promised.checked
        found, expected = self.events(), promised.events
        if how == "killed":  # a save is logged in the step after its commit
            found = [event for event in found if event[0] != "save"]
            expected = [event for event in expected if event[0] != "save"]
        assert found == expected
        if result:
            assert from_arrays(result.state) == promised.state
            if real.num_steps:  # the first removes the rows that a killed start has left
                self.compare_rows(promised.state)

    def batches_near_trouble(self, position):
        """Returns the batches from `position` on that follow an unusual one, or any of the next."""
        troubles = {number + more for number in self.promised.batches for more in range(3)}
        near = sorted(number for number in troubles if position <= number < position + 15)
        any_batch = st.integers(position, position + 12)
        return st.sampled_from(near) | any_batch if near else any_batch

    def compare_disk(self):
        folder = self.folder / find.FOLDER
        promised = self.promised
        assert sorted(find.steps(folder)) == sorted(promised.checkpoints)
        quarantined = [int(path.name.split(".")[0]) for path in find.quarantined_paths(folder)]
        assert sorted(quarantined) == sorted(promised.quarantined)
        for step, expected in promised.checkpoints.items():
            if expected.is_damaged:
                continue
            directory = folder / str(step)
            saved = manifest.read(directory)
            state = from_arrays(read_state(directory, float16=promised.settings.float16))
            assert (saved.step, state) == (step, expected.state)
            assert saved.position == expected.position * BATCH
            names = ("loss", "eval_loss", "skipped", "tokens")
            metrics = {name: saved.metrics[name] for name in names if name in saved.metrics}
            assert metrics == pytest.approx(expected.metrics)
            assert saved.loss_statistics == pytest.approx(expected.watch.statistics())

    def events(self):
        found = []
        for row in (
            rows(self.folder, "events.jsonl") if (self.folder / "events.jsonl").exists() else []
        ):
            if row["event"] == "rollback":
                found.append(("rollback", row["step"], row["to"], row["position"]))
            elif row["event"] in ("skip", "spike", "new_level", "save"):
                found.append((row["event"], row["step"]))
        return found

    def compare_rows(self, state):
        """The rows of a run are those of the batches that its state has seen."""
        table = [row for row in rows(self.folder) if "loss" in row] if state.seen else []
        expected = [self.promised.batch(number).loss(number) for number in state.seen]
        assert [row["step"] for row in table] == list(range(len(state.seen)))
        found = [np.nan if row["loss"] is None else row["loss"] for row in table]
        np.testing.assert_allclose(found, expected)

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)


STORIES = {
    "stopped right after a spike": (
        Settings(every=5, rollback=True),
        {7: "spike"},
        [Start(steps=12, stop_in_step=8), Start(steps=12)],
    ),
    "stopped after a spike, while the first checkpoint is written": (
        Settings(every=5, rollback=True),
        {6: "spike"},
        [Start(steps=12, stop_in_step=7, slow_saves=True), Start(steps=12)],
    ),
    "the data fails right after a spike": (
        Settings(every=5, rollback=True),
        {7: "spike"},
        [Start(steps=12, data_fails_at=8), Start(steps=12)],
    ),
    "a spike, and all checkpoints are damaged": (
        Settings(every=5, keep_last=1, rollback=True),
        {8: "spike"},
        [Start(steps=12, damage_in_step=7)],
    ),
    "a spike, and the newest checkpoint is damaged": (
        Settings(every=3, rollback=True),
        {8: "spike"},
        [Start(steps=12, damage_in_step=8)],
    ),
    "a failed save, then a spike without a valid checkpoint": (
        Settings(every=3, keep_last=1, rollback=True),
        {7: "spike"},
        [Start(steps=30, damage_in_step=5, failing_saves=frozenset({2}))],
    ),
    "a batch without weight between two skips": (
        Settings(max_skips=2),
        {5: "nan", 6: "empty", 7: "nan"},
        [Start(steps=12), Start(steps=12)],
    ),
    "skips in a row over two starts": (
        Settings(max_skips=3),
        {4: "nan", 5: "nan", 6: "nan"},
        [Start(steps=12, stop_in_step=5), Start(steps=12), Start(steps=12)],
    ),
    "the last step is not finite": (
        Settings(rollback=True),
        {7: "nan"},
        [Start(steps=8), Start(steps=8), Start(steps=9)],
    ),
    "float16 ends with an overflow": (
        Settings(float16=True),
        {7: "overflow"},
        [Start(steps=8), Start(steps=8), Start(steps=9)],
    ),
    "float16 ends with a batch without weight": (
        Settings(float16=True),
        {7: "empty"},
        [Start(steps=8), Start(steps=8)],
    ),
    "a spike in the last step": (
        Settings(every=3, rollback=True),
        {7: "spike"},
        [Start(steps=8), Start(steps=8)],
    ),
    "three rollbacks to one checkpoint": (
        Settings(every=20, rollback=True),
        {7: "spike", 15: "spike", 23: "spike", 31: "spike"},
        [Start(steps=5), Start(steps=19), Start(steps=19)],
    ),
    "two rollbacks, a crash, and the third": (
        Settings(every=20, rollback=True),
        {7: "spike", 15: "spike", 23: "spike"},
        [Start(steps=5), Start(steps=19, kill_in_step=14), Start(steps=19), Start(steps=19)],
    ),
    "stopped in an evaluation that a save follows": (
        Settings(every=4, eval_every=4, keep_best=1, health_every=3),
        {},
        [Start(steps=9, stop_in_evaluation=2), Start(steps=9)],
    ),
    "stopped in the last evaluation": (
        Settings(eval_every=4),
        {},
        [Start(steps=9, stop_in_evaluation=3), Start(steps=9)],
    ),
    "the last save fails three times": (
        Settings(every=4),
        {},
        [Start(steps=6, failing_saves=frozenset({2, 3, 4}))],
    ),
    "the last save fails every time": (
        Settings(every=4),
        {},
        [Start(steps=6, failing_saves=frozenset({2, 3, 4, 5})), Start(steps=6)],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_run_keeps_its_promises_if(story):
    own, kinds, starts = STORIES[story]
    machine = TrainingStates()
    try:
        machine.promised = PromisedRun(own, {number: Batch(kind) for number, kind in kinds.items()})
        for plan in starts:
            machine.play(plan)
    finally:
        machine.teardown()


SHARED_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CONFIG = parse(tiny_config(), num_devices=8)


def test_a_run_keeps_its_promises_through_spikes_skips_stops_and_crashes():
    run_machine(TrainingStates, num_examples=35, num_rules=6)


@pytest.mark.slow
def test_a_run_keeps_its_promises_in_many_more_stories():
    run_machine(TrainingStates, num_examples=400, num_rules=8)
