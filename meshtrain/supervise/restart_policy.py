"""Decide after an attempt: which process failed first, which one hangs, whether to restart, where time went."""

import collections
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshtrain.cluster import environment, limits, progress
from meshtrain.errors import (
    EXIT_FAILED,
    EXIT_NOT_FINITE,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USER,
    ConfigError,
)
from meshtrain.supervise.workers import Exit, ProcessStatus

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

# For the other phases until the median duration of a step is known: the first steps open connections.
FIRST_STEPS_LIMIT = 10

STEP_LIMIT = 5  # later: this multiple of the median duration, at least `stall_seconds`

STOPPED_LIMIT = 10.0  # seconds after which a process stopped by a signal counts as stuck

# The order of the phases of a step; the process that is furthest behind holds up the others.
PHASE_ORDER = ("start", "restore", "compile", "data", "step", "check", "eval", "save", "end")

# What jax and gloo print in a process that has lost another.
LOST_PEER = re.compile(
    r"(Connection (closed|reset)) by peer|distributed service|coordination service"
)

# Failures in a row, with the same exit code at the same step, after which a restart is useless.
MAX_SAME_FAILURES = collections.defaultdict(lambda: 2, {-signal.SIGKILL: 3, EXIT_STALLED: 3})

MAX_BACKOFF = 30.0  # seconds between attempts


@dataclass(frozen=True)
class Settings:
    """The flags of `meshtrain launch`. Raises ConfigError if one of them is invalid."""

    nproc: int = 1  # processes on this host
    simulate_devices: int | None = None  # CPU devices of each process
    force: bool = False  # more processes and devices than this machine is likely to have room for
    max_restarts: int = 3  # within `window`
    window: float = 3600.0  # seconds
    min_nproc: int | None = (
        None  # over all hosts: fewest processes to continue with if some are lost
    )
    stall_seconds: float = 60.0  # without a step
    grace: float = 60.0  # seconds that processes have to save when asked to stop
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None  # HOST:PORT of node 0
    join_seconds: float = 120.0  # timeout for all hosts to connect
    # Of the processes' port on node 0; below the ports that systems give to outgoing connections.
    ports: str = "20000-31999"

    def __post_init__(self):
        faults = [
            f"--{name}={value}: use 1 or more"
            for name, value in (
                ("nproc", self.nproc),
                ("nnodes", self.nnodes),
                ("min_nproc", 1 if self.min_nproc is None else self.min_nproc),
            )
            if value < 1
        ]
        if self.max_restarts < 0:
            faults.append(f"--max_restarts={self.max_restarts}: use 0 or more")
        names = ("window", "stall_seconds", "grace", "join_seconds")
        faults += environment.seconds_faults({name: getattr(self, name) for name in names})
        faults += limits.process_faults(self.nproc, force=self.force)
        if self.simulate_devices is not None:
            faults += limits.device_faults(
                "--simulate_devices",
                self.simulate_devices,
                num_processes=self.nproc,
                force=self.force,
            )
        if self.min_nproc and self.min_nproc > self.nproc * self.nnodes:
            faults.append(
                f"--min_nproc={self.min_nproc}: there are {self.nproc * self.nnodes} processes in all"
            )
        if not 0 <= self.node_rank < self.nnodes:
            faults.append(
                f"--node_rank={self.node_rank}: use 0 to {self.nnodes - 1}, below --nnodes"
            )
        if self.nnodes > 1 and not (self.coordinator or "").rpartition(":")[2].isdigit():
            faults.append(f"--coordinator={self.coordinator}: use HOST:PORT of node 0")
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", str(self.ports), re.ASCII)
        if not found or not 1 <= int(found[1]) <= int(found[2]) <= 65535:
            faults.append(f"--ports={self.ports}: use LOW-HIGH, such as 20000-31999")
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the exit code of the process that failed first, or 0."""

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


def first_failure(exits: Iterable[Exit]) -> Exit | None:
    """Returns the exit that caused the others, among processes that ended at about the same time.

    The other processes fail because they lose a peer: jax aborts them, or a collective raises an error.
    Order of precedence: exit codes that name the cause (2, 17), other failures, aborts, and last processes
    whose output reports a lost peer. Ties: the first in `exits`.
    """

    def precedence(one: Exit) -> int:
        if one.code in (EXIT_USER, EXIT_NOT_FINITE):
            return 0
        if any(LOST_PEER.search(line) for line in one.tail):
            return 3
        return 2 if one.code == -signal.SIGABRT else 1

    return min((one for one in exits if one.code), key=precedence, default=None)


def describe_exit(one: Exit) -> str:
    if one.code < 0:
        known = -one.code in set(signal.Signals)  # most real-time signals have no name
        name = f" ({signal.Signals(-one.code).name})" if known else ""
        how = f"killed by signal {-one.code}{name}"
    else:
        how = f"ended with exit code {one.code}"
    return f"rank {one.rank} (pid {one.status.pid}) {how} {_describe_phase(one.status)}"


def _describe_phase(status: ProcessStatus) -> str:
    step = f" of step {status.current_step}" if status.first_step >= 0 else ""
    return f"in phase {status.phase}" + step


def find_stall(statuses: Sequence[ProcessStatus], stall_seconds: float) -> Outcome | None:
    """Returns the outcome of a stall, with the process that holds up the others; None if there is none."""
    for status in sorted(statuses, key=lambda one: (-one.stopped_for, -one.heartbeat_age)):
        silent = status.heartbeat_age > stall_seconds
        if status.stopped_for > STOPPED_LIMIT or status.stopped_for and silent:
            return _stalled(status, f"stopped by a signal for {status.stopped_for:.0f} s")
        if silent:
            return _stalled(status, f"sent no heartbeat for {status.heartbeat_age:.0f} s")
    late = [one for one in statuses if one.phase_age > _time_limit(one, stall_seconds)]
    if not late:
        return None

    def progress_of(one: ProcessStatus) -> tuple:
        return (
            not one.stopped_for,
            one.current_step,
            PHASE_ORDER.index(one.phase),
            -one.phase_age,
        )

    behind = min(statuses, key=progress_of)
    why = "is stopped by a signal, and there was" if behind.stopped_for else "made"
    return _stalled(behind, f"{why} no progress for {max(one.phase_age for one in late):.0f} s")


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


class RestartBudget:
    """Decides whether to start another attempt, and when."""

    def __init__(self, *, max_restarts: int, window: float):
        self._max, self._window = max_restarts, window
        self._times: collections.deque = collections.deque()
        self._last_failure: tuple | None = None
        self._num_same = self._num_without_progress = 0  # attempts in a row

    @property
    def used(self) -> int:
        """Returns the number of restarts within the window."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        return len(self._times)

    def reason_to_give_up(self, outcome: Outcome, count: int) -> str:
        """Returns why no attempt should follow this one of `count` processes, or ""."""
        if outcome.code == EXIT_USER:
            return "the configuration or the data has to be changed"
        if outcome.code == EXIT_NOT_FINITE:
            return "the same would happen again"
        status = outcome.status
        progressed = outcome.reached_a_step and status.current_step > status.first_step
        self._num_without_progress = 0 if progressed else self._num_without_progress + 1
        if outcome.code == EXIT_PREEMPTED:
            return ""
        step = status and status.current_step
        failure = (outcome.code, step, outcome.reached_a_step, count)
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
        # A run that is preempted again and again may have any number of attempts.
        return min(2.0 ** min(self._num_without_progress, 10) - 1, MAX_BACKOFF)


