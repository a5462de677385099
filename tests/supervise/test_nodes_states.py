"""Which host has which rank, as a state machine: hosts that join, fall silent, leave and return.

The links are objects in memory, and the clock is set by hand.
"""

import types

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from meshtrain.errors import EXIT_PREEMPTED, ConfigError
from meshtrain.supervise import nodes
from meshtrain.supervise.workers import RankAssignment
from tests.lib.hellos import STATUS
from tests.lib.machines import run_machine
from tests.lib.supervised import ended

REPLACE_AFTER = 5.0  # seconds of silence after which another host may have a rank


class Link:
    """A connection: what has arrived, and what was sent over it."""

    def __init__(self, clock, *messages):
        self.clock = clock
        self.arrived = [*messages]
        self.sent = []
        self.heard_at = clock.seconds
        self.open = True
        self.accepted = self.answered = False
        self.fault = ""
        self.connection = None

    def on_answer(self):
        pass

    def receive(self):
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, **message):
        self.sent.append(message)

    def silence(self):
        return self.clock.seconds - self.heard_at

    def reject(self, why):
        self.fault = why
        self.close()

    def close(self):
        self.open = False


class NodeStates(RuleBasedStateMachine):
    """Hosts say hello with ranks that are free, taken, or of another run."""

    @initialize(nnodes=st.integers(2, 4))
    def open(self, nnodes):
        self.clock = types.SimpleNamespace(seconds=0.0)
        self.nnodes = nnodes
        self.waiting = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nodes.rendezvous, "listen", lambda host, port: self)
            self.server = nodes.Server("host", 1, nnodes)
        self.server._accept = self.accept
        self.hosts = {}  # rank -> the link that has it
        self.nproc = {}
        self.running = {}  # rank of the host -> ranks of its processes
        self.faults = set()  # each is logged once

    def setblocking(self, is_blocking):
        pass

    def accept(self):
        self.server._pending += self.waiting
        self.waiting = []

    def poll(self):
        """Returns the faults that are new."""
        found = self.server.poll()
        assert not self.faults & {*found}
        self.faults |= {*found}
        return found

    @rule(node=st.integers(0, 5), nnodes=st.sampled_from([0, 0, 0, 1]), nproc=st.integers(1, 3))
    def a_host_joins(self, node, nnodes, nproc):
        """A rank is free, or its host has left, or was silent for long; else it stays his."""
        nnodes += self.nnodes
        link = Link(self.clock, {"node": node, "nnodes": nnodes, "nproc": nproc})
        self.waiting.append(link)
        old = self.hosts.get(node)
        is_taken = old is not None and old.open and old.silence() < REPLACE_AFTER
        self.poll()
        if nnodes == self.nnodes and 0 < node < nnodes and not is_taken:
            assert link.accepted and link.open
            assert old is None or not old.open
            self.hosts[node] = link
            self.nproc[node] = nproc
            self.running[node] = set()
            return
        assert not is_taken or old.open
        assert not link.accepted and not link.open
        (answer,) = link.sent
        assert answer["do"] == "reject"
        expected = "--nnodes" if nnodes != self.nnodes else "--node_rank"
        assert expected in answer["fault"] and answer["fault"] in self.faults

    @precondition(lambda self: self.hosts)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 4.9, 5.1]))
    def a_host_wants_a_rank_that_another_had(self, data, seconds):
        self.clock.seconds += seconds
        node = data.draw(st.sampled_from(sorted(self.hosts)))
        self.a_host_joins(node=node, nnodes=0, nproc=1)

    @rule(message=st.sampled_from([{}, {"node": 1}, {"node": True, "nnodes": 2, "nproc": 1}]))
    def a_stranger_connects(self, message):
        link = Link(self.clock, message)
        self.waiting.append(link)
        self.poll()
        assert not link.accepted and not link.open

    @rule(seconds=st.sampled_from([1.0, 4.9, 5.1, 20.0]), heard=st.sets(st.integers(1, 3)))
    def time_passes(self, seconds, heard):
        """Some hosts report meanwhile."""
        self.clock.seconds += seconds
        for node in heard & self.hosts.keys():
            self.hosts[node].heard_at = self.clock.seconds

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def a_host_leaves(self, data):
        self.hosts[data.draw(st.sampled_from(sorted(self.hosts)))].open = False

    @precondition(lambda self: self.open_nodes())
    @rule(data=st.data(), code=st.sampled_from([0, 1, 75]), is_repeated=st.booleans())
    def a_process_ends(self, data, code, is_repeated):
        """Its host reports that once, for a rank of its own; other reports end the connection."""
        node = data.draw(st.sampled_from(self.open_nodes()))
        remote = self.server.remotes[node]
        remote.start(RankAssignment("host:1", 9, 3, 2))
        rank = data.draw(st.integers(2, 5))
        self.running[node] = {3, 4} - {rank}
        status = {**STATUS, "rank": rank}
        report = {"exits": [dict(rank=rank, code=code, status=status, tail=[])]}
        remote.link.arrived = [report, report] if is_repeated else [report]
        self.poll()
        if is_repeated or rank not in (3, 4):
            assert not remote.link.open
        else:
            assert [(exit.rank, exit.code) for exit in remote.new_exits()] == [(rank, code)]
            assert remote.link.open and not remote.killed
            remote.link.arrived = [{"dead": True}]
            self.poll()
            assert remote.killed

    def open_nodes(self):
        return sorted(node for node, link in self.hosts.items() if link.open)

    @invariant()
    def the_hosts_that_can_be_reached_are_in_the_order_of_their_ranks(self):
        connected = self.server.connected()
        assert [remote.node for remote in connected] == self.open_nodes()
        for remote in connected:
            assert remote.link is self.hosts[remote.node]
            assert remote.num_local == self.nproc[remote.node]
        for node, link in self.hosts.items():
            is_lost = not link.open and bool(self.running[node])
            assert self.server.remotes[node].lost == is_lost


