"""What the supervisor thinks of an attempt: who failed first, who hangs, whether to try again, where time went."""

import collections
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshtrain.cluster import progress
from meshtrain.cluster.workers import Exit, ProcessStatus
from meshtrain.errors import (
    EXIT_FAILED,
    EXIT_NOT_FINITE,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USER,
    ConfigError,
)

# How often `stall_seconds` fits into what a phase may take; of a step also 5 of its usual duration.
PATIENCE = {
    "start": 30,
    "restore": 30,
    "compile": 60,
    "save": 30,
    "eval": 30,
    "check": 5,
    "end": 10,
}
FIRST = 10  # the same for the first steps, when connections are made and nothing is usual yet
USUAL = 5
STOPPED = 10.0  # seconds until a process that a signal stopped counts as stuck
ORDER = ("start", "restore", "compile", "data", "step", "check", "eval", "save", "end")
# What jax and gloo say in a process that has lost another.
LOST_PEER = re.compile(
    r"(Connection (closed|reset)) by peer|distributed service|coordination service"
)
# A crash at the same step, in the same way, so many times in a row will come again.
IN_A_ROW = collections.defaultdict(lambda: 2, {-signal.SIGKILL: 3, EXIT_STALLED: 3})
LONGEST_WAIT = 30.0  # seconds between attempts


