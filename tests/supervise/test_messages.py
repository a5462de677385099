"""The supervisors' port and the rendezvous port: whatever a stranger sends, the run goes on."""

import contextlib
import json
import os
import socket
import sys
import threading
import time

import pytest

from meshtrain.cluster import rendezvous, signature
from meshtrain.cluster.launchers import ProcessInfo
from meshtrain.cluster.limits import MAX_PROCESSES
from meshtrain.cluster.signature import Signer
from meshtrain.errors import ConfigError
from meshtrain.supervise import messages, nodes, restart_policy
from meshtrain.supervise.messages import InvalidMessage
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import TAIL, Exit, ProcessStatus, RankAssignment, Workers
from tests.lib.hellos import HELLO, NOT_HELLO, STATUS, is_closed, line, poll
from tests.lib.processes import free_port

EXIT = dict(rank=1, code=-9, status=STATUS, tail=["bye"])
RANKS = dict(address="a:1", num_processes=2, first_rank=1, num_local=1, nonce="0" * 32)
NOT_REPORTS = [
    {"exits": 1},
    {"exits": [1]},
    {"exits": [EXIT, EXIT]},
    {"exits": [{}]},
    {"exits": [{**EXIT, "rank": 0}]},
    {"exits": [{**EXIT, "code": "9"}]},
    {"exits": [{**EXIT, "code": 10**20}]},
    {"exits": [{**EXIT, "tail": "x"}]},
    {"exits": [{**EXIT, "tail": [1]}]},
    {"exits": [{**EXIT, "status": None}]},
    {"statuses": {}},
    {"statuses": ["x"]},
    {"statuses": [{**STATUS, "phase": "sleep"}]},
    {"statuses": [{**STATUS, "phase": ["step"]}]},
    {"statuses": [{**STATUS, "phase_age": float("nan")}]},
    {"statuses": [{**STATUS, "phase_age": 10**400}]},
    {"statuses": [{**STATUS, "heartbeat_age": float("inf")}]},
    {"statuses": [{**STATUS, "step_seconds": "1"}]},
    {"statuses": [{**STATUS, "current_step": 1.5}]},
    {"statuses": [{**STATUS, "rank": 5}]},
    {"statuses": [{**STATUS, "more": 1}]},
    {"statuses": [STATUS, STATUS]},
    {"dead": "yes"},
    {"dead": 1},
    {"do": "end", "code": 0},
]
NOT_COMMANDS = [
    {},
    {"do": 1},
    {"do": ["end"]},
    {"do": "run"},
    {"do": "end"},
    {"do": "end", "code": "0"},
    {"do": "end", "code": True},
    {"do": "reject"},
    {"do": "reject", "fault": ["x"]},
    {"do": "reject", "fault": "\x1b[2J"},
    {"do": "start"},
    {"do": "start", "ranks": 1},
    {"do": "start", "ranks": {}},
    {"do": "start", "ranks": {**RANKS, "address": 1}},
    {"do": "start", "ranks": {**RANKS, "address": "a:1\n"}},
    {"do": "start", "ranks": {**RANKS, "num_local": 10**9}},
    {"do": "start", "ranks": {**RANKS, "num_local": 2}},
    {"do": "start", "ranks": {**RANKS, "first_rank": -1}},
    {"do": "start", "ranks": {**RANKS, "first_rank": 2}},
    {"do": "start", "ranks": {**RANKS, "command": "sh"}},
    {"do": "start", "ranks": {**RANKS, "nonce": 1}},
    {"do": "start", "ranks": {**RANKS, "nonce": "\x1b[2J"}},
    {"do": "start", "ranks": {**RANKS, "nonce": "0" * 1000}},
]


@pytest.fixture
def server():
    port = free_port()
    server = nodes.Server("127.0.0.1", port, 2)
    server.port = port
    yield server
    server.close(0)


def join(server, hello=HELLO):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(line(hello))
    return connection


def test_closing_the_server_closes_the_connection_of_a_node_that_has_left(server):
    join(server).close()
    poll(server, lambda: server.remotes and not server.connected())
    server.close(0)
    assert server.remotes[1].link.connection.fileno() == -1


