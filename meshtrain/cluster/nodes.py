"""The supervisors of several hosts: node 0 decides, the others execute its commands, sent as lines of JSON.

Messages contain ranks, commands (start, stop, kill ...) and the status of processes; never code.
"""

import contextlib
import dataclasses
import json
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from meshtrain.cluster import rendezvous
from meshtrain.cluster.workers import Exit, ProcessStatus, RankAssignment, Workers
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError

MAX_READS = 100  # of 64 KiB at a time: a peer that sends without pause must not block the others
RETRY = 0.5  # seconds between attempts to reach node 0
REPORT_EVERY = 0.5  # seconds between status messages, which are also heartbeats
REPLACE_AFTER = 5.0  # seconds of silence after which another host may take over a rank
LOST_AFTER = 30.0  # seconds of silence after which a host counts as lost
TICK = 0.1
EXIT_NOT_SAVED = 128 + signal.SIGTERM  # of a host that was asked to stop and could not save


class Link:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.open, self.received_at = connection, True, time.monotonic()
        self._partial_line = b""

    def send(self, **message: Any) -> None:
        try:
            self.connection.setblocking(True)
            self.connection.settimeout(LOST_AFTER)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self.connection.setblocking(False)
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived, without waiting."""
        try:
            for _ in range(MAX_READS):
                received = self.connection.recv(1 << 16)
                if not received:
                    self.open = False
                    break
                self.received_at = time.monotonic()
                self._partial_line += received
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._partial_line = self._partial_line.split(b"\n")
        if time.monotonic() - self.received_at > LOST_AFTER:
            self.open = False
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.open = False  # not a meshtrain supervisor
            return []

    def close(self) -> None:
        self.open = False
        self.connection.close()


class RemoteWorkers:
    """The processes of another host, for the supervisor of node 0; used like `Workers`."""

    def __init__(self, link: Link, node: int, num_local: int):
        self.link, self.node, self.num_local = link, node, num_local
        self._exits: list[Exit] = []
        self._statuses: list[ProcessStatus] = []
        self._dead, self._num_running = True, 0

    @property
    def lost(self) -> bool:
        """Whether the connection was lost while processes were running on that host."""
        return not self.link.open and self._num_running > 0

    def poll(self) -> None:
        for message in self.link.receive():
            exits = [_parse_exit(fields) for fields in message.get("exits", ())]
            self._exits += exits
            self._num_running -= len(exits)
            self._statuses = [ProcessStatus(**fields) for fields in message.get("statuses", ())]
            self._dead = message.get("dead", self._dead)

    def start(self, ranks: RankAssignment) -> None:
        self._exits, self._statuses = [], []
        self._dead, self._num_running = False, ranks.num_local
        self.link.send(do="start", ranks=dataclasses.asdict(ranks))

    def new_exits(self) -> list[Exit]:
        found, self._exits = self._exits, []
        return found

    def statuses(self) -> list[ProcessStatus]:
        return self._statuses

    def request_stop(self) -> None:
        self.link.send(do="stop")

    def dump_stacks(self) -> None:
        self.link.send(do="dump")

    def kill(self) -> None:
        """Kills the processes of that host; returns when they are dead or the host cannot be reached."""
        self.link.send(do="kill")
        while self.link.open and not self._dead:
            time.sleep(TICK)
            self.poll()

    def end(self, code: int) -> None:
        self.link.send(do="end", code=code)
        self.link.close()


class Server:
    """Node 0's server, to which the supervisors of the other nodes connect."""

    def __init__(self, host: str, port: int, nnodes: int):
        try:
            self._server = rendezvous.listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"--coordinator: cannot listen on port {port}: {error.strerror}; use a free one"
            ) from error
        self._server.setblocking(False)
        self._nnodes = nnodes
        self.remotes: dict[int, RemoteWorkers] = {}
        self._pending: list[Link] = []  # connections that have not sent their rank
        self._heartbeat_at = 0.0

    def poll(self) -> list[str]:
        """Accepts connections and reads messages; returns the faults of rejected connections."""
        with contextlib.suppress(BlockingIOError):
            self._pending.append(Link(self._server.accept()[0]))
        faults = []
        for link in list(self._pending):
            for message in link.receive()[:1]:
                self._pending.remove(link)
                node, nnodes = message.get("node"), message.get("nnodes")
                if fault := self._join_fault(node, nnodes, message):
                    link.send(do="reject", fault=fault)
                    link.close()
                    faults.append(fault)
                else:
                    self.remotes[node] = RemoteWorkers(link, node, message["nproc"])
        heartbeat_due = time.monotonic() - self._heartbeat_at > REPORT_EVERY
        for remote in self.remotes.values():
            remote.poll()
            if heartbeat_due:
                remote.link.send(do="nothing")
                self._heartbeat_at = time.monotonic()
        self._pending = [link for link in self._pending if link.open]
        return faults

    def _join_fault(self, node: Any, nnodes: Any, message: dict[str, Any]) -> str:
        """Returns why a supervisor cannot join, or "". Closes the connection that it replaces."""
        if nnodes != self._nnodes:
            return f"node 0 is one of {self._nnodes} nodes and node {node} one of {nnodes}; set the same --nnodes"
        if not isinstance(node, int) or not 0 < node < nnodes or "nproc" not in message:
            return f"node {node}: use --node_rank from 0 to {nnodes - 1}"
        old = self.remotes.get(node)
        if old and old.link.open and time.monotonic() - old.link.received_at < REPLACE_AFTER:
            return f"two nodes have rank {node}; give each its own --node_rank"
        if old:
            old.link.close()
        return ""

    def connected(self) -> list[RemoteWorkers]:
        """Returns the nodes that can be reached, by rank."""
        return [self.remotes[node] for node in sorted(self.remotes) if self.remotes[node].link.open]

    def close(self, code: int) -> None:
        for remote in self.connected():
            remote.end(code)
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
) -> int:
    """Executes the commands of node 0 on this host; returns the exit code that node 0 sends.

    `num_signals` counts the signals so far: after the first, processes have `grace` seconds to save and
    stop; after the second they are killed.
    """
    hello = {"node": node, "nnodes": nnodes, "nproc": nproc}
    while (link := _connect(host, port, hello, seconds, num_signals)) is not None:
        log(f"node {node} of {nnodes}: connected to node 0 at {host}:{port}")
        with contextlib.closing(link):
            code = _execute_commands(workers, link, num_signals, grace)
            workers.kill()
        if code is not None:
            return code
        if num_signals():
            return EXIT_NOT_SAVED
        log("lost the connection to node 0; reconnecting")
    if num_signals():
        return EXIT_PREEMPTED  # nothing was running
    log(f"--coordinator={host}:{port}: node 0 not reached within {seconds:.0f} s")
    return EXIT_FAILED


