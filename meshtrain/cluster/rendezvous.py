"""Waits for all processes before jax joins them: if one is missing, jax aborts the others later.

Process 0 listens on the address that jax will use. Each other process sends it one line of JSON,
and all get the same answer: a list of faults, empty if all is well. Under a supervisor these lines
are signed with the token of the attempt: without it nobody can take a rank, or answer as process 0.
"""

import contextlib
import json
import os
import random
import selectors
import socket
import sys
import time
from typing import Any

from meshtrain.cluster.launchers import (
    ALONE,
    FLAGS,
    JAX_VARIABLES,
    LOCALHOST,
    LOOPBACK,
    LOOPBACK_IPV6,
    MAX_PROCESSES,
    ProcessInfo,
)
from meshtrain.cluster.signature import Signer, signer_of_node
from meshtrain.errors import ConfigError, TransientError

TOKEN_VARIABLE = "MESHTRAIN_TOKEN"  # the supervisor sets it
RETRY = 0.2  # seconds between attempts to reach process 0
LOG_EVERY = 10.0  # seconds between log lines that name the missing processes
ANSWER_TIMEOUT = 5.0  # seconds after the deadline until process 0 must have answered
MAX_LINE = 1000  # bytes

# Connections that have not sent their line; if there are more, the oldest is closed.
MAX_PENDING = 100
HELLO_SECONDS = 10.0  # within which a process sends its line, however slowly
MAX_REPORTED = 20  # addresses of strangers that are logged
MAX_ANSWER = 100_000  # bytes
MAX_WHO = 300  # characters of the name of a process
MAX_SHOWN = 20  # missing processes
MISSING = "missing"  # marks a fault that is not a user's mistake


class RendezvousError(TransientError):
    """A process is missing, or the port is in use: no user's mistake if there is a supervisor."""


def wait_for_all(process: ProcessInfo, *, seconds: float, token: str = "") -> None:
    """Returns when all processes have connected and agree on their number.

    With a `token`, those that have another one or none are strangers. Raises ConfigError on every
    process that has connected if others are missing after `seconds`, or if they disagree.
    """
    deadline = time.monotonic() + seconds
    hello = {
        "meshtrain": 1,
        "id": process.process_id,
        "count": process.num_processes,
        "who": f"pid {os.getpid()} on {socket.gethostname()}",
    }
    if process.process_id == 0:
        with _listen(process) as server:
            faults = _serve(server, hello, deadline, process, token)
    else:
        faults = _connect(process, hello, deadline, seconds, token)
    if any(MISSING in fault for fault in faults):
        raise RendezvousError(*faults)
    if faults:
        raise ConfigError(*faults)


def _listen(process: ProcessInfo) -> socket.socket:
    try:
        return listen(process.host, process.port)
    except OSError as error:
        raise RendezvousError(
            f"{_given_address(process)}: process 0 cannot listen there: "
            f"{error.strerror}; "
            f"use a free port{_with_address(process)}, or stop the program that uses it"
        ) from error


class _Peer:
    """A connection to process 0, and the part of its line that has arrived."""

    def __init__(self, connection: socket.socket, address: str, token: str):
        connection.setblocking(False)
        self.connection = connection
        self.address = address
        self.opened_at = time.monotonic()
        self.line = b""
        self._signer = Signer(token, is_node_0=True) if token else None
        if self._signer:
            with contextlib.suppress(OSError):  # it has already left
                connection.send(json.dumps(self._signer.greeting).encode() + b"\n")

    def read(self) -> bool:
        """Reads what has arrived; returns whether that is a line, or the end, or too long."""
        try:
            received = self.connection.recv(MAX_LINE)
        except OSError:
            received = b""
        self.line += received
        return not received or b"\n" in self.line or len(self.line) >= MAX_LINE

    def hello(self) -> dict[str, Any] | None:
        """Returns the line of a process; None if something else has connected."""
        line = self.line.removesuffix(b"\n")
        text = self._signer.checked(line) if self._signer else line
        return _parse_hello(text) if text else None

    def answer(self, faults: list[str]) -> None:
        line = json.dumps(faults).encode()
        if self._signer:
            line = self._signer.sign(line)
        with self.connection:
            self.connection.settimeout(ANSWER_TIMEOUT)
            with contextlib.suppress(OSError):  # it died in the meantime; the others will notice
                self.connection.sendall(line + b"\n")


