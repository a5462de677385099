"""The supervisors of several hosts: node 0 decides, the others execute its commands, sent as lines of JSON.

`cluster.messages` checks each of them. They contain ranks, commands and the status of processes; never code.
"""

import contextlib
import dataclasses
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from meshtrain.cluster import rendezvous
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError
from meshtrain.supervise import messages
from meshtrain.supervise.messages import Link, Signer
from meshtrain.supervise.workers import Exit, ProcessStatus, RankAssignment, Workers

REPORT_EVERY = 0.5  # seconds between status messages, which are also heartbeats

REPLACE_AFTER = 5.0  # seconds of silence after which another host may take over a rank

MAX_PENDING = (
    100  # connections that have not sent their rank; if there are more, the oldest is closed
)

MAX_REPORTED = 1000  # faults that are logged; each once

TICK = 0.1

EXIT_NOT_SAVED = 128 + signal.SIGTERM  # of a host that was asked to stop and could not save


class RemoteWorkers:
    """The processes of another host, for the supervisor of node 0; used like `Workers`."""

    def __init__(self, link: Link, node: int, num_local: int):
        self.link, self.node, self.num_local = link, node, num_local
        self._exits: list[Exit] = []
        self._statuses: list[ProcessStatus] = []
        self._dead, self._ranks, self._running = True, range(0), set()

    @property
    def lost(self) -> bool:
        """Whether the connection was lost while processes were running on that host."""
        return not self.link.open and bool(self._running)

    def poll(self) -> None:
        for message in self.link.receive():
            try:
                exits, statuses, dead = messages.parse_report(message, self._ranks)
                self._count(exits)
            except messages.InvalidMessage as error:
                self.link.reject(str(error))
                return
            self._exits += exits
            self._statuses = self._statuses if statuses is None else statuses
            self._dead = self._dead if dead is None else dead

    def _count(self, exits: list[Exit]) -> None:
        for one in exits:
            if one.rank not in self._running:
                raise messages.InvalidMessage(f"a second exit of rank {one.rank}")
            self._running.remove(one.rank)

    def start(self, ranks: RankAssignment) -> None:
        self._exits, self._statuses, self._dead = [], [], False
        self._ranks = range(ranks.first_rank, ranks.first_rank + ranks.num_local)
        self._running = set(self._ranks)
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
        """Accepts connections and reads messages; returns the faults of rejected peers, each fault once."""
        self._accept()
        faults = []
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
        faults += [
            f"node {one.node}: {one.link.fault}" for one in self.remotes.values() if one.link.fault
        ]
        for link in self._pending:
            if not link.open:
                link.close()
        self._pending = [link for link in self._pending if link.open]
        while len(self._pending) > MAX_PENDING:
            self._pending.pop(0).close()
        new = [one for one in dict.fromkeys(faults) if one not in self._reported]
        new = new[: MAX_REPORTED - len(self._reported)]
        self._reported.update(new)
        return new

    def _accept(self) -> None:
        # BlockingIOError: no more; other errors: too many open files, or the peer has already left.
        with contextlib.suppress(OSError):
            for _ in range(MAX_PENDING):
                connection, address = self._server.accept()
                signer = Signer(self._secret, is_node_0=True) if self._secret else None
                link = Link(connection, str(address[0]), accepted=False, signer=signer)
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
            return f"node 0 is one of {self._nnodes} nodes and node {node} one of {nnodes}; set the same --nnodes"
        if not 0 < node < nnodes:
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
        for link in [*self._pending, *(remote.link for remote in self.remotes.values())]:
            link.close()
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

    `num_signals` counts the signals so far: after the first, processes have `grace` seconds to save and
    stop; after the second they are killed.
    """
    hello = {"node": node, "nnodes": nnodes, "nproc": nproc}
    said: set[str] = set()  # of connections without an answer: each fault once
    deadline = time.monotonic() + seconds
    while (link := messages.connect(host, port, hello, deadline, num_signals, secret)) is not None:
        text = f"node {node} of {nnodes}: connected to node 0 at {host}:{port}"
        link.on_answer = partial(log, text)
        with contextlib.closing(link):
            code = _execute_commands(workers, link, nproc, num_signals, grace)
            workers.kill()
        if code is not None:
            return code
        if num_signals():
            return EXIT_NOT_SAVED
        why = link.fault or "lost the connection to node 0"
        if link.answered:  # else another program may answer there
            deadline = time.monotonic() + seconds
        elif not link.fault and secret:
            why = f"node 0 has closed the connection; it must have the same {messages.SECRET_VARIABLE}"
        if link.answered or why not in said:
            log(f"{why}; reconnecting")
        said.add(why)
        time.sleep(messages.RETRY)
    if num_signals():
        return EXIT_PREEMPTED  # nothing was running
    hint = f"; it must have the same {messages.SECRET_VARIABLE}" if secret else ""
    log(f"--coordinator={host}:{port}: node 0 not reached within {seconds:.0f} s{hint}")
    return EXIT_FAILED


def _execute_commands(
    workers: Workers, link: Link, nproc: int, num_signals: Callable[[], int], grace: float
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
                try:
                    message = messages.parse_command(message, nproc)
                except messages.InvalidMessage as error:
                    link.reject(str(error))
                    return None
                if not link.answered:
                    link.answered = True
                    link.on_answer()
                match message["do"]:
                    case "start":
                        workers.start(ranks := message["ranks"])
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
                    exits=[messages.exit_message(one) for one in exits],
                    statuses=[dataclasses.asdict(status) for status in statuses],
                )
            if num_signals() and not statuses:
                # Only this host was asked to stop: the others may continue.
                return EXIT_NOT_SAVED if min(codes) < 0 else max(codes)
    return None
