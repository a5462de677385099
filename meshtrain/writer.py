"""What a run tells: metrics.jsonl, events.jsonl and config.json in its folder, lines or a bar on the console."""

import datetime
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.progress

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


class Writer:
    """Writes what process 0 knows; on other processes it stays silent. Close it to restore the terminal."""

    def __init__(self, workdir: Path | None, *, leader: bool):
        self._folder = workdir if leader else None
        self._console = rich.console.Console(
            quiet=not leader, highlight=False, soft_wrap=True, markup=False
        )
        self._bar: rich.progress.Progress | None = None
        self._since = time.perf_counter()
        self._steps_since = 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)

    def begin(
        self,
        *,
        start: int,
        steps: int,
        tokens_per_step: int,
        unit: str,
        flops_per_token: float | None,
    ) -> None:
        """Starts the clock. Rows of step `start` and later, left by a run that went further, are dropped."""
        self._steps, self._tokens_per_step, self._unit = steps, tokens_per_step, unit
        peak = peak_flops(jax.devices()[0].device_kind)
        self._flop_share = (
            flops_per_token / (peak * jax.device_count()) if flops_per_token and peak else None
        )
        if self._folder and (metrics := self._folder / "metrics.jsonl").exists():
            rows = [
                line
                for line in metrics.read_text().splitlines()
                if json.loads(line)["step"] < start
            ]
            metrics.write_text("".join(row + "\n" for row in rows))
        if self._console.is_terminal and steps > start:
            columns = rich.progress.BarColumn(), rich.progress.TextColumn("{task.description}")
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=steps, completed=start)
            self._bar.start()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of the step time what happened since the last row: an evaluation, say."""
        self._since, self._steps_since = time.perf_counter(), 0

    def step(
        self, step: int, report: dict[str, jax.Array], *, log: bool, **extra: float
    ) -> dict[str, float]:
        """Waits for the step's report and returns it as numbers; `log` makes a row and a line of it."""
        numbers = {name: float(value) for name, value in jax.device_get(report).items()}
        self._steps_since += 1
        if not log:
            return numbers
        now = time.perf_counter()
        step_time = (now - self._since) / self._steps_since
        per_second = self._tokens_per_step / step_time
        row = {
            "step": step,
            **numbers,
            "tokens": (step + 1) * self._tokens_per_step,
            "step_time": step_time,
            "tokens_per_second": per_second,
            "mfu": self._flop_share and self._flop_share * per_second,
            **extra,
        }
        self._append("metrics.jsonl", row)
        self._show(row)
        self._since, self._steps_since = now, 0
        return numbers

    def _show(self, row: dict[str, Any]) -> None:
        width = len(str(self._steps))
        left = datetime.timedelta(seconds=round((self._steps - row["step"] - 1) * row["step_time"]))
        mfu = f" · mfu {row['mfu']:.1%}" if row["mfu"] else ""
        heldout = f" · held-out loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
        text = (
            f"step {row['step']:>{width}}/{self._steps} · loss {row['loss']:.4f} · grad norm {row['grad_norm']:.3f} · "
            f"lr {row['learning_rate']:.2e} · {row['tokens_per_second']:,.0f} {self._unit}/s{mfu} · "
            f"{left} left{heldout}"
        )
        if self._bar is None:
            self.line(text)
        else:
            self._bar.update(self._task, completed=row["step"] + 1, description=text)

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
            (self._folder / "config.json").write_text(
                json.dumps(config, indent=2, default=str) + "\n"
            )

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if self._folder:
            finite = {
                key: None if isinstance(v, float) and not math.isfinite(v) else v
                for key, v in row.items()
            }
            with open(self._folder / name, "a") as file:
                file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
