"""The supervisor, with processes that do no more than it can see."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, free_port

from meshtrain.cluster import nodes, progress
from meshtrain.cluster import restart_policy as attempts
from meshtrain.cluster.restart_policy import Budget, Outcome, Settings
from meshtrain.cluster.supervisor import Supervisor, _shares
from meshtrain.cluster.workers import Exit, ProcessStatus, Start, Workers
from meshtrain.errors import ConfigError

# What a worker shows of itself, without jax: importing that takes seconds.
WORKER = """
import mmap, os, signal, sys, time
rank, folder = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1]
with open(os.environ["MESHTRAIN_PROGRESS"], "r+b") as file:
    page = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
FIELDS = sys.argv[2].split(",")
PHASES = FIELDS[FIELDS.index("stop") + 1:]
def put(name, value): page[FIELDS.index(name)] = value
def step(number, phase="step"):
    put("typical", 0.01)
    put("phase", PHASES.index(phase)); put("since", time.monotonic()); put("beat", time.monotonic())
    if page[FIELDS.index("first")] < 0: put("first", number)
    put("reached", number)
def attempt():
    name = f"{folder}/attempts-{rank}"
    with open(name, "a") as file: file.write("x")
    return os.path.getsize(name)
def asked(): return page[FIELDS.index("stop")] > 0
def go_on(seconds=30):
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until and not asked():
        step(number := number + 1); time.sleep(0.02)
    sys.exit(75 if asked() else 0)
number = attempt()
"""


def look(rank=0, phase="step", reached=5, **fields):
    known = dict(pid=7, first=0, age=0.0, silent=0.0, stopped=0.0, typical=0.1)
    return ProcessStatus(rank=rank, phase=phase, reached=reached, **{**known, **fields})


def ended(code, rank=0):
    return Exit(rank, code, look(rank), [])


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def supervise(tmp_path, capfd):
    """Runs processes with this code; returns the exit code and all that was printed."""

    def run(code, **settings):
        settings = {"nproc": 2, "stall_seconds": 1.0, "grace": 5.0, **settings}
        command = [sys.executable, "-c", WORKER + code, str(tmp_path), ",".join(progress.FIELDS)]
        supervisor = Supervisor(Settings(**settings), workdir=tmp_path)
        exit_code = supervisor.run(command, environ=dict(os.environ), logs=tmp_path)
        out, err = capfd.readouterr()
        return exit_code, out + err

    return run


def attempts_of(tmp_path, rank=0):
    return (tmp_path / f"attempts-{rank}").stat().st_size


def test_lines_come_with_their_rank_and_go_into_its_log(supervise, tmp_path):
    code, said = supervise(
        "print('[Gloo] noise'); print('hello', flush=True); os.write(2, b'no end')"
    )
    assert code == 0
    lines = said.splitlines()
    assert {"[0] hello", "[1] hello", "[0] no end", "[1] no end"} <= {*lines}
    assert "Gloo" not in said
    assert "[Gloo] noise\nhello\nno end" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("dies", "told"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "rank 1 .* killed by signal 9 .SIGKILL. in phase step of step 3",
        ),
        ("sys.exit('the reason')", "rank 1 .* ended with exit code 1 in phase step of step 3"),
        (
            "os.kill(os.getpid(), 19)",
            "rank 1 .* stopped by a signal.*, in phase step of step 3",
        ),
        ("put('beat', 1.0); time.sleep(99)", "rank 1 .* gave no sign of life for"),
    ],
)
def test_whatever_befalls_a_process_all_start_again(supervise, tmp_path, dies, told):
    code, said = supervise(f"""
step(3)
if number == 1 and rank == 1: {dies}
while number == 1: put("beat", time.monotonic()); time.sleep(0.1)
""")
    assert code == 0
    assert attempts_of(tmp_path, 0) == attempts_of(tmp_path, 1) == 2
    assert re.search(told + ".*; restart 1 of 3", said)


def test_the_one_behind_is_named_when_all_wait(supervise):
    code, said = supervise("""
step(5 if rank == 0 else 4)
if number == 1:
    while True: put("beat", time.monotonic()); time.sleep(0.1)
""")
    assert (
        code == 0
        and "rank 1" in said
        and "made no progress for 1 s, in phase step of step 4" in said
    )


def test_what_a_process_starts_dies_with_it(supervise, tmp_path):
    code, _ = supervise("""