def test_a_host_is_not_lost_because_all_hosts_were_suspended(server):
    with join(server):
        poll(server, lambda: server.remotes)
        link, seconds = server.remotes[1].link, 0.0
        link._clock = RunningClock(lambda: seconds)
        link._received_at = link._clock.now()
        seconds = 1e6  # of silence, in which node 0 was suspended too
        server.poll()
        assert link.open and link.silence() < messages.LOST_AFTER
        while link.open and seconds < 2e6:
            seconds += 0.1
            server.poll()
        assert messages.LOST_AFTER < link.silence() < messages.LOST_AFTER + 1


@pytest.mark.parametrize("received", NOT_HELLO, ids=lambda received: repr(received[:40]))
def test_a_stranger_is_ignored_and_logged_once(server, received):
    faults = []
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(received)
            faults += poll(server, lambda stranger=stranger: is_closed(stranger))
    assert not server.connected() and len(faults) <= 1
    assert all(len(fault) < 300 and fault.isprintable() for fault in faults)
    with join(server):
        poll(server, server.connected)


def test_half_open_connections_and_floods_do_not_keep_a_host_out(server):
    strangers = []
    for _ in range(2 * nodes.MAX_PENDING):
        strangers.append(socket.create_connection(("127.0.0.1", server.port)))
        strangers[-1].sendall(b'{"node": 1, ')
        server.poll()
    with join(server):
        poll(server, server.connected)
    assert len(server._pending) <= nodes.MAX_PENDING
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("secret", ["", "s" * 32], ids=["insecure", "secret"])
@pytest.mark.parametrize("sent", [b"", b"{"], ids=["nothing", "slow bytes"])
def test_a_stranger_that_sends_no_line_is_dropped_and_logged(sent, secret, monkeypatch):
    """Each byte is a sign of life, but the line has to arrive in HELLO_SECONDS."""
    monkeypatch.setattr(messages, "HELLO_SECONDS", 0.5)
    port = free_port()
    server = nodes.Server("127.0.0.1", port, 2, secret)
    with socket.create_connection(("127.0.0.1", port)) as stranger:

        def is_dropped():
            if is_closed(stranger):
                return True
            with contextlib.suppress(OSError):
                stranger.send(sent)
            return False

        faults = poll(server, is_dropped)
    assert not server.remotes and not server._pending
    server.close(0)
    assert faults == [
        "127.0.0.1 has sent no line within 0 s: not a supervisor of this run; connection closed"
    ]


def test_the_limits_of_a_stranger_end_when_a_host_has_joined(server):
    """Neither end is dropped after a pause, or for a line longer than a first one may be."""
    address = dict(host="127.0.0.1", port=server.port, secret="")
    until = dict(deadline=time.monotonic() + 30, num_signals=lambda: 0)
    of_host = messages.connect(**address, hello=HELLO, **until)
    poll(server, server.connected)
    (remote,) = server.connected()
    ends = of_host, remote.link
    for link in ends:
        link._opened_at -= 2 * messages.HELLO_SECONDS
        link.receive()
        assert link.open, link.fault
    for sender, receiver in (ends, ends[::-1]):
        texts = ["a" * (2 * messages.MAX_HELLO), "b"]
        for text in texts:
            sender.send(text=text)
        received, deadline = [], time.monotonic() + 30
        while len(received) < 2 and receiver.open and time.monotonic() < deadline:
            received += [one["text"] for one in receiver.receive() if "text" in one]
        assert received == texts, receiver.fault
    of_host.close()


def test_a_line_of_60_mb_of_a_host_ends_at_the_limit(server):
    with join(server) as host:
        poll(server, server.connected)
        (remote,) = server.connected()
        host.setblocking(False)
        longest = 0
        faults, deadline = [], time.monotonic() + 30
        while remote.link.open and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                host.send(b"[" * (1 << 20))
            faults += server.poll()
            longest = max(longest, len(remote.link._partial_line))
        faults += server.poll()
    assert faults == [
        "node 1: 127.0.0.1 has sent a line that is too long: not a supervisor of this run; "
        "connection closed"
    ]
    assert 1 << 20 < longest <= messages.MAX_REPORT + (1 << 16)


