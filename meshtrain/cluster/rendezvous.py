"""All processes meet before jax joins them: jax aborts, minutes later, where one is missing.

Process 0 listens where jax will, one line of JSON comes from each other process, and all get the same
verdict.
"""

import json
import os
import selectors
import socket
import sys
import time
from typing import Any

from meshtrain.cluster.environment import JAX, LOCALHOST, LOOPBACK, LOOPBACK_6, Place
from meshtrain.errors import ConfigError

RETRY = 0.2  # seconds between attempts to reach process 0
TELL_EVERY = 10.0  # seconds between lines that say who is missing
PATIENCE = 5.0  # seconds that a stranger's line, or the verdict after the deadline, may take
LONGEST_LINE = 100_000  # bytes
MISSING = "missing"  # in the faults that are nobody's mistake


class MeetingError(ConfigError):
    """Somebody is not there: where a supervisor watches, that is no user's mistake."""


def meet(place: Place, *, seconds: float) -> None:
    """Returns when all processes have arrived and agree on how many they are.

    Raises ConfigError, on those that are there, when they do not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    hello = {"meshtrain": 1, "id": place.process_id, "count": place.num_processes}
    hello["who"] = f"pid {os.getpid()} on {socket.gethostname()}"
    if place.process_id > 0:
        faults = _ask(place, hello, deadline, seconds)
    else:
        with _listen(place) as server:
            faults = _receive(server, hello, deadline, place.num_processes)
    if any(MISSING in fault for fault in faults):
        raise MeetingError(*faults)
    if faults:
        raise ConfigError(*faults)


def listen(host: str, port: int) -> socket.socket:
    """Returns a server on this host alone where it is called loopback, else on all its addresses."""
    if host not in LOCALHOST and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    if host == LOOPBACK_6:
        return socket.create_server((host, port), family=socket.AF_INET6)
    return socket.create_server((LOOPBACK if host in LOCALHOST else "", port))


def _listen(place: Place) -> socket.socket:
    try:
        return listen(place.host, place.port)
    except OSError as error:
        raise MeetingError(
            f"{JAX[0]}={place.address}: process 0 cannot listen there: {error.strerror}; "
            f"use a free port, or end what has it"
        ) from error


def _receive(server: socket.socket, own: dict, deadline: float, count: int) -> list[str]:
    """Process 0: waits for the others, judges, and tells all of them."""
    arrived, faults, told_at = {0: own}, [], time.monotonic()
    strangers: dict[socket.socket, bytes] = {}  # what they said so far
    members: list[socket.socket] = []
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while len(arrived) < count and not faults and time.monotonic() < deadline:
            for key, _ in ready.select(timeout=min(0.5, max(0, deadline - time.monotonic()))):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    strangers[connection] = b""
                    ready.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                said = strangers[connection] + _read(connection)
                strangers[connection] = said
                if said and not said.endswith(b"\n") and len(said) < LONGEST_LINE:
                    continue  # there is more to come
                ready.unregister(connection)
                del strangers[connection]
                if hello := _parse(said):
                    faults += _misfit(hello, arrived, count)
                    arrived.setdefault(hello["id"], hello)
                    members.append(connection)
                else:
                    connection.close()  # no process of ours: a port scan, a health check
            if time.monotonic() - told_at > TELL_EVERY:
                told_at = time.monotonic()
                print(f"waiting: {_missing(arrived, count)}", file=sys.stderr, flush=True)
    if not faults and len(arrived) < count:
        faults = [f"{_missing(arrived, count)}; start those too, or set a lower count"]
    for connection in members:
        with connection:
            connection.setblocking(True)
            try:
                connection.sendall(json.dumps(faults).encode() + b"\n")
            except OSError:
                continue  # it has died meanwhile, which the others will notice
    for connection in strangers:
        connection.close()
    return faults


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(LONGEST_LINE)
    except OSError:
        return b""


def _parse(said: bytes) -> dict[str, Any] | None:
    try:
        hello = json.loads(said)
        fits = hello["meshtrain"] == 1 and isinstance(hello["id"], int)
        return hello if fits and isinstance(hello["count"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _misfit(hello: dict, arrived: dict[int, dict], count: int) -> list[str]:
    number, who = hello["id"], hello.get("who")
    if hello["count"] != count:
        return [
            f"process 0 ({arrived[0]['who']}) is one of {count} processes and process {number} ({who}) "
            f"one of {hello['count']}; set {JAX[1]} to the same on all"
        ]
    if number in arrived:
        return [
            f"two processes are number {number}: {arrived[number]['who']} and {who}; "
            f"give each its own {JAX[2]}"
        ]
    return []


def _missing(arrived: dict[int, dict], count: int) -> str:
    missing = [number for number in range(count) if number not in arrived]
    return f"{len(arrived)} of {count} processes arrived, {MISSING} {missing}"


def _ask(place: Place, hello: dict, deadline: float, seconds: float) -> list[str]:
    """Another process: says who it is, and returns the verdict."""
    told_at = time.monotonic()
    while True:
        try:
            left = max(RETRY, deadline - time.monotonic())
            with socket.create_connection((place.host, place.port), timeout=left) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(left + PATIENCE)
                return _verdict(connection, place)
        except OSError as error:  # process 0 is not there yet, or its name is not known yet
            why = error.strerror or "no answer in time"
        if time.monotonic() >= deadline:
            return [
                f"{JAX[0]}={place.address}: {MISSING} process 0, which is not there after {seconds:.0f} s: {why}; "
                f"use its address, and start it on that host"
            ]
        if time.monotonic() - told_at > TELL_EVERY:
            told_at = time.monotonic()
            print(f"waiting for process 0 at {place.address}: {why}", file=sys.stderr, flush=True)
        time.sleep(RETRY)


def _verdict(connection: socket.socket, place: Place) -> list[str]:
    with connection.makefile("rb") as lines:
        said = lines.readline(LONGEST_LINE)
    if not said:
        raise ConnectionResetError(0, "it hung up")
    try:
        return [str(fault) for fault in list(json.loads(said))]
    except (ValueError, TypeError):
        return [
            f"{JAX[0]}={place.address}: what answers there is no process of this run; use a free port"
        ]