import subprocess
if rank == 0: open(f"{folder}/child", "w").write(str(subprocess.Popen(["sleep", "99"]).pid))
step(1)
if rank == 1: time.sleep(0.5); sys.exit(2)
time.sleep(99)
""")
    assert code == 2
    pid = int((tmp_path / "child").read_text())
    until = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


@pytest.mark.parametrize("code", [2, 17])
def test_what_would_happen_again_is_not_tried_again(supervise, tmp_path, code):
    exit_code, said = supervise(f"print('train.steps=x: no'); step(3); sys.exit({code})")
    assert exit_code == code and attempts_of(tmp_path) == 1
    assert "giving up" in said and "launch:   train.steps=x: no" in said


def test_a_crash_loop_at_one_step_stops_early_and_a_moving_one_at_the_budget(supervise, tmp_path):
    code, said = supervise("step(3)\nif rank == 1: sys.exit(1)\ntime.sleep(99)", max_restarts=9)
    assert code == 1 and attempts_of(tmp_path) == 2
    assert "2 attempts in a row ended this way at step 3" in said
    code, said = supervise(
        "step(0); step(3 + number)\nif rank == 1: sys.exit(1)\ntime.sleep(99)", max_restarts=2
    )
    assert code == 1 and attempts_of(tmp_path) == 2 + 3
    assert "2 restarts within 3600 s are as many as --max_restarts" in said


def test_a_run_that_hangs_for_good_ends_with_18(supervise, tmp_path):
    code, _ = supervise("step(3); time.sleep(99)", max_restarts=9)
    assert code == 18 and attempts_of(tmp_path) == 3


def test_a_run_that_was_preempted_goes_on_and_it_does_not_count(supervise, tmp_path):
    code, said = supervise("step(3); sys.exit(75 if number < 4 else 0)", max_restarts=0)
    assert code == 0 and attempts_of(tmp_path) == 4 and "restart after saving" in said


def test_a_signal_asks_all_to_save(supervise, tmp_path):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    code, said = supervise("go_on()")
    assert code == 75 and "asked to stop" in said and attempts_of(tmp_path) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_does_not_save_in_time_is_killed(supervise):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code, said = supervise("while True: step(1); time.sleep(0.1)", grace=0.5)
    assert code == 128 + signal.SIGTERM and "not saved within" in said


def test_a_second_signal_aborts(supervise):
    # A shell's background jobs ignore Ctrl-C, this one too then, and its supervisors.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for seconds in (0.5, 1.0):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    code, said = supervise("while True: step(1); time.sleep(0.1)", grace=60)
    signal.signal(signal.SIGINT, before)
    assert code == 128 + signal.SIGINT and "aborted" in said and time.monotonic() - began < 10


def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    code = """
import os, sys
from meshtrain.cluster.restart_policy import Settings
from meshtrain.cluster.supervisor import Supervisor
worker = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
Supervisor(Settings(nproc=2), workdir=None).run([sys.executable, "-c", worker], environ=dict(os.environ), logs=None)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as run:
        pids = [int(run.stdout.readline().split()[-1]) for _ in range(2)]
        run.kill()
    time.sleep(1)
    assert not [pid for pid in pids if is_alive(pid)]


def test_fewer_go_on_while_one_cannot_come_back_and_all_when_it_can(supervise, tmp_path):
    """With three to begin with: two may not fit, which the run itself says with exit code 2."""
    code, said = supervise(
        """
count = int(os.environ["JAX_NUM_PROCESSES"])
with open(f"{folder}/counts", "a") as file: file.write(str(count) if rank == 0 else "")
if number == 2 and count == 3 and rank == 1: sys.exit(1)
if count == 2: time.sleep(0.2); sys.exit(2)
step(number); step(number + 1)
if number < 5 and rank == 0: time.sleep(0.3); sys.exit(1)
time.sleep(0.6)
""",
        nproc=3,
        min_nproc=1,
        max_restarts=9,
    )
    assert code == 0, said
    assert (tmp_path / "counts").read_text() == "33213"


def test_it_goes_down_to_the_number_that_works(supervise, tmp_path):
    settings = dict(nproc=3, min_nproc=1, max_restarts=9)
    code, said = supervise("if rank: sys.exit(1)\nstep(0); time.sleep(0.5)", **settings)
    assert code == 0 and attempts_of(tmp_path) == 3 and "without 2 of 3 processes" in said


def test_one_that_is_stopped_before_its_first_step_is_not_left_out(supervise, tmp_path):
    code, said = supervise("sys.exit(75 if number < 2 else 0)", min_nproc=1)
    assert code == 0 and attempts_of(tmp_path, 1) == 2 and "without" not in said


def test_one_that_never_stops_talking_does_not_keep_the_supervisor_from_its_work(supervise):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    talks = "step(1)\nwhile not asked(): os.write(1, b'x\\n' * 1000)\nsys.exit(75)"
    assert supervise(talks, stall_seconds=60)[0] == 75


