"""Shows a run below the cell of a notebook: one output, with the bar and the curves of the loss."""

import contextlib
import importlib.util
import math
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import console, foreign
from meshtrain.errors import first_line, install_command
from meshtrain.monitor import curves

SECONDS = 1.0  # at least, between two pictures of steps
# Pictures, of a tenth of a second each, take at most this part of the time: no step is dispatched
# meanwhile.
MAX_PART = 0.05


def in_cell() -> bool:
    """Returns whether a notebook's kernel runs this process. IPython's terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def memory_freed() -> Iterator[None]:
    """Frees the arrays that an error holds, in a cell.

    IPython keeps the last error for its debugger, and with it the frames of its traceback: the
    state would stay on the devices, where the next run has to fit. Frames of the user's own
    functions keep their variables.
    """
    try:
        yield
    except BaseException as error:
        if in_cell():
            _clear_frames(error)
        raise


def _clear_frames(error: BaseException | None) -> None:
    """Removes the variables of the frames of this package and of jax that have ended."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] in ("meshtrain", "jax"):
                with contextlib.suppress(RuntimeError):  # still runs
                    frame.clear()
        error = error.__context__


class Cell:
    """The output of a run in a cell: a `console.Display` for bars, and a `sinks.Sink` for rows.

    Without matplotlib it is the bar alone, as text. The last picture stays when it is closed.
    """

    name, optional = "the picture in the cell", True

    def __init__(self, workdir: Path | None):
        from IPython.display import display  # loaded already: a kernel runs this

        self._loss: dict[int, float] = {}  # by step
        self._heldout_loss: dict[int, float] = {}
        self._line = "starting"  # of the bar
        self._next = 0.0  # when the next picture may be drawn
        self._next_step = 0.0  # when the next picture of a step may be drawn
        self.shows_rows = importlib.util.find_spec("matplotlib") is not None
        if not self.shows_rows:
            missing = "no curves: the package matplotlib is missing"
            console.say(f"{missing}; {install_command('notebook')}")
        if workdir:
            self._read(workdir / "metrics.jsonl")
        # Above all lines that the run logs, where a reader of a long output finds it.
        self._handle = display(self._output(), raw=True, display_id=True)
        console.set_display(self)

    def _read(self, path: Path) -> None:
        """Reads the rows that earlier starts of the run wrote."""
        if not path.is_file():
            return
        for line in path.read_bytes().splitlines():
            try:
                row = foreign.parse_json(line)
            except ValueError:
                continue  # part of a line, after a crash
            if isinstance(row, dict) and type(row.get("step")) is int:
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        # A skipped step had no effect.
        losses = {"loss": None if row.get("skipped") else row.get("loss")}
        losses["eval_loss"] = row.get("eval_loss")
        for name, values in (("loss", self._loss), ("eval_loss", self._heldout_loss)):
            loss = losses[name]
            if isinstance(loss, int | float) and math.isfinite(loss):
                values[row["step"]] = loss

    # ---- rows ----

    def begin(self, step: int) -> None:
        """Removes the points of `step` and later: those that follow replace them."""
        for values in (self._loss, self._heldout_loss):
            for later in [one for one in values if one >= step]:
                del values[later]

    def write(self, row: dict[str, Any]) -> None:
        self._add(row)

    def close(self) -> None:
        """Shows the curves without a bar."""
        console.set_display(None)
        self._line = ""
        self._draw()

    # ---- the bar ----

    def due(self, *, is_phase: bool) -> bool:
        """Returns whether `show` may be called; a phase, such as compiling, is shown sooner."""
        return time.monotonic() >= (self._next if is_phase else self._next_step)

    def show(self, line: str) -> None:
        """Shows the line of the bar, and the curves."""
        self._line = line
        self._draw()

    def hide(self) -> None:
        """Removes the line of the bar; the next picture is without it."""
        self._line = ""

    def _draw(self) -> None:
        began = time.monotonic()
        self._handle.update(self._output(), raw=True)
        ended = time.monotonic()
        self._next = ended + (ended - began) * (1 / MAX_PART - 1)
        self._next_step = max(self._next, began + SECONDS)

    def _output(self) -> dict[str, Any]:
        """Returns the picture and, for a reader without pictures, a text."""
        if not (self._loss or self._heldout_loss):
            return {"text/plain": self._line}
        parts = []
        for name, values in (("training", self._loss), ("held-out", self._heldout_loss)):
            if values:
                parts.append(f"{name} loss {[*values.values()][-1]:.4f}")
        output: dict[str, Any] = {"text/plain": self._line or ", ".join(parts)}
        if self.shows_rows:
            try:
                output["image/png"] = curves.png(curves.draw([self._curve()], title=self._line))
            except Exception as error:  # of matplotlib or its settings: the run continues
                self.shows_rows = False
                console.say(f"no curves: {first_line(error)}")
        return output

    def _curve(self) -> curves.Curve:
        return curves.Curve(
            name="",
            steps=np.array([*self._loss]),
            loss=np.array([*self._loss.values()]),
            heldout_steps=np.array([*self._heldout_loss]),
            heldout_loss=np.array([*self._heldout_loss.values()]),
        )
