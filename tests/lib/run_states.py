"""What the pages promise of a run that spikes, skips steps, stops, crashes and resumes.

`PromisedRun` takes the steps of `docs/guides/resume.md` and `docs/concepts/checkpoints.md` in plain
Python, with lists in place of arrays. It shares no code with the trainer.
"""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

BATCH = 2  # samples of a batch
FIRST_SCALE = 16.0  # of the loss
WARM_UP = 3  # losses without a spike; 50 in a run, too many for short stories
FIRST_RETRY = 5.0  # seconds after a failed save; twice as many after each further one
LAST_TRIES = 4  # of the save at the end
MAX_ROLLBACKS = 3
MAX_DEVIATIONS = 8.0  # above the mean, beyond which a loss is a spike
NUM_BATCHES = 200  # of the data


@dataclass(frozen=True)
class Settings:
    """The keys of the config that matter here."""

    every: int = 4
    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    best_by: str = "eval_loss"
    eval_every: int = 0
    health_every: int = 0
    max_skips: int = 3
    rollback: bool = False
    float16: bool = False


@dataclass(frozen=True)
class Start:
    """What happens to one start of the run. Steps and saves count from 1 in each start."""

    steps: int  # train.steps
    stop_before: bool = False  # asked to stop before its first step
    stop_in_step: int = 0
    stop_in_evaluation: int = 0
    is_evaluation_cut: bool = True  # or the request arrives in its last batch
    kill_in_step: int = 0
    kill_in_save: int = 0
    is_killed_after_commit: bool = False
    failing_saves: frozenset[int] = frozenset()
    damage_in_step: int = 0  # of the newest checkpoint, while this step runs
    data_fails_at: int = -1  # batch
    slow_saves: bool = False  # they are committed when the run waits for them, or at once
    differs_at_check: int = 0  # check of the replicas that finds a difference


@dataclass(frozen=True)
class State:
    """The batches that a state has seen, those that have changed it, and its loss scale."""

    seen: tuple[int, ...] = ()
    applied: tuple[int, ...] = ()
    scale: float = FIRST_SCALE

    @property
    def step(self) -> int:
        return len(self.seen)


@dataclass(frozen=True)
class Batch:
    """What the loss does at a batch."""

    kind: str = "usual"  # or spike, nan, overflow (of float16 gradients), empty (without weight)
    level: float = 1.0  # of the usual loss

    def loss(self, number: int) -> float:
        if self.kind in ("nan", "empty"):
            return math.nan
        usual = self.level * (3.0 + 0.01 * math.sin(number))
        return 10 * usual if self.kind == "spike" else usual

    def is_skipped(self) -> bool:
        return self.kind in ("nan", "overflow")


def eval_loss(state: State) -> float:
    """Returns a held-out loss that differs between states, and that no order of steps explains."""
    return 1.0 + sum(number * 37 for number in state.applied) % 101 / 101


@dataclass
class Watch:
    """The losses since the mean started, and what else decides on skips and spikes."""

    losses: list[float] = field(default_factory=list)  # without spikes
    spikes: list[bool] = field(default_factory=list)  # of each step that counts
    skips: int = 0  # in a row
    rollbacks: int = 0  # to `rolled_back_to`, one after the other
    rolled_back_to: int = -1

    def copy(self) -> "Watch":
        return dataclasses.replace(self, losses=[*self.losses], spikes=[*self.spikes])

    def observe(self, step: int, loss: float, *, is_skipped: bool, warm_up: int) -> list[str]:
        """Counts the loss of a step; returns what is logged about it."""
        if math.isnan(loss) and not is_skipped:  # a batch without weight says nothing
            return []
        if is_skipped:
            self.skips += 1
            return ["skip"]
        self.skips = 0
        is_spike = len(self.losses) >= warm_up and self.deviations(loss) > MAX_DEVIATIONS
        self.spikes.append(is_spike)
        if not is_spike:
            self.losses.append(loss)
            return []
        # After the last rollback but one, a high loss in the first step: the data has changed.
        is_in_vain = step == self.rolled_back_to and self.rollbacks == MAX_ROLLBACKS - 1
        if self.spike_share() > 0.1 or is_in_vain:
            self.losses = [loss]
            self.spikes = []
            self.rollbacks = 0
            return ["spike", "new_level"]
        return ["spike"]

    def roll_back(self, step: int) -> bool:
        """Counts a rollback; returns whether it ends the run. The next start has all again."""
        self.rollbacks = self.rollbacks + 1 if step == self.rolled_back_to else 1
        self.rolled_back_to = step
        is_last = self.rollbacks == MAX_ROLLBACKS
        if is_last:
            self.rollbacks = 0
        return is_last

    def deviations(self, loss: float) -> float:
        mean, variance = weighted_mean_and_variance(self.losses)
        return (loss - mean) / max(math.sqrt(variance), 0.01 * abs(mean))

    def spike_share(self) -> float:
        return sum(0.01 * 0.99**age for age, spike in enumerate(reversed(self.spikes)) if spike)

    def statistics(self) -> dict[str, float]:
        """Returns them as a checkpoint has them."""
        mean, variance = 0.0, 0.0
        if self.losses:
            mean, variance = weighted_mean_and_variance(self.losses)
        found = {"count": len(self.losses), "mean": mean, "variance": variance}
        found |= {"spike_share": self.spike_share(), "skips": self.skips}
        if self.rollbacks:
            found |= {"rollbacks": self.rollbacks, "rollback_step": self.rolled_back_to}
        return found


