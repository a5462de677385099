"""Supervises a run on all its hosts: starts an attempt, watches it, restarts after a failure."""

import contextlib
import json
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import console, storage
from meshtrain.cluster import launchers, rendezvous, signals
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER
from meshtrain.supervise import messages, nodes, restart_policy
from meshtrain.supervise.nodes import RemoteWorkers
from meshtrain.supervise.restart_policy import Outcome, RestartBudget, Settings, TimeAccount
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import Exit, ProcessStatus, RankAssignment, Workers

TICK = 0.1  # seconds between checks
END_TIMEOUT = 60.0  # seconds within which all processes have to end once one has ended normally
DUMP_SECONDS = 1.0  # that processes have to print their stacks

# Lines that are logged and not shown. All but the first kind only say, with C++ details, that
# another process has ended: the supervisor itself says which, and why.
HIDDEN = re.compile(
    r"\[Gloo\]"
    r"|[EF]\d{4} [\d:.]+ +\d+ (coordination_service_agent\.cc|client\.h):"
    r"|Additional GRPC error information from remote target coordination_service"
    r"|:UNKNOWN:Error received from peer"
)
# Threads of a process print [Gloo] lines at the same time, piece by piece. A line that holds the
# pieces of two is followed by a line with the rest: some of these words, a number, or nothing.
REST_OF_GLOO = re.compile(r"\d*$|.*(is connected to|peer ranks)")


