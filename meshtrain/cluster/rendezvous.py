"""Wait for all processes before jax joins them: if one is missing, jax aborts the others minutes later.

Process 0 listens on the address that jax will use. Each other process sends it one line of JSON, and
all get the same answer: a list of faults, empty if all is well.
"""

import json
import os
import selectors
import socket
import sys
import time
from typing import Any

from meshtrain.cluster.environment import (
    JAX_VARIABLES,
    LOCALHOST,
    LOOPBACK,
    LOOPBACK_IPV6,
    ProcessInfo,
)
from meshtrain.errors import ConfigError, TransientError

RETRY = 0.2  # seconds between attempts to reach process 0
LOG_EVERY = 10.0  # seconds between log lines that name the missing processes
ANSWER_TIMEOUT = 5.0  # seconds after the deadline until process 0 must have answered
MAX_LINE = 100_000  # bytes
MISSING = "missing"  # marks a fault that is not a user's mistake


class RendezvousError(TransientError):
    """A process is missing, or the port is taken: not the user's mistake if a supervisor started the run."""


def wait_for_all(process: ProcessInfo, *, seconds: float) -> None:
    """Returns when all processes have connected and agree on their number.

    Raises ConfigError on every process that has connected if others are missing after `seconds`, or if
    they disagree.
    """
    deadline = time.monotonic() + seconds
    hello = {"meshtrain": 1, "id": process.process_id, "count": process.num_processes}
    hello["who"] = f"pid {os.getpid()} on {socket.gethostname()}"
    if process.process_id > 0:
        faults = _connect(process, hello, deadline, seconds)
    else:
        with _listen(process) as server:
            faults = _serve(server, hello, deadline, process.num_processes)
    if any(MISSING in fault for fault in faults):
        raise RendezvousError(*faults)
    if faults:
        raise ConfigError(*faults)


def listen(host: str, port: int) -> socket.socket:
    """Returns a server socket: on loopback if `host` is a name for loopback, otherwise on all addresses."""
    if host not in LOCALHOST and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    if host == LOOPBACK_IPV6:
        return socket.create_server((host, port), family=socket.AF_INET6)
    return socket.create_server((LOOPBACK if host in LOCALHOST else "", port))


def _listen(process: ProcessInfo) -> socket.socket:
    try:
        return listen(process.host, process.port)
    except OSError as error:
        raise RendezvousError(
            f"{JAX_VARIABLES[0]}={process.address}: process 0 cannot listen there: {error.strerror}; "
            f"use a free port, or stop the program that uses it"
        ) from error


def _serve(server: socket.socket, own: dict, deadline: float, count: int) -> list[str]:
    """On process 0: waits for the others, checks what they send, and answers all of them."""
    arrived, faults, logged_at = {0: own}, [], time.monotonic()
    pending: dict[socket.socket, bytes] = {}  # connections and the part of a line received so far
    members: list[socket.socket] = []
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while len(arrived) < count and not faults and time.monotonic() < deadline:
            for key, _ in ready.select(timeout=min(0.5, max(0, deadline - time.monotonic()))):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    pending[connection] = b""
                    ready.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                received = pending[connection] + _read(connection)
                pending[connection] = received
                if received and not received.endswith(b"\n") and len(received) < MAX_LINE:
                    continue  # an incomplete line
                ready.unregister(connection)
                del pending[connection]
                if hello := _parse_hello(received):
                    faults += _hello_faults(hello, arrived, count)
                    arrived.setdefault(hello["id"], hello)
                    members.append(connection)
                else:
                    connection.close()  # not a meshtrain process: a port scan, a health check
            if time.monotonic() - logged_at > LOG_EVERY:
                logged_at = time.monotonic()
                print(f"waiting: {_describe_missing(arrived, count)}", file=sys.stderr, flush=True)
    if not faults and len(arrived) < count:
        missing = _describe_missing(arrived, count)
        faults = [f"{missing}; start those too, or set a lower number of processes"]
    for connection in members:
        with connection:
            connection.setblocking(True)
            try:
                connection.sendall(json.dumps(faults).encode() + b"\n")
            except OSError:
                continue  # it died in the meantime; the others will notice
    for connection in pending:
        connection.close()
    return faults


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(MAX_LINE)
    except OSError:
        return b""


def _parse_hello(line: bytes) -> dict[str, Any] | None:
    try:
        hello = json.loads(line)
        valid = hello["meshtrain"] == 1 and isinstance(hello["id"], int)
        return hello if valid and isinstance(hello["count"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _hello_faults(hello: dict, arrived: dict[int, dict], count: int) -> list[str]:
    number, who = hello["id"], hello.get("who")
    if hello["count"] != count:
        return [
            f"process 0 ({arrived[0]['who']}) is one of {count} processes and process {number} ({who}) "
            f"one of {hello['count']}; set {JAX_VARIABLES[1]} to the same on all"
        ]
    if number in arrived:
        return [
            f"two processes have number {number}: {arrived[number]['who']} and {who}; "
            f"give each its own {JAX_VARIABLES[2]}"
        ]
    return []


def _describe_missing(arrived: dict[int, dict], count: int) -> str:
    missing = [number for number in range(count) if number not in arrived]
    return f"{len(arrived)} of {count} processes arrived, {MISSING} {missing}"


def _connect(process: ProcessInfo, hello: dict, deadline: float, seconds: float) -> list[str]:
    """On the other processes: sends `hello` to process 0 and returns its answer."""
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
            why = error.strerror or "no answer in time"
        if time.monotonic() >= deadline:
            return [
                f"{JAX_VARIABLES[0]}={process.address}: {MISSING} process 0, not reached within {seconds:.0f} s: "
                f"{why}; use its address, and start it on that host"
            ]
        if time.monotonic() - logged_at > LOG_EVERY:
            logged_at = time.monotonic()
            print(f"waiting for process 0 at {process.address}: {why}", file=sys.stderr, flush=True)
        time.sleep(RETRY)


def _read_answer(connection: socket.socket, process: ProcessInfo) -> list[str]:
    with connection.makefile("rb") as lines:
        answer = lines.readline(MAX_LINE)
    if not answer:
        raise ConnectionResetError(0, "it closed the connection")
    try:
        return [str(fault) for fault in list(json.loads(answer))]
    except (ValueError, TypeError):
        return [
            f"{JAX_VARIABLES[0]}={process.address}: the program that answers there is not a process of this run; "
            f"use a free port"
        ]