def test_a_host_that_reads_nothing_does_not_keep_node_0_waiting(server, monkeypatch):
    monkeypatch.setattr(nodes, "SEND_SECONDS", 0.2)
    with join(server):
        poll(server, server.connected)
        (remote,) = server.connected()

        def fill():
            while remote.link.open:
                remote.link.send(do="reject", fault="x" * 1000)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        thread.join(15)
        assert not thread.is_alive() and not server.connected()


def test_the_longest_lines_that_a_host_sends_are_shorter_than_the_limit():
    statuses = [{**STATUS, "rank": 10**9, "pid": 2**31, "phase_age": 1e7 / 3}] * MAX_PROCESSES
    assert len(line({"statuses": statuses})) < messages.MAX_REPORT
    last_lines = ["\N{GRINNING FACE}" * 10**5] * TAIL
    longest = messages.exit_message(Exit(1, 1, ProcessStatus(**STATUS), last_lines))
    assert len(line({"exits": [longest]})) < messages.MAX_REPORT
    fault = "\N{GREEK SMALL LETTER ALPHA}" * messages.MAX_HELLO
    assert len(line({"do": "reject", "fault": fault})) < messages.MAX_COMMAND


@pytest.mark.parametrize("message", NOT_REPORTS, ids=str)
def test_a_wrong_report_closes_the_connection_only(server, message):
    with join(server) as host:
        poll(server, server.connected)
        (remote,) = server.connected()
        remote.start(RankAssignment(**RANKS))
        host.sendall(line({"statuses": [STATUS], "exits": []}))
        poll(server, remote.statuses)
        host.sendall(line(message))
        faults = poll(server, lambda: not remote.link.open)
        faults += server.poll()
    assert remote.lost and len(faults) == 1 and faults[0].startswith("node 1: 127.0.0.1 has sent ")


def test_a_right_report_arrives(server):
    with join(server) as host:
        poll(server, server.connected)
        (remote,) = server.connected()
        remote.start(RankAssignment(**RANKS))
        host.sendall(line({"exits": [EXIT], "statuses": []}) + line({"dead": True}))
        poll(server, lambda: remote._dead)
        assert remote.new_exits() == [Exit(1, -9, ProcessStatus(**STATUS), ["bye"])]
        remote.kill()
        assert not remote.lost
    long = Exit(1, 1, ProcessStatus(**STATUS), ["x" * 10**6] * 30)
    assert len(line(messages.exit_message(long))) < 100_000


@pytest.mark.parametrize("message", NOT_COMMANDS, ids=str)
def test_a_wrong_command_is_rejected(message):
    with pytest.raises(InvalidMessage):
        messages.parse_command(message, 1)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", line({"do": "start", "ranks": {}})])
def test_a_host_gives_up_on_a_program_that_is_not_node_0(answer):
    logged, done = [], []
    workers = Workers([sys.executable], environ=dict(os.environ), logs=None, show=print)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def serve():
            while not done:
                connection, _ = other.accept()
                connection.sendall(answer)
                time.sleep(0.05)
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        code = nodes.follow_node_0(
            workers,
            host="127.0.0.1",
            port=port,
            node=1,
            nnodes=2,
            nproc=1,
            seconds=1.5,
            grace=1,
            num_signals=lambda: 0,
            log=logged.append,
        )
        done.append(True)
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
    workers.close()
    assert code == 1 and "not reached within" in logged[-1] and len(logged) < 12
    assert any("not a supervisor of this run" in text for text in logged)


