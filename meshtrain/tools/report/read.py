"""Reads what a run has written to its workdir so far; a later `update` reads only what is new."""

import itertools
import math
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import foreign
from meshtrain.config.schema import TASK_PREFIX
from meshtrain.errors import ConfigError

LINES_AT_ONCE = 4096
MAX_STEP = 2**53  # as float64 exact below
# What a row says of the run. The other metrics are of the step's batch.
OF_THE_RUN = {
    "step",
    "skipped",
    "learning_rate",
    "loss_scale",
    "tokens",
    "step_time",
    "data_wait",
    "tokens_per_second",
    "mfu",
    "predicted_step_time",
    "peak_memory",
    "host_memory",
    "peak_host_memory",
    "eval_loss",
}
MAX_LINE_BYTES = 16 << 20  # of a table; a longer line, and what follows it, is left out


class Table:
    """The rows of a JSON-lines file that may be growing, or be replaced when the run resumes."""

    def __init__(self, path: Path):
        self.path = path
        self.clear()

    def clear(self) -> None:
        self._inode, self._offset = 0, 0
        self.num_corrupt = 0  # lines that are no JSON object
        self.is_truncated = False  # whether the last line has no end

    def is_replaced(self) -> bool:
        """Returns whether the file is another one than before; then `clear`, and read again."""
        try:
            stat = self.path.stat()
        except OSError:
            return self._offset > 0
        return self._offset > 0 and (stat.st_ino != self._inode or stat.st_size < self._offset)

    def new_rows(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of the complete lines since the last call, in lists."""
        if not self.path.is_file():
            return
        with foreign.open_file(self.path) as file:
            self._inode = self.path.stat().st_ino
            file.seek(self._offset)
            lines: list[bytes] = []
            size = 0
            self.is_truncated = False
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    # Not searched for its end, which may be terabytes away.
                    self.num_corrupt += 1
                    self._offset = file.seek(0, os.SEEK_END)
                    break
                if not line.endswith(b"\n"):
                    self.is_truncated = True
                    break
                self._offset += len(line)
                lines.append(line)
                size += len(line)
                if len(lines) == LINES_AT_ONCE or size > MAX_LINE_BYTES:
                    yield self._parse(lines)
                    lines = []
                    size = 0
            yield self._parse(lines)

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        # All lines at once take half the time.
        try:
            values = foreign.parse_json(b"[" + b",".join(lines) + b"]")
        except ValueError:
            values = []
        if len(values) != len(lines):
            values = [_parsed(line) for line in lines]
        rows = [value for value in values if isinstance(value, dict)]
        self.num_corrupt += len(lines) - len(rows)
        return rows


def _parsed(line: bytes) -> Any | None:
    """Returns the value of a line; None if it is no JSON."""
    try:
        return foreign.parse_json(line)
    except ValueError:
        return None


class Metrics:
    """The values of each metric by step.

    Of a step that was repeated, the last row counts: what the run kept.
    """

    def __init__(self):
        self.num_rows = self.num_repeated = 0
        self._last_step = -1.0
        self._parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, rows: list[dict[str, Any]]) -> int:
        """Adds rows; returns how many of them have no step, and are left out."""
        valid = [row for row in rows if _has_step(row)]
        if not valid:
            return len(rows)
        steps = np.array([row["step"] for row in valid], float)
        # A row is kept if no later one goes back to its step or before it.
        smallest_from = np.minimum.accumulate(steps[::-1])[::-1]
        is_kept = np.append(steps[:-1] < smallest_from[1:], True)
        kept = [_as_counted(row) for row in itertools.compress(valid, is_kept)]
        self._drop_from(smallest_from[0])
        self.num_repeated += len(valid) - len(kept)
        self.num_rows += len(kept)
        self._last_step = steps[-1]
        for name in dict.fromkeys(itertools.chain.from_iterable(kept)):
            self._add_column(name, kept, steps[is_kept])
        return len(rows) - len(valid)

    def _drop_from(self, step: float) -> None:
        """Removes the rows of `step` and later."""
        if step > self._last_step:
            return
        before = self.num_rows
        for name, (steps, values) in self.columns().items():
            end = np.searchsorted(steps, step)
            self._parts[name] = [(steps[:end], values[:end])]
        self.num_rows = len(self._parts["step"][0][0])
        self.num_repeated += before - self.num_rows

    def _add_column(self, name: str, rows: list[dict[str, Any]], steps: np.ndarray) -> None:
        try:
            values = [*map(operator.itemgetter(name), rows)]
        except KeyError:
            has_name = [name in row for row in rows]
            values = [row[name] for row in itertools.compress(rows, has_name)]
            steps = steps[has_name]
        columns = {name: values}
        if list in {*map(type, values)}:
            # A value of each layer.
            layer_values = [_numbers(value) for value in values]
            columns = {
                f"{name}: largest of the layers": [max(v, default=None) for v in layer_values],
                f"{name}: smallest of the layers": [min(v, default=None) for v in layer_values],
            }
        for key, column in columns.items():
            try:
                numbers = np.array(column, float)  # None becomes NaN
            except (TypeError, ValueError, OverflowError):
                continue  # text
            numbers[~np.isfinite(numbers)] = np.nan
            self._parts.setdefault(key, []).append((steps, numbers))

    def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns steps and values of each metric, (N,) each; NaN where a row has null."""
        for name, parts in self._parts.items():
            if len(parts) > 1:
                self._parts[name] = [tuple(map(np.concatenate, zip(*parts, strict=True)))]
        return {name: parts[0] for name, parts in self._parts.items()}


def _has_step(row: dict[str, Any]) -> bool:
    step = row.get("step")
    return type(step) is int and 0 <= step < MAX_STEP


def _as_counted(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row; of a skipped step, which had no effect, without the metrics of its batch."""
    if not row.get("skipped"):
        return row
    counted = dict(row)
    for name in row.keys() - OF_THE_RUN:
        if name.startswith(TASK_PREFIX):
            continue
        # An empty list has no value of any layer.
        counted[name] = [] if type(row[name]) is list else None
    return counted


def _numbers(value: Any) -> list[float]:
    """Returns the finite numbers in a list; [] for what is no list."""
    return [entry for entry in value if is_number(entry)] if type(value) is list else []


class Run:
    """The files of a workdir. Raises ConfigError if it has neither metrics nor events."""

    def __init__(self, workdir: Path):
        self.workdir = workdir
        self._tables = [Table(workdir / name) for name in ("metrics.jsonl", "events.jsonl")]
        if not any(table.path.is_file() for table in self._tables):
            fault = "not a run (no metrics.jsonl and no events.jsonl)"
            raise ConfigError(f"{workdir}: {fault}; give the --workdir of a run")
        self._clear()

    def _clear(self) -> None:
        self.metrics = Metrics()
        self.events: list[dict[str, Any]] = []
        self._without_step = 0
        for table in self._tables:
            table.clear()

    def update(self) -> None:
        """Reads what was written since the last call."""
        if any(table.is_replaced() for table in self._tables):
            self._clear()
        metrics_table, events_table = self._tables
        for rows in metrics_table.new_rows():
            self._without_step += self.metrics.add(rows)
        for rows in events_table.new_rows():
            self.events += [row for row in rows if isinstance(row.get("event"), str)]

    def last_write(self) -> float:
        """Returns when a row or an event was last written, in seconds since 1970."""
        paths = [table.path for table in self._tables if table.path.is_file()]
        return max((path.stat().st_mtime for path in paths), default=0.0)

    def notes(self) -> list[str]:
        """Returns a line for everything that is missing, incomplete or left out."""
        notes = []
        for table in self._tables:
            name = table.path.name
            if not table.path.is_file():
                notes.append(f"{name} is missing")
            if table.is_truncated:
                notes.append(f"{name}: the last line is incomplete, and left out")
            num_corrupt = table.num_corrupt
            if name == "metrics.jsonl":
                num_corrupt += self._without_step
            if num_corrupt:
                notes.append(f"{name}: {num_corrupt:,} lines cannot be read, and are left out")
        if self.metrics.num_repeated:
            notes.append(
                f"metrics.jsonl: {self.metrics.num_repeated:,} rows of steps that the run repeated "
                f"are left out"
            )
        if self.json("config.json") is None:
            notes.append("config.json is missing, or cannot be read")
        return notes

    def json(self, name: str) -> Any | None:
        """Returns a JSON file of the workdir; None if it is missing or cannot be read."""
        return read_json(self.workdir / name)

    def configs(self) -> list[dict[str, Any]]:
        """Returns the configs of all starts where they differ, the latest one last."""
        earlier = sorted((self.workdir / "config_history").glob("[0-9]*.json"))
        configs = [*map(read_json, earlier), self.json("config.json")]
        return [config for config in configs if isinstance(config, dict)]

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest of the newest checkpoint, or {}."""
        folders = (self.workdir / "checkpoints").glob("[0-9]*")
        steps = [int(path.name) for path in folders if path.name.isdecimal()]
        if not steps:
            return {}
        manifest = self.json(f"checkpoints/{max(steps)}/MANIFEST.json")
        return manifest if isinstance(manifest, dict) else {}


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number that JSON and float64 accept."""
    if type(value) is int:
        return abs(value) < MAX_STEP
    return type(value) is float and math.isfinite(value)


def read_json(path: Path) -> Any | None:
    """Returns what a JSON file contains; None if it is missing, too large or no JSON."""
    try:
        return foreign.read_json(path, None)
    except (OSError, ValueError):
        return None