def _connect(
    host: str, port: int, hello: dict, seconds: float, num_signals: Callable[[], int]
) -> Link | None:
    """Returns a connection to node 0; None after `seconds` or a signal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not num_signals():
        try:
            link = Link(socket.create_connection((host, port), timeout=RETRY * 10))
        except OSError:
            time.sleep(RETRY)
            continue
        link.send(**hello)
        return link
    return None


def _execute_commands(
    workers: Workers, link: Link, num_signals: Callable[[], int], grace: float
) -> int | None:
    """Executes commands until node 0 ends the run; returns the exit code, or None if the connection is lost.

    Raises ConfigError if node 0 rejects this host.
    """
    sent_at, stop_requested_at, codes = 0.0, 0.0, [EXIT_PREEMPTED]
    with selectors.DefaultSelector() as ready:
        ready.register(link.connection, selectors.EVENT_READ)
        while link.open:
            workers.poll(TICK / 2)
            ready.select(TICK / 2)
            for message in link.receive():
                match message.get("do"):
                    case "start":
                        workers.start(ranks := RankAssignment(**message["ranks"]))
                        codes = [0] if ranks.num_local else [EXIT_PREEMPTED]
                    case "stop":
                        workers.request_stop()
                    case "dump":
                        workers.dump_stacks()
                    case "kill":
                        workers.kill()
                        link.send(dead=True)
                    case "reject":
                        raise ConfigError(message["fault"])
                    case "end":
                        return message["code"]
            if num_signals() and not stop_requested_at:
                stop_requested_at = time.monotonic()
                workers.request_stop()
            late = stop_requested_at and time.monotonic() - stop_requested_at > grace
            if num_signals() > 1 or late:
                return EXIT_NOT_SAVED
            exits, statuses = workers.new_exits(), workers.statuses()
            codes += [one.code for one in exits]
            if exits or time.monotonic() - sent_at > REPORT_EVERY:
                sent_at = time.monotonic()
                link.send(
                    exits=[dataclasses.asdict(one) for one in exits],
                    statuses=[dataclasses.asdict(status) for status in statuses],
                )
            if num_signals() and not statuses:
                # Only this host was asked to stop: the others may continue.
                return EXIT_NOT_SAVED if min(codes) < 0 else max(codes)
    return None


def _parse_exit(fields: dict[str, Any]) -> Exit:
    return Exit(**{**fields, "status": ProcessStatus(**fields["status"])})