@pytest.mark.parametrize(
    "received",
    [
        b"[" * 900 + b"\n",
        b"x" * 100_000,
        line({"meshtrain": 1, "id": -5, "count": 2, "who": "x"}),
        line({"meshtrain": 1, "id": 2, "count": 2, "who": "x"}),
        line({"meshtrain": 1, "id": 10**30, "count": 10**31, "who": "x"}),
        line({"meshtrain": 1, "id": True, "count": 2, "who": "x"}),
        line({"meshtrain": 1, "id": 1, "count": 2, "who": "\x1b[2J"}),
        line({"meshtrain": 1, "id": 1, "count": 2, "who": ["x"]}),
        line({"meshtrain": 1, "id": 1, "count": 2}),
    ],
    ids=lambda received: repr(received[:60]),
)
def test_a_stranger_does_not_end_a_rendezvous(received):
    port, results = free_port(), []
    first, second = (ProcessInfo("127.0.0.1", port, 2, number) for number in range(2))

    def wait_as_process_0():
        results.append(rendezvous.wait_for_all(first, seconds=20))

    thread = threading.Thread(target=wait_as_process_0)
    thread.start()
    strangers = []
    for _ in range(200):
        try:
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            break
        except OSError:
            time.sleep(0.02)
    strangers += [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
    try:
        strangers[0].sendall(received)
        rendezvous.wait_for_all(second, seconds=20)
    finally:
        for one in strangers:
            one.close()
    thread.join(30)
    assert results == [None]


TOKEN = "f" * 64
JOIN = {"meshtrain": 1, "id": 1, "count": 2, "who": "x"}


def start_process_0(port, results, *, token=TOKEN):
    """Starts a rendezvous of two processes in a thread; returns it once its port is open."""
    first = ProcessInfo("127.0.0.1", port, 2, 0)

    def wait():
        try:
            results.append(rendezvous.wait_for_all(first, seconds=20, token=token))
        except ConfigError as error:
            results.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        time.sleep(0.02)
    return thread


@pytest.mark.parametrize(
    "sent",
    [
        line(JOIN),  # takes the rank of another process
        line({**JOIN, "count": 3}),  # would end the run: a mistake of the user
        Signer("e" * 64, is_node_0=False).sign(line({**JOIN, "nonce": "0" * 32})[:-1]) + b"\n",
        b"0" * 64 + b" " + line({**JOIN, "nonce": "0" * 32}),
        b"[" * 900 + b"\n",
        b"x" * 100_000,
    ],
    ids=["rank", "count", "token", "no signature", "nested", "long"],
)
def test_nobody_without_the_token_joins_the_processes_of_an_attempt(sent, capfd):
    port, results = free_port(), []
    thread = start_process_0(port, results)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        greeting = stranger.recv(100)
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert not stranger.recv(100)  # it is closed
    rendezvous.wait_for_all(ProcessInfo("127.0.0.1", port, 2, 1), seconds=20, token=TOKEN)
    thread.join(30)
    assert results == [None] and json.loads(greeting).keys() == {"nonce"}
    assert capfd.readouterr().err == "127.0.0.1 is not a process of this run; connection closed\n"


def test_the_line_of_a_process_cannot_be_sent_again():
    """A relay records what process 1 sends, and its connection ends before process 0 sees that."""
    port, results, recorded = free_port(), [], []
    thread = start_process_0(port, results)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        signer = signature.signer_of_node(TOKEN, connection)
        recorded = signer.sign(json.dumps({**JOIN, **signer.greeting}).encode()) + b"\n"
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.recv(100)
        stranger.sendall(recorded)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert not stranger.recv(100)
    rendezvous.wait_for_all(ProcessInfo("127.0.0.1", port, 2, 1), seconds=20, token=TOKEN)
    thread.join(30)
    assert results == [None]


def test_a_silent_stranger_is_dropped_while_processes_wait(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.3)
    port, results = free_port(), []
    thread = start_process_0(port, results)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.recv(100)
        stranger.settimeout(5)
        assert not stranger.recv(100)
    rendezvous.wait_for_all(ProcessInfo("127.0.0.1", port, 2, 1), seconds=20, token=TOKEN)
    thread.join(30)
    assert results == [None] and "not a process of this run" in capfd.readouterr().err


@pytest.mark.parametrize("greeting", [b"", line({"nonce": "0" * 32})])
@pytest.mark.parametrize("answer", [b"[]\n", line(["a fault of a stranger"])])
def test_nobody_without_the_token_answers_as_process_0(greeting, answer):
    """Process 1 neither continues nor blames its user: the next attempt has another port."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            while not done.is_set():
                connection, _ = other.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(greeting + answer)
                    connection.settimeout(0.2)
                    connection.recv(1000)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = other.getsockname()[1]
        process = ProcessInfo("127.0.0.1", port, 2, 1)
        with pytest.raises(rendezvous.RendezvousError, match="missing process 0, not reached"):
            rendezvous.wait_for_all(process, seconds=1, token=TOKEN)
        done.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


def test_a_signal_without_a_name_is_described():
    one = Exit(0, -35, ProcessStatus(**STATUS), [])
    assert "killed by signal 35 in phase step" in restart_policy.describe_exit(one)
