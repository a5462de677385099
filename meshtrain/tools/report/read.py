"""Reads what a run has written to its workdir so far; a reader that is kept reads only what is new."""

import itertools
import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError

LINES_AT_ONCE = 4096

MAX_STEP = 2**53  # as float64 exact below

MAX_JSON_BYTES = 256 << 20  # of a file that is read at once; a larger one is left out


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
        """Whether the file is not the one that was read before; then `clear`, and read again."""
        try:
            stat = self.path.stat()
        except OSError:
            return self._offset > 0
        return self._offset > 0 and (stat.st_ino != self._inode or stat.st_size < self._offset)

    def new_rows(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of the complete lines since the last call, in lists."""
        if not self.path.is_file():
            return
        with open(self.path, "rb") as file:
            self._inode = self.path.stat().st_ino
            file.seek(self._offset)
            lines: list[bytes] = []
            self.is_truncated = False
            for line in file:
                if not line.endswith(b"\n"):
                    self.is_truncated = True
                    break
                self._offset += len(line)
                lines.append(line)
                if len(lines) == LINES_AT_ONCE:
                    yield self._parse(lines)
                    lines = []
            yield self._parse(lines)

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:  # all at once takes half the time
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) != len(lines):
            found = [row for line in lines for row in _parsed(line)]
        rows = [row for row in found if isinstance(row, dict)]
        self.num_corrupt += len(lines) - len(rows)
        return rows


def _parsed(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []


class Metrics:
    """The values of each metric by step. Of a step that was repeated, the last row counts: what the run kept."""

    def __init__(self):
        self.num_rows = self.num_repeated = 0
        self._last_step = -1.0
        self._parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, rows: list[dict[str, Any]]) -> int:
        """Adds rows; returns how many of them have no step, and are left out."""
        valid = [
            row for row in rows if type(row.get("step")) is int and 0 <= row["step"] < MAX_STEP
        ]
        if valid:
            steps = np.array([row["step"] for row in valid], float)
            smallest_from = np.minimum.accumulate(steps[::-1])[::-1]
            is_kept = np.append(steps[:-1] < smallest_from[1:], True)
            self._drop_from(smallest_from[0])
            kept = list(itertools.compress(valid, is_kept))
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
        if list in {*map(type, values)}:  # of each layer
            layers = [[x for x in v if is_number(x)] if type(v) is list else [] for v in values]
            bounds = {"largest": max, "smallest": min}
            columns = {
                f"{name}: {bound} of the layers": [pick(one, default=None) for one in layers]
                for bound, pick in bounds.items()
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


class Run:
    """The files of a workdir. Raises ConfigError if it has neither metrics nor events."""

    def __init__(self, workdir: Path):
        self.workdir = workdir
        self._tables = [Table(workdir / name) for name in ("metrics.jsonl", "events.jsonl")]
        if not any(table.path.is_file() for table in self._tables):
            why = "not a run (no metrics.jsonl and no events.jsonl)"
            raise ConfigError(f"{workdir}: {why}; give the --workdir of a run")
        self._clear()

    def _clear(self) -> None:
        self.metrics, self.events, self._without_step = Metrics(), [], 0
        for table in self._tables:
            table.clear()

    def update(self) -> None:
        """Reads what was written since the last call."""
        if any(table.is_replaced() for table in self._tables):
            self._clear()
        metrics, events = self._tables
        for rows in metrics.new_rows():
            self._without_step += self.metrics.add(rows)
        for rows in events.new_rows():
            self.events += [row for row in rows if isinstance(row.get("event"), str)]

    def last_write(self) -> float:
        """Returns when a row or an event was last written, in seconds since 1970."""
        paths = [table.path for table in self._tables if table.path.is_file()]
        return max((path.stat().st_mtime for path in paths), default=0.0)

    def notes(self) -> list[str]:
        """Returns a line for everything that is missing, incomplete or left out."""
        found = []
        for table in self._tables:
            name = table.path.name
            if not table.path.is_file():
                found.append(f"{name} is missing")
            if table.is_truncated:
                found.append(f"{name}: the last line is incomplete, and left out")
            num_corrupt = table.num_corrupt + (
                self._without_step if table is self._tables[0] else 0
            )
            if num_corrupt:
                found.append(f"{name}: {num_corrupt:,} lines cannot be read, and are left out")
        if self.metrics.num_repeated:
            found.append(
                f"metrics.jsonl: {self.metrics.num_repeated:,} rows of steps that the run repeated are left out"
            )
        if self.json("config.json") is None:
            found.append("config.json is missing, or cannot be read")
        return found

    def json(self, name: str) -> Any | None:
        """Returns a JSON file of the workdir; None if it is missing or cannot be read."""
        return read_json(self.workdir / name)

    def configs(self) -> list[dict[str, Any]]:
        """Returns the configs of all starts where they differ, the latest one last."""
        earlier = sorted((self.workdir / "config_history").glob("[0-9]*.json"))
        found = [*map(read_json, earlier), self.json("config.json")]
        return [one for one in found if isinstance(one, dict)]

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest of the newest checkpoint, or {}."""
        folders = (self.workdir / "checkpoints").glob("[0-9]*")
        steps = sorted((int(path.name) for path in folders if path.name.isdecimal()), reverse=True)
        found = self.json(f"checkpoints/{steps[0]}/MANIFEST.json") if steps else None
        return found if isinstance(found, dict) else {}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no integer that JSON or float64 may reject."""
    return (
        type(value) is int
        and abs(value) < MAX_STEP
        or type(value) is float
        and math.isfinite(value)
    )


def read_json(path: Path) -> Any | None:
    """Returns what a JSON file contains; None if it is missing, too large or no JSON."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
