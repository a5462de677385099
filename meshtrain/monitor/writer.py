"""What a run tells: metrics.jsonl, events.jsonl and config.json in its folder, lines or a bar on the console."""

import contextlib
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.progress

from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError
from meshtrain.monitor.summary import Units

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak of the longest name that `device_kind` starts with, None where it is not known."""
    names = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def _step_of(row: str) -> float:
    """A row that was cut off by a crash counts as a late one."""
    try:
        return json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises ConfigError where it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ConfigError(f"{path}: {error.strerror}; make room, or repair it") from error


class Writer:
    """Writes what process 0 knows; on other processes it stays silent. Close it to take the bar down."""

    def __init__(self, workdir: Path | None, *, leader: bool):
        self._folder = workdir if leader else None
        self._console = rich.console.Console(
            quiet=not leader, highlight=False, soft_wrap=True, markup=False
        )
        self._bar: rich.progress.Progress | None = None
        self._pending: tuple | None = None
        self._waiting: dict[str, list[str]] = {}  # lines that could not be written yet
        self.newest: dict[str, float] = {}  # numbers of the newest step that ended
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)

    def begin(
        self,
        start: int,
        cfg: Config,
        units: Units,
        *,
        samples: int,
        waited: float,
        see: Callable[[int, dict[str, float]], None],
    ) -> None:
        """Starts the clock at step `start`, after `samples` samples and `waited` seconds for data.

        `see` is given the numbers of each step before they are written. Rows of step `start` and
        later, left by a run that went further than its last checkpoint, are dropped.
        """
        self._start, self._steps, self._units, self._see = start, cfg.train.steps, units, see
        self._units_before, self._units_per_step = (
            samples * units.per_sample,
            cfg.train.global_batch * units.per_sample,
        )
        peak = peak_flops(jax.devices()[0].device_kind)
        self._share_of_peak = (
            units.flops / (peak * jax.device_count()) if units.flops and peak else None
        )
        if self._folder and (metrics := self._folder / "metrics.jsonl").exists():
            rows = metrics.read_text(errors="replace").splitlines()
            kept = [row for row in rows if _step_of(row) < start]
            if kept != rows:
                _replace(metrics, "".join(row + "\n" for row in kept))
        if self._console.is_terminal and not self._bar:
            columns = rich.progress.BarColumn(20), rich.progress.TextColumn("{task.description}")
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._steps, completed=start)
            self._bar.start()
        self._since, self._steps_since, self._waited_before = time.perf_counter(), 0, waited

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out of the step time what happens inside: an evaluation, say."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def step(
        self,
        step: int,
        report: dict[str, jax.Array],
        eval_loss: float | None,
        *,
        waited: float,
        log: bool,
    ) -> None:
        """Takes the report of a step just dispatched, and writes the one before.

        So the device has its next work while the host waits. `waited` seconds went by for data, in all
        steps together. `log` makes a row and a line of a step.
        """
        # Where dispatching waits for the result, as on simulated devices, the step ended by now.
        ended = time.perf_counter() if report["loss"].is_ready() else None
        self.flush()
        self._pending = step, report, ended, waited, log, eval_loss

    def flush(self) -> None:
        """Waits for the report that is still held, and writes it."""
        if self._pending is None:
            return
        (step, report, ended, waited, log, eval_loss), self._pending = self._pending, None
        numbers = {name: float(value) for name, value in jax.device_get(report).items()}
        ended = ended or time.perf_counter()
        self._steps_since += 1
        self.newest = numbers
        if log:
            self._write(step, numbers, ended, waited, eval_loss)
        self._see(step, numbers)

    def _write(
        self,
        step: int,
        numbers: dict[str, float],
        ended: float,
        waited: float,
        eval_loss: float | None,
    ) -> None:
        # Of two very short steps the second can be ready before the first is looked at.
        step_time = max(ended - self._since, 1e-6) / self._steps_since
        per_second = self._units_per_step / step_time
        row = {
            "step": step,
            "loss": numbers["loss"],
            **{name: value for name, value in numbers.items() if name != "step"},
            "tokens": self._units_before + (step - self._start + 1) * self._units_per_step,
            "step_time": step_time,
            "data_wait": (waited - self._waited_before) / self._steps_since,
            "tokens_per_second": per_second,
            "mfu": self._share_of_peak and self._share_of_peak * per_second,
        }
        if eval_loss is not None:
            row["eval_loss"] = eval_loss
        self._append("metrics.jsonl", row)
        self._show(row)
        self._since, self._steps_since, self._waited_before = ended, 0, waited

    def _show(self, row: dict[str, Any]) -> None:
        """A line for each row; where there is a bar, it holds the newest and only evaluations are lines."""
        left = datetime.timedelta(seconds=round((self._steps - row["step"] - 1) * row["step_time"]))
        speed = f"{row['tokens_per_second']:,.0f} {self._units.name}/s"
        speed += f" · mfu {row['mfu']:.1%}" if row["mfu"] else ""
        if self._bar:
            text = (
                f"{row['step'] + 1}/{self._steps} · loss {row['loss']:.4f} · {speed} · {left} left"
            )
            self._bar.update(self._task, completed=row["step"] + 1, description=text)
            if "eval_loss" not in row:
                return
        more = " · skipped" if row.get("skipped") else ""
        more += f" · held-out loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
        self.line(
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps} · loss {row['loss']:.4f} · "
            f"grad norm {row['grad_norm']:.3f} · lr {row['learning_rate']:.2e} · {speed} · {left} left{more}"
        )

    def line(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self._console.print(text)
        sys.stdout.flush()

    def event(self, event: str, **fields: Any) -> None:
        """Puts one line on record in events.jsonl."""
        self._append("events.jsonl", {"event": event, "time": time.time(), **fields})

    def config(self, config: dict[str, Any]) -> None:
        """Writes config.json, the resolved config of the latest start."""
        if self._folder:
            text = json.dumps(config, indent=2, default=str) + "\n"
            _replace(self._folder / "config.json", text)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a line to a file; on a full disk it waits for the next one that can be written."""
        if not self._folder:
            return
        finite = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in row.items()
        }
        waiting = self._waiting.setdefault(name, [])
        waiting.append(json.dumps(finite) + "\n")
        path, size = self._folder / name, None
        try:
            with open(path, "a") as file:
                size = file.tell()
                file.writelines(waiting)
            waiting.clear()
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(path, size)  # no line in part
            if len(waiting) == 1:
                self.line(f"{path}: {error.strerror}; what should go there waits")

    def close(self) -> None:
        """Takes the bar down; lines and events go on."""
        if self._bar:
            self._bar.stop()
            self._bar = None
