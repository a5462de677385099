"""The supervisors of several hosts: node 0 decides, the others execute its commands.

Node 0 has a `Server`, with `RemoteWorkers` for each other host; the other hosts call
`follow_node_0`. The messages contain ranks, commands and the status of processes, never code;
`messages.py` checks each of them.
"""

import contextlib
import dataclasses
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from meshtrain.cluster import rendezvous
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError
from meshtrain.supervise import messages
from meshtrain.supervise.messages import Link, Signer
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import Exit, ProcessStatus, RankAssignment, Workers

REPORT_EVERY = 0.5  # seconds between status messages, which are also heartbeats
REPLACE_AFTER = 5.0  # seconds of silence after which another host may take over a rank

# Connections that have not sent their rank; if there are more, the oldest is closed.
MAX_PENDING = 100
MAX_REPORTED = 1000  # faults that are logged; each once
SEND_SECONDS = 5.0  # that a host may keep node 0, and with it all others, from sending a command
KILL_SECONDS = messages.LOST_AFTER  # within which another host has to kill its processes
TICK = 0.1
EXIT_NOT_SAVED = 128 + signal.SIGTERM  # of a host that was asked to stop and could not save


class RemoteWorkers:
    """The processes of another host, for the supervisor of node 0; used like `Workers`."""

    def __init__(self, link: Link, node: int, num_local: int):
        self.link, self.node, self.num_local = link, node, num_local
        self._exits: list[Exit] = []
        self._statuses: list[ProcessStatus] = []
        self._dead = True  # whether that host has killed the processes of the latest attempt
        self._ranks = range(0)
        self._running: set[int] = set()  # ranks

    @property
    def lost(self) -> bool:
        """Returns whether the connection was lost while processes were running on that host."""
        return not self.link.open and bool(self._running)

    def poll(self) -> None:
        """Reads the reports that have arrived; closes the connection at an invalid one."""
        for message in self.link.receive():
            try:
                exits, statuses, dead = messages.parse_report(message, self._ranks)
                self._remove_running(exits)
            except messages.InvalidMessage as error:
                self.link.reject(str(error))
                return
            self._exits += exits
            if statuses is not None:
                self._statuses = statuses
            if dead is not None:
                self._dead = dead

    def _remove_running(self, exits: list[Exit]) -> None:
        for process in exits:
            if process.rank not in self._running:
                raise messages.InvalidMessage(f"a second exit of rank {process.rank}")
            self._running.remove(process.rank)

    def start(self, ranks: RankAssignment) -> None:
        self._exits = []
        self._statuses = []
        self._dead = False
        self._ranks = range(ranks.first_rank, ranks.first_rank + ranks.num_local)
        self._running = set(self._ranks)
        self.link.send(do="start", ranks=dataclasses.asdict(ranks))

    def new_exits(self) -> list[Exit]:
        exits, self._exits = self._exits, []
        return exits

    def statuses(self) -> list[ProcessStatus]:
        return self._statuses

    def request_stop(self) -> None:
        self.link.send(do="stop")

    def dump_stacks(self) -> None:
        self.link.send(do="dump")

    def kill(self) -> None:
        """Asks that host to kill its processes; `killed` is True once it has."""
        self.link.send(do="kill")

    @property
    def killed(self) -> bool:
        """Returns whether that host has killed its processes, or its connection is closed.

        A supervisor that loses the connection kills them too.
        """
        return self._dead or not self.link.open

    def end(self, code: int) -> None:
        self.link.send(do="end", code=code)
        self.link.close()


