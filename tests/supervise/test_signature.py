"""With MESHTRAIN_SECRET only supervisors that know it take part.

Nobody can write or repeat their messages.
"""

import copy
import json
import os
import random
import socket
import subprocess
import sys
import time

import pytest

from meshtrain.cluster import rendezvous, signature
from meshtrain.cluster.signature import Signer
from meshtrain.errors import ConfigError
from meshtrain.supervise import messages, nodes, restart_policy
from meshtrain.supervise.messages import Link
from meshtrain.supervise.workers import RankAssignment
from tests.lib.hellos import HELLO, NOT_HELLO, is_closed, line, poll
from tests.lib.paths import ROOT
from tests.lib.processes import free_port

SECRET = "correct horse battery"
RANKS = RankAssignment("a:1", 2, 1, 1)


@pytest.fixture
def server():
    port = free_port()
    server = nodes.Server("127.0.0.1", port, 2, SECRET)
    server.port = port
    yield server
    server.close(0)


@pytest.fixture
def connect(server):
    """Returns a function that returns the link of node 1, which has sent its first message."""
    links = []

    def connect(secret=SECRET, kind=Link):
        connection = socket.create_connection(("127.0.0.1", server.port))
        poll(server, lambda: server._pending)  # sends the nonce
        signer = signature.signer_of_node(secret, connection)
        links.append(link := kind(connection, signer=signer))
        link.send(**HELLO, **signer.greeting)
        return link

    yield connect
    for link in links:
        link.close()


def test_a_node_with_the_secret_joins_and_exchanges_messages(server, connect):
    link = connect()
    poll(server, lambda: server.connected())
    (remote,) = server.connected()
    assert (remote.node, remote.num_local) == (1, 1)
    remote.start(RANKS)
    received, deadline = [], time.monotonic() + 10
    while not received and time.monotonic() < deadline:
        received = [one for one in link.receive() if one["do"] == "start"]
    assert messages.parse_command(received[0], 1) == {"do": "start", "ranks": RANKS}
    link.send(exits=[], statuses=[], dead=True)
    poll(server, lambda: remote._dead)
    assert remote.link.open and not remote.link.fault


@pytest.mark.parametrize("sent", [line(HELLO), *NOT_HELLO], ids=lambda sent: repr(sent[:60]))
def test_a_stranger_takes_no_seat(server, sent):
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(sent)
        faults = poll(server, lambda: is_closed(stranger))
    assert not server.remotes and len(faults) == 1
    assert "without the right signature" in faults[0] or "a line that is too long" in faults[0]


@pytest.mark.parametrize("secret", ["", SECRET])
def test_lines_of_strangers_do_not_keep_node_0_busy(secret):
    """Each of 100 connections sends 64 KiB of empty lines: only the first of them is looked at."""
    port, looked_at = free_port(), []
    server = nodes.Server("127.0.0.1", port, 2, secret)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        parse = messages.parse_line
        patch.setattr(messages, "parse_line", lambda one: looked_at.append(one) or parse(one))
        checked = Signer.checked
        patch.setattr(Signer, "checked", lambda *args: looked_at.append(1) or checked(*args))
        for stranger in strangers:
            stranger.sendall(b"\n" * 65536)
        poll(server, lambda: all(map(is_closed, strangers)))
    assert len(looked_at) == 100 and not server.remotes
    for stranger in strangers:
        stranger.close()
    server.close(0)


def test_a_node_waits_for_a_nonce_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(signature, "NONCE_SECONDS", 0.5)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError):
        theirs.sendall(b"{")
        signature.signer_of_node(SECRET, ours)


def test_a_signal_ends_the_wait_for_a_nonce():
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError):
        theirs.sendall(b'{"nonce": "no such"}\n')  # without the signal: ConnectionResetError
        signature.signer_of_node(SECRET, ours, lambda: 1)


def test_a_second_message_that_comes_with_the_first_is_not_lost(server, connect):
    link = connect()
    link.send(dead=False)
    poll(server, lambda: server.connected() and not server.remotes[1]._dead)


def test_a_port_is_free_although_the_last_connection_on_it_is_not_forgotten():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listening.accept()[0].close()
            client.recv(1)
    assert rendezvous.free_port(f"{port}-{port}") == port


def test_ports_that_others_use_are_a_mistake(monkeypatch):
    monkeypatch.setattr(rendezvous, "PORT_SECONDS", 0.0)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--ports={port}-{port}: Address already in use"):
            rendezvous.free_port(f"{port}-{port}")


def test_the_token_of_an_attempt_cannot_be_made_without_the_secret():
    token = signature.attempt_token(SECRET, "1" * 32)
    others = {signature.attempt_token(*args) for args in ((SECRET, "2" * 32), ("", "1" * 32))}
    assert len({token, *others}) == 3 and SECRET not in token


def test_a_secret_need_not_be_utf_8():
    Signer("\udcffaaaaaaaaaaaaaaaa", is_node_0=True)


def test_another_secret_is_rejected_with_what_to_do(server, connect):
    link = connect("another secret, long")
    (fault,) = poll(server, lambda: is_closed(link.connection))
    assert "set the same MESHTRAIN_SECRET on all hosts" in fault and not server.remotes