@dataclass(frozen=True)
class Settings:
    """What the flags of `meshtrain launch` say. Raises ConfigError for what does not fit."""

    nproc: int = 1  # processes on this host
    simulate_devices: int | None = None  # CPU devices of each
    max_restarts: int = 3
    window: float = 3600.0  # seconds within which there may be so many
    min_nproc: int | None = None  # of all hosts: goes on with fewer, if one cannot come back
    stall_seconds: float = 60.0  # without a step
    grace: float = 60.0  # seconds to save in when stopped
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None  # HOST:PORT of node 0
    join_seconds: float = 120.0  # until all hosts must be there

    def __post_init__(self):
        faults = [
            f"--{name}={value}: use 1 or more"
            for name, value in (
                ("nproc", self.nproc),
                ("nnodes", self.nnodes),
                ("min_nproc", self.min_nproc or 1),
            )
            if value < 1
        ]
        if self.max_restarts < 0:
            faults.append(f"--max_restarts={self.max_restarts}: use 0 or more")
        for name in ("window", "stall_seconds", "grace", "join_seconds"):
            if not getattr(self, name) > 0:
                faults.append(f"--{name}={getattr(self, name)}: use a positive number of seconds")
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
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: with the exit code of the process that failed first, if one did."""

    code: int  # negative: the signal that killed it
    why: str = ""
    look: ProcessStatus | None = None
    tail: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    @property
    def began(self) -> bool:
        """Whether a step was reached."""
        return self.look is not None and self.look.first >= 0


def first_failure(exits: Iterable[Exit]) -> Exit | None:
    """Returns the cause among processes that ended at about the same time, in their order.

    The others lose their peer: jax aborts them, or a collective raises an error. What a process says of
    itself (2, 17) comes first, an abort late, and last of all who complains of a lost peer.
    """

    def rank(one: Exit) -> int:
        if one.code in (EXIT_USER, EXIT_NOT_FINITE):
            return 0
        if any(LOST_PEER.search(line) for line in one.tail):
            return 3
        return 2 if one.code == -signal.SIGABRT else 1

    return min((one for one in exits if one.code), key=rank, default=None)


def described(one: Exit) -> str:
    if one.code < 0:
        how = f"killed by signal {-one.code} ({signal.Signals(-one.code).name})"
    else:
        how = f"ended with exit code {one.code}"
    return f"rank {one.rank} (pid {one.look.pid}) {how} {_where(one.look)}"


def _where(look: ProcessStatus) -> str:
    return f"in phase {look.phase}" + (f" of step {look.reached}" if look.first >= 0 else "")


def stall(looks: Sequence[ProcessStatus], stall_seconds: float) -> Outcome | None:
    """Returns who holds the others up, if anybody does for too long."""
    for look in sorted(looks, key=lambda look: (-look.stopped, -look.silent)):
        if look.stopped > STOPPED or look.stopped and look.silent > stall_seconds:
            return _stalled(look, f"stopped by a signal for {look.stopped:.0f} s")
        if look.silent > stall_seconds:
            return _stalled(look, f"gave no sign of life for {look.silent:.0f} s")
    late = [look for look in looks if look.age > _limit(look, stall_seconds)]
    if not late:
        return None
    behind = min(
        looks,
        key=lambda look: (not look.stopped, look.reached, ORDER.index(look.phase), -look.age),
    )
    why = "is stopped by a signal, and there was" if behind.stopped else "made"
    return _stalled(behind, f"{why} no progress for {max(look.age for look in late):.0f} s")


def _limit(look: ProcessStatus, stall_seconds: float) -> float:
    if look.phase in PATIENCE:
        return PATIENCE[look.phase] * stall_seconds
    return max(stall_seconds, USUAL * look.typical) if look.typical else FIRST * stall_seconds


def _stalled(look: ProcessStatus, why: str) -> Outcome:
    return Outcome(EXIT_STALLED, f"rank {look.rank} (pid {look.pid}) {why}, {_where(look)}", look)


class Budget:
    """Decides whether to try again."""

    def __init__(self, *, max_restarts: int, window: float):
        self._max, self._window = max_restarts, window
        self._times: collections.deque = collections.deque()
        self._last: tuple | None = None
        self._same = self._idle = 0

    @property
    def used(self) -> int:
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        return len(self._times)

    def refuse(self, outcome: Outcome, count: int) -> str:
        """Returns why there is to be no attempt after this one of `count` processes, or nothing."""
        if outcome.code == EXIT_USER:
            return "something has to be changed first"
        if outcome.code == EXIT_NOT_FINITE:
            return "the same would happen again"
        went_on = outcome.began and outcome.look.reached > outcome.look.first
        self._idle = 0 if went_on else self._idle + 1
        if outcome.code == EXIT_PREEMPTED:
            return ""
        place = (outcome.code, outcome.look and outcome.look.reached, outcome.began, count)
        self._same = self._same + 1 if place == self._last else 1
        self._last = place
        if self._same >= IN_A_ROW[outcome.code]:
            where = f"step {outcome.look.reached}" if outcome.began else "the start"
            return f"{self._same} attempts in a row ended this way at {where}"
        if self.used >= self._max:
            return f"{self.used} restarts within {self._window:.0f} s are as many as --max_restarts"
        self._times.append(time.monotonic())
        return ""

    def wait(self) -> float:
        """Returns the seconds until the next attempt: none after one that went on."""
        return min(2.0**self._idle - 1, LONGEST_WAIT)


class Account:
    """Where the time of all attempts went, as the first process spent it."""

    def __init__(self):
        self._began = time.monotonic()
        self._spent: list[dict[str, float]] = []
        self._reached, self._typical = -1, 0.0
        self.restarts = self.lost_steps = 0

    def close_attempt(
        self, seconds: dict[str, float], look: ProcessStatus | None, stalled: float
    ) -> None:
        """`stalled` seconds of the phase in `look` were waiting for a process that hung."""
        seconds = dict(seconds)
        if look and stalled:
            stalled = min(stalled, seconds[look.phase])
            seconds[look.phase] -= stalled
            seconds["stalled"] = stalled
        self._spent.append(seconds)
        if look and look.first >= 0:
            self._redone(look.first)
            self._reached, self._typical = look.reached, look.typical

    def _redone(self, first: int) -> None:
        """Steps from `first` on were done before, in vain."""
        again = max(0, self._reached - first)
        self.lost_steps += again
        if again:
            self._spent.append({"lost": again * self._typical, "step": -again * self._typical})

    def total(self) -> dict[str, float]:
        """Returns seconds by kind; `restart` is what lies between attempts."""
        total = progress.add(self._spent)
        total["wall"] = time.monotonic() - self._began
        total["restart"] = total["wall"] - sum(v for k, v in total.items() if k != "wall")
        return {name: max(0.0, seconds) for name, seconds in total.items()}

    def line(self) -> str:
        total = self.total()
        wall = total.pop("wall")
        share = total.get("step", 0.0) / max(wall, 1e-9)
        parts = [f"{name} {seconds:.1f}" for name, seconds in total.items() if seconds >= 0.05]
        return (
            f"goodput {share:.1%} of {wall:.1f} s · {self.restarts} restarts · {self.lost_steps} steps lost · "
            f"seconds: {', '.join(parts)}"
        )


def failed(why: str, look: ProcessStatus | None) -> Outcome:
    """Of something that is no process's fault; `look` says how far the run came."""
    return Outcome(EXIT_FAILED, why, look)


def of_exit(one: Exit) -> Outcome:
    return Outcome(one.code, described(one), one.look, one.tail)