class Server:
    """Node 0's server, to which the supervisors of the other nodes connect."""

    def __init__(self, host: str, port: int, nnodes: int, secret: str = ""):
        try:
            self._server = rendezvous.listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"--coordinator: cannot listen on port {port}: {error.strerror}; use a free one"
            ) from error
        self._server.setblocking(False)
        self._nnodes, self._secret = nnodes, secret
        self.remotes: dict[int, RemoteWorkers] = {}
        self._pending: list[Link] = []  # connections that have not sent their rank
        self._heartbeat_at = 0.0
        self._reported: set[str] = set()

    def poll(self) -> list[str]:
        """Accepts connections, reads messages; returns the faults of rejected peers, each once."""
        self._accept()
        faults = []

        # The first message of a new connection is its rank; the next ones are read once it is
        # admitted.
        for link in list(self._pending):
            for message in link.receive()[:1]:
                self._pending.remove(link)
                faults += self._admit(link, message)

        heartbeat_due = time.monotonic() - self._heartbeat_at > REPORT_EVERY
        for remote in self.remotes.values():
            remote.poll()
            if heartbeat_due:
                remote.link.send(do="nothing")
                self._heartbeat_at = time.monotonic()

        faults += [link.fault for link in self._pending if link.fault]
        for remote in self.remotes.values():
            if remote.link.fault:
                faults.append(f"node {remote.node}: {remote.link.fault}")

        for link in self._pending:
            if not link.open:
                link.close()
        self._pending = [link for link in self._pending if link.open]
        while len(self._pending) > MAX_PENDING:
            self._pending.pop(0).close()

        # Anybody can connect and cause faults: each is logged once, and MAX_REPORTED in all.
        new = [fault for fault in dict.fromkeys(faults) if fault not in self._reported]
        new = new[: MAX_REPORTED - len(self._reported)]
        self._reported.update(new)
        return new

    def _accept(self) -> None:
        # BlockingIOError: no more; other errors: too many open files, or the peer has already left.
        with contextlib.suppress(OSError):
            for _ in range(MAX_PENDING):
                connection, address = self._server.accept()
                signer = Signer(self._secret, is_node_0=True) if self._secret else None
                link = Link(
                    connection,
                    str(address[0]),
                    accepted=False,
                    send_seconds=SEND_SECONDS,
                    signer=signer,
                )
                self._pending.append(link)

    def _admit(self, link: Link, message: dict[str, Any]) -> list[str]:
        """Adds the node that has sent this first message; returns the faults if it cannot join."""
        try:
            node, nnodes, nproc = messages.parse_hello(message)
        except messages.InvalidMessage as error:
            link.reject(str(error))
            return [link.fault]
        if fault := self._join_fault(node, nnodes):
            link.send(do="reject", fault=fault)
            link.close()
            return [fault]
        link.accepted = True
        self.remotes[node] = RemoteWorkers(link, node, nproc)
        return []

    def _join_fault(self, node: int, nnodes: int) -> str:
        """Returns why a supervisor cannot join, or "". Closes the connection that it replaces."""
        if nnodes != self._nnodes:
            return (
                f"node 0 is one of {self._nnodes} nodes and node {node} one of {nnodes}; "
                f"set the same --nnodes"
            )
        if not 0 < node < nnodes:
            return f"node {node}: use --node_rank from 0 to {nnodes - 1}"
        old = self.remotes.get(node)
        if old:
            if old.link.open and old.link.silence() < REPLACE_AFTER:
                return f"two nodes have rank {node}; give each its own --node_rank"
            old.link.close()
        return ""

    def connected(self) -> list[RemoteWorkers]:
        """Returns the nodes that can be reached, by rank."""
        by_rank = [self.remotes[node] for node in sorted(self.remotes)]
        return [remote for remote in by_rank if remote.link.open]

    def close(self, code: int) -> None:
        for remote in self.connected():
            remote.end(code)
        for link in self._pending:
            link.close()
        for remote in self.remotes.values():
            remote.link.close()
        self._server.close()