class _Strangers:
    """Closes connections that are not from processes of this run: port scans, health checks."""

    def __init__(self):
        self._reported: set[str] = set()

    def close(self, peer: _Peer) -> None:
        peer.connection.close()
        if peer.address not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(peer.address)
            line = f"{peer.address} is not a process of this run; connection closed"
            print(line, file=sys.stderr, flush=True)


def _serve(
    server: socket.socket,
    own: dict[str, Any],
    deadline: float,
    process: ProcessInfo,
    token: str,
) -> list[str]:
    """Waits for the others on process 0, checks what they send, and answers all of them."""
    count = process.num_processes
    arrived = {0: own}  # by rank
    members: list[_Peer] = []
    faults: list[str] = []
    pending: list[_Peer] = []  # the oldest first
    strangers = _Strangers()
    logged_at = time.monotonic()
    server.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)

        def forget(peer: _Peer) -> None:
            ready.unregister(peer.connection)
            pending.remove(peer)

        while len(arrived) < count and not faults and time.monotonic() < deadline:
            for key, _ in ready.select(timeout=min(0.5, max(0, deadline - time.monotonic()))):
                peer = key.data
                if key.fileobj is server:
                    peer = _accept(server, token)
                    if peer:
                        pending.append(peer)
                        ready.register(peer.connection, selectors.EVENT_READ, peer)
                elif peer.read():
                    forget(peer)
                    hello = peer.hello()
                    if hello:
                        faults += _hello_faults(hello, arrived, process)
                        arrived.setdefault(hello["id"], hello)
                        members.append(peer)
                    else:
                        strangers.close(peer)
            while pending and (
                len(pending) > MAX_PENDING
                or time.monotonic() - pending[0].opened_at > HELLO_SECONDS
            ):
                oldest = pending[0]
                forget(oldest)
                strangers.close(oldest)
            if time.monotonic() - logged_at > LOG_EVERY:
                logged_at = time.monotonic()
                missing = _describe_missing(arrived, count)
                line = f"waiting: {missing}; {process.names[1]}={count} says how many there are"
                if process.variables:
                    line = f"waiting: {missing}; {process.variables}; {ALONE}"
                print(line, file=sys.stderr, flush=True)
    if not faults and len(arrived) < count:
        name = process.names[1]
        missing = _describe_missing(arrived, count)
        faults = [
            f"{missing}; start those too, or set {name} to the number that you start, now {count}"
            + (f"; {ALONE}" if process.variables else "")
        ]
    for peer in members:
        peer.answer(faults)
    for peer in pending:
        peer.connection.close()
    return faults


def _accept(server: socket.socket, token: str) -> _Peer | None:
    try:
        connection, address = server.accept()
    except OSError:
        time.sleep(0.01)  # for example too many open files: others may be closed in the meantime
        return None
    return _Peer(connection, str(address[0]), token)


def _parse_hello(line: bytes) -> dict[str, Any] | None:
    """Returns the first line of a process; None if something else has connected."""
    hello = parse_line(line) or {}
    rank, count, who = hello.get("id"), hello.get("count"), hello.get("who")
    if hello.get("meshtrain") != 1 or not is_integer(count, 2, MAX_PROCESSES):
        return None
    if not is_integer(rank, 1, count - 1):
        return None
    if not isinstance(who, str) or len(who) >= MAX_WHO or not who.isprintable():
        return None
    return hello


def _hello_faults(hello: dict, arrived: dict[int, dict], process: ProcessInfo) -> list[str]:
    rank, who = hello["id"], hello["who"]
    count = process.num_processes
    if hello["count"] != count:
        return [
            f"process 0 ({arrived[0]['who']}) is one of {count} processes and process {rank} "
            f"({who}) "
            f"one of {hello['count']}; set {process.names[1]} to the same on all"
        ]
    if rank in arrived:
        return [
            f"two processes have number {rank}: {arrived[rank]['who']} and {who}; "
            f"give each its own {process.names[2]}"
        ]
    return []


def _describe_missing(arrived: dict[int, dict], count: int) -> str:
    missing = [str(rank) for rank in range(count) if rank not in arrived]
    shown = missing[:MAX_SHOWN]
    if len(missing) > MAX_SHOWN:
        shown.append("...")
    return f"{len(arrived)} of {count} processes arrived, {MISSING} [{', '.join(shown)}]"


