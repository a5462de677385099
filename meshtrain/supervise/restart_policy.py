"""Decides after an attempt whether to restart: what failed first, what hangs, where time went.

The settings are at the top, then the outcome of an attempt, the budget of restarts, and the account
of time.
"""

import collections
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshtrain.cluster import environment, limits, progress
from meshtrain.errors import (
    EXIT_NOT_FINITE,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USER,
    ConfigError,
)
from meshtrain.supervise.workers import Exit, ProcessStatus


@dataclass(frozen=True)
class Settings:
    """The flags of `meshtrain launch`. Raises ConfigError if one of them is invalid."""

    nproc: int = 1  # processes on this host
    simulate_devices: int | None = None  # CPU devices of each process
    force: bool = False  # more processes and devices than this machine is likely to have room for
    max_restarts: int = 3  # within `window`
    window: float = 3600.0  # seconds
    # Over all hosts: fewest processes to continue with if some are lost.
    min_nproc: int | None = None
    stall_seconds: float = 60.0  # without a step
    grace: float = 60.0  # seconds that processes have to save when asked to stop
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None  # HOST:PORT of node 0
    join_seconds: float = 120.0  # timeout for all hosts to connect
    # Of the processes' port on node 0; below the ports that systems give to outgoing connections.
    ports: str = "20000-31999"
    insecure: bool = False  # supervisors of several hosts may meet without MESHTRAIN_SECRET
    quiet: bool = False  # print no progress

    def __post_init__(self):
        faults = []
        for name in ("nproc", "nnodes", "min_nproc"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"--{name}={value}: use 1 or more")
        if self.max_restarts < 0:
            faults.append(f"--max_restarts={self.max_restarts}: use 0 or more")
        durations = {
            "window": self.window,
            "stall_seconds": self.stall_seconds,
            "grace": self.grace,
            "join_seconds": self.join_seconds,
        }
        faults += environment.seconds_faults(durations)
        faults += limits.process_faults(self.nproc, force=self.force)
        if self.simulate_devices is not None:
            faults += limits.device_faults(
                "--simulate_devices",
                self.simulate_devices,
                num_processes=self.nproc,
                force=self.force,
            )
        num_processes = self.nproc * self.nnodes
        if self.min_nproc and self.min_nproc > num_processes:
            faults.append(
                f"--min_nproc={self.min_nproc}: there are {num_processes} processes in all"
            )
        if not 0 <= self.node_rank < self.nnodes:
            faults.append(
                f"--node_rank={self.node_rank}: use 0 to {self.nnodes - 1}, below --nnodes"
            )
        if self.nnodes > 1 and not (self.coordinator or "").rpartition(":")[2].isdigit():
            faults.append(f"--coordinator={self.coordinator}: use HOST:PORT of node 0")
        ports = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.ports, re.ASCII)
        if not ports or not 1 <= int(ports[1]) <= int(ports[2]) <= 65535:
            faults.append(f"--ports={self.ports}: use LOW-HIGH, such as 20000-31999")
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt: the exit code of the process that failed first, or 0."""

    code: int  # negative: the signal that killed it
    why: str = ""
    status: ProcessStatus | None = None
    tail: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    @property
    def reached_a_step(self) -> bool:
        return self.status is not None and self.status.first_step >= 0


def exit_outcome(process: Exit) -> Outcome:
    """Returns the outcome of an attempt that this exit has ended."""
    return Outcome(process.code, describe_exit(process), process.status, process.tail)


# What jax and gloo print in a process that has lost another.
LOST_PEER = re.compile(
    r"(Connection (closed|reset)) by peer|distributed service|coordination service"
)


def first_failure(exits: Iterable[Exit]) -> Exit | None:
    """Returns the exit that caused the others, among processes that ended at about the same time.

    The other processes fail because they lose a peer: jax aborts them, or a collective raises an
    error. Order of precedence: exit codes that name the cause (2, 17), other failures, aborts, and
    last processes whose output reports a lost peer. Ties: the first in `exits`.
    """

    def precedence(process: Exit) -> int:
        if process.code in (EXIT_USER, EXIT_NOT_FINITE):
            return 0
        if any(LOST_PEER.search(line) for line in process.tail):
            return 3
        return 2 if process.code == -signal.SIGABRT else 1

    failures = [process for process in exits if process.code]
    return min(failures, key=precedence, default=None)


def describe_exit(process: Exit) -> str:
    if process.code < 0:
        number = -process.code
        known = number in set(signal.Signals)  # most real-time signals have no name
        name = f" ({signal.Signals(number).name})" if known else ""
        cause = f"killed by signal {number}{name}"
    else:
        cause = f"ended with exit code {process.code}"
    status = process.status
    return f"rank {process.rank} (pid {status.pid}) {cause} {_describe_phase(status)}"


def _describe_phase(status: ProcessStatus) -> str:
    step = f" of step {status.current_step}" if status.first_step >= 0 else ""
    return f"in phase {status.phase}{step}"


# The time limit of each phase, as a multiple of `stall_seconds`.
PHASE_LIMITS = {
    "start": 30,
    "restore": 30,
    "compile": 60,
    "save": 30,
    "eval": 30,
    "check": 5,
    "end": 10,
}

# For the other phases until the median duration of a step is known: the first steps open
# connections.
FIRST_STEPS_LIMIT = 10
STEP_LIMIT = 5  # later: this multiple of the median duration, at least `stall_seconds`
STOPPED_LIMIT = 10.0  # seconds after which a process stopped by a signal counts as stuck

# The order of the phases of a step; the process that is furthest behind holds up the others.
PHASE_ORDER = ("start", "restore", "compile", "data", "step", "check", "eval", "save", "end")


def find_stall(statuses: Sequence[ProcessStatus], stall_seconds: float) -> Outcome | None:
    """Returns the outcome of a stall, with the process that causes it; None if there is none."""

    # A process that is stopped or sends no heartbeat is stuck, whatever its phase.
    def longest_silence_first(status: ProcessStatus) -> tuple[float, float]:
        return -status.stopped_for, -status.heartbeat_age

    for status in sorted(statuses, key=longest_silence_first):
        silent = status.heartbeat_age > stall_seconds
        if status.stopped_for > STOPPED_LIMIT or (status.stopped_for and silent):
            return _stalled(status, f"stopped by a signal for {status.stopped_for:.0f} s")
        if silent:
            return _stalled(status, f"sent no heartbeat for {status.heartbeat_age:.0f} s")

    # One that is late may wait for another: the process that is furthest behind is named.
    late = [status for status in statuses if status.phase_age > _time_limit(status, stall_seconds)]
    if not late:
        return None

    def furthest_behind_first(status: ProcessStatus) -> tuple[bool, int, int, float]:
        phase = PHASE_ORDER.index(status.phase)
        return not status.stopped_for, status.current_step, phase, -status.phase_age

    behind = min(statuses, key=furthest_behind_first)
    seconds = max(status.phase_age for status in late)
    verb = "is stopped by a signal, and there was" if behind.stopped_for else "made"
    return _stalled(behind, f"{verb} no progress for {seconds:.0f} s")


def _time_limit(status: ProcessStatus, stall_seconds: float) -> float:
    """Returns the seconds that a process may stay in its phase."""
    if status.phase in PHASE_LIMITS:
        return PHASE_LIMITS[status.phase] * stall_seconds
    if not status.step_seconds:
        return FIRST_STEPS_LIMIT * stall_seconds
    return max(stall_seconds, STEP_LIMIT * status.step_seconds)


def _stalled(status: ProcessStatus, why: str) -> Outcome:
    message = f"rank {status.rank} (pid {status.pid}) {why}, {_describe_phase(status)}"
    return Outcome(EXIT_STALLED, message, status)


# Failures in a row, with the same exit code at the same step, after which a restart is useless.
MAX_SAME_FAILURES = collections.defaultdict(lambda: 2, {-signal.SIGKILL: 3, EXIT_STALLED: 3})
MAX_BACKOFF = 30.0  # seconds between attempts


class RestartBudget:
    """Decides whether to start another attempt, and when."""

    def __init__(self, *, max_restarts: int, window: float):
        self._max, self._window = max_restarts, window
        self._times: collections.deque[float] = collections.deque()
        self._last_failure: tuple | None = None
        # Attempts in a row that failed in the same way, and that made no step.
        self._num_same = 0
        self._num_without_progress = 0

    @property
    def used(self) -> int:
        """Returns the number of restarts within the window."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        return len(self._times)

    def reason_to_give_up(self, outcome: Outcome, num_processes: int) -> str:
        """Returns why no attempt should follow this one of `num_processes` processes, or ""."""
        if outcome.code == EXIT_USER:
            return "the configuration or the data has to be changed"
        if outcome.code == EXIT_NOT_FINITE:
            return "the same would happen again"
        status = outcome.status
        progressed = (
            status is not None
            and outcome.reached_a_step
            and status.current_step > status.first_step
        )
        self._num_without_progress = 0 if progressed else self._num_without_progress + 1
        if outcome.code == EXIT_PREEMPTED:
            self._num_same = 0
            self._last_failure = None
            return ""

        step = status and status.current_step
        failure = (outcome.code, step, outcome.reached_a_step, num_processes)
        self._num_same = self._num_same + 1 if failure == self._last_failure else 1
        self._last_failure = failure
        if self._num_same >= MAX_SAME_FAILURES[outcome.code]:
            where = f"step {step}" if outcome.reached_a_step else "the start"
            return f"{self._num_same} attempts in a row ended this way at {where}"

        if self.used >= self._max:
            return f"{self.used} restarts within {self._window:.0f} s, the limit of --max_restarts"
        self._times.append(time.monotonic())
        return ""

    def backoff(self) -> float:
        """Returns the seconds until the next attempt; 0 after an attempt that made progress."""
        # A run may be preempted any number of times, and 2.0 ** 1024 would overflow.
        exponent = min(self._num_without_progress, 10)
        return min(2.0**exponent - 1, MAX_BACKOFF)


