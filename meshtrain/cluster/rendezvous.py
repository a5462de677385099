"""Waits for all processes before jax joins them: if one is missing, jax aborts the others later.

Process 0 listens on the address that jax will use. Each other process sends it one line of JSON,
and all get the same answer: a list of faults, empty if all is well.
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
from meshtrain.errors import ConfigError, TransientError

RETRY = 0.2  # seconds between attempts to reach process 0
LOG_EVERY = 10.0  # seconds between log lines that name the missing processes
ANSWER_TIMEOUT = 5.0  # seconds after the deadline until process 0 must have answered
MAX_LINE = 1000  # bytes

# Connections that have not sent their line; if there are more, the oldest is closed.
MAX_PENDING = 100
MAX_ANSWER = 100_000  # bytes
MAX_WHO = 300  # characters of the name of a process
MAX_SHOWN = 20  # missing processes
MISSING = "missing"  # marks a fault that is not a user's mistake


class RendezvousError(TransientError):
    """A process is missing, or the port is in use: no user's mistake if there is a supervisor."""


def wait_for_all(process: ProcessInfo, *, seconds: float) -> None:
    """Returns when all processes have connected and agree on their number.

    Raises ConfigError on every process that has connected if others are missing after `seconds`, or
    if they disagree.
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
            faults = _serve(server, hello, deadline, process)
    else:
        faults = _connect(process, hello, deadline, seconds)
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


def _serve(
    server: socket.socket, own: dict[str, Any], deadline: float, process: ProcessInfo
) -> list[str]:
    """Waits for the others on process 0, checks what they send, and answers all of them."""
    count = process.num_processes
    arrived = {0: own}  # by rank
    members: list[socket.socket] = []
    faults: list[str] = []
    pending: dict[socket.socket, bytes] = {}  # connections and the part of a line received so far
    logged_at = time.monotonic()
    server.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)

        def forget(connection: socket.socket) -> None:
            ready.unregister(connection)
            del pending[connection]

        while len(arrived) < count and not faults and time.monotonic() < deadline:
            for key, _ in ready.select(timeout=min(0.5, max(0, deadline - time.monotonic()))):
                connection = key.fileobj
                if connection is server:
                    connection = _accept(server)
                    if connection:
                        pending[connection] = b""
                        ready.register(connection, selectors.EVENT_READ)
                elif connection in pending:  # else closed in this round
                    received = _read(connection)
                    pending[connection] += received
                    line = pending[connection]
                    if received and b"\n" not in line and len(line) < MAX_LINE:
                        continue  # an incomplete line
                    forget(connection)
                    hello = _parse_hello(line)
                    if hello:
                        faults += _hello_faults(hello, arrived, process)
                        arrived.setdefault(hello["id"], hello)
                        members.append(connection)
                    else:
                        connection.close()  # not a meshtrain process: a port scan, a health check
                if len(pending) > MAX_PENDING:
                    oldest = next(iter(pending))
                    forget(oldest)
                    oldest.close()
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
    _answer(members, faults)
    for connection in pending:
        connection.close()
    return faults


def _accept(server: socket.socket) -> socket.socket | None:
    try:
        connection, _ = server.accept()
    except OSError:
        time.sleep(0.01)  # for example too many open files: others may be closed in the meantime
        return None
    connection.setblocking(False)
    return connection


def _answer(members: list[socket.socket], faults: list[str]) -> None:
    for connection in members:
        with connection:
            connection.settimeout(ANSWER_TIMEOUT)
            with contextlib.suppress(OSError):  # it died in the meantime; the others will notice
                connection.sendall(json.dumps(faults).encode() + b"\n")


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(MAX_LINE)
    except OSError:
        return b""


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


def _connect(process: ProcessInfo, hello: dict, deadline: float, seconds: float) -> list[str]:
    """Sends `hello` to process 0 from another process, and returns the answer."""
    logged_at = time.monotonic()
    while True:
        try:
            left = max(RETRY, deadline - time.monotonic())
            address = (process.host, process.port)
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(left + ANSWER_TIMEOUT)
                return _read_answer(connection, process)
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


def _read_answer(connection: socket.socket, process: ProcessInfo) -> list[str]:
    with connection.makefile("rb") as lines:
        answer = lines.readline(MAX_ANSWER)
    if not answer:
        raise ConnectionResetError(0, "it closed the connection")
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
