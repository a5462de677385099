"""The processes of one host."""

import os
import sys

from meshtrain.cluster import progress
from meshtrain.supervise import restart_policy
from meshtrain.supervise.running_clock import RunningClock
from meshtrain.supervise.workers import RankAssignment, Workers


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