def follow_node_0(
    workers: Workers,
    *,
    host: str,
    port: int,
    node: int,
    nnodes: int,
    nproc: int,
    seconds: float,
    grace: float,
    num_signals: Callable[[], int],
    log: Callable[[str], None],
    secret: str = "",
) -> int:
    """Executes the commands of node 0 on this host; returns the exit code that node 0 sends.

    `num_signals` counts the signals so far: after the first, processes have `grace` seconds to save
    and stop; after the second they are killed.
    """
    hello = {"node": node, "nnodes": nnodes, "nproc": nproc}
    if why := _lookup_fault(host):  # of a pod, the name may be known later
        log(f"--coordinator={host}:{port}: {why}; trying again for {seconds:.0f} s")
    logged: set[str] = set()  # of connections without an answer: each fault once
    deadline = time.monotonic() + seconds
    while True:
        link = messages.connect(
            host,
            port,
            hello=hello,
            deadline=deadline,
            num_signals=num_signals,
            secret=secret,
        )
        if link is None:
            break
        text = f"node {node} of {nnodes}: connected to node 0 at {host}:{port}"
        link.on_answer = partial(log, text)
        with contextlib.closing(link):
            code = _execute_commands(
                workers,
                link,
                nproc=nproc,
                num_signals=num_signals,
                grace=grace,
            )
            workers.kill()
        if code is not None:
            return code
        if num_signals():
            return EXIT_NOT_SAVED

        # Node 0 may come back: try to reach it until the deadline.
        fault = link.fault or "lost the connection to node 0"
        if link.answered:  # else another program may answer there
            deadline = time.monotonic() + seconds
        elif not link.fault and secret:
            fault = (
                f"node 0 has closed the connection; "
                f"it must have the same {messages.SECRET_VARIABLE}"
            )
        if link.answered or fault not in logged:
            log(f"{fault}; reconnecting")
        logged.add(fault)
        time.sleep(messages.RETRY)
    if num_signals():
        return EXIT_PREEMPTED  # nothing was running
    # The secret is only to blame if something answers there.
    why = _connect_fault(host, port)
    if why:
        hint = f": {why}; use its address, and start it there"
    else:
        hint = f"; it must have the same {messages.SECRET_VARIABLE}" if secret else ""
    log(f"--coordinator={host}:{port}: node 0 not reached within {seconds:.0f} s{hint}")
    return EXIT_FAILED


def _lookup_fault(host: str) -> str:
    """Returns why a name has no address on this host, or ""."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"cannot look up {host}: {reason}"
    return ""


def _connect_fault(host: str, port: int) -> str:
    """Returns why no connection to node 0 is possible, or ""."""
    if fault := _lookup_fault(host):
        return fault
    try:
        socket.create_connection((host, port), timeout=messages.RETRY).close()
    except OSError as error:
        return error.strerror or "no answer in time"
    return ""


def _execute_commands(
    workers: Workers,
    link: Link,
    *,
    nproc: int,
    num_signals: Callable[[], int],
    grace: float,
) -> int | None:
    """Executes commands until node 0 ends the run; returns the exit code.

    None if the connection is lost. Raises ConfigError if node 0 rejects this host.
    """
    reported_at = 0.0
    clock = RunningClock()
    stop_requested_at: float | None = None
    # Exit codes of this attempt; the first entry counts if no process has ended.
    codes = [EXIT_PREEMPTED]
    with selectors.DefaultSelector() as ready:
        ready.register(link.connection, selectors.EVENT_READ)
        while link.open:
            workers.poll(TICK / 2)
            ready.select(TICK / 2)

            # ---- the commands that have arrived ----
            for message in link.receive():
                try:
                    command = messages.parse_command(message, nproc)
                except messages.InvalidMessage as error:
                    link.reject(str(error))
                    return None
                if not link.answered:
                    link.answered = True
                    link.on_answer()
                match command["do"]:
                    case "start":
                        ranks = command["ranks"]
                        workers.start(ranks)
                        codes = [0] if ranks.num_local else [EXIT_PREEMPTED]
                    case "stop":
                        workers.request_stop()
                    case "dump":
                        workers.dump_stacks()
                    case "kill":
                        workers.kill()
                        link.send(dead=True)
                    case "reject":
                        raise ConfigError(command["fault"])
                    case "end":
                        return command["code"]

            # ---- signals to this host ----
            if num_signals() and stop_requested_at is None:
                stop_requested_at = clock.now()
                workers.request_stop()
            late = stop_requested_at is not None and clock.now() - stop_requested_at > grace
            if num_signals() > 1 or late:
                return EXIT_NOT_SAVED

            # ---- the report to node 0: at once if a process has ended ----
            exits = workers.new_exits()
            statuses = workers.statuses()
            codes += [process.code for process in exits]
            if exits or time.monotonic() - reported_at > REPORT_EVERY:
                reported_at = time.monotonic()
                _send_report(link, exits, statuses)
            if num_signals() and not statuses:
                # Only this host was asked to stop: the others may continue.
                return EXIT_NOT_SAVED if min(codes) < 0 else max(codes)
    return None


def _send_report(link: Link, exits: list[Exit], statuses: list[ProcessStatus]) -> None:
    """Sends a line for each exit, which may be long with its last output, and one of statuses."""
    for process in exits:
        link.send(exits=[messages.exit_message(process)])
    link.send(statuses=[dataclasses.asdict(status) for status in statuses])