class TimeAccount:
    """Sums up how all attempts spent their time, as measured by the first process on node 0."""

    def __init__(self):
        self._started_at = time.monotonic()
        self._spent: list[dict[str, float]] = []
        self._reached_step = -1
        self._step_seconds = 0.0
        self.restarts = 0
        self.lost_steps = 0

    def close_attempt(
        self, seconds: dict[str, float], status: ProcessStatus | None, stalled: float
    ) -> None:
        """Adds an attempt: `seconds` by phase, of which the last `stalled` seconds are a hang."""
        seconds = dict(seconds)
        if status and stalled:
            stalled = min(stalled, seconds[status.phase])
            seconds[status.phase] -= stalled
            seconds["stalled"] = stalled
        self._spent.append(seconds)
        if status and status.first_step >= 0:
            self._add_lost_steps(status.first_step)
            self._reached_step = status.current_step
            self._step_seconds = status.step_seconds

    def _add_lost_steps(self, first: int) -> None:
        """Counts the steps from `first` on that an earlier attempt had already done."""
        repeated = max(0, self._reached_step - first)
        self.lost_steps += repeated
        if repeated:
            lost = repeated * self._step_seconds
            self._spent.append({"lost": lost, "step": -lost})

    def total(self) -> dict[str, float]:
        """Returns seconds by kind; `restart` is the time between attempts."""
        total = progress.sum_by_name(self._spent)
        total["wall"] = time.monotonic() - self._started_at
        spent = sum(seconds for name, seconds in total.items() if name != "wall")
        total["restart"] = total["wall"] - spent
        return {name: max(0.0, seconds) for name, seconds in total.items()}

    def summary(self) -> str:
        total = self.total()
        wall = total.pop("wall")
        share = total.get("step", 0.0) / max(wall, 1e-9)
        parts = [f"{name} {seconds:.1f}" for name, seconds in total.items() if seconds >= 0.05]
        return (
            f"goodput {share:.1%} of {wall:.1f} s · {self.restarts} restarts · {self.lost_steps} "
            f"steps lost · "
            f"seconds: {', '.join(parts)}"
        )
