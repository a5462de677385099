"""What a process is doing, in a small file that its supervisor maps: phase, step, a heartbeat, seconds.

A process that is stuck in native code or stopped by a signal cannot tell anybody; its page stays there
to be read. The clock runs without a supervisor as well, for the account of a run's time.
"""

import collections
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "MESHTRAIN_PROGRESS"  # the file's path, from the supervisor
PHASES = ("start", "restore", "compile", "data", "step", "save", "eval", "check", "end")
FIELDS = ("beat", "phase", "since", "first", "reached", "typical", "stop", *PHASES)
BEAT = 0.5  # seconds between heartbeats
TYPICAL = 50  # steps whose median duration is the typical one


class ProgressPage:
    """Numbers by name, in memory or in a file that several processes map."""

    def __init__(self, path: Path | None = None):
        if path is None:
            self._numbers = memoryview(bytearray(8 * len(FIELDS))).cast("d")
            return
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 8 * len(FIELDS))).cast("d")

    @classmethod
    def create(cls, path: Path) -> "ProgressPage":
        """Makes the file of a process that is about to be started."""
        path.write_bytes(bytes(8 * len(FIELDS)))
        page = cls(path)
        page["since"], page["first"] = time.monotonic(), -1
        return page

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
        spent[self.phase] += time.monotonic() - self["since"]
        return spent


class Clock:
    """Counts the time of this process by phases; close it when the run ends."""

    def __init__(self):
        path = os.environ.get(VARIABLE)
        self.page = ProgressPage(Path(path)) if path else ProgressPage()
        if not path:
            self.page["since"], self.page["first"] = time.monotonic(), -1
        self._steps: collections.deque = collections.deque(maxlen=TYPICAL)
        self._worked = 0.0  # seconds of data and step when the newest step began
        self._closed = threading.Event()
        if path:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase, of a step; `data` is the first of each step."""
        page, now = self.page, time.monotonic()
        page[page.phase] += now - page["since"]
        page["since"], page["phase"] = now, PHASES.index(phase)
        if step is None:
            return
        if phase == "data":
            worked = page["data"] + page["step"]
            if page["first"] < 0:
                page["first"] = step
            elif worked > self._worked:
                self._steps.append(worked - self._worked)
                if len(self._steps) >= 3:  # the first ones may be dispatched only, or connect
                    page["typical"] = statistics.median(self._steps)
            self._worked = worked
        page["reached"] = step

    @property
    def asked(self) -> bool:
        """Whether the supervisor wants the run to save and stop."""
        return self.page["stop"] > 0

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            self.page["beat"] = time.monotonic()

    def close(self) -> None:
        """Leaves the phase as it is: where a run failed is to be seen."""
        self._closed.set()


def add(accounts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns the sums by name."""
    total: dict[str, float] = {}
    for account in accounts:
        for name, seconds in account.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