def test_each_rank_belongs_to_one_host_whatever_joins_and_leaves():
    run_machine(NodeStates, num_examples=60, num_rules=25)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], 75),
        ([0, 75], 75),
        ([0, 0], 0),
        ([75, 1], 75),  # one has saved, so all have written their arrays
        ([75, -9], 143),  # not saved
        ([1, 1], 1),
        ([], 75),  # nothing was running
    ],
    ids=str,
)
def test_the_exit_code_of_a_host_that_alone_is_asked_to_stop(codes, expected, monkeypatch):
    clock = types.SimpleNamespace(seconds=0.0)
    start = {"address": "h:1", "num_processes": 9, "first_rank": 0, "nonce": ""}
    start["num_local"] = len(codes)
    link = Link(clock, {"do": "start", "ranks": start})
    exits = [ended(code, rank) for rank, code in enumerate(codes)]
    told = []

    def new_exits():
        found = exits[:1] if told else []
        del exits[: len(found)]
        return found

    workers = types.SimpleNamespace(
        poll=lambda seconds: None,
        start=lambda ranks: None,
        request_stop=lambda: told.append(True),
        new_exits=new_exits,
        statuses=lambda: [one.status for one in exits],
    )
    monkeypatch.setattr(nodes.selectors, "DefaultSelector", NoSelector)
    code = nodes._execute_commands(workers, link, nproc=2, num_signals=lambda: 1, grace=60.0)
    assert code == expected and told == [True]


class NoSelector:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def register(self, connection, event):
        pass

    def select(self, seconds):
        pass


def test_a_host_ends_as_node_0_says(monkeypatch):
    clock = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(nodes.selectors, "DefaultSelector", NoSelector)
    done = []
    workers = types.SimpleNamespace(
        poll=lambda seconds: None,
        kill=lambda: done.append("kill"),
        dump_stacks=lambda: done.append("dump"),
        request_stop=lambda: done.append("stop"),
        new_exits=list,
        statuses=list,
    )
    commands = ["dump", "stop", "nothing", "kill"]
    link = Link(clock, *({"do": name} for name in commands), {"do": "end", "code": EXIT_PREEMPTED})
    options = dict(nproc=1, num_signals=lambda: 0, grace=60.0)
    assert nodes._execute_commands(workers, link, **options) == EXIT_PREEMPTED
    assert done == ["dump", "stop", "kill"] and {"dead": True} in link.sent
    with pytest.raises(ConfigError, match="taken"):
        nodes._execute_commands(workers, Link(clock, {"do": "reject", "fault": "taken"}), **options)
