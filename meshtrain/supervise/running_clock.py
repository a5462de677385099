"""The clock of a supervisor: it stands still while the supervisor itself is suspended.

A signal, a laptop that sleeps or a pause of its virtual machine suspends the supervisor, mostly
together with the processes that it watches. They have not stalled then.
"""

import time
from collections.abc import Callable

# Seconds by which one reading advances the clock at most. A supervisor reads it many times a second
# while it runs, so more is time in which it was suspended.
MAX_ADVANCE = 0.5


class RunningClock:
    """Seconds in which the caller was running; `read` returns the seconds of a monotonic clock."""

    def __init__(self, read: Callable[[], float] = time.monotonic):
        self._read = read
        self._read_at = read()
        self._now = 0.0

    def now(self) -> float:
        """Returns the seconds since this clock was made, without those of suspensions."""
        read_at = self._read()
        self._now += min(read_at - self._read_at, MAX_ADVANCE)
        self._read_at = read_at
        return self._now
