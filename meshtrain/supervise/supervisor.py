"""Supervises a run on all its hosts: starts an attempt, watches it, and restarts it after a failure."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from meshtrain import console
from meshtrain.cluster import launchers, rendezvous, signals
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER
from meshtrain.supervise import messages, nodes, restart_policy
from meshtrain.supervise.restart_policy import Outcome, RestartBudget, Settings, TimeAccount
from meshtrain.supervise.workers import RankAssignment, Workers

TICK = 0.1  # seconds between checks

END_TIMEOUT = 60.0  # seconds within which all processes have to end once one has ended normally

DUMP_SECONDS = 1.0  # that processes have to print their stacks

# Lines that are only logged. The second kind, with C++ details, only says that another process has ended:
# the supervisor itself says which, and why.
HIDDEN = re.compile(
    r"\[Gloo\]"
    r"|[EF]\d{4} [\d:.]+ +\d+ (coordination_service_agent\.cc|client\.h):"
    r"|Additional GRPC error information from remote target coordination_service"
    r"|:UNKNOWN:Error received from peer"
)


class Supervisor:
    """Runs on each host; the one on node 0 makes the decisions."""

    def __init__(self, settings: Settings, *, workdir: Path | None, secret: str = ""):
        """Events are appended to `events.jsonl` in `workdir`. `secret` signs messages, see signature.py."""
        self._settings = s = settings
        self._secret = secret
        self._signals: list[int] = []
        self._workdir = workdir
        self._account = TimeAccount()
        self._budget = RestartBudget(max_restarts=s.max_restarts, window=s.window)
        self._server: nodes.Server | None = None
        self._failed_at: float | None = None  # None again after the next step

    def run(self, command: Sequence[str], **host_options) -> int:
        """Returns the exit code of the run; `host_options` are the keyword arguments of `Workers`."""
        s = self._settings
        with contextlib.ExitStack() as stack:
            stack.enter_context(console.guarded())
            console.log_to(self._workdir and self._workdir / console.LOG)
            stack.enter_context(signals.received_by(self._record_signal))
            self._workers = Workers(command, show=self._show, **host_options)
            stack.enter_context(contextlib.closing(self._workers))
            if s.nnodes == 1:
                return self._run_attempts()
            host, port = s.coordinator.rsplit(":", 1)
            host = host.strip("[]")
            if s.node_rank > 0:
                return nodes.follow_node_0(
                    self._workers,
                    host=host,
                    port=int(port),
                    node=s.node_rank,
                    nnodes=s.nnodes,
                    nproc=s.nproc,
                    seconds=s.join_seconds,
                    grace=s.grace,
                    num_signals=lambda: len(self._signals),
                    log=self._log,
                    secret=self._secret,
                )
            if not self._secret:
                self._log(
                    f"port {port} is open to all who reach it; {messages.SECRET_VARIABLE} closes it"
                )
            self._server = nodes.Server(host, int(port), s.nnodes, self._secret)
            code = EXIT_FAILED
            try:
                code = self._run_attempts()
                return code
            finally:
                self._server.close(code)

    def _run_attempts(self) -> int:
        s, num_left_out = self._settings, 0  # processes that the next attempt does not start
        can_shrink = s.min_nproc is not None
        while True:
            groups, missing = self._wait_for_hosts()
            if missing:
                self._log(missing, error=True)
                return self._conclude(Outcome(EXIT_PREEMPTED if self._signals else EXIT_FAILED))
            counts = _remove_processes([count for _, count in groups], num_left_out)
            outcome = self._run_attempt([group for group, _ in groups], counts)
            if outcome.code == 0 or self._signals:
                return self._conclude(outcome)
            if num_left_out and outcome.code == EXIT_USER:
                # The config does not allow this number of processes: try fewer, and then all again.
                can_shrink = sum(counts) > s.min_nproc
                num_left_out = num_left_out + 1 if can_shrink else 0
            else:
                # A process that fails before its first step may be on a broken device.
                lost = can_shrink and not outcome.reached_a_step and outcome.code != EXIT_PREEMPTED
                num_left_out = num_left_out + 1 if lost and sum(counts) > s.min_nproc else 0
                if why := self._budget.reason_to_give_up(outcome, sum(counts)):
                    return self._give_up(outcome, why)
            self._prepare_restart(outcome, sum(counts), num_left_out)
            if self._signals:  # between two attempts: nothing to stop
                return self._conclude(outcome)

    def _give_up(self, outcome: Outcome, why: str) -> int:
        self._log(f"{outcome.why}; giving up: {why}", error=True)
        for line in outcome.tail:
            self._log(f"  {line}", error=True)
        return self._conclude(outcome)

    def _prepare_restart(self, outcome: Outcome, count: int, num_left_out: int) -> None:
        """Logs why the run restarts, and waits for the backoff."""
        s, status = self._settings, outcome.status
        self._account.restarts += 1
        number = f"{self._budget.used} of {s.max_restarts}"
        message = f"restart {number if outcome.code != EXIT_PREEMPTED else 'after saving'}"
        if num_left_out:
            message += f", without {num_left_out} of {s.nproc * s.nnodes} processes"
        if not self._workdir:
            message += ", from the beginning: there is no --workdir"
        self._log(f"{outcome.why or 'preempted'}; {message}")
        where = {}
        if status:
            where = {"rank": status.rank, "step": status.current_step, "phase": status.phase}
        self._event("restart", code=outcome.code, why=outcome.why, processes=count, **where)
        self._sleep(self._budget.backoff())

    def _conclude(self, outcome: Outcome) -> int:
        """Logs the time account; returns the exit code."""
        total = self._account.total()
        if total.get("step"):  # else no step was done: the workdir may belong to another run
            self._log(self._account.summary())
            counts = {"restarts": self._account.restarts, "lost_steps": self._account.lost_steps}
            self._event("goodput", **counts, seconds=total)
        if self._signals and outcome.code not in (0, EXIT_PREEMPTED):
            return 128 + self._signals[0]
        return outcome.exit_code

    def _wait_for_hosts(self) -> tuple[list[tuple], str]:
        """Returns (workers, number of processes) of each host, and "" or a message that names missing ones."""
        s, started_at = self._settings, time.monotonic()
        while True:
            remotes = self._server.connected() if self._server else []
            groups = [(self._workers, s.nproc), *((r, r.num_local) for r in remotes)]
            if len(groups) == s.nnodes:
                return groups, ""
            late = time.monotonic() - started_at > s.join_seconds
            if late and s.min_nproc and sum(count for _, count in groups) >= s.min_nproc:
                return groups, ""
            if late or self._signals:
                arrived = {0, *(remote.node for remote in remotes)}
                missing = [node for node in range(s.nnodes) if node not in arrived]
                return [], f"{len(arrived)} of {s.nnodes} nodes arrived, missing {missing}"
            self._poll()

    def _run_attempt(self, groups: list, counts: list[int]) -> Outcome:
        host = launchers.LOOPBACK
        if self._server:
            host = self._settings.coordinator.rsplit(":", 1)[0]
        address, first_rank = f"{host}:{rendezvous.free_port(self._settings.ports)}", 0
        for group, count in zip(groups, counts, strict=True):
            group.start(RankAssignment(address, sum(counts), first_rank, count))
            first_rank += count
        outcome = restart_policy.failed("the supervisor failed", None)
        try:
            outcome = self._watch(groups, sum(counts))
            return outcome
        finally:
            status = self._workers.first_status()
            stalled = status.phase_age if status and outcome.code == EXIT_STALLED else 0.0
            self._account.close_attempt(self._workers.first_phase_seconds(), status, stalled)
            for group in groups:
                # Without a grace period: processes that lost a peer hang in a collective and cannot save.
                group.kill()
            if self._failed_at is None:
                self._failed_at = time.monotonic()

    def _watch(self, groups: list, count: int) -> Outcome:
        """Waits until an attempt of `count` processes has ended; returns its outcome."""
        ended, first_end_at, stop_requested_at = [], 0.0, None
        while True:
            self._poll()
            exits = [one for group in groups for one in group.new_exits()]
            if failed := [one for one in exits if one.code not in (0, EXIT_PREEMPTED)]:
                self._poll()  # the process that caused the failure may be seen a moment later
                failed += [one for group in groups for one in group.new_exits()]
                failed = [one for one in failed if one.code != EXIT_PREEMPTED]
                return restart_policy.outcome_of(restart_policy.first_failure(failed))
            ended += exits
            if len(ended) == count:
                return Outcome(max(one.code for one in ended), status=ended[0].status)
            first_end_at = first_end_at or (time.monotonic() if ended else 0.0)
            if first_end_at and time.monotonic() - first_end_at > END_TIMEOUT:
                why = f"rank {ended[0].rank} has ended and others have not"
                return restart_policy.failed(why, ended[0].status)
            for group in groups[1:]:
                if group.lost:
                    status = self._workers.first_status()
                    return restart_policy.failed(f"node {group.node} is lost", status)
            if self._signals and stop_requested_at is None:
                stop_requested_at = time.monotonic()
                self._log("asked to stop: saving")
                for group in groups:
                    group.request_stop()
            grace = self._settings.grace
            late = stop_requested_at and time.monotonic() - stop_requested_at > grace
            if late or len(self._signals) > 1:
                why = f"not saved within {grace:.0f} s" if late else "aborted"
                why = why if grace >= 1 else "interrupted"
                self._log(why, error=True)
                return restart_policy.failed(why, None)
            statuses = [status for group in groups for status in group.statuses()]
            if stall := restart_policy.find_stall(statuses, self._settings.stall_seconds):
                self._dump_stacks(groups, stall)
                return stall
            self._log_recovery(statuses)

    def _dump_stacks(self, groups: list, stall: Outcome) -> None:
        self._log(f"{stall.why}; the stacks of all processes:")
        for group in groups:
            group.dump_stacks()
        self._sleep(DUMP_SECONDS)

    def _log_recovery(self, statuses: list) -> None:
        """Logs the first step after a failure."""
        if self._failed_at is None or not statuses:
            return
        first = statuses[0].first_step
        if statuses[0].current_step > first >= 0:
            seconds, self._failed_at = time.monotonic() - self._failed_at, None
            if self._account.restarts:
                self._event("recovered", step=first, seconds=seconds)
                self._log(f"resumed from step {first}, {seconds:.1f} s after the failure")

    def _poll(self) -> None:
        self._workers.poll(TICK)
        for fault in self._server.poll() if self._server else ():
            self._log(fault, error=True)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            self._poll()

    def _record_signal(self, number: int) -> None:
        # A closed terminal sends SIGHUP more than once; a second signal aborts.
        if number != signal.SIGHUP or not self._signals:
            self._signals.append(number)

    def _show(self, rank: int, line: str) -> None:
        if not HIDDEN.match(line):
            self._print(f"[{rank}] {line}")

    def _log(self, line: str, *, error: bool = False) -> None:
        self._print(f"launch: {line}", stream="stderr" if error else "stdout")

    def _print(self, line: str, *, stream: str = "stdout") -> None:
        console.say(line, stream=stream)
        for fields in console.new_faults():
            self._event("output_lost", **fields)

    def _event(self, event: str, **fields) -> None:
        if self._workdir and self._workdir.is_dir() and self._settings.node_rank == 0:
            row = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
            with contextlib.suppress(OSError), open(self._workdir / "events.jsonl", "a") as file:
                file.write(row)


def _remove_processes(counts: list[int], num_removed: int) -> list[int]:
    """Returns the number of processes of each host after removing `num_removed`, from the last hosts first."""
    counts = list(counts)
    for i in reversed(range(len(counts))):
        removed = min(num_removed, counts[i])
        counts[i] -= removed
        num_removed -= removed
    return counts