def _given_address(process: ProcessInfo) -> str:
    """Returns the address of process 0, and the flag or the variables that give it."""
    if process.variables:  # the address may be made from several of them
        return f"{process.variables}: {process.address}"
    return f"{process.names[0]}={process.address}"


def _with_address(process: ProcessInfo) -> str:
    """Returns how to choose the address, for launchers that do not let the user choose it."""
    ours = process.names[0] in (JAX_VARIABLES[0], FLAGS[0])
    return "" if ours else f", with {JAX_VARIABLES[0]}=HOST:PORT"


def _connect(
    process: ProcessInfo, hello: dict, deadline: float, seconds: float, token: str
) -> list[str]:
    """Sends `hello` to process 0 from another process, and returns the answer."""
    logged_at = time.monotonic()
    while True:
        try:
            left = max(RETRY, deadline - time.monotonic())
            address = (process.host, process.port)
            with socket.create_connection(address, timeout=left) as connection:
                signer = signer_of_node(token, connection)
                greeting = signer.greeting if signer else {}
                line = json.dumps({**hello, **greeting}).encode()
                connection.settimeout(left)
                connection.sendall((signer.sign(line) if signer else line) + b"\n")
                line = _read_line(connection, time.monotonic() + left + ANSWER_TIMEOUT)
                return _parse_answer(line, signer, process)
        except OSError as error:  # process 0 does not listen yet, or its name does not resolve yet
            reason = error.strerror or "no answer in time"
        if time.monotonic() >= deadline:
            return [
                f"{_given_address(process)}: {MISSING} process 0, not reached within "
                f"{seconds:.0f} s: {reason}; use its address, and start it on that host"
                + (f"; {ALONE}" if process.variables else "")
            ]
        if time.monotonic() - logged_at > LOG_EVERY:
            logged_at = time.monotonic()
            line = f"waiting for process 0: {_given_address(process)}: {reason}"
            print(line, file=sys.stderr, flush=True)
        time.sleep(RETRY)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Returns the answer, up to MAX_ANSWER bytes. Raises OSError if it is not there in time."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        received = connection.recv(MAX_ANSWER)
        if not received:
            raise ConnectionResetError(0, "it closed the connection")
        line += received
    return line


def _parse_answer(line: bytes, signer: Signer | None, process: ProcessInfo) -> list[str]:
    """Returns the faults in an answer. Raises OSError if another than process 0 has signed it."""
    answer = line.removesuffix(b"\n")
    if signer:
        signed = signer.checked(answer)
        if signed is None:
            raise ConnectionResetError(0, "another program answers there")
        answer = signed
    with contextlib.suppress(ValueError, RecursionError):
        faults = json.loads(answer)
        if isinstance(faults, list) and all(isinstance(fault, str) for fault in faults):
            return faults
    return [
        f"{_given_address(process)}: the program that answers there is not a process of "
        f"this "
        f"run; use a free port{_with_address(process)}"
    ]


# ---- sockets and lines, for the supervisors too ----


def listen(host: str, port: int) -> socket.socket:
    """Returns a server socket: on loopback if `host` is a name for it, else on all addresses."""
    if host not in LOCALHOST and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    if host == LOOPBACK_IPV6:
        return socket.create_server((host, port), family=socket.AF_INET6)
    return socket.create_server((LOOPBACK if host in LOCALHOST else "", port))


PORT_SECONDS = 10.0  # in which one of --ports has to become free


def free_port(ports: str) -> int:
    """Returns a random free port. Raises ConfigError if there is none for PORT_SECONDS."""
    low, _, high = ports.partition("-")
    numbers = range(int(low), int(high) + 1)
    until = time.monotonic() + PORT_SECONDS
    reason = None
    while True:
        for port in random.sample(numbers, len(numbers)):
            with socket.socket() as probe:
                # A port is free although connections of the last attempt are not yet forgotten.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", port))
                    return port
                except OSError as error:
                    reason = error.strerror
        if time.monotonic() > until:
            raise ConfigError(f"--ports={ports}: {reason}; use a larger range, or other ports")
        time.sleep(RETRY)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if there is something else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def is_integer(value: Any, low: int, high: int) -> bool:
    """Returns whether a value from JSON is an integer from `low` to `high`."""
    return type(value) is int and low <= value <= high
