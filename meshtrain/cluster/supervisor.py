"""Starts the processes of a run, watches them, and starts them again: an attempt after the other."""

import contextlib
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cluster import environment as places
from meshtrain.cluster import nodes, signals
from meshtrain.cluster import restart_policy as attempts
from meshtrain.cluster.restart_policy import Account, Budget, Outcome, Settings
from meshtrain.cluster.workers import Start, Workers
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USER

TICK = 0.1  # seconds between looks
TOGETHER = 60.0  # seconds within which all end, once one has ended well
STACKS = 1.0  # seconds to write them
PORTS = range(20000, 32000)  # below those that systems give to outgoing connections
HIDDEN = "[Gloo]"  # lines that tell nobody anything


class Supervisor:
    """One on each host; that of node 0 decides."""

    def __init__(self, settings: Settings, *, workdir: Path | None):
        """Events go on record in `workdir`."""
        self._settings = s = settings
        self._signals: list[int] = []
        self._workdir = workdir
        self._account = Account()
        self._budget = Budget(max_restarts=s.max_restarts, window=s.window)
        self._head: nodes.Head | None = None
        self._failed_at: float | None = None  # until the next step

    def run(self, command: Sequence[str], **where) -> int:
        """Returns the exit code of the run; `where` is what `Workers` has to know of this host."""
        s = self._settings
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._heeding())
            self._workers = Workers(command, show=self._show, **where)
            stack.enter_context(contextlib.closing(self._workers))
            if s.nnodes == 1:
                return self._attempts()
            host, port = s.coordinator.rsplit(":", 1)
            host = host.strip("[]")
            if s.node_rank > 0:
                return nodes.follow(
                    self._workers,
                    host=host,
                    port=int(port),
                    node=s.node_rank,
                    nnodes=s.nnodes,
                    nproc=s.nproc,
                    seconds=s.join_seconds,
                    grace=s.grace,
                    asked=lambda: len(self._signals),
                    line=self._say,
                )
            self._head, code = nodes.Head(host, int(port), s.nnodes), EXIT_FAILED
            try:
                code = self._attempts()
                return code
            finally:
                self._head.close(code)

    def _attempts(self) -> int:
        s, lacking = self._settings, 0  # processes that the next attempt goes without
        can_shrink = s.min_nproc is not None
        while True:
            groups, missing = self._gather()
            if missing:
                self._say(missing, error=True)
                return self._conclude(Outcome(EXIT_PREEMPTED if self._signals else EXIT_FAILED))
            counts = _shares([count for _, count in groups], lacking)
            outcome = self._attempt([group for group, _ in groups], counts)
            if outcome.code == 0 or self._signals:
                return self._conclude(outcome)
            if lacking and outcome.code == EXIT_USER:
                # So many processes do not fit the config; fewer may, or it has to be all.
                can_shrink = sum(counts) > s.min_nproc
                lacking = lacking + 1 if can_shrink else 0
            else:
                gone = can_shrink and not outcome.began and outcome.code != EXIT_PREEMPTED
                lacking = lacking + 1 if gone and sum(counts) > s.min_nproc else 0
                if why := self._budget.refuse(outcome, sum(counts)):
                    return self._give_up(outcome, why)
            self._restart(outcome, sum(counts), lacking)
            if self._signals:  # between two attempts: there is nothing to stop
                return self._conclude(outcome)

    def _give_up(self, outcome: Outcome, why: str) -> int:
        self._say(f"{outcome.why}; giving up: {why}", error=True)
        for line in outcome.tail:
            self._say(f"  {line}", error=True)
        return self._conclude(outcome)

    def _restart(self, outcome: Outcome, count: int, lacking: int) -> None:
        s = self._settings
        self._account.restarts += 1
        counted = f"{self._budget.used} of {s.max_restarts}"
        told = f"restart {counted if outcome.code != EXIT_PREEMPTED else 'after saving'}"
        told += f", without {lacking} of {s.nproc * s.nnodes} processes" if lacking else ""
        told += "" if self._workdir else ", from the beginning: there is no --workdir"
        self._say(f"{outcome.why or 'stopped from outside'}; {told}")
        look = outcome.look
        where = {"rank": look.rank, "step": look.reached, "phase": look.phase} if look else {}
        self._event("restart", code=outcome.code, why=outcome.why, processes=count, **where)
        self._sleep(self._budget.wait())

    def _conclude(self, outcome: Outcome) -> int:
        total = self._account.total()
        if total.get("step"):  # else the run may be another's, which this one was kept out of
            self._say(self._account.line())
            counts = {"restarts": self._account.restarts, "lost_steps": self._account.lost_steps}
            self._event("goodput", **counts, seconds=total)
        if self._signals and outcome.code not in (0, EXIT_PREEMPTED):
            return 128 + self._signals[0]
        return outcome.exit_code

    def _gather(self) -> tuple[list[tuple], str]:
        """Returns who takes part with how many processes, once all hosts are there; or who is missing."""
        s, began = self._settings, time.monotonic()
        while True:
            remotes = self._head.present() if self._head else []
            groups = [(self._workers, s.nproc), *((r, r.num_local) for r in remotes)]
            if len(groups) == s.nnodes:
                return groups, ""
            late = time.monotonic() - began > s.join_seconds
            if late and s.min_nproc and sum(count for _, count in groups) >= s.min_nproc:
                return groups, ""
            if late or self._signals:
                there = {0, *(remote.node for remote in remotes)}
                missing = [node for node in range(s.nnodes) if node not in there]
                return [], f"{len(there)} of {s.nnodes} nodes arrived, missing {missing}"
            self._pump()

    def _attempt(self, groups: list, counts: list[int]) -> Outcome:
        host = places.LOOPBACK
        if self._head:
            host = self._settings.coordinator.rsplit(":", 1)[0]
        address, first = f"{host}:{_free_port()}", 0
        for group, count in zip(groups, counts, strict=True):
            group.start(Start(address, sum(counts), first, count))
            first += count
        outcome = attempts.failed("the supervisor failed", None)
        try:
            outcome = self._watch(groups, sum(counts))
            return outcome
        finally:
            look = self._workers.first()
            stalled = look.age if look and outcome.code == attempts.EXIT_STALLED else 0.0
            self._account.close_attempt(self._workers.seconds(), look, stalled)
            for group in groups:
                # At once: who lost a peer waits in a collective, and has nothing it could save.
                group.kill()
            if self._failed_at is None:
                self._failed_at = time.monotonic()

    def _watch(self, groups: list, count: int) -> Outcome:
        """Returns how the attempt ends."""
        ended, first_end, asked_at = [], 0.0, None
        while True:
            self._pump()
            exits = [one for group in groups for one in group.exits()]
            if failed := [one for one in exits if one.code not in (0, EXIT_PREEMPTED)]:
                self._pump()  # the cause may be told a moment after what follows from it
                failed += [one for group in groups for one in group.exits()]
                failed = [one for one in failed if one.code != EXIT_PREEMPTED]
                return attempts.of_exit(attempts.first_failure(failed))
            ended += exits
            if len(ended) == count:
                return Outcome(max(one.code for one in ended), look=ended[0].look)
            first_end = first_end or (time.monotonic() if ended else 0.0)
            if first_end and time.monotonic() - first_end > TOGETHER:
                why = f"rank {ended[0].rank} has ended and others have not"
                return attempts.failed(why, ended[0].look)
            for group in groups[1:]:
                if group.lost:
                    return attempts.failed(f"node {group.node} is lost", self._workers.first())
            if self._signals and asked_at is None:
                asked_at = time.monotonic()
                self._say("asked to stop: saving")
                for group in groups:
                    group.ask()
            late = asked_at and time.monotonic() - asked_at > self._settings.grace
            if late or len(self._signals) > 1:
                why = f"not saved within {self._settings.grace:.0f} s" if late else "aborted"
                self._say(why, error=True)
                return attempts.failed(why, None)
            looks = [look for group in groups for look in group.looks()]
            if found := attempts.stall(looks, self._settings.stall_seconds):
                return self._with_stacks(groups, found)
            self._note_recovery(looks)

    def _with_stacks(self, groups: list, found: Outcome) -> Outcome:
        self._say(f"{found.why}; the stacks of all:")
        for group in groups:
            group.dump()
        self._sleep(STACKS)
        return found

    def _note_recovery(self, looks: list) -> None:
        if self._failed_at is not None and looks and looks[0].reached > looks[0].first >= 0:
            took, self._failed_at = time.monotonic() - self._failed_at, None
            if self._account.restarts:
                self._event("recovered", step=looks[0].first, seconds=took)
                self._say(f"going on from step {looks[0].first}, {took:.1f} s after the failure")

    def _pump(self) -> None:
        self._workers.pump(TICK)
        for fault in self._head.pump() if self._head else ():
            self._say(fault, error=True)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            self._pump()

    @contextlib.contextmanager
    def _heeding(self):
        """Counts the signals that ask to stop, except those that the caller ignores (nohup)."""
        numbers = [*signals.STOPPING, signal.SIGHUP]
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # signals belong to the main thread
        before = {n: signal.getsignal(n) for n in numbers}
        heeded = {n: old for n, old in before.items() if old is not signal.SIG_IGN}
        for number in heeded:
            signal.signal(number, lambda signum, frame: self._signals.append(signum))
        try:
            yield
        finally:
            for number, handler in heeded.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _show(self, rank: int, line: str) -> None:
        if not line.startswith(HIDDEN):
            _print(f"[{rank}] {line}", sys.stdout)

    def _say(self, line: str, *, error: bool = False) -> None:
        _print(f"launch: {line}", sys.stderr if error else sys.stdout)

    def _event(self, event: str, **fields) -> None:
        if self._workdir and self._workdir.is_dir() and self._settings.node_rank == 0:
            row = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
            with contextlib.suppress(OSError), open(self._workdir / "events.jsonl", "a") as file:
                file.write(row)


def _shares(counts: list[int], lacking: int) -> list[int]:
    """Takes so many processes away, from the last hosts first."""
    counts = list(counts)
    for i in reversed(range(len(counts))):
        taken = min(lacking, counts[i])
        counts[i] -= taken
        lacking -= taken
    return counts


def _free_port() -> int:
    """A fresh one for each attempt: what is left of the last may still have its own."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _print(line: str, stream) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more: the training goes on
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