class Supervisor:
    """Runs on each host; the one on node 0 makes the decisions."""

    def __init__(self, settings: Settings, *, workdir: Path | None, secret: str = ""):
        """Events are appended to `events.jsonl` in `workdir`; `secret` signs messages."""
        self._settings = settings
        self._workdir = workdir
        self._secret = secret
        self._signals: list[int] = []
        self._clock = RunningClock()  # of all time limits
        self._account = TimeAccount()
        self._budget = RestartBudget(
            max_restarts=settings.max_restarts,
            window=settings.window,
        )
        self._node_0 = launchers.LOOPBACK  # as the processes of all hosts reach it
        self._server: nodes.Server | None = None  # on node 0, if there are several hosts
        self._failed_at: float | None = None  # None again after the next step
        # By rank: lines to come with the rest of [Gloo] lines that were mixed.
        self._gloo_rests: Counter[int] = Counter()

    def run(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        logs: Path | None,
        local_id: int = 0,
        num_supervisors: int = 1,
    ) -> int:
        """Returns the exit code of the run of `command`; for the other arguments see `Workers`."""
        settings = self._settings
        with contextlib.ExitStack() as stack:
            stack.enter_context(console.guarded())
            console.log_to(self._workdir and self._workdir / console.LOG)
            stack.enter_context(signals.received_by(self._record_signal))
            self._workers = Workers(
                command,
                environ=environ,
                local_id=local_id,
                num_supervisors=num_supervisors,
                secret=self._secret,
                logs=logs,
                show=self._show,
                clock=self._clock,
            )
            stack.enter_context(contextlib.closing(self._workers))
            if settings.nnodes == 1:
                return self._run_attempts()

            assert settings.coordinator is not None  # the settings of several hosts have one
            self._node_0, port = settings.coordinator.rsplit(":", 1)
            host = self._node_0.strip("[]")
            if settings.node_rank > 0:
                return nodes.follow_node_0(
                    self._workers,
                    host=host,
                    port=int(port),
                    node=settings.node_rank,
                    nnodes=settings.nnodes,
                    nproc=settings.nproc,
                    seconds=settings.join_seconds,
                    grace=settings.grace,
                    num_signals=lambda: len(self._signals),
                    log=self._log,
                    secret=self._secret,
                )
            if not self._secret:
                self._log(
                    f"port {port} is open to all who reach it; {messages.SECRET_VARIABLE} closes it"
                )
            self._server = nodes.Server(host, int(port), settings.nnodes, self._secret)
            code = EXIT_FAILED
            try:
                code = self._run_attempts()
                return code
            finally:
                self._server.close(code)

    def _run_attempts(self) -> int:
        """Runs attempts until one succeeds or none may follow; returns the exit code."""
        min_nproc = self._settings.min_nproc
        can_shrink = min_nproc is not None
        num_left_out = 0  # processes that the next attempt does not start
        while True:
            remotes, missing = self._wait_for_hosts()
            if missing:
                self._log(missing, error=True)
                return self._conclude(Outcome(EXIT_PREEMPTED if self._signals else EXIT_FAILED))
            available = self._num_processes(remotes)
            if min_nproc is not None:  # hosts that are missing leave out processes too
                num_left_out = min(num_left_out, max(0, sum(available) - min_nproc))
            counts = _remove_processes(available, num_left_out)
            outcome = self._run_attempt(remotes, counts)
            if outcome.code == 0 or self._signals:
                return self._conclude(outcome)

            # How many processes the next attempt leaves out, and whether there is one.
            if num_left_out and outcome.code == EXIT_USER:
                # The config does not allow this number of processes: try fewer, and then all again.
                can_shrink = sum(counts) > min_nproc
                num_left_out = num_left_out + 1 if can_shrink else 0
            else:
                # A process that fails before its first step may be on a broken device.
                failed_early = not outcome.reached_a_step and outcome.code != EXIT_PREEMPTED
                if can_shrink and failed_early and sum(counts) > min_nproc:
                    num_left_out += 1
                else:
                    num_left_out = 0
                reason = self._budget.reason_to_give_up(outcome, sum(counts))
                if reason:
                    return self._give_up(outcome, reason)

            self._prepare_restart(outcome, sum(counts), num_left_out)
            if self._signals:  # between two attempts: nothing to stop
                return self._conclude(outcome)

    def _wait_for_hosts(self) -> tuple[list[RemoteWorkers], str]:
        """Returns the other hosts, and "" or a message that names the missing ones."""
        settings = self._settings
        started_at = self._clock.now()
        while True:
            remotes = self._server.connected() if self._server else []
            if 1 + len(remotes) == settings.nnodes:
                return remotes, ""
            late = self._clock.now() - started_at > settings.join_seconds
            if late and settings.min_nproc:
                if sum(self._num_processes(remotes)) >= settings.min_nproc:
                    return remotes, ""
            if late or self._signals:
                arrived = {0, *(remote.node for remote in remotes)}
                missing = [node for node in range(settings.nnodes) if node not in arrived]
                return [], f"{len(arrived)} of {settings.nnodes} nodes arrived, missing {missing}"
            self._poll()

    def _num_processes(self, remotes: Sequence[RemoteWorkers]) -> list[int]:
        """Returns the number of processes of each host, this one first."""
        return [self._settings.nproc, *(remote.num_local for remote in remotes)]

    def _run_attempt(self, remotes: Sequence[RemoteWorkers], counts: Sequence[int]) -> Outcome:
        """Runs an attempt with `counts` processes per host; none is left when it returns."""
        address = f"{self._node_0}:{rendezvous.free_port(self._settings.ports)}"
        nonce = secrets.token_hex(16)
        first_rank = 0
        for host, count in zip([self._workers, *remotes], counts, strict=True):
            host.start(RankAssignment(address, sum(counts), first_rank, count, nonce))
            first_rank += count
        outcome = Outcome(EXIT_FAILED, "the supervisor failed")
        try:
            outcome = self._watch(remotes, sum(counts))
            return outcome
        finally:
            status = self._workers.first_status()
            stalled = status.phase_age if status and outcome.code == EXIT_STALLED else 0.0
            self._account.close_attempt(self._workers.first_phase_seconds(), status, stalled)
            # Without a grace period: processes that lost a peer hang in a collective and cannot
            # save.
            self._kill(remotes)
            if self._failed_at is None:
                self._failed_at = time.monotonic()

    def _kill(self, remotes: Sequence[RemoteWorkers]) -> None:
        """Kills the processes of all hosts, and drops a host that does not do so in time."""
        for remote in remotes:
            remote.kill()
        self._workers.kill()
        deadline = self._clock.now() + nodes.KILL_SECONDS
        while not all(remote.killed for remote in remotes) and self._clock.now() < deadline:
            self._poll()
        late = [remote for remote in remotes if not remote.killed]
        for remote in late:
            seconds = f"{nodes.KILL_SECONDS:.0f} s"
            remote.link.drop(f"has not killed its processes within {seconds}")
        if late:
            self._poll()  # logs it

    def _watch(self, remotes: Sequence[RemoteWorkers], num_processes: int) -> Outcome:
        """Waits until an attempt of `num_processes` processes has ended; returns its outcome."""
        settings = self._settings
        hosts = [self._workers, *remotes]
        ended: list[Exit] = []  # the processes that have ended normally
        first_end_at: float | None = None
        stop_requested_at: float | None = None
        while True:
            self._poll()

            # ---- a process has failed ----
            exits = _new_exits(hosts)
            if any(process.code not in (0, EXIT_PREEMPTED) for process in exits):
                self._poll()  # the process that caused the failure may be seen a moment later
                return _failure([*exits, *_new_exits(hosts)])

            # ---- all have ended, or one has ended and the others do not follow ----
            ended += exits
            if len(ended) == num_processes:
                return Outcome(max(process.code for process in ended), status=ended[0].status)
            if ended and first_end_at is None:
                first_end_at = self._clock.now()
            if first_end_at is not None and self._clock.now() - first_end_at > END_TIMEOUT:
                why = f"rank {ended[0].rank} has ended and others have not"
                return Outcome(EXIT_FAILED, why, ended[0].status)

            # ---- the connection to a host is lost ----
            for remote in remotes:
                if remote.lost:
                    why = f"node {remote.node} is lost"
                    return Outcome(EXIT_FAILED, why, self._workers.first_status())

            # ---- the first signal asks for a save; a second one, or `grace` seconds, abort it ----
            if self._signals and stop_requested_at is None:
                stop_requested_at = self._clock.now()
                self._log("asked to stop: saving")
                for host in hosts:
                    host.request_stop()
            late = (
                stop_requested_at is not None
                and self._clock.now() - stop_requested_at > settings.grace
            )
            if late or len(self._signals) > 1:
                why = f"not saved within {settings.grace:.0f} s" if late else "aborted"
                if settings.grace < 1:  # there was nothing to save
                    why = "interrupted"
                self._log(why, error=True)
                return Outcome(EXIT_FAILED, why)

            # ---- a process hangs ----
            statuses = [status for host in hosts for status in host.statuses()]
            stall = restart_policy.find_stall(statuses, settings.stall_seconds)
            if stall:
                self._log(f"{stall.why}; the stacks of all processes:")
                for host in hosts:
                    host.dump_stacks()
                self._sleep(DUMP_SECONDS)
                return stall
            self._log_recovery(statuses)

    def _log_recovery(self, statuses: Sequence[ProcessStatus]) -> None:
        """Logs the first step after a failure."""
        if self._failed_at is None or not statuses:
            return
        first_step = statuses[0].first_step
        if statuses[0].current_step > first_step >= 0:
            seconds = time.monotonic() - self._failed_at
            self._failed_at = None
            if self._account.restarts:
                self._event("recovered", step=first_step, seconds=seconds)
                self._log_progress(
                    f"resumed from step {first_step}, {seconds:.1f} s after the failure"
                )

    def _give_up(self, outcome: Outcome, reason: str) -> int:
        """Logs why the run ends, with the last output of what failed; returns the exit code."""
        self._log(f"{outcome.why}; giving up: {reason}", error=True)
        for line in outcome.tail:
            self._log(f"  {line}", error=True)
        return self._conclude(outcome)

    def _prepare_restart(self, outcome: Outcome, num_processes: int, num_left_out: int) -> None:
        """Logs why the run restarts, and waits for the backoff."""
        settings = self._settings
        self._account.restarts += 1
        if outcome.code == EXIT_PREEMPTED:
            message = "restart after saving"
        else:
            message = f"restart {self._budget.used} of {settings.max_restarts}"
        if num_left_out:
            message += f", without {num_left_out} of {settings.nproc * settings.nnodes} processes"
        if not self._workdir:
            message += ", from the beginning: there is no --workdir"
        self._log(f"{outcome.why or 'preempted'}; {message}")
        fields: dict[str, Any] = {
            "code": outcome.code,
            "why": outcome.why,
            "processes": num_processes,
        }
        if outcome.status:
            fields["rank"] = outcome.status.rank
            fields["step"] = outcome.status.current_step
            fields["phase"] = outcome.status.phase
        self._event("restart", **fields)
        self._sleep(self._budget.backoff())

    def _conclude(self, outcome: Outcome) -> int:
        """Logs the time account; returns the exit code."""
        seconds = self._account.total()
        if seconds.get("step"):  # else no step was done: the workdir may belong to another run
            self._log_progress(self._account.summary())
            self._event(
                "goodput",
                restarts=self._account.restarts,
                lost_steps=self._account.lost_steps,
                seconds=seconds,
            )
        if self._signals and outcome.code not in (0, EXIT_PREEMPTED):
            return 128 + self._signals[0]
        return outcome.exit_code

    def _poll(self) -> None:
        self._workers.poll(TICK)
        if self._server:
            for fault in self._server.poll():
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
        is_rest = self._gloo_rests[rank] > 0 and REST_OF_GLOO.match(line)
        if is_rest or HIDDEN.match(line):
            # Each [Gloo] ends one line.
            num_rests = self._gloo_rests[rank] + line.count("[Gloo]") - 1
            self._gloo_rests[rank] = max(num_rests, 0)
            return
        num_processes = self._settings.nproc * self._settings.nnodes
        if num_processes > 1:
            line = f"[{rank}] {line}"
        self._print(line)

    def _log(self, line: str, *, error: bool = False) -> None:
        self._print(f"launch: {line}", stream="stderr" if error else "stdout")

    def _log_progress(self, line: str) -> None:
        if not self._settings.quiet:
            self._log(line)

    def _print(self, line: str, *, stream: str = "stdout") -> None:
        console.say(line, stream=stream)
        for fields in console.new_faults():
            self._event("output_lost", **fields)

    def _event(self, event: str, **fields: Any) -> None:
        if self._workdir and self._workdir.is_dir() and self._settings.node_rank == 0:
            row = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
            with contextlib.suppress(OSError):
                storage.append_lines(self._workdir / "events.jsonl", [row])


def _new_exits(hosts: Sequence[Workers | RemoteWorkers]) -> list[Exit]:
    return [process for host in hosts for process in host.new_exits()]


def _failure(exits: Sequence[Exit]) -> Outcome:
    """Returns the outcome of an attempt of which at least one process has failed."""
    # A process that was asked to stop, and has saved, is no failure.
    failed = [process for process in exits if process.code != EXIT_PREEMPTED]
    return restart_policy.exit_outcome(restart_policy.first_failure(failed))


def _remove_processes(counts: Sequence[int], num_removed: int) -> list[int]:
    """Returns the counts of the hosts after removing `num_removed`, from the last hosts first."""
    remaining = list(counts)
    for i in reversed(range(len(remaining))):
        removed = min(num_removed, remaining[i])
        remaining[i] -= removed
        num_removed -= removed
    return remaining