def weighted_mean_and_variance(losses: list[float]) -> tuple[float, float]:
    """Returns mean and variance with weights that decay by 0.99, the first 100 losses equal."""
    count = len(losses)
    weights = [1.0] * count
    if count > 100:
        first = 0.99 ** (count - 100) / 100
        weights = [first] * 100 + [0.01 * 0.99 ** (count - 1 - i) for i in range(100, count)]
    mean = float(np.average(losses, weights=weights))
    return mean, float(np.average((np.array(losses) - mean) ** 2, weights=weights))


@dataclass
class Checkpoint:
    """What a checkpoint holds."""

    state: State
    position: int  # of the next batch
    watch: Watch
    metrics: dict[str, float]
    is_damaged: bool = False


@dataclass
class End:
    """How a start ends: "done", "stopped", "killed", or the exception that it raises."""

    how: str
    state: State | None = None  # that `train` returns
    events: list[tuple] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)  # steps at which replicas were compared


class _Ended(Exception):
    pass


class PromisedRun:
    """A workdir, and the starts of a run in it."""

    def __init__(self, settings: Settings, batches: dict[int, Batch]):
        self.settings = settings
        self.batches = batches  # that are not usual
        self.checkpoints: dict[int, Checkpoint] = {}
        self.quarantined: list[int] = []

    def batch(self, number: int) -> Batch:
        return self.batches.get(number, Batch())

    def position_to_resume(self) -> int:
        """Returns the batch with which the next start begins, unless checkpoints are damaged."""
        newest = self.checkpoints.get(max(self.checkpoints, default=-1))
        return newest.position if newest else 0

    # ---- a start ----

    def run(self, start: Start) -> End:
        """Makes a start; returns how it ends. The checkpoints are then those on the disk."""
        self.start = start
        self.end = End("done")
        self.now = 0.0  # seconds; a step takes one
        self.num_steps = self.num_saves = self.num_evaluations = self.num_checks = 0
        self.failed_saves = 0  # in a row
        self.retry_at = 0.0
        self.pending: tuple[int, Checkpoint] | None = None
        self.is_stopping = start.stop_before
        self.spike: int | None = None
        self.failure: int | None = None
        self.unread: int | None = None  # the batch whose loss was not read yet
        saved = self.newest_valid()
        if saved is None and (self.checkpoints or self.quarantined):
            self.end.how = "ConfigError"
            return self.end
        saved = saved or Checkpoint(State(), 0, Watch(), {"tokens": 0})
        self.state = saved.state
        self.position = saved.position
        self.watch = saved.watch.copy()
        self.newest = {key: value for key, value in saved.metrics.items() if key != "eval_loss"}
        self.first_step = self.state.step
        self.newest_saved = self.first_step if self.checkpoints else None
        try:
            if self.first_step < start.steps and not self.is_stopping:
                self.take_steps()
            self.finish()
        except _Ended as ended:
            self.end.how = str(ended)
        if self.end.how != "killed":
            self.wait()
        return self.end

    def newest_valid(self) -> Checkpoint | None:
        """Returns the newest valid checkpoint, if there is one; newer ones are quarantined."""
        valid = [step for step, saved in self.checkpoints.items() if not saved.is_damaged]
        if not valid:
            return None  # they stay where they are
        newest = max(valid)
        for step in [step for step in self.checkpoints if step > newest]:
            self.quarantined.append(step)
            del self.checkpoints[step]
        return self.checkpoints[newest]

    def take_steps(self) -> None:
        settings, start = self.settings, self.start
        while True:
            step = self.state.step
            save_due = self.save_due(step)
            is_stopping = self.is_stopping
            is_last = step >= start.steps
            eval_due = not is_last and is_multiple(step, settings.eval_every)
            is_ending = is_stopping or is_last or self.failure is not None
            # A checkpoint and an evaluation are of a state whose losses are known.
            check_due = settings.health_every > 0 and step > 0
            check_due &= save_due or is_ending or is_multiple(step, settings.health_every)
            if is_ending or eval_due or save_due or check_due:
                self.read_loss()
                if self.failure is not None and not is_ending:
                    continue
            if self.spike is not None and not is_stopping:
                self.roll_back()
                continue
            if check_due:
                self.compare_replicas()
            if is_ending:
                return
            evaluation: dict[str, float] = {}
            if eval_due:
                found = self.evaluate()
                if found is None:
                    continue
                evaluation = found
                saved = self.checkpoints.get(self.newest_saved)
                if self.newest_saved == step and saved and not saved.is_damaged:
                    saved.metrics = {**found, **saved.metrics}
            if save_due:
                self.save(evaluation)
            if self.position == start.data_fails_at:
                self.read_loss()
                if not self.is_to_be_rolled_back():
                    if settings.health_every and step > 0:
                        self.compare_replicas()
                    self.save_last(evaluation)
                raise _Ended("DataError")
            self.take_step()

    def compare_replicas(self) -> None:
        self.num_checks += 1
        if self.num_checks == self.start.differs_at_check:
            raise _Ended("CorruptState")
        self.end.checked.append(self.state.step)

    def take_step(self) -> None:
        start, number = self.start, self.position
        self.position += 1
        self.num_steps += 1
        if self.num_steps == start.kill_in_step:
            raise _Ended("killed")
        self.now += 1.0
        if self.num_steps == start.damage_in_step and self.checkpoints:
            self.checkpoints[max(self.checkpoints)].is_damaged = True
        if self.num_steps == start.stop_in_step:
            self.is_stopping = True
        batch, state = self.batch(number), self.state
        scale = state.scale
        if batch.is_skipped() and self.settings.float16:
            scale /= 2
        applied = state.applied if batch.is_skipped() else (*state.applied, number)
        self.state = State((*state.seen, number), applied, scale)
        self.read_loss()  # of the step before
        self.unread = number

    # ---- losses ----

    def read_loss(self) -> None:
        """Reads the loss of the step before, if it was not read yet."""
        if self.unread is None:
            return
        number, self.unread = self.unread, None
        step = self.step_of_loss(number)
        batch = self.batch(number)
        loss = batch.loss(number)
        is_skipped = batch.is_skipped()
        tokens = self.newest["tokens"] + BATCH
        self.newest = {"loss": loss, "skipped": is_skipped, "tokens": tokens}
        found = self.watch.observe(step, loss, is_skipped=is_skipped, warm_up=WARM_UP)
        self.end.events += [(name, step) for name in found]
        if self.watch.skips >= self.settings.max_skips and self.failure is None:
            self.failure = self.watch.skips
        if found == ["spike"] and self.settings.rollback:
            self.spike = step

    def step_of_loss(self, number: int) -> int:
        """Returns the step that read a batch, the newest of this state or the one before."""
        return self.state.seen.index(number)

    def roll_back(self) -> None:
        self.read_loss()
        spike, self.spike = self.spike, None
        self.wait()
        saved = self.newest_valid()
        if saved is None:
            self.newest_saved = None
            return
        step = saved.state.step
        self.failed_saves = 0
        self.newest_saved = step
        self.state = saved.state
        self.end.events.append(("rollback", spike, step, self.position * BATCH))
        is_last = self.watch.roll_back(step)
        saved.position = self.position
        saved.watch = self.watch_to_save()
        saved.metrics["tokens"] = self.newest["tokens"]
        if is_last:
            raise _Ended("FloatingPointError")

    # ---- evaluations ----

    def evaluate(self) -> dict[str, float] | None:
        if not self.settings.eval_every:
            return {}
        self.num_evaluations += 1
        if self.num_evaluations == self.start.stop_in_evaluation:
            self.is_stopping = True
            if self.start.is_evaluation_cut:
                return None
        return {"eval_loss": eval_loss(self.state)}

    # ---- saves ----

    def save_due(self, step: int) -> bool:
        if self.failed_saves:
            return self.now >= self.retry_at
        return is_multiple(step, self.settings.every) and step > self.first_step

    def save(self, evaluation: dict[str, float], *, last_wait: float | None = None) -> bool:
        """Saves the state; returns whether that worked."""
        step = self.state.step
        self.wait()
        if step == self.newest_saved:
            saved = self.checkpoints.get(step)
            if saved and not saved.is_damaged:
                saved.metrics = {**self.fields(evaluation), **saved.metrics}
            return True
        if step in self.checkpoints:  # a damaged one, which a save does not replace
            self.quarantined.append(step)
            del self.checkpoints[step]
        self.num_saves += 1
        if self.num_saves in self.start.failing_saves:
            # Each try waits twice as long; the tries at the end of a run have waits of their own.
            wait = FIRST_RETRY * 2**self.failed_saves if last_wait is None else last_wait
            self.retry_at = self.now + wait
            self.failed_saves += 1
            return False
        metrics = self.fields(evaluation)
        saved = Checkpoint(self.state, self.position, self.watch_to_save(), metrics)
        if self.start.slow_saves:
            self.pending = (step, saved)
        else:
            self.commit(step, saved)
        return True

    def watch_to_save(self) -> Watch:
        watch = self.watch.copy()
        if self.failure is not None:
            watch.skips = 0  # the next start may skip as many again
        return watch

    def wait(self) -> None:
        if self.pending:
            step, saved = self.pending
            self.pending = None
            self.commit(step, saved)

    def commit(self, step: int, saved: Checkpoint) -> None:
        is_killed = self.num_saves == self.start.kill_in_save
        if is_killed and not self.start.is_killed_after_commit:
            raise _Ended("killed")
        self.checkpoints[step] = saved
        if is_killed:
            raise _Ended("killed")
        self.failed_saves = 0
        self.newest_saved = step
        self.end.events.append(("save", step))
        self.remove_old()

    def fields(self, evaluation: dict[str, float]) -> dict[str, float]:
        metrics = {**self.newest, **evaluation}
        return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}

    def remove_old(self) -> None:
        settings = self.settings
        valid = {step: saved for step, saved in self.checkpoints.items() if not saved.is_damaged}
        kept = set(sorted(valid)[-settings.keep_last :])
        if settings.keep_every:
            kept |= {step for step in valid if step % settings.keep_every == 0}
        rated = {step: saved.metrics.get(settings.best_by) for step, saved in valid.items()}
        rated = {step: value for step, value in rated.items() if value is not None}
        # Of equally good ones the newest.
        ranked = sorted(rated, key=lambda step: (rated[step], -step))
        kept |= {*ranked[: settings.keep_best]}
        for step in valid.keys() - kept:
            del self.checkpoints[step]

    def is_to_be_rolled_back(self) -> bool:
        """Returns whether the state has a spike, and the run a checkpoint to return to."""
        if self.spike is None:
            return False
        self.wait()
        return self.newest_saved is not None

    def save_last(self, evaluation: dict[str, float]) -> None:
        waits = [1.0, 2.0, 4.0, 0.0]
        self.wait()
        for wait in waits:
            if self.save(evaluation, last_wait=wait):
                self.wait()
                return
        raise _Ended("ConfigError")

    # ---- the end ----

    def finish(self) -> None:
        is_finished = self.state.step >= self.start.steps
        evaluation: dict[str, float] | None = self.evaluate() if is_finished else {}
        if evaluation is None:
            is_finished, evaluation = False, {}
        if not self.is_to_be_rolled_back():
            self.save_last(evaluation)
        if self.failure is not None:
            raise _Ended("FloatingPointError")
        is_overflow = self.settings.float16 and math.isfinite(self.newest.get("loss", math.nan))
        if is_finished and self.newest.get("skipped") and not is_overflow:
            raise _Ended("FloatingPointError")
        self.end.how = "done" if is_finished else "stopped"
        self.end.state = self.state


def is_multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
