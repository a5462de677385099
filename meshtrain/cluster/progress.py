"""The progress page of a process: a small file with its phase, step, heartbeat and times.

The supervisor reads the file, so it can read the page of a process that is stuck in native code or
stopped by a signal. Without a supervisor the clock still measures the time of each phase.
"""

import array
import collections
import contextlib
import math
import os
import statistics
import threading
import time
import weakref
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


STOP = FIELDS.index("stop_requested")  # the one field that the supervisor writes
MAX_TIME = 1e10  # seconds; no clock and no run has more
MAX_STEP = 2**53


class ProgressPage:
    """float64 numbers by name, in memory or in a file that a process and its supervisor share.

    Each of the two writes its own fields, and reads those of the other. Whatever the file holds,
    reading it does no harm: what is missing or impossible is ignored, and the last valid value
    counts. So it is not mapped into memory: a mapped file that is truncated kills who reads it.
    """

    def __init__(self, path: Path | None = None, *, of_supervisor: bool = False):
        self._numbers = array.array("d", bytes(8 * len(FIELDS)))
        self._lock = threading.Lock()  # the heartbeat comes from another thread
        self._file: int | None = None
        self._of_supervisor = of_supervisor
        self.fault = ""  # the first value that was ignored
        if path is not None:
            self._file = os.open(path, os.O_RDWR)
            weakref.finalize(self, os.close, self._file)
            self._read(range(len(FIELDS)))

    @classmethod
    def create(cls, path: Path) -> "ProgressPage":
        """Creates the file of a process to be started, and returns its supervisor's page."""
        path.write_bytes(bytes(8 * len(FIELDS)))
        cls(path).start()
        return cls(path, of_supervisor=True)

    def start(self) -> None:
        self["phase_start"] = time.monotonic()
        self["first_step"] = -1

    def __getitem__(self, name: str) -> float:
        number = FIELDS.index(name)
        if (number == STOP) != self._of_supervisor:
            self._read([number])
        return self._numbers[number]

    def __setitem__(self, name: str, value: float) -> None:
        with self._lock:
            self._numbers[FIELDS.index(name)] = value
            if self._of_supervisor:
                self._write(STOP, STOP + 1)
            else:
                # All of them, so that what was damaged is soon repaired.
                self._write(0, STOP)
                self._write(STOP + 1, len(FIELDS))

    def _read(self, numbers: Iterable[int]) -> None:
        """Reads these fields from the file, if there is one."""
        if self._file is None:
            return
        page = b""
        with contextlib.suppress(OSError):
            page = os.pread(self._file, 8 * len(FIELDS), 0)
        values = array.array("d", page[: len(page) // 8 * 8])
        for number in numbers:
            name = FIELDS[number]
            if number >= len(values):
                self.fault = self.fault or f"{len(page)} of {8 * len(FIELDS)} bytes"
            elif not _is_possible(name, values[number]):
                self.fault = self.fault or f"{name}={values[number]}"
            else:
                self._numbers[number] = values[number]

    def _write(self, start: int, stop: int) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                os.pwrite(self._file, self._numbers[start:stop].tobytes(), 8 * start)

    @property
    def phase(self) -> str:
        return PHASES[int(self["phase"])]

    def seconds(self) -> dict[str, float]:
        """Returns the time spent in each phase so far."""
        spent = {name: self[name] for name in PHASES}
        spent[self.phase] += time.monotonic() - self["phase_start"]
        return spent


def _is_possible(name: str, value: float) -> bool:
    """Returns whether a process can have written a value."""
    if name == "phase":
        return value in range(len(PHASES))
    if name in ("first_step", "current_step"):
        return value.is_integer() and -1 <= value < MAX_STEP
    return math.isfinite(value) and abs(value) < MAX_TIME


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
