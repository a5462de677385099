"""The supervisors of several hosts: the first one decides, the others do as it says, by lines of JSON.

What passes is who is there, when to start and to kill, and how the processes are; never code.
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
from meshtrain.cluster.workers import Exit, ProcessStatus, Start, Workers
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError

MOST_READS = 100  # of 64 KiB at a time: one who never stops must not take all of it
RETRY = 0.5  # seconds between attempts to reach the first supervisor
LOOK_EVERY = 0.5  # seconds between reports, which are heartbeats as well
SILENT = 5.0  # seconds after which another one may come in the place of a host
LOST_AFTER = 30.0  # seconds of silence
TICK = 0.1
NOT_SAVED = 128 + signal.SIGTERM  # the exit code of a host that was told to go, and could not save


class Link:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.open, self.heard = connection, True, time.monotonic()
        self._part = b""

    def send(self, **message: Any) -> None:
        try:
            self.connection.setblocking(True)
            self.connection.settimeout(LOST_AFTER)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self.connection.setblocking(False)
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        try:
            for _ in range(MOST_READS):
                said = self.connection.recv(1 << 16)
                if not said:
                    self.open = False
                    break
                self.heard = time.monotonic()
                self._part += said
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._part = self._part.split(b"\n")
        if time.monotonic() - self.heard > LOST_AFTER:
            self.open = False
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.open = False  # no supervisor of ours
            return []

    def close(self) -> None:
        self.open = False
        self.connection.close()


class Remote:
    """The processes of another host, as the first supervisor sees them; in use it is like `Workers`."""

    def __init__(self, link: Link, node: int, num_local: int):
        self.link, self.node, self.num_local = link, node, num_local
        self._exits: list[Exit] = []
        self._looks: list[ProcessStatus] = []
        self._dead, self._running = True, 0

    @property
    def lost(self) -> bool:
        """Whether processes of ours were there when the host fell silent."""
        return not self.link.open and self._running > 0

    def pump(self) -> None:
        for message in self.link.receive():
            exits = [_exit(fields) for fields in message.get("exits", ())]
            self._exits += exits
            self._running -= len(exits)
            self._looks = [ProcessStatus(**fields) for fields in message.get("looks", ())]
            self._dead = message.get("dead", self._dead)

    def start(self, how: Start) -> None:
        self._exits, self._looks = [], []
        self._dead, self._running = False, how.num_local
        self.link.send(do="start", how=dataclasses.asdict(how))

    def exits(self) -> list[Exit]:
        found, self._exits = self._exits, []
        return found

    def looks(self) -> list[ProcessStatus]:
        return self._looks

    def ask(self) -> None:
        self.link.send(do="ask")

    def dump(self) -> None:
        self.link.send(do="dump")

    def kill(self) -> None:
        """Returns when all are dead there, or the host cannot be reached."""
        self.link.send(do="kill")
        while self.link.open and not self._dead:
            time.sleep(TICK)
            self.pump()

    def end(self, code: int) -> None:
        self.link.send(do="end", code=code)
        self.link.close()


class Head:
    """Where the other supervisors come to."""

    def __init__(self, host: str, port: int, nnodes: int):
        try:
            self._server = rendezvous.listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"--coordinator: cannot listen on port {port}: {error.strerror}; use a free one"
            ) from error
        self._server.setblocking(False)
        self._nnodes = nnodes
        self.remotes: dict[int, Remote] = {}
        self._strangers: list[Link] = []
        self._told_at = 0.0

    def pump(self) -> list[str]:
        """Lets in who comes and hears all; returns what is wrong with those who came."""
        with contextlib.suppress(BlockingIOError):
            self._strangers.append(Link(self._server.accept()[0]))
        faults = []
        for link in list(self._strangers):
            for message in link.receive()[:1]:
                self._strangers.remove(link)
                node, nnodes = message.get("node"), message.get("nnodes")
                if fault := self._misfit(node, nnodes, message):
                    link.send(do="refuse", fault=fault)
                    link.close()
                    faults.append(fault)
                else:
                    self.remotes[node] = Remote(link, node, message["nproc"])
        tell = time.monotonic() - self._told_at > LOOK_EVERY
        for remote in self.remotes.values():
            remote.pump()
            if tell:
                remote.link.send(do="nothing")  # so that it knows that we are alive
                self._told_at = time.monotonic()
        self._strangers = [link for link in self._strangers if link.open]
        return faults

    def _misfit(self, node: Any, nnodes: Any, message: dict[str, Any]) -> str:
        if nnodes != self._nnodes:
            return f"node 0 is one of {self._nnodes} nodes and node {node} one of {nnodes}; set the same --nnodes"
        if not isinstance(node, int) or not 0 < node < nnodes or "nproc" not in message:
            return f"node {node}: use --node_rank from 0 to {nnodes - 1}"
        old = self.remotes.get(node)
        if old and old.link.open and time.monotonic() - old.link.heard < SILENT:
            return f"two nodes are number {node}; give each its own --node_rank"
        if old:
            old.link.close()  # its host is gone, and this one takes its place
        return ""

    def present(self) -> list[Remote]:
        """Returns those that can be reached, in their order."""
        return [self.remotes[node] for node in sorted(self.remotes) if self.remotes[node].link.open]

    def close(self, code: int) -> None:
        for remote in self.present():
            remote.end(code)
        self._server.close()


def follow(
    workers: Workers,
    *,
    host: str,
    port: int,
    node: int,
    nnodes: int,
    nproc: int,
    seconds: float,
    grace: float,
    asked: Callable[[], int],
    line: Callable[[str], None],
) -> int:
    """Does on this host what the first supervisor says; returns the exit code that it gives.

    `asked` counts the signals so far: the first asks to save and stop within `grace` seconds, a second
    one kills.
    """
    hello = {"node": node, "nnodes": nnodes, "nproc": nproc}
    while (link := _reach(host, port, hello, seconds, asked)) is not None:
        line(f"node {node} of {nnodes}: in touch with node 0 at {host}:{port}")
        with contextlib.closing(link):
            code = _obey(workers, link, asked, grace)
            workers.kill()
        if code is not None:
            return code
        if asked():
            return NOT_SAVED
        line("lost touch with node 0; trying to find it again")
    if asked():
        return EXIT_PREEMPTED  # nothing was begun
    line(f"--coordinator={host}:{port}: node 0 is not there after {seconds:.0f} s")
    return EXIT_FAILED


def _reach(
    host: str, port: int, hello: dict, seconds: float, asked: Callable[[], int]
) -> Link | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not asked():
        try:
            link = Link(socket.create_connection((host, port), timeout=RETRY * 10))
        except OSError:
            time.sleep(RETRY)
            continue
        link.send(**hello)
        return link
    return None


def _obey(workers: Workers, link: Link, asked: Callable[[], int], grace: float) -> int | None:
    """Returns the exit code, None where the first supervisor is lost. Raises ConfigError if refused."""
    told_at, asked_at, codes = 0.0, 0.0, [EXIT_PREEMPTED]
    with selectors.DefaultSelector() as ready:
        ready.register(link.connection, selectors.EVENT_READ)
        while link.open:
            workers.pump(TICK / 2)
            ready.select(TICK / 2)
            for message in link.receive():
                match message.get("do"):
                    case "start":
                        workers.start(how := Start(**message["how"]))
                        codes = [0] if how.num_local else [EXIT_PREEMPTED]
                    case "ask":
                        workers.ask()
                    case "dump":
                        workers.dump()
                    case "kill":
                        workers.kill()
                        link.send(dead=True)
                    case "refuse":
                        raise ConfigError(message["fault"])
                    case "end":
                        return message["code"]
            if asked() and not asked_at:
                asked_at = time.monotonic()
                workers.ask()
            if asked() > 1 or asked_at and time.monotonic() - asked_at > grace:
                return NOT_SAVED
            exits, looks = workers.exits(), workers.looks()
            codes += [one.code for one in exits]
            if exits or time.monotonic() - told_at > LOOK_EVERY:
                told_at = time.monotonic()
                link.send(
                    exits=[dataclasses.asdict(one) for one in exits],
                    looks=[dataclasses.asdict(one) for one in looks],
                )
            if asked() and not looks:
                # This host is to go, whatever the others do.
                return NOT_SAVED if min(codes) < 0 else max(codes)
    return None


def _exit(fields: dict[str, Any]) -> Exit:
    return Exit(**{**fields, "look": ProcessStatus(**fields["look"])})
