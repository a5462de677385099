"""The supervisor as a state machine: fake processes and hosts, and a clock that is set by hand.

The supervisor runs in a thread and waits for the test whenever it polls. What has to happen is
worked out beside it, from docs/guides/resume.md and docs/guides/hosts.md.
"""

import threading
import types
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from meshtrain.cluster import progress
from meshtrain.supervise import restart_policy, supervisor
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import Exit, ProcessStatus
from tests.lib.machines import run_machine
from tests.lib.supervised import PromisedBudget

TICK = 0.1  # seconds between polls
STALL, GRACE, JOIN, WINDOW, KILL = 8.0, 4.0, 5.0, 300.0, 2.0  # seconds
SIGTERM, SIGKILL, SIGABRT = 15, -9, -6
DONE, CRASH, USER, NOT_FINITE, STALLED, PREEMPTED = 0, 1, 2, 17, 18, 75


class Closed(BaseException):
    """Ends the thread of a supervisor whose story is over."""


@dataclass
class Process:
    rank: int
    changed_at: float
    phase: str = "start"
    first_step: int = -1
    current_step: int = 0
    silent_since: float | None = None
    is_running: bool = True


@dataclass
class Host:
    """Stands in for `Workers`, and, of another host, for `RemoteWorkers` and its link."""

    node: int
    num_local: int
    world: "World"
    processes: dict[int, Process] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    is_connected: bool = True
    is_deaf: bool = False  # does not answer the command to kill
    is_killed: bool = True
    was_told_to_stop: bool = False

    def poll(self, seconds):
        self.world.wait_for_test()

    def start(self, ranks):
        self.exits = []
        self.is_killed = self.was_told_to_stop = False
        numbers = range(ranks.first_rank, ranks.first_rank + ranks.num_local)
        self.processes = {rank: Process(rank, self.world.clock.now()) for rank in numbers}
        self.world.started.append((self.node, [*numbers], ranks.num_processes, ranks.nonce))

    def status(self, process):
        now = self.world.clock.now()
        silent = process.silent_since
        return ProcessStatus(
            rank=process.rank,
            pid=1000 + process.rank,
            phase=process.phase,
            current_step=process.current_step,
            first_step=process.first_step,
            phase_age=now - process.changed_at,
            heartbeat_age=0.0 if silent is None else now - silent,
            stopped_for=0.0,
            step_seconds=0.1 if process.first_step >= 0 else 0.0,
        )

    def statuses(self):
        return [self.status(process) for process in self.processes.values() if process.is_running]

    def first_status(self):
        return next((self.status(process) for process in self.processes.values()), None)

    def first_phase_seconds(self):
        return dict.fromkeys(progress.PHASES, 0.0)

    def new_exits(self):
        exits, self.exits = self.exits, []
        return exits

    def request_stop(self):
        self.was_told_to_stop = True

    def dump_stacks(self):
        pass

    def kill(self):
        self.is_killed = not self.is_deaf
        for process in self.processes.values():
            process.is_running = False

    # ---- of another host ----

    @property
    def killed(self):
        return self.is_killed or not self.is_connected

    @property
    def lost(self):
        is_running = any(process.is_running for process in self.processes.values())
        return not self.is_connected and is_running

    @property
    def link(self):
        return self

    def drop(self, what):
        self.is_connected = False