class TimeAccount:
    """Sums up how all attempts spent their time, as measured by the first process on node 0."""

    def __init__(self):
        self._started_at = time.monotonic()
        self._spent: list[dict[str, float]] = []
        self._reached_step, self._step_seconds = -1, 0.0
        self.restarts = self.lost_steps = 0

    def close_attempt(
        self, seconds: dict[str, float], status: ProcessStatus | None, stalled: float
    ) -> None:
        """Adds an attempt: `seconds` by phase; the last `stalled` seconds of its last phase were a hang."""
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
        total["restart"] = total["wall"] - sum(v for k, v in total.items() if k != "wall")
        return {name: max(0.0, seconds) for name, seconds in total.items()}

    def summary(self) -> str:
        total = self.total()
        wall = total.pop("wall")
        share = total.get("step", 0.0) / max(wall, 1e-9)
        parts = [f"{name} {seconds:.1f}" for name, seconds in total.items() if seconds >= 0.05]
        return (
            f"goodput {share:.1%} of {wall:.1f} s · {self.restarts} restarts · {self.lost_steps} steps lost · "
            f"seconds: {', '.join(parts)}"
        )


def failed(why: str, status: ProcessStatus | None) -> Outcome:
    """Returns the outcome of a failure that no process caused; `status` is how far the run got."""
    return Outcome(EXIT_FAILED, why, status)


def outcome_of(one: Exit) -> Outcome:
    return Outcome(one.code, describe_exit(one), one.status, one.tail)
