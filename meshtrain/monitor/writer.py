"""Writes metrics.jsonl, events.jsonl and config.json of a run, and its lines or progress bar."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtrain import console, foreign, hardware, storage
from meshtrain.config.schema import TASK_PREFIX, Config
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.monitor import memory
from meshtrain.monitor.sinks import Sink
from meshtrain.storage import Workdir

TABLES = ("metrics.jsonl", "events.jsonl")


@dataclass(frozen=True)
class Units:
    """The units of the data that a run counts: tokens of a language model, else examples."""

    name: str  # plural
    per_sample: int
    flops: float | None  # per unit, forward and backward
    packed: bool = False  # rows hold several documents


class _Pending(NamedTuple):
    """The report of a step that was dispatched, and that the device may still compute."""

    step: int
    report: dict[str, jax.Array]
    ended: float | None  # when the step ended, if it had when it was handed over
    waited: float  # total seconds of waiting for data until then
    num_samples: int  # of its batch, without padding
    log: bool  # whether the step gets a row
    evaluation: Mapping[str, float | None]  # held-out metrics before the step; {}: not evaluated


class Writer:
    """Writes the output of process 0; does nothing on other processes.

    Close it to remove the progress bar.
    """

    def __init__(self, workdir: Workdir | None, *, leader: bool):
        self._workdir = workdir
        self._folder = workdir.folder if workdir and leader else None
        self._leader = leader
        self._bar: console.Bar | None = None
        self._pending: _Pending | None = None  # of the latest step, see `step`
        self._unwritten: dict[str, list[str]] = {}  # file name -> lines still to be written
        # The numbers of the newest finished step, without those of single layers.
        self.newest: dict[str, Any] = {}
        # Tokens, or examples, of all finished steps; those that a rollback undid included.
        self.tokens = 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_outputs(self._folder)
        self._sinks: list[Sink] = []
        console.log_to(workdir.folder / console.LOG if workdir else None)

    def open(self, sinks: list[Sink]) -> None:
        """Writes each row to these as well, and closes them at the end."""
        self._sinks = sinks

    def resume_from(self, metrics: Mapping[str, Any], *, tokens: int) -> None:
        """Continues after a checkpoint with these metrics, before which `tokens` were read."""
        # What the loop would know after that step, for a run that takes none.
        self.newest = {
            name: value
            for name, value in metrics.items()
            if name != "eval_loss" and not name.startswith(TASK_PREFIX)
        }
        self.tokens = tokens

    def begin(
        self,
        start: int,
        cfg: Config,
        units: Units,
        *,
        waited: float,
        observe: Callable[[int, dict[str, Any]], bool],
        predicted: float | None = None,
    ) -> None:
        """Starts the clock at step `start`, after `waited` seconds of waiting for data.

        `observe` is called with the metrics of each step after they are written; if it returns
        True, the step gets a row in any case. `predicted` is the predicted step time in seconds, if
        it is known. Removes the rows of step `start` and later,
        which an interrupted run wrote after its last checkpoint.
        """
        self._steps, self._units = cfg.train.steps, units
        self._observe, self._predicted = observe, predicted
        self._units_per_step = cfg.train.global_batch * units.per_sample
        peak = hardware.peak_flops(jax.devices()[0].device_kind, cfg.hardware.peak_flops)
        # Seconds per unit at peak: times units per second, it is the model FLOPs utilization (MFU).
        self._seconds_at_peak: float | None = None
        if units.flops and peak:
            self._seconds_at_peak = units.flops / (peak * jax.device_count())
        self._remove_rows_from(start)
        if self._leader and not self._bar:
            self._bar = console.Bar(self._steps, stream="stdout")
            self._bar.show(start, f"{start}/{self._steps}")
        self._last_row_time = time.perf_counter()
        self._steps_since_row = 0
        self._waited_at_row = waited

    def _remove_rows_from(self, start: int) -> None:
        """Removes the rows of step `start` and later: those that follow replace them."""
        if self._folder and (path := self._folder / "metrics.jsonl").exists():
            rows = path.read_text(errors="replace", encoding="utf-8").splitlines()
            earlier = [row for row in rows if _row_step(row) < start]
            if earlier != rows:
                replace_file(path, "".join(row + "\n" for row in earlier))
        for sink in self._sinks:
            sink.begin(start)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time in the context, for example of an evaluation, from the step time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._last_row_time += time.perf_counter() - began

    def step(
        self,
        step: int,
        report: dict[str, jax.Array],
        evaluation: Mapping[str, float | None],
        *,
        waited: float,
        num_samples: int,
        log: bool,
    ) -> None:
        """Stores the report of the step just dispatched, and writes that of the previous step.

        Thus the device always has work while the host waits for a report. `evaluation` has the
        held-out metrics of the state before the step, if they were measured. `waited` is the total
        of all seconds spent waiting for data, `num_samples` the size of the batch without padding.
        With `log` the step gets a row in metrics.jsonl and a line.
        """
        # Simulated devices dispatch synchronously: the step has already ended.
        ended = time.perf_counter() if report["loss"].is_ready() else None
        if ended and self._pending and not self._pending.ended:
            # Both ended since the last look. All steps since the last row count as equally long.
            before = self._steps_since_row + 1
            row_time = self._last_row_time
            previous_ended = row_time + (ended - row_time) * before / (before + 1)
            self._pending = self._pending._replace(ended=previous_ended)
        self.flush()
        self._pending = _Pending(
            step=step,
            report=report,
            ended=ended,
            waited=waited,
            num_samples=num_samples,
            log=log,
            evaluation=evaluation,
        )

    def flush(self) -> None:
        """Waits for the pending report and writes it."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        report = jax.device_get(pending.report)  # waits for the step
        ended = pending.ended or time.perf_counter()
        metrics = {name: np.float64(value).tolist() for name, value in report.items()}
        if math.isnan(metrics["loss"]) and not metrics["skipped"]:
            metrics = as_json(metrics)  # the means of a batch without weight: there are none
        self._steps_since_row += 1
        self.tokens += pending.num_samples * self._units.per_sample
        self.newest = {
            name: value for name, value in metrics.items() if not isinstance(value, list)
        }
        if self._bar and self._bar.due():
            step_time = (ended - self._last_row_time) / self._steps_since_row
            self._draw(self._bar, pending.step, metrics, step_time)
        self._report_lost_output()
        if pending.log:
            self._write(pending, metrics, ended)
        # After the row, because what it logs is about that row.
        needs_row = self._observe(pending.step, metrics)
        if needs_row and not pending.log:
            self._write(pending, metrics, ended)

    def _write(self, pending: _Pending, metrics: dict[str, Any], ended: float) -> None:
        """Writes the row of a step to metrics.jsonl, to the sinks, and as a line."""
        step_time = (ended - self._last_row_time) / self._steps_since_row
        per_second = self._units_per_step / step_time
        row = {
            "step": pending.step,
            "loss": metrics["loss"],
            **{name: value for name, value in metrics.items() if name != "step"},
            "tokens": self.tokens,
            "step_time": step_time,
            "data_wait": (pending.waited - self._waited_at_row) / self._steps_since_row,
            "tokens_per_second": per_second,
            "mfu": self._seconds_at_peak and self._seconds_at_peak * per_second,
        }
        if self._predicted:
            row["predicted_step_time"] = self._predicted
        row |= pending.evaluation
        peak = memory.peak_bytes_in_use()
        if peak is not None:
            row["peak_memory"] = peak
        row |= memory.of_process()
        self._add_row(row)
        if not (self._bar and self._bar.shows_rows):
            self._show(row)
        self._show_tasks(row)
        self._last_row_time = ended
        self._steps_since_row = 0
        self._waited_at_row = pending.waited

    def final_evaluation(self, step: int, evaluation: Mapping[str, float | None]) -> None:
        """Writes a row of the state after the last step, with nothing but these metrics.

        If the run is continued, the row of its next step replaces it.
        """
        self._remove_rows_from(step)
        row = {"step": step, **evaluation}
        self._add_row(row)
        self._show_tasks(row)

    def _add_row(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl, and gives it to the sinks."""
        self._append("metrics.jsonl", row)
        for sink in list(self._sinks):
            try:
                sink.write(row)
            except Exception as error:
                if not sink.optional:
                    raise
                self._sinks.remove(sink)
                self.log(f"{sink.name} gets no more rows: {error}")

    def _show(self, row: dict[str, Any]) -> None:
        """Logs a row as a line."""
        left = console.duration((self._steps - row["step"] - 1) * row["step_time"])
        width = len(str(self._steps))
        parts = [
            f"step {row['step']:>{width}}/{self._steps}",
            f"loss {_loss_text(row['loss'])}",
            f"grad norm {row['grad_norm']:.3f}",
            f"lr {row['learning_rate']:.2e}",
            f"{row['tokens_per_second']:,.0f} {self._units.name}/s",
        ]
        if row["mfu"]:
            parts.append(f"mfu {row['mfu']:.1%}")
        parts.append(f"{left} left")
        if row.get("skipped"):
            parts.append("skipped")
        if "eval_loss" in row:
            parts.append(f"held-out loss {_loss_text(row['eval_loss'])}")
        self.progress(" · ".join(parts))

    def _show_tasks(self, row: dict[str, Any]) -> None:
        """Logs the metrics of tasks in a row, if it has any, as a line."""
        parts = []
        for name, value in row.items():
            if name.startswith(TASK_PREFIX):
                task, _, metric = name.removeprefix(TASK_PREFIX).partition("/")
                parts.append(f"{task} {metric} {'none' if value is None else f'{value:.4g}'}")
        if parts:
            self.progress(f"tasks       step {row['step']}: {' · '.join(parts)}")

    def _draw(self, bar: console.Bar, step: int, metrics: dict[str, Any], step_time: float) -> None:
        """Shows a step in the bar."""
        step_time = max(step_time, 1e-6)
        per_second = self._units_per_step / step_time
        parts = [
            f"{step + 1}/{self._steps}",
            f"loss {_loss_text(metrics['loss'])}",
            f"grad norm {metrics['grad_norm']:.3f}",
            f"lr {metrics['learning_rate']:.1e}",
            f"{_short(per_second)} {self._units.name}/s",
            f"{console.duration((self._steps - step - 1) * step_time)} left",
        ]
        if self._seconds_at_peak:
            parts.append(f"mfu {self._seconds_at_peak * per_second:.1%}")
        bar.show(step + 1, *parts)

    def log(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._leader:
            console.say(storage.readable(text))
            self._report_lost_output()

    def progress(self, text: str) -> None:
        """Prints a line that only shows how the run progresses: `console.quiet` leaves it out."""
        if self._leader:
            console.say_progress(storage.readable(text))
            self._report_lost_output()

    def _report_lost_output(self) -> None:
        for fields in console.new_faults():
            self.event("output_lost", **fields)

    def event(self, event: str, **fields: Any) -> None:
        """Appends a line to events.jsonl."""
        self._append("events.jsonl", {"event": event, "time": time.time(), **fields})

    def warn(self, text: str, fields: Mapping[str, Any]) -> None:
        """Logs a warning, and appends it to events.jsonl with what it is about."""
        self.log(f"warning     {text}")
        self.event("warning", **fields, text=text)

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes config.json, the config of the latest start; keeps the previous if it differs."""
        if not self._folder:
            return
        path = self._folder / "config.json"
        text = config_text(config)
        previous = path.read_text(errors="replace", encoding="utf-8") if path.is_file() else text
        if previous != text:
            history = self._folder / "config_history"
            names = [file.stem for file in history.glob("*.json")]
            newest = max((int(name) for name in names if name.isdecimal()), default=0)
            replace_file(history / f"{newest + 1:04}.json", previous)
        replace_file(path, text)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a line to a file; if that fails, writes the line together with the next line."""
        if not self._folder:
            return
        unwritten = self._unwritten.setdefault(name, [])
        unwritten.append(storage.readable(json.dumps(as_json(row))) + "\n")
        path = self._folder / name
        try:
            storage.append_lines(path, unwritten)
            unwritten.clear()
        except OSError as error:
            if len(unwritten) == 1:
                self.log(
                    f"{path}: {error.strerror}; its lines are kept in memory until it can be "
                    f"written"
                )

    def sync(self) -> None:
        """Flushes metrics.jsonl and events.jsonl to disk; uploads all files to an object store."""
        if self._workdir and self._folder:
            sync_tables(self._folder)
            self._workdir.push()

    def close(self) -> None:
        """Removes the bar; `log` and `event` still work."""
        if self._bar:
            self._bar.close()
            self._bar = None
        while self._sinks:
            self._sinks.pop().close()


def units_of(batch: Any, model: Model) -> Units:
    """Returns the units that a run counts: tokens if its data yields a `Batch`."""
    if not isinstance(batch, Batch):
        return Units("examples", 1, None)
    seq_len = batch.tokens.shape[1]
    flops = model.flops_per_token and model.flops_per_token(seq_len)
    return Units("tokens", seq_len, flops, packed=batch.segments is not None)


# ---- rows ----


def _row_step(row: str) -> float:
    """Returns the step of a row; inf for a row without one, such as part of one, to drop it."""
    try:
        values = foreign.parse_json(row.encode())
    except ValueError:
        return math.inf
    step = values.get("step") if isinstance(values, dict) else None
    return step if isinstance(step, int | float) else math.inf


def as_json(value: Any) -> Any:
    """Returns the value with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


INFINITY_MARK = "\0infinity"


def config_text(config: Mapping[str, Any]) -> str:
    """Returns the text of config.json.

    An infinite value, such as divergence.spike_sigmas=inf, is 1e999: JSON has no name for it, and
    what reads this number as a float gets infinity.
    """

    def marked(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: marked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [marked(entry) for entry in value]
        if isinstance(value, float) and math.isinf(value):
            return INFINITY_MARK if value > 0 else "-" + INFINITY_MARK
        return value

    text = json.dumps(marked(config), indent=2, default=str)
    for sign in ("", "-"):
        text = text.replace(json.dumps(sign + INFINITY_MARK), f"{sign}1e999")
    return text + "\n"


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the metrics whose value is a finite number."""
    return {
        name: value for name, value in metrics.items() if value is not None and math.isfinite(value)
    }


def _loss_text(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f}"


def _short(number: float) -> str:
    """Returns a number with three digits: 123k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


# ---- files ----


def check_outputs(folder: Path) -> None:
    """Raises ConfigError with a line for each output of an earlier run that cannot be continued."""
    faults = []
    names = (*TABLES, "config.json", console.LOG)
    for name in names:
        path = folder / name
        if not os.path.lexists(path):
            continue
        try:
            # Opening a pipe would wait for its other end; a link may lead out of the workdir.
            if path.is_symlink() or not path.is_file():
                raise OSError(errno.EINVAL, "is not a file")
            open(path, "ab").close()
        except OSError as error:
            faults.append(f"{path}: {error.strerror}; move it away, or use another --workdir")
    if faults:
        raise ConfigError(*faults)


def replace_file(path: Path, text: str) -> None:
    """Replaces a file: after a crash or a power loss it is the new one or the old one.

    Raises ConfigError if it cannot be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir()
            storage.sync(path.parent.parent)
        new.unlink(missing_ok=True)  # it may be a link
        new.write_text(text, encoding="utf-8")
        storage.sync(new)
        os.replace(new, path)
        storage.sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ConfigError(f"{path}: {error.strerror}; make room, or repair it") from error


def sync_tables(folder: Path) -> None:
    """Flushes the tables and their folder to disk; a failure does not stop the run."""
    for path in (*(folder / name for name in TABLES), folder):
        with contextlib.suppress(OSError):
            storage.sync(path)