@pytest.mark.parametrize(
    ("code", "expected"), [("go_on()", 75), ("step(1); os.kill(os.getpid(), 15)", 143), ("", 75)]
)
def test_a_host_that_is_asked_to_go_says_what_became_of_its_processes(tmp_path, code, expected):
    port, asked, ends = free_port(), [], []
    head = nodes.Head("127.0.0.1", port, 2)
    command = [sys.executable, "-c", WORKER + code, str(tmp_path), ",".join(progress.FIELDS)]
    workers = Workers(command, environ=dict(os.environ), logs=None, show=lambda *line: None)

    def follow():
        where = dict(host="127.0.0.1", port=port, node=1, nnodes=2, nproc=1, seconds=5, grace=5)
        seen = dict(asked=lambda: len(asked), line=lambda text: None)
        ends.append(nodes.follow(workers, **where, **seen))

    thread = threading.Thread(target=follow)
    thread.start()
    began = 0.0  # when there was a connection
    while thread.is_alive():
        head.pump()
        time.sleep(0.01)
        if head.present() and not began:
            began = time.monotonic()
            if code:
                head.present()[0].start(Start("127.0.0.1:1", 1, 0, 1))
        if began and not asked and time.monotonic() - began > 0.5:
            asked.append(1)
    workers.close()
    head.close(0)
    assert ends == [expected]


def test_time_spent_is_told(supervise, tmp_path):
    code, said = supervise("""
step(0); time.sleep(0.3); step(10)
if number == 1: time.sleep(0.2); os.kill(os.getpid(), 9)
put("first", 4); time.sleep(0.3)
""")
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["restart", "recovered", "goodput"]
    assert (rows[2]["restarts"], rows[2]["lost_steps"]) == (1, 6)
    assert abs(rows[2]["seconds"]["lost"] - 0.06) < 1e-6 and rows[2]["seconds"]["wall"] > 0.5
    assert "1 restarts · 6 steps lost" in said


def test_the_cause_is_found_among_those_who_ended():
    def cause(*codes, bereft=()):
        exits = [ended(code, rank) for rank, code in enumerate(codes)]
        for rank in bereft:
            exits[rank].tail.append("Gloo all-reduce failed: Connection closed by peer [127.0.0.1]")
        return attempts.first_failure(exits).code

    assert cause(0, -6, -9) == -9
    assert cause(-6, 1) == 1
    assert cause(-6, 1, bereft=[1]) == -6
    assert cause(1, -11, -6) == 1
    assert cause(1, -11, -6, bereft=[0, 2]) == -11
    assert cause(1, 2, -9) == 2
    assert attempts.first_failure([ended(0)]) is None


def test_each_phase_has_its_patience():
    def late(**fields):
        found = attempts.stall([look(**fields)], 60.0)
        return found and found.why

    assert late(age=59) is None and "no progress for 61 s" in late(age=61)
    assert late(age=200, typical=50) is None and late(age=251, typical=50)
    assert late(phase="compile", age=3000) is None and late(phase="compile", age=3601)
    assert "no sign of life" in late(phase="compile", age=70, silent=61)
    assert "stopped by a signal" in late(phase="save", stopped=11)
    two = [look(0, "step", 8, age=61), look(1, "data", 7, age=61.5)]
    assert attempts.stall(two, 60.0).look.rank == 1
    # After step 7 comes the save that is due then, and so far only rank 1 is.
    two = [look(0, "step", 7, age=61), look(1, "save", 7, age=61)]
    assert attempts.stall(two, 60.0).look.rank == 0
    # Nothing is usual yet in the first steps: connections are made, in which NCCL takes its time.
    assert late(typical=0.0, age=599) is None and late(typical=0.0, age=601)


def test_the_budget_is_of_a_window():
    budget = Budget(max_restarts=2, window=0.3)
    for reached in range(2):
        assert not budget.refuse(Outcome(1, look=look(reached=reached)), 2)
    assert budget.refuse(Outcome(1, look=look(reached=2)), 2)
    time.sleep(0.35)
    assert not budget.refuse(Outcome(1, look=look(reached=3)), 2)


def test_shares():
    assert (
        _shares([2, 2], 0) == [2, 2]
        and _shares([2, 2], 1) == [2, 1]
        and _shares([2, 2], 3) == [1, 0]
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(nproc=0), "--nproc=0: use 1 or more"),
        (dict(nproc=2, min_nproc=3), "--min_nproc=3: there are 2 processes in all"),
        (dict(nnodes=2), "--coordinator=None: use HOST:PORT"),
        (dict(nnodes=2, node_rank=2, coordinator="a:1"), "--node_rank=2: use 0 to 1"),
        (dict(max_restarts=-1, grace=0), "--max_restarts=-1"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings, told):
    with pytest.raises(ConfigError, match=told):
        Settings(**settings)


