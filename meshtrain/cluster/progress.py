"""The progress page of a process: a small file with its phase, step, heartbeat and times.

The supervisor maps the file into memory, so it can read the page of a process that is stuck in
native code or stopped by a signal. Without a supervisor the clock still measures the time of each
phase.
"""

import collections
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

# The environment variable with the path of the file; the supervisor sets it.
VARIABLE = "MESHTRAIN_PROGRESS"
PHASES = ("start", "restore", "compile", "data", "step", "save", "eval", "check", "end")
FIELDS = (
    "heartbeat",  # time of the last one
    "phase",  # index in PHASES
    "phase_start",
    "first_step",  # -1 until then
    "current_step",
    "step_seconds",  # median of the latest steps; 0 before there are enough
    "stop_requested",
    *PHASES,  # seconds in each
)
HEARTBEAT_SECONDS = 0.5  # between heartbeats
MEDIAN_STEPS = 50  # latest steps whose median duration is `step_seconds`


class ProgressPage:
    """float64 numbers by name, in memory or in a file that several processes map."""

    def __init__(self, path: Path | None = None):
        if path is None:
            self._numbers = memoryview(bytearray(8 * len(FIELDS))).cast("d")
            return
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 8 * len(FIELDS))).cast("d")

    @classmethod
    def create(cls, path: Path) -> "ProgressPage":
        """Creates the file for a process that is about to be started."""
        path.write_bytes(bytes(8 * len(FIELDS)))
        page = cls(path)
        page.start()
        return page

    def start(self) -> None:
        self["phase_start"] = time.monotonic()
        self["first_step"] = -1

    def __getitem__(self, name: str) -> float:
        return self._numbers[FIELDS.index(name)]

    def __setitem__(self, name: str, value: float) -> None:
        self._numbers[FIELDS.index(name)] = value

    @property
    def phase(self) -> str:
        return PHASES[int(self["phase"])]

    def seconds(self) -> dict[str, float]:
        """Returns the time spent in each phase so far."""
        spent = {name: self[name] for name in PHASES}
        spent[self.phase] += time.monotonic() - self["phase_start"]
        return spent


class Clock:
    """Measures the time that this process spends in each phase; close it when the run ends."""

    def __init__(self):
        path = os.environ.get(VARIABLE)
        if path:  # the supervisor has created it, and its time began then
            self.progress = ProgressPage(Path(path))
        else:
            self.progress = ProgressPage()
            self.progress.start()
        self._durations: collections.deque[float] = collections.deque(maxlen=MEDIAN_STEPS)
        self._total_at_step_start = 0.0  # seconds in phases `data` and `step`
        self._closed = threading.Event()
        if path:
            threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    @property
    def seconds_waiting_for_data(self) -> float:
        """Seconds of all steps so far; with prefetching, those in which the next batch was late."""
        return self.progress["data"]

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase, of a step if one is given; each step begins with the phase `data`."""
        page = self.progress
        now = time.monotonic()
        page[page.phase] += now - page["phase_start"]
        page["phase_start"] = now
        page["phase"] = PHASES.index(phase)
        if step is None:
            return
        if phase == "data":
            total = page["data"] + page["step"]
            if page["first_step"] < 0:
                page["first_step"] = step
            elif total > self._total_at_step_start:
                self._durations.append(total - self._total_at_step_start)
                # The first steps are not typical: they may only dispatch, or open connections.
                if len(self._durations) >= 3:
                    page["step_seconds"] = statistics.median(self._durations)
            self._total_at_step_start = total
        page["current_step"] = step

    @property
    def stop_requested(self) -> bool:
        """Returns whether the supervisor has asked the run to save and stop."""
        return self.progress["stop_requested"] > 0

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self.progress["heartbeat"] = time.monotonic()

    def close(self) -> None:
        """Stops the heartbeat. The phase stays, so that the supervisor sees where a run failed."""
        self._closed.set()


def sum_by_name(accounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of the values with the same name."""
    total: dict[str, float] = {}
    for account in accounts:
        for name, seconds in account.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