class World:
    """The hosts, the clock, and the thread of the supervisor."""

    def __init__(self, own: Settings):
        self.seconds = 1000.0
        self.started: list[tuple] = []  # node, ranks, number of processes and nonce, by start
        self.events: list[dict] = []  # of restarts
        self.code: int | None = None  # with which the supervisor has ended
        self.error: BaseException | None = None
        self.is_closing = False
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)

        self.supervisor = supervisor.Supervisor(own, workdir=None)
        self.clock = RunningClock(lambda: self.seconds)
        self.supervisor._clock = self.clock
        self.supervisor._log = lambda line, **options: None
        self.supervisor._event = lambda name, **fields: self.events.append(
            {"event": name, **fields}
        )
        self.hosts = [Host(node, own.nproc, self) for node in range(own.nnodes)]
        self.supervisor._workers = self.hosts[0]
        if own.nnodes > 1:
            others = self.hosts[1:]
            self.supervisor._server = types.SimpleNamespace(
                poll=list,
                connected=lambda: [host for host in others if host.is_connected],
            )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._waiting.acquire()

    def record(self, event, **fields):
        if event == "restart":
            self.events.append(fields)

    def _run(self):
        try:
            self.code = self.supervisor._run_attempts()
        except Closed:
            pass
        except BaseException as error:  # noqa: BLE001  raised in the thread of the test
            self.error = error
        self._waiting.release()

    def wait_for_test(self):
        """Called by the supervisor whenever it polls."""
        if not self.is_closing:
            self._waiting.release()
            self._go.acquire()
        if self.is_closing:
            raise Closed

    def tick(self):
        """Lets the supervisor run until it polls again, or ends."""
        self.seconds += TICK
        if self.code is not None:
            return
        self.clock.now()
        self._go.release()
        self._waiting.acquire()
        if self.error:
            raise self.error

    def close(self):
        if self.code is None and not self.error:
            self.is_closing = True
            self._go.release()
        self._thread.join()

    def processes(self):
        return {rank: one for host in self.hosts for rank, one in host.processes.items()}

    def host_of(self, rank):
        return next(host for host in self.hosts if rank in host.processes)

    def end(self, rank, code, tail=()):
        process = self.processes()[rank]
        host = self.host_of(rank)
        host.exits.append(Exit(rank, code, host.status(process), [*tail]))
        process.is_running = False