def supervisors(tmp_path, code, count, **settings):
    """Runs one on each of `count` hosts, which are folders here; returns their exit codes."""
    port, codes = free_port(), {}

    def one(node):
        (folder := tmp_path / str(node)).mkdir(exist_ok=True)
        program = f"""
import os, sys
from meshtrain.cluster.restart_policy import Settings
from meshtrain.cluster.supervisor import Supervisor
settings = Settings(nnodes={count}, node_rank={node}, coordinator="127.0.0.1:{port}", **{settings})
command = [sys.executable, "-c", {WORKER + code!r}, {str(folder)!r}, {",".join(progress.FIELDS)!r}]
sys.exit(Supervisor(settings, workdir=None).run(command, environ=dict(os.environ), logs=None))
"""
        with open(folder / "out", "w") as out:
            codes[node] = subprocess.run(
                [sys.executable, "-c", program], cwd=ROOT, stdout=out, stderr=out, timeout=60
            ).returncode

    threads = [threading.Thread(target=one, args=(node,)) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [codes[node] for node in range(count)]


def test_supervisors_of_two_hosts_start_again_together(tmp_path):
    codes = supervisors(
        tmp_path,
        "assert os.environ['JAX_NUM_PROCESSES'] == '3'\nstep(3)\n"
        "if number == 1: time.sleep(0.3 if rank == 2 else 99)\n"
        "if number == 1: sys.exit(1)\n",
        3,
        join_seconds=30.0,
    )
    assert codes == [0, 0, 0]
    out = (tmp_path / "0" / "out").read_text()
    assert "rank 2 (pid" in out and "restart 1 of 3" in out
    assert [attempts_of(tmp_path / str(node), node) for node in range(3)] == [2, 2, 2]


def test_a_host_that_is_missing_is_named(tmp_path, capfd):
    assert supervisors(tmp_path, "", 1) == [0]
    settings = Settings(nnodes=2, coordinator=f"127.0.0.1:{free_port()}", join_seconds=0.5)
    assert Supervisor(settings, workdir=None).run(["true"], environ={}, logs=None) == 1
    assert "1 of 2 nodes arrived, missing [1]" in capfd.readouterr().err


def test_a_supervisor_of_another_run_is_refused():
    port = free_port()
    head = nodes.Head("127.0.0.1", port, 2)
    told, faults = [], []

    def follow(nnodes):
        workers = Workers(["true"], environ={}, logs=None, show=print)
        where = dict(host="127.0.0.1", port=port, node=1, nnodes=nnodes, nproc=1)
        rest = dict(seconds=5, grace=5, asked=lambda: 0, line=lambda text: None)
        try:
            nodes.follow(workers, **where, **rest)
        except ConfigError as error:
            told.extend(error.faults)
        finally:
            workers.close()

    thread = threading.Thread(target=follow, args=(3,))
    thread.start()
    while thread.is_alive():
        faults += head.pump()
        time.sleep(0.01)
    head.close(0)
    assert told == faults and "node 0 is one of 2 nodes and node 1 one of 3" in told[0]


def test_a_page_is_shared_with_the_one_who_made_it(tmp_path, monkeypatch):
    page = progress.ProgressPage.create(tmp_path / "page")
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "page"))
    clock = progress.Clock()
    clock.enter("data", 7)
    clock.enter("step", 7)
    clock.enter("data", 8)
    assert (page.phase, page["first"], page["reached"]) == ("data", 7, 8)
    assert page["typical"] == 0 and not clock.asked
    for step in (9, 10):
        clock.enter("data", step)
    assert page["typical"] > 0  # of three steps and more
    page["stop"] = 1
    assert clock.asked
    time.sleep(2 * progress.BEAT)
    clock.close()
    assert time.monotonic() - page["beat"] < 2 * progress.BEAT
    assert sum(page.seconds().values()) < 5


def test_start_says_what_a_process_needs(tmp_path):
    said = []
    code = "import os; print(*(os.environ[n] for n in ('JAX_PROCESS_ID', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"
    workers = Workers(
        [sys.executable, "-c", code],
        environ=dict(os.environ),
        local_id=1,
        num_supervisors=2,
        logs=None,
        show=lambda rank, line: said.append((rank, line)),
    )
    workers.start(Start("127.0.0.1:1", 8, 6, 2))
    done = []
    while len(done) < 2:
        workers.pump(0.05)
        done += workers.exits()
    workers.close()
    assert sorted(said) == [(6, "6 2 4"), (7, "7 3 4")] and {one.code for one in done} == {0}
