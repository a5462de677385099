"""Exchanges messages between supervisors: lines of JSON, each field checked before it is used.

Anybody who reaches the port can send anything: a wrong message ends its connection and nothing
else. With a secret, each message is signed, and one without the right signature counts as wrong.

`Link` sends and receives, `parse_hello`, `parse_report` and `parse_command` check,
`cluster.signature` signs.
"""

import dataclasses
import json
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshtrain.cluster import progress
from meshtrain.cluster.limits import MAX_PROCESSES as MAX_LOCAL
from meshtrain.cluster.rendezvous import is_integer, parse_line
from meshtrain.cluster.signature import Signer, signer_of_node
from meshtrain.errors import ConfigError
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import Exit, ProcessStatus, RankAssignment

RETRY = 0.5  # seconds between attempts to reach node 0
MAX_READS = 16  # of 64 KiB at a time: a peer that sends without pause must not block the others
LOST_AFTER = 30.0  # seconds of silence after which a host counts as lost
HELLO_SECONDS = 10.0  # within which the first line has to arrive, however slowly it is sent
MAX_HELLO = 1000  # bytes of the first line
MAX_COMMAND = 10_000  # bytes of a line from node 0
MAX_REPORT = 4 << 20  # bytes of a line to node 0: the states of MAX_LOCAL processes, or one exit
MAX_TAIL_LINE = 2000  # characters of a line of output in a message


class Link:
    """Lines of JSON over a connection.

    The peer of a link that is not `accepted` is a stranger: it has HELLO_SECONDS for a first line
    of at most MAX_HELLO bytes. Later lines may have `max_line` bytes. A peer that does not read a
    line within `send_seconds` is lost.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str = "",
        *,
        accepted: bool = True,
        max_line: int = MAX_REPORT,
        send_seconds: float = LOST_AFTER,
        signer: Signer | None = None,
    ):
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer
        self.accepted = accepted
        self.open = True
        self.fault = ""  # why the connection was closed, if the peer has done something wrong
        self._clock = RunningClock()
        self._received_at = self._clock.now()
        self.answered = False  # whether a valid message has arrived
        self.on_answer: Callable[[], None] = lambda: None  # called at the first valid message
        self._partial_line = b""
        self._opened_at = self._clock.now()
        self._max_line = max_line
        self._send_seconds = send_seconds
        self._signer = signer
        if signer and signer.is_node_0:
            self._send(json.dumps(signer.greeting).encode())

    def send(self, **message: Any) -> None:
        line = json.dumps(message).encode()
        if self._signer:
            line = self._signer.sign(line)
        self._send(line)

    def _send(self, line: bytes) -> None:
        try:
            self.connection.setblocking(True)
            self.connection.settimeout(self._send_seconds)
            self.connection.sendall(line + b"\n")
            self.connection.setblocking(False)
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived; closes the connection of a stranger."""
        limit = self._max_line if self.accepted else MAX_HELLO
        self._read(limit)
        # Of a stranger only the first line: to check many would keep the others waiting.
        max_splits = -1 if self.accepted else 1
        *lines, self._partial_line = self._partial_line.split(b"\n", max_splits)
        if self.silence() > LOST_AFTER:
            self.open = False
        # What follows the first line of a stranger is read later, so it may be longer.
        is_partial = self.accepted or not lines
        if is_partial and len(self._partial_line) > limit:
            self.reject("a line that is too long")
        elif not (self.accepted or lines) and self._clock.now() - self._opened_at > HELLO_SECONDS:
            self.reject(f"no line within {HELLO_SECONDS:.0f} s")
        messages = []
        for line in lines:
            text = self._signer.checked(line) if self._signer else line
            if text is None:
                self.reject(WRONG_SIGNATURE)
                return []
            message = parse_line(text)
            if message is None:
                self.reject("a line that is not a JSON object")
                return []
            if self._signer:
                message.pop("nonce", None)
            messages.append(message)
        return messages

    def silence(self) -> float:
        """Returns the seconds since something has arrived."""
        return self._clock.now() - self._received_at

    def _read(self, limit: int) -> None:
        """Adds what has arrived to the partial line, until that is longer than `limit` bytes."""
        try:
            for _ in range(MAX_READS):
                received = self.connection.recv(min(1 << 16, limit + 1))
                if not received:
                    self.open = False
                    break
                self._received_at = self._clock.now()
                self._partial_line += received
                if len(self._partial_line) > limit:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.open = False

    def reject(self, why: str) -> None:
        """Closes the connection because of what the peer has sent."""
        who = "" if SECRET_VARIABLE in why else ": not a supervisor of this run"
        self.drop(f"has sent {why}{who}")

    def drop(self, what: str) -> None:
        """Closes the connection because of what the peer has done."""
        self.fault = f"{self.peer} {what}; connection closed"
        self.close()

    def close(self) -> None:
        self.open = False
        self.connection.close()