class SupervisorStates(RuleBasedStateMachine):
    """Lets processes and hosts fail, and compares with what the guide promises."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world: World | None = None
        self.end_code: int | None = None

    @initialize(
        nnodes=st.integers(1, 3),
        nproc=st.integers(1, 2),
        max_restarts=st.integers(0, 4),
        smallest=st.none() | st.integers(1, 6),
    )
    def open(self, nnodes, nproc, max_restarts, smallest):
        clock = types.SimpleNamespace(
            monotonic=lambda: self.world.seconds if self.world else 1000.0,
            time=lambda: 1e9,
        )
        self.patch.setattr(supervisor, "time", clock)
        self.patch.setattr(restart_policy, "time", clock)
        self.patch.setattr(supervisor.rendezvous, "free_port", lambda ports: 20000)
        self.patch.setattr(supervisor.nodes, "KILL_SECONDS", KILL)
        self.own = Settings(
            nproc=nproc,
            nnodes=nnodes,
            coordinator="127.0.0.1:1",
            min_nproc=min(smallest, nnodes * nproc) if smallest else None,
            max_restarts=max_restarts,
            window=WINDOW,
            stall_seconds=STALL,
            grace=GRACE,
            join_seconds=JOIN,
        )
        self.begin()

    def begin(self):
        """Starts a run; what is promised of it is worked out in these numbers."""
        self.budget = PromisedBudget(max_restarts=self.own.max_restarts, window=WINDOW)
        self.num_left_out = 0
        self.can_shrink = self.own.min_nproc is not None
        self.num_signals = self.num_suspensions = 0
        self.end_code: int | None = None
        self.nonces: set[str] = set()
        self.world = World(self.own)
        self.expect_attempt()

    # ---- what is promised ----

    def expect_attempt(self):
        """Checks the ranks of an attempt that has just started."""
        world = self.world
        connected = [host for host in world.hosts if host.is_connected]
        for host in world.hosts:
            if not host.is_connected:
                host.processes = {}
        counts = [host.num_local for host in connected]
        if self.own.min_nproc:  # at least these remain, of those that are there
            self.num_left_out = min(self.num_left_out, max(sum(counts) - self.own.min_nproc, 0))
        for _ in range(self.num_left_out):  # from the last host on, the last one first
            last = max(i for i, count in enumerate(counts) if count)
            counts[last] -= 1
        expected, first = [], 0
        for host, count in zip(connected, counts, strict=True):
            expected.append((host.node, [*range(first, first + count)], sum(counts)))
            first += count
        assert [start[:3] for start in world.started] == expected
        nonces = {start[3] for start in world.started}
        assert len(nonces) == 1 and not nonces & self.nonces  # one for each attempt
        self.nonces |= nonces
        world.started.clear()
        self.num_processes = sum(counts)
        self.ended: list[int] = []
        self.first_end_at = 0.0

    def gives_up(self, code, process) -> bool:
        """Returns whether no attempt follows one that ended in this way."""
        reached = process is not None and process.first_step >= 0
        step = process.current_step if process else None
        return self.budget.gives_up(
            self.world.seconds,
            code,
            reached=reached,
            step=step,
            taken=reached and step > process.first_step,
            num_processes=self.num_processes,
        )

    def expect_failure(self, code, process, *, seconds=1.0):
        """Lets the supervisor see a failure, and checks what it does about it."""
        world = self.world
        num_events = len(world.events)
        processes = [*world.processes().values()]
        if any(host.is_deaf for host in world.hosts):
            seconds += KILL + 1.0
        until = world.seconds + seconds
        while world.seconds < until and world.code is None and len(world.events) == num_events:
            world.tick()
        assert not any(one.is_running for one in processes), "all processes are killed"
        if self.num_signals:
            self.expect_end(code if code == PREEMPTED else 128 + SIGTERM)
            return
        smallest, num_all = self.own.min_nproc, self.num_processes
        reached = process is not None and process.first_step >= 0
        if self.num_left_out and code == USER:
            # This number does not suit the config: one process less, or all again.
            self.can_shrink = num_all > smallest
            self.num_left_out = self.num_left_out + 1 if self.can_shrink else 0
        else:
            may_be_broken = not reached and code != PREEMPTED
            shrinks = self.can_shrink and may_be_broken and num_all > smallest
            self.num_left_out = self.num_left_out + 1 if shrinks else 0
            if self.gives_up(code, process):
                self.expect_end(128 - code if code < 0 else code)
                return
        self.expect_restart(num_events, code, process)

    def expect_restart(self, num_events, code, process):
        world = self.world
        (event,) = world.events[num_events:]
        assert event["code"] == code
        if process:
            assert (event["rank"], event["step"]) == (process.rank, process.current_step)
        wait = self.budget.wait()
        began = world.seconds
        is_complete = all(host.is_connected for host in world.hosts)
        limit = wait + (0 if is_complete else JOIN) + 1.0
        while not world.started and world.code is None and world.seconds < began + limit:
            world.tick()
        enough = sum(host.num_local for host in world.hosts if host.is_connected)
        if is_complete or (self.own.min_nproc and enough >= self.own.min_nproc):
            assert world.started and world.code is None
            assert world.seconds - began >= wait - 0.3
            self.expect_attempt()
        else:
            self.expect_end(CRASH)

    def expect_end(self, code):
        world = self.world
        for _ in range(int(KILL / TICK) + 5):
            world.tick()
        assert world.code == code
        self.end_code = code

    def is_running(self):
        return any(process.is_running for process in self.world.processes().values())

    def running(self):
        return [process for process in self.world.processes().values() if process.is_running]

    def may_go_on(self):
        return self.world is not None and self.end_code is None

    def is_calm(self):
        return self.may_go_on() and not self.num_signals and not self.ended

    # ---- what may happen ----

    @precondition(lambda self: self.end_code is not None)
    @rule()
    def another_run_begins(self):
        self.world.close()
        self.world = None
        self.begin()

    @precondition(is_calm)
    @rule(count=st.integers(1, 30))
    def time_passes(self, count):
        """All processes take steps meanwhile."""
        self.keep_going(count)
        assert self.world.code is None and not self.world.started

    def keep_going(self, count):
        """Each step may take a tick; processes do not go past the one that has ended."""
        for _ in range(count):
            for process in self.running():
                process.changed_at = self.world.clock.now()
            self.world.tick()

    @precondition(is_calm)
    @rule(first=st.integers(0, 3), count=st.integers(0, 3))
    def steps_are_taken(self, first, count):
        for process in self.running():
            if process.first_step < 0:
                process.first_step = process.current_step = first
            process.phase = "step"
            process.current_step += count
        self.keep_going(2)

    @precondition(is_calm)
    @rule(
        code=st.sampled_from([USER, NOT_FINITE, *[CRASH, SIGKILL, -11] * 3]),
        data=st.data(),
    )
    def a_process_fails(self, code, data):
        self.fail(data.draw(st.sampled_from(self.running())), code)

    def fail(self, process, code):
        self.world.end(process.rank, code)
        self.expect_failure(code, process)

    @precondition(lambda self: self.is_calm() and len(self.running()) > 1)
    @rule(codes=st.permutations([SIGABRT, CRASH, SIGKILL, USER, "peer"]), data=st.data())
    def several_fail_together(self, codes, data):
        """The cause is named: exit codes that say it, then others, aborts, lost peers."""
        running = self.running()
        seen = {}
        for process, code in zip(running, codes, strict=False):
            seen[process.rank] = code
            tail = ["Connection reset by peer"] if code == "peer" else []
            self.world.end(process.rank, CRASH if code == "peer" else code, tail)
        order = [USER, CRASH, SIGKILL, SIGABRT, "peer"]
        ranks = sorted(seen, key=lambda rank: (max(order.index(seen[rank]), 0), rank))
        rank = ranks[0]
        if {CRASH, SIGKILL} <= {*seen.values()} and USER not in seen.values():
            rank = min(rank for rank, code in seen.items() if code in (CRASH, SIGKILL))
        code = CRASH if seen[rank] == "peer" else seen[rank]
        self.expect_failure(code, self.world.processes()[rank])

    @precondition(is_calm)
    @rule()
    def all_are_preempted(self):
        """Each saves and ends with 75."""
        processes = self.running()
        for process in processes:
            self.world.end(process.rank, PREEMPTED)
        self.expect_failure(PREEMPTED, processes[0])

    @precondition(is_calm)
    @rule(names_first=st.booleans())
    def one_saves_and_another_crashes(self, names_first):
        processes = self.running()
        if len(processes) < 2:
            return
        saved, crashed = (0, -1) if names_first else (-1, 0)
        self.world.end(processes[saved].rank, PREEMPTED)
        self.world.end(processes[crashed].rank, CRASH)
        self.expect_failure(CRASH, processes[crashed])

    @precondition(lambda self: self.is_calm() and len(self.running()) > 1)
    @rule()
    def some_are_done_and_others_have_saved(self):
        """The run is not done: its last step may be missing."""
        processes = self.running()
        for process in processes:
            self.world.end(process.rank, DONE if process is processes[0] else PREEMPTED)
        self.expect_failure(PREEMPTED, processes[0])

    @precondition(is_calm)
    @rule(is_rare=st.sampled_from([True, False, False, False]))
    def all_are_done(self, is_rare):
        for process in self.running() if is_rare else []:
            self.world.end(process.rank, DONE)
        if is_rare:
            self.expect_end(DONE)

    @precondition(is_calm)
    @rule(data=st.data(), is_silent=st.booleans())
    def a_process_hangs(self, data, is_silent):
        """The others wait for it, at a later step or without a heartbeat less."""
        processes = [process for process in self.running() if process.first_step >= 0]
        if len(processes) < len(self.running()):
            return
        hung = data.draw(st.sampled_from(processes))
        for process in processes:
            process.changed_at = self.world.clock.now()
            process.current_step += process is not hung
        if is_silent:
            hung.silent_since = self.world.clock.now()
        for _ in range(int(STALL / TICK) - 4):
            self.world.tick()
            assert self.is_running() and self.world.code is None
        self.expect_failure(STALLED, hung, seconds=3.0)

    @precondition(lambda self: self.may_go_on() and self.num_suspensions < 3)
    @rule(seconds=st.floats(10, 1e6))
    def all_are_suspended(self, seconds):
        """A laptop sleeps: nobody has stalled, and no time limit is near."""
        self.num_suspensions += self.num_signals  # each may take a second of the grace period
        self.world.seconds += seconds
        self.keep_going(1)
        assert self.world.code is None and not self.world.started

    # ---- hosts ----

    @precondition(lambda self: self.is_calm() and len(self.connected_others()) > 0)
    @rule(data=st.data())
    def a_host_is_lost(self, data):
        self.lose(data.draw(st.sampled_from(self.connected_others())))

    def lose(self, host):
        host.is_connected = False
        if not host.processes or not any(p.is_running for p in host.processes.values()):
            self.keep_going(2)
            assert self.world.code is None
            return
        first = min(self.world.hosts[0].processes.values(), key=lambda p: p.rank, default=None)
        self.expect_failure(CRASH, first)

    @precondition(lambda self: self.is_calm() and len(self.connected_others()) > 0)
    @rule(data=st.data())
    def a_host_stops_to_answer(self, data):
        """It is dropped when it does not kill its processes in time."""
        data.draw(st.sampled_from(self.connected_others())).is_deaf = True

    @precondition(lambda self: self.is_calm() and len(self.lost_hosts()) > 0)
    @rule(data=st.data())
    def a_host_returns(self, data):
        """It takes part from the next attempt on."""
        host = data.draw(st.sampled_from(self.lost_hosts()))
        host.is_connected, host.processes, host.is_deaf = True, {}, False
        self.keep_going(2)
        assert self.world.code is None and not self.world.started

    def connected_others(self):
        return [host for host in self.world.hosts[1:] if host.is_connected]

    def lost_hosts(self):
        return [host for host in self.world.hosts[1:] if not host.is_connected]

    # ---- signals ----

    @precondition(lambda self: self.may_go_on() and not self.ended)
    @rule(is_hangup=st.booleans(), is_rare=st.sampled_from([True, False, False]))
    def a_signal_arrives(self, is_hangup, is_rare):
        """The first asks to save. A second one aborts, unless it is SIGHUP."""
        if not (is_rare or self.num_signals):
            return
        number = 1 if is_hangup and self.num_signals else SIGTERM
        self.world.supervisor._record_signal(number)
        self.num_signals += number == SIGTERM
        if self.num_signals > 1:
            self.expect_end(128 + SIGTERM)
            assert not self.is_running()
            return
        self.keep_going(2)
        assert self.world.code is None
        hosts = [host for host in self.world.hosts if host.processes and host.is_connected]
        assert all(host.was_told_to_stop for host in hosts)

    @precondition(lambda self: self.may_go_on() and self.num_signals == 1)
    @rule(how=st.sampled_from(["saved", "done", "crash", "late"]))
    def the_run_ends_after_a_signal(self, how):
        codes = {"saved": PREEMPTED, "done": DONE, "crash": CRASH}
        num_restarts = len(self.world.events)
        if how == "late":
            self.keep_going(int(GRACE / TICK) + 3)
            self.expect_end(128 + SIGTERM)
        elif how == "crash":
            self.world.end(self.running()[-1].rank, CRASH)
            self.expect_end(128 + SIGTERM)
        else:
            for process in self.running():
                self.world.end(process.rank, codes[how])
            self.expect_end(codes[how])
        assert not self.is_running()
        assert len(self.world.events) == num_restarts

    def teardown(self):
        if self.world:
            self.world.close()
        self.patch.undo()


def test_with_hosts_missing_the_fewest_processes_still_start():
    """Two attempts that failed before their first step, and two hosts that are lost meanwhile."""
    machine = SupervisorStates()
    try:
        machine.open(nnodes=3, nproc=1, max_restarts=4, smallest=1)
        machine.fail(machine.running()[0], CRASH)
        machine.lose(machine.world.hosts[2])
        machine.lose(machine.world.hosts[1])
        assert len(machine.running()) == 1
    finally:
        machine.teardown()


def test_a_supervisor_keeps_its_promises_whatever_fails():
    run_machine(SupervisorStates, num_examples=50, num_rules=20)


@pytest.mark.slow
def test_a_supervisor_keeps_its_promises_in_many_more_stories():
    run_machine(SupervisorStates, num_examples=400, num_rules=40)
