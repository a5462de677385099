"""With MESHTRAIN_SECRET only supervisors that know it take part; nobody can write or repeat their messages."""

import json
import os
import random
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, free_port
from test_messages import HELLO, NOT_HELLO, is_closed, line, poll

from meshtrain.cluster import messages, nodes, restart_policy, signature
from meshtrain.cluster.messages import Link
from meshtrain.cluster.signature import Signer
from meshtrain.cluster.workers import RankAssignment
from meshtrain.errors import ConfigError

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
    assert signature.WRONG in server.remotes[1].link.fault


def test_10_000_changed_and_repeated_messages_are_rejected():
    draw = random.Random(0)
    node_0 = Signer(SECRET, is_node_0=True)
    sender = Signer(SECRET, is_node_0=False)
    assert sender.meet(json.dumps(node_0.greeting).encode())
    texts = [json.dumps({**HELLO, **sender.greeting}), *(json.dumps({"dead": True}),) * 9]
    valid = [sender.sign(text.encode()) for text in texts]
    for _ in range(10_000):
        number = draw.randrange(len(valid))
        message = bytearray(valid[number])
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
        # else as it was, on a connection of its own
        ours, theirs = socket.socketpair()
        with ours, theirs:
            link = Link(ours, "x", accepted=False, signer=Signer(SECRET, is_node_0=True))
            theirs.sendall(bytes(message) + b"\n")
            assert link.receive() == [] and not link.open and link.fault


def test_messages_in_the_right_order_are_accepted():
    first, second = Signer(SECRET, is_node_0=True), Signer(SECRET, is_node_0=False)
    assert second.meet(json.dumps(first.greeting).encode())
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
    assert signature.of_environment(environ) == secret


def test_a_short_secret_is_a_mistake():
    with pytest.raises(ConfigError, match="MESHTRAIN_SECRET: has 3 characters; use 16 or more"):
        signature.of_environment({"MESHTRAIN_SECRET": "abc"})


@pytest.mark.parametrize("ports", ["", "20000", "2-1", "0-5", "1-65536", "a-b", "-"])
def test_ports_are_checked(ports):
    with pytest.raises(ConfigError, match=rf"--ports={ports}: use LOW-HIGH"):
        restart_policy.Settings(ports=ports)


@pytest.mark.multiprocess
@pytest.mark.parametrize("secrets", [(SECRET, SECRET), (SECRET, SECRET + "!"), (SECRET, "")])
def test_two_hosts_meet_if_their_secrets_are_the_same(tmp_path, secrets):
    port, low = free_port(), free_port()
    show = "import os; print('SECRET', 'MESHTRAIN_SECRET' in os.environ)"
    (tmp_path / "sitecustomize.py").write_text(show)
    flags = ["--nnodes=2", f"--coordinator=127.0.0.1:{port}", f"--ports={low}-{low + 20}"]
    flags += ["--join_seconds=60" if secrets[0] == secrets[1] else "--join_seconds=4"]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "meshtrain", "launch", *flags, f"--node_rank={rank}"]
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
        assert "MESHTRAIN_SECRET" in texts[1]