def connect(
    host: str,
    port: int,
    *,
    hello: Mapping[str, int],
    deadline: float,
    num_signals: Callable[[], int],
    secret: str,
) -> Link | None:
    """Sends `hello` to node 0 and returns the connection; None after `deadline` or a signal."""
    while time.monotonic() < deadline and not num_signals():
        try:
            connection = socket.create_connection((host, port), timeout=RETRY * 10)
            signer = signer_of_node(secret, connection, num_signals)
        except OSError:
            time.sleep(RETRY)
            continue
        link = Link(connection, f"{host}:{port}", max_line=MAX_COMMAND, signer=signer)
        greeting = signer.greeting if signer else {}
        link.send(**hello, **greeting)
        return link
    return None


def exit_message(process: Exit) -> dict[str, Any]:
    """Returns the fields of an exit, with its last lines truncated; `_parse_exit` reads them."""
    fields = dataclasses.asdict(process)
    fields["tail"] = [line[:MAX_TAIL_LINE] for line in process.tail]
    return fields


# ---- checks of the fields of a message ----

MAX_NODES = 100_000
MAX_NONCE = 100  # characters
COMMANDS = ("start", "stop", "dump", "kill", "reject", "end", "nothing")  # of node 0


class InvalidMessage(ValueError):
    """A message that no supervisor of this version sends."""