def test_what_a_node_has_sent_cannot_be_sent_again(server, connect):
    """Not on another connection, and not twice on its own."""
    recorded = []

    class Recorded(Link):
        def _send(self, line):
            recorded.append(line + b"\n")
            super()._send(line)

    link = connect(kind=Recorded)
    link.send(statuses=[])
    poll(server, lambda: server.connected())
    for again in (recorded[:1], recorded[1:], recorded):
        with socket.create_connection(("127.0.0.1", server.port)) as other:
            other.sendall(b"".join(again))
            poll(server, lambda other=other: is_closed(other))
        assert server.connected()  # the node itself stays
    link.connection.setblocking(True)
    link.connection.sendall(recorded[1])
    poll(server, lambda: not server.connected())
    assert messages.WRONG_SIGNATURE in server.remotes[1].link.fault


def test_10_000_changed_and_repeated_messages_are_rejected():
    draw = random.Random(0)
    node_0 = Signer(SECRET, is_node_0=True)
    sender = Signer(SECRET, is_node_0=False)
    assert sender.accept_nonce(json.dumps(node_0.greeting).encode())
    texts = [json.dumps({**HELLO, **sender.greeting}), *(json.dumps({"dead": True}),) * 9]
    valid = [sender.sign(text.encode()) for text in texts]
    for _ in range(10_000):
        number = draw.randrange(len(valid))
        message = bytearray(valid[number])
        # The receiver of this connection, which expects the message with this number.
        receiver = copy.copy(node_0)
        for earlier in valid[:number]:
            assert receiver.checked(earlier) is not None
        kind = draw.randrange(5)
        if kind == 0:
            at = draw.randrange(len(message))
            message[at] ^= draw.randrange(1, 256)
        elif kind == 1:
            del message[draw.randrange(len(message)) :]
        elif kind == 2:
            message = bytearray(draw.randbytes(draw.randrange(300)))
        elif kind == 3:
            message[:65] = valid[draw.randrange(len(valid))][:65]  # the signature of another
        # else as it was
        is_changed = message != valid[number]
        assert (receiver.checked(bytes(message)) is None) == is_changed
        if draw.randrange(10):
            continue
        # On a connection of its own even a message that is unchanged is rejected.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            link = Link(ours, "x", accepted=False, signer=Signer(SECRET, is_node_0=True))
            theirs.sendall(bytes(message) + b"\n")
            assert link.receive() == [] and not link.open and link.fault


def test_messages_in_the_right_order_are_accepted():
    first, second = Signer(SECRET, is_node_0=True), Signer(SECRET, is_node_0=False)
    assert second.accept_nonce(json.dumps(first.greeting).encode())
    hello = json.dumps(second.greeting).encode()
    sent = [second.sign(text) for text in (hello, b"1", b"2")]
    assert [first.checked(one) for one in sent] == [hello, b"1", b"2"]
    own = [first.sign(text) for text in (b"3", b"4", b"5", b"6")]
    assert second.checked(own[0]) == b"3"
    assert first.checked(own[3]) is None  # its own message of the number that it expects, sent back


@pytest.mark.parametrize(
    ("environ", "secret"),
    [({}, ""), ({"MESHTRAIN_SECRET": ""}, ""), ({"MESHTRAIN_SECRET": "x" * 16}, "x" * 16)],
)
def test_the_secret_is_read_from_the_environment(environ, secret):
    assert messages.secret_of_environment(environ) == secret


def test_a_short_secret_is_a_mistake():
    with pytest.raises(ConfigError, match="MESHTRAIN_SECRET: has 3 characters; use 16 or more"):
        messages.secret_of_environment({"MESHTRAIN_SECRET": "abc"})


@pytest.mark.parametrize("ports", ["", "20000", "2-1", "0-5", "1-65536", "a-b", "-"])
def test_ports_are_checked(ports):
    with pytest.raises(ConfigError, match=rf"--ports={ports}: use LOW-HIGH"):
        restart_policy.Settings(ports=ports)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("secrets", [(SECRET, SECRET), (SECRET, SECRET + "!"), (SECRET, "")])
def test_two_hosts_meet_if_their_secrets_are_the_same(tmp_path, secrets):
    port, low = free_port(), free_port()
    show = "import os; print('SECRET', 'MESHTRAIN_SECRET' in os.environ)"
    (tmp_path / "sitecustomize.py").write_text(show)
    flags = ["--nnodes=2", f"--coordinator=127.0.0.1:{port}", f"--ports={low}-{low + 20}"]
    flags += ["--join_seconds=60" if secrets[0] == secrets[1] else "--join_seconds=10"]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "meshtrain", "launch", *flags, f"--node_rank={rank}"]
            + ([] if secret else ["--insecure"])
            + ["--", "info", "--simulate_devices=1"],
            env={
                **os.environ,
                "MESHTRAIN_SECRET": secret,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    texts = [host.communicate(timeout=120)[0] for host in hosts]
    codes = [host.returncode for host in hosts]
    if secrets[0] == secrets[1]:
        assert codes == [0, 0], texts
        assert all("SECRET False" in text for text in texts)  # of the processes
    else:
        assert codes == [1, 1], texts
        assert "set the same MESHTRAIN_SECRET on all hosts" in texts[0]
        assert "MESHTRAIN_SECRET" in texts[1] and len(texts[1].splitlines()) < 6, texts[1]
