"""Which process failed, what it may take, and how often all restart."""

import time

import pytest

from meshtrain.errors import EXIT_PREEMPTED, ConfigError
from meshtrain.supervise import restart_policy
from meshtrain.supervise.restart_policy import Outcome, RestartBudget, Settings
from tests.lib.supervised import ended, status


def test_the_process_that_failed_first_is_found():
    def cause(*codes, lost_peer=()):
        exits = [ended(code, rank) for rank, code in enumerate(codes)]
        for rank in lost_peer:
            exits[rank].tail.append("Gloo all-reduce failed: Connection closed by peer [127.0.0.1]")
        return restart_policy.first_failure(exits).code

    assert cause(0, -6, -9) == -9
    assert cause(-6, 1) == 1
    assert cause(-6, 1, lost_peer=[1]) == -6
    assert cause(1, -11, -6) == 1
    assert cause(1, -11, -6, lost_peer=[0, 2]) == -11
    assert cause(1, 2, -9) == 2
    assert restart_policy.first_failure([ended(0)]) is None


def test_each_phase_has_its_time_limit():
    def late(**fields):
        found = restart_policy.find_stall([status(**fields)], 60.0)
        return found and found.why

    assert late(phase_age=59) is None and "no progress for 61 s" in late(phase_age=61)
    assert late(phase_age=200, step_seconds=50) is None and late(phase_age=251, step_seconds=50)
    assert late(phase="compile", phase_age=3000) is None and late(phase="compile", phase_age=3601)
    assert "no heartbeat" in late(phase="compile", phase_age=70, heartbeat_age=61)
    assert "stopped by a signal" in late(phase="save", stopped_for=11)
    two = [status(0, "step", 8, phase_age=61), status(1, "data", 7, phase_age=61.5)]
    assert restart_policy.find_stall(two, 60.0).status.rank == 1
    # The save that is due comes after step 7: only rank 1 has reached it.
    two = [status(0, "step", 7, phase_age=61), status(1, "save", 7, phase_age=61)]
    assert restart_policy.find_stall(two, 60.0).status.rank == 0
    # The first steps have a higher limit: NCCL makes its connections then.
    assert late(step_seconds=0.0, phase_age=599) is None and late(step_seconds=0.0, phase_age=601)


def test_only_restarts_within_the_window_count():
    budget = RestartBudget(max_restarts=2, window=0.3)
    for reached in range(2):
        assert not budget.reason_to_give_up(Outcome(1, status=status(current_step=reached)), 2)
    assert budget.reason_to_give_up(Outcome(1, status=status(current_step=2)), 2)
    time.sleep(0.35)
    assert not budget.reason_to_give_up(Outcome(1, status=status(current_step=3)), 2)


def test_attempts_in_a_row_are_those_without_a_preemption_between_them():
    budget = RestartBudget(max_restarts=9, window=60.0)
    crash, preempted = Outcome(1, status=status()), Outcome(EXIT_PREEMPTED, status=status())
    for _ in range(3):
        assert budget.reason_to_give_up(crash, 2) == ""
        assert budget.reason_to_give_up(preempted, 2) == ""
    assert budget.reason_to_give_up(crash, 2) == ""
    assert "2 attempts in a row ended this way at step 5" in budget.reason_to_give_up(crash, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(nproc=0), "--nproc=0: use 1 or more"),
        (dict(nproc=2, min_nproc=3), "--min_nproc=3: there are 2 processes in all"),
        (dict(nnodes=2), "--coordinator=None: use HOST:PORT"),
        (dict(nnodes=2, node_rank=2, coordinator="a:1"), "--node_rank=2: use 0 to 1"),
        (dict(max_restarts=-1, grace=0), "--max_restarts=-1"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**settings)