def parse_hello(message: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the rank of a node, the number of nodes it knows, and its number of processes."""
    checks = {
        "node": _integer(0, MAX_NODES),
        "nnodes": _integer(1, MAX_NODES),
        "nproc": _integer(1, MAX_LOCAL),
    }
    _check(message, checks)
    return message["node"], message["nnodes"], message["nproc"]


def parse_report(
    message: Mapping[str, Any], ranks: range
) -> tuple[list[Exit], list[ProcessStatus] | None, bool | None]:
    """Returns the exits, the statuses and the field `dead` of a report about these ranks.

    The last two are None if the report does not have them.
    """
    unknown = set(message) - {"exits", "statuses", "dead"}
    if unknown:
        raise InvalidMessage(f"field {min(unknown)[:99]!r}")
    exits = [_parse_exit(fields, ranks) for fields in _list(message, "exits", len(ranks))]
    statuses = None
    if "statuses" in message:
        rows = _list(message, "statuses", len(ranks))
        statuses = [_parse_status(fields, ranks) for fields in rows]
    dead = message.get("dead")
    if dead is not None and type(dead) is not bool:
        raise InvalidMessage(f"dead={dead!r}"[:99])
    return exits, statuses, dead


def parse_command(message: Mapping[str, Any], num_local: int) -> dict[str, Any]:
    """Returns a command to a host of `num_local` processes; `ranks` are a RankAssignment."""
    if [*message] == ["nonce"]:
        raise InvalidMessage(f"a nonce: it has {SECRET_VARIABLE}; set the same on all hosts")
    do = message.get("do")
    if not isinstance(do, str) or do not in COMMANDS:
        raise InvalidMessage(f"do={do!r}"[:99])
    checks: dict[str, Callable[[Any], bool]] = {"do": lambda value: True}
    if do == "start":
        checks["ranks"] = lambda value: isinstance(value, dict)
    elif do == "reject":
        checks["fault"] = lambda value: _is_text(value, MAX_HELLO)
    elif do == "end":
        checks["code"] = _integer(-255, 255)
    _check(message, checks)
    if do != "start":
        return dict(message)
    ranks = message["ranks"]
    checks = {
        "address": lambda value: _is_text(value, 300),
        "num_processes": _integer(1, MAX_NODES * MAX_LOCAL),
        "first_rank": _integer(0, MAX_NODES * MAX_LOCAL),
        "num_local": _integer(0, num_local),
        "nonce": lambda value: _is_text(value, MAX_NONCE),
    }
    _check(ranks, checks)
    if ranks["first_rank"] + ranks["num_local"] > ranks["num_processes"]:
        raise InvalidMessage("more ranks than processes")
    return {"do": do, "ranks": RankAssignment(**ranks)}


def _parse_exit(fields: Any, ranks: range) -> Exit:
    checks = {
        "rank": lambda value: is_integer(value, ranks.start, ranks.stop - 1),
        "code": _integer(-255, 255),
        "status": lambda value: True,
        "tail": lambda value: (
            isinstance(value, list) and all(isinstance(line, str) for line in value)
        ),
    }
    _check(fields, checks)
    return Exit(
        rank=fields["rank"],
        code=fields["code"],
        status=_parse_status(fields["status"], ranks),
        tail=fields["tail"],
    )


def _parse_status(fields: Any, ranks: range) -> ProcessStatus:
    checks = {
        "rank": lambda value: is_integer(value, ranks.start, ranks.stop - 1),
        "pid": _integer(1, 2**31),
        "phase": lambda value: isinstance(value, str) and value in progress.PHASES,
        "current_step": _integer(-1, 2**53),
        "first_step": _integer(-1, 2**53),
        "phase_age": _is_finite,
        "heartbeat_age": _is_finite,
        "stopped_for": _is_finite,
        "step_seconds": _is_finite,
    }
    _check(fields, checks)
    return ProcessStatus(**fields)


def _check(fields: Any, checks: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raises InvalidMessage unless `fields` has exactly these names, with values that pass."""
    if not isinstance(fields, dict) or set(fields) != set(checks):
        raise InvalidMessage("other fields than " + ", ".join(checks))
    for name, is_valid in checks.items():
        if not is_valid(fields[name]):
            raise InvalidMessage(f"{name}={fields[name]!r}"[:99])


def _list(message: Mapping[str, Any], name: str, length: int) -> list[Any]:
    rows = message.get(name, [])
    if not isinstance(rows, list) or len(rows) > length:
        raise InvalidMessage(f"{name}={rows!r}"[:99])
    return rows


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: is_integer(value, low, high)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _is_text(value: Any, length: int) -> bool:
    return isinstance(value, str) and len(value) <= length and value.isprintable()


# ---- the secret that signs messages ----

SECRET_VARIABLE = "MESHTRAIN_SECRET"
SHORTEST_SECRET = 16  # characters
WRONG_SIGNATURE = (
    f"a message without the right signature; set the same {SECRET_VARIABLE} on all hosts"
)


def secret_of_environment(environ: Mapping[str, str]) -> str:
    """Returns the secret, "" without one. Raises ConfigError if it is short."""
    secret = environ.get(SECRET_VARIABLE, "")
    if secret and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"{SECRET_VARIABLE}: has {len(secret)} characters; use {SHORTEST_SECRET} or more, "
            f"such as the output of `openssl rand -hex 32`"
        )
    return secret
