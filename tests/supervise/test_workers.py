"""The processes of one host."""

import os
import sys
import types

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from meshtrain.cluster import progress
from meshtrain.supervise import restart_policy
from meshtrain.supervise.running_clock import MAX_ADVANCE, RunningClock
from meshtrain.supervise.workers import RankAssignment, Workers, _Child
from tests.lib.machines import run_machine


def test_processes_get_their_ranks_in_variables(tmp_path):
    lines = []
    code = (
        "import os; print(*(os.environ[n] for n in ('JAX_PROCESS_ID', 'LOCAL_RANK', "
        "'LOCAL_WORLD_SIZE')))"
    )
    workers = Workers(
        [sys.executable, "-c", code],
        environ=dict(os.environ),
        local_id=1,
        num_supervisors=2,
        logs=None,
        show=lambda rank, line: lines.append((rank, line)),
    )
    workers.start(RankAssignment("127.0.0.1:1", 8, 6, 2))
    exits = []
    while len(exits) < 2:
        workers.poll(0.05)
        exits += workers.new_exits()
    workers.close()
    assert sorted(lines) == [(6, "6 2 4"), (7, "7 3 4")] and {one.code for one in exits} == {0}


def test_time_in_which_the_supervisor_was_suspended_counts_for_no_stall(monkeypatch):
    """Also if it is suspended while it waits for output, as it almost always is."""
    seconds = 100.0
    workers = Workers(
        [sys.executable, "-c", "import time; time.sleep(99)"],
        environ=dict(os.environ),
        logs=None,
        show=lambda *line: None,
        clock=RunningClock(lambda: seconds),
    )
    workers.start(RankAssignment("127.0.0.1:1", 1, 0, 1))
    (child,) = workers._children
    page = progress.ProgressPage(child.path)
    page["heartbeat"] = 1.0
    page["phase"] = progress.PHASES.index("step")

    def select(timeout):
        nonlocal seconds
        seconds += suspended or timeout
        return []

    monkeypatch.setattr(workers._ready, "select", select)

    def stall():
        workers.poll(0.1)
        return restart_policy.find_stall(workers.statuses(), stall_seconds=60.0)

    suspended = 0.0
    assert stall() is None
    for suspended in (1e4, 0.0, 50.0, 50.0, 1e9):
        assert stall() is None, suspended
    suspended = 0.0
    until = seconds + 50.0
    while seconds < until:
        assert stall() is None
    until = seconds + 20.0
    while seconds < until and not (found := stall()):
        pass
    assert found and "sent no heartbeat for 60 s" in found.why
    workers.close()


class ClockStates(RuleBasedStateMachine):
    """A process writes its page by a clock that jumps; its supervisor measures with its own."""

    def __init__(self):
        super().__init__()
        self.seconds = self.own_clock = 1000.0
        self.clock = RunningClock(lambda: self.seconds)
        self.workers = Workers(
            ["true"], environ={}, logs=None, show=lambda *line: None, clock=self.clock
        )
        process = types.SimpleNamespace(pid=7, stdout=object())
        self.page = progress.ProgressPage()
        self.child = _Child(0, process, None, self.page)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("meshtrain.supervise.workers._is_stopped", lambda pid: self.is_stopped)
        self.is_stopped = False
        # Seconds in which the supervisor was running, since the last sign of life of each kind.
        self.since_heartbeat = self.since_phase = self.stopped_for = 0.0
        self.has_heartbeat = False
        self.poll()

    def poll(self):
        self.status = self.workers._status(self.child)

    @rule(ticks=st.integers(1, 50))
    def time_passes(self, ticks):
        for _ in range(ticks):
            self.pass_by(0.1, 0.1)

    @rule(seconds=st.floats(1, 1e6))
    def both_are_suspended(self, seconds):
        """Of that time the supervisor counts half a second."""
        self.pass_by(seconds, MAX_ADVANCE)

    def pass_by(self, seconds, counted):
        self.seconds += seconds
        self.own_clock += seconds
        self.since_heartbeat += counted
        self.since_phase += counted
        self.stopped_for += counted if self.is_stopped else 0.0
        self.poll()

    @rule(seconds=st.floats(-1e5, 1e5))
    def the_clock_of_the_process_jumps(self, seconds):
        self.own_clock += seconds

    @precondition(lambda self: not self.is_stopped)
    @rule()
    def a_heartbeat_is_sent(self):
        self.own_clock += 0.001
        self.page["heartbeat"] = self.own_clock
        self.has_heartbeat = True
        self.since_heartbeat = 0.0
        self.poll()

    @precondition(lambda self: not self.is_stopped)
    @rule(phase=st.sampled_from(progress.PHASES), more=st.integers(0, 1))
    def a_phase_begins(self, phase, more):
        self.own_clock += 0.001
        self.page["phase"] = progress.PHASES.index(phase)
        self.page["phase_start"] = self.own_clock
        self.page["current_step"] += more
        self.since_phase = 0.0
        self.poll()

    @rule()
    def a_signal_stops_or_continues_it(self):
        self.is_stopped = not self.is_stopped
        self.stopped_for = 0.0
        self.poll()

    @invariant()
    def ages_are_those_by_the_clock_of_the_supervisor(self):
        age = self.since_heartbeat if self.has_heartbeat else 0.0
        assert self.status.heartbeat_age == pytest.approx(age, abs=1e-3)
        assert self.status.phase_age == pytest.approx(self.since_phase, abs=1e-3)
        assert self.status.stopped_for == pytest.approx(self.stopped_for, abs=1e-3)

    def teardown(self):
        self.patch.undo()
        self.workers.close()


def test_signs_of_life_are_timed_by_the_clock_of_the_supervisor():
    run_machine(ClockStates, num_examples=40, num_rules=25)
