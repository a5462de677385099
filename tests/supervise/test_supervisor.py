"""The supervisor, with processes that only write their progress page and do not import jax."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshtrain.cluster import progress
from meshtrain.errors import ConfigError
from meshtrain.supervise import nodes
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.supervisor import Supervisor, _remove_processes
from meshtrain.supervise.workers import RankAssignment, Workers
from tests.lib.hellos import HELLO, NOT_HELLO, STATUS, line
from tests.lib.paths import ROOT
from tests.lib.processes import free_port, wait_until_listening

# A worker that writes its progress page without importing jax, which takes seconds.
WORKER = """
import mmap, os, signal, sys, time
rank, folder = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1]
with open(os.environ["MESHTRAIN_PROGRESS"], "r+b") as file:
    page = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
FIELDS = sys.argv[2].split(",")
PHASES = FIELDS[FIELDS.index("stop_requested") + 1:]
def put(name, value): page[FIELDS.index(name)] = value
def step(number, phase="step"):
    put("step_seconds", 0.01); put("phase", PHASES.index(phase))
    put("phase_start", time.monotonic()); put("heartbeat", time.monotonic())
    if page[FIELDS.index("first_step")] < 0: put("first_step", number)
    put("current_step", number)
def attempt():
    # Writes how many processes the run has, and waits until all of this host have started: a
    # process that fails in its first line must not end the attempt before another has started.
    # Returns the number of the attempt.
    name, env = f"{folder}/attempts-{rank}", os.environ
    with open(name, "a") as file: file.write(env["JAX_NUM_PROCESSES"])
    local = range(int(env["LOCAL_WORLD_SIZE"]))
    started = [f"{folder}/{env['JAX_COORDINATOR_ADDRESS']}-{i}" for i in local]
    open(started[int(env["LOCAL_RANK"])], "w").close()
    while not all(map(os.path.exists, started)): time.sleep(0.01)
    return os.path.getsize(name)
def stop_requested(): return page[FIELDS.index("stop_requested")] > 0
def run_steps(seconds=30):
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until and not stop_requested():
        step(number := number + 1); time.sleep(0.02)
    sys.exit(75 if stop_requested() else 0)
number = attempt()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def supervise(tmp_path, capfd):
    """Returns a function that runs processes with some code.

    It returns the exit code and all output.
    """

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


def test_output_is_prefixed_with_the_rank_and_logged(supervise, tmp_path):
    code, output = supervise(
        "print('[Gloo] noise'); print('hello', flush=True); os.write(2, b'no end')"
    )
    assert code == 0
    lines = output.splitlines()
    assert {"[0] hello", "[1] hello", "[0] no end", "[1] no end"} <= {*lines}
    assert "Gloo" not in output
    assert "[Gloo] noise\nhello\nno end" in (tmp_path / "rank-1.log").read_text()


def test_lines_of_gloo_that_threads_have_mixed_are_not_shown(supervise):
    """The rest of the second line follows, or only its line break. Seen with jaxlib 0.10.2."""
    words = "is connected to 3 peer ranks. Expected number of connected peer ranks is : "
    mixed = [
        "before",
        "",
        f"[Gloo] Rank [Gloo] Rank 0 {words}1",
        f"0 {words}3",
        "between",
        f"[Gloo] Rank 1[Gloo] Rank 3 {words}33",
        "",
        "",
        f"[Gloo] Rank 2 {words}[Gloo] Rank 0 {words}3",
        "3",
        "4",
        "after",
    ]
    code, output = supervise(f"print(*{mixed!r}, sep='\\n')", nproc=1)
    # A process alone has no rank before its lines.
    shown = [line for line in output.splitlines() if not line.startswith("launch: ")]
    kept = ["before", "", "between", "", "4", "after"]
    assert code == 0 and shown == kept


def test_lines_that_only_say_that_another_process_has_ended_are_logged_and_not_shown(
    supervise, tmp_path
):
    lines = """E1123 04:40:01.048467    9768 coordination_service_agent.cc:289] Polled an error \
from coordination
F1123 04:40:01.048498    9768 client.h:80] Terminating process because the JAX distributed service \
detected
Additional GRPC error information from remote target coordination_service while calling \
/xla.coordination
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}
F1123 04:36:12.977217    3156 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --nonsense"""
    code, output = supervise(f"print({lines!r})")
    shown = [line for line in output.splitlines() if line.startswith("[0]")]
    assert code == 0 and len(shown) == 1 and "Unknown flag" in shown[0]
    assert lines in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "rank 1 .* killed by signal 9 .SIGKILL. in phase step of step 3",
        ),
        (
            "import ctypes; ctypes.string_at(0)",
            "rank 1 .* killed by signal 11 .SIGSEGV. in phase step of step 3",
        ),
        ("sys.exit('the reason')", "rank 1 .* ended with exit code 1 in phase step of step 3"),
        (
            "os.kill(os.getpid(), 19)",
            "rank 1 .* stopped by a signal.*, in phase step of step 3",
        ),
        ("put('heartbeat', 1.0); time.sleep(99)", "rank 1 .* sent no heartbeat for"),
    ],
)
def test_after_any_failure_of_a_process_all_restart(supervise, tmp_path, failure, message):
    code, output = supervise(f"""
step(3)
if number == 1 and rank == 1: {failure}
while number == 1: step(3); time.sleep(0.1)
""")
    assert code == 0
    assert attempts_of(tmp_path, 0) == attempts_of(tmp_path, 1) == 2
    assert re.search(message + ".*; restart 1 of 3", output)


@pytest.mark.slow
@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_clock_of_a_process_that_jumps_neither_causes_nor_hides_a_stall(supervise, jump):
    """The times that a process writes are compared only with each other."""
    code, output = supervise(
        f"""
real, began = time.monotonic, time.monotonic()
def jumping(): return real() + ({jump} if real() > began + 0.3 else 0)
time.monotonic = jumping
for i in range(12):
    step(i); time.sleep(0.05)
if number == 1 and rank == 1: time.sleep(20)
if number == 1: [(step(12), time.sleep(0.1)) for _ in range(200)]
""",
        stall_seconds=2.0,
    )
    assert code == 0 and "restart 1 of 3" in output
    assert re.search(
        "rank 1 .* (sent no heartbeat|no progress) .* in phase step of step 11", output
    )


@pytest.mark.parametrize(
    "damage",
    [
        "put('phase', float('nan'))",
        "put('current_step', 1e300)",
        "os.truncate(os.environ['MESHTRAIN_PROGRESS'], 20)",
    ],
)
def test_a_damaged_progress_page_is_one_line_and_the_run_continues(supervise, tmp_path, damage):
    code, output = supervise(f"step(3)\nif rank == 1: {damage}\ntime.sleep(0.5)")
    assert code == 0 and attempts_of(tmp_path) == 1
    (line,) = [line for line in output.splitlines() if "damaged" in line]
    assert line.startswith("[1] its progress page is damaged: ")


def test_the_process_furthest_behind_is_named_when_all_wait(supervise):
    code, output = supervise("""
step(5 if rank == 0 else 4)
if number == 1:
    while True: put("heartbeat", time.monotonic()); time.sleep(0.1)
""")
    assert code == 0 and "rank 1" in output
    assert "made no progress for 1 s, in phase step of step 4" in output


def test_subprocesses_die_with_their_process(supervise, tmp_path):
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
def test_failures_that_would_recur_are_not_retried(supervise, tmp_path, code):
    exit_code, output = supervise(f"print('train.steps=x: no'); step(3); sys.exit({code})")
    assert exit_code == code and attempts_of(tmp_path) == 1
    assert "giving up" in output and "launch:   train.steps=x: no" in output


def test_a_crash_loop_at_one_step_stops_early_and_one_that_progresses_at_max_restarts(
    supervise, tmp_path
):
    code, output = supervise("step(3)\nif rank == 1: sys.exit(1)\ntime.sleep(99)", max_restarts=9)
    assert code == 1 and attempts_of(tmp_path) == 2
    assert "2 attempts in a row ended this way at step 3" in output
    code, output = supervise(
        "step(0); step(3 + number)\nif rank == 1: sys.exit(1)\ntime.sleep(99)", max_restarts=2
    )
    assert code == 1 and attempts_of(tmp_path) == 2 + 3
    assert "2 restarts within 3600 s, the limit of --max_restarts" in output


@pytest.mark.slow
def test_a_run_that_always_hangs_ends_with_18(supervise, tmp_path):
    code, _ = supervise("step(3); time.sleep(99)", max_restarts=9)
    assert code == 18 and attempts_of(tmp_path) == 3


@pytest.mark.slow
def test_a_preempted_run_resumes_without_using_the_restart_budget(supervise, tmp_path):
    code, output = supervise("step(3); sys.exit(75 if number < 4 else 0)", max_restarts=0)
    assert code == 0 and attempts_of(tmp_path) == 4 and "restart after saving" in output


def test_a_signal_asks_all_processes_to_save(supervise, tmp_path):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    code, output = supervise("run_steps()")
    assert code == 75 and "asked to stop" in output and attempts_of(tmp_path) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_that_do_not_save_in_time_are_killed(supervise):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code, output = supervise("while True: step(1); time.sleep(0.1)", grace=1.0)
    assert code == 128 + signal.SIGTERM and "not saved within" in output


def test_a_second_signal_aborts(supervise):
    # In a background job of a shell, Ctrl-C is ignored, and the supervisor would keep ignoring it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for seconds in (0.5, 1.0):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    code, output = supervise("while True: step(1); time.sleep(0.1)", grace=60)
    signal.signal(signal.SIGINT, before)
    assert code == 128 + signal.SIGINT and "aborted" in output and time.monotonic() - began < 10


def test_processes_die_when_their_supervisor_is_killed(tmp_path):
    code = """
import os, sys
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.supervisor import Supervisor
worker = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
Supervisor(Settings(nproc=2), workdir=None).run(
    [sys.executable, "-c", worker], environ=dict(os.environ), logs=None
)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as run:
        pids = [int(run.stdout.readline().split()[-1]) for _ in range(2)]
        run.kill()
    time.sleep(1)
    assert not [pid for pid in pids if is_alive(pid)]


def test_fewer_processes_continue_until_all_can_restart(supervise, tmp_path):
    """Starts with three processes.

    The config does not allow two, so with two it ends with exit code 2.
    """
    code, output = supervise(
        """
count = int(os.environ["JAX_NUM_PROCESSES"])
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
    assert code == 0, output
    assert (tmp_path / "attempts-0").read_text() == "33213"


def test_processes_are_left_out_until_an_attempt_works(supervise, tmp_path):
    settings = dict(nproc=3, min_nproc=1, max_restarts=9)
    code, output = supervise("if rank: sys.exit(1)\nstep(0); time.sleep(0.5)", **settings)
    assert code == 0 and attempts_of(tmp_path) == 3 and "without 2 of 3 processes" in output


def test_a_process_preempted_before_its_first_step_is_not_left_out(supervise, tmp_path):
    code, output = supervise("sys.exit(75 if number < 2 else 0)", min_nproc=1)
    assert code == 0 and attempts_of(tmp_path, 1) == 2 and "without" not in output


def test_a_process_that_prints_without_pause_does_not_block_the_supervisor(supervise):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code = "step(1)\nwhile not stop_requested(): os.write(1, b'x\\n' * 1000)\nsys.exit(75)"
    assert supervise(code, stall_seconds=60)[0] == 75


@pytest.mark.parametrize(
    ("code", "expected"),
    [("run_steps()", 75), ("step(1); os.kill(os.getpid(), 15)", 143), ("", 75)],
)
def test_a_host_that_is_asked_to_stop_exits_with_the_code_of_its_processes(
    tmp_path, code, expected
):
    port, received_signals, codes = free_port(), [], []
    server = nodes.Server("127.0.0.1", port, 2)
    command = [sys.executable, "-c", WORKER + code, str(tmp_path), ",".join(progress.FIELDS)]
    workers = Workers(command, environ=dict(os.environ), logs=None, show=lambda *line: None)

    def follow():
        where = dict(host="127.0.0.1", port=port, node=1, nnodes=2, nproc=1, seconds=5, grace=5)
        callbacks = dict(num_signals=lambda: len(received_signals), log=lambda line: None)
        codes.append(nodes.follow_node_0(workers, **where, **callbacks))

    thread = threading.Thread(target=follow)
    thread.start()
    connected_at = 0.0
    while thread.is_alive():
        server.poll()
        time.sleep(0.01)
        if server.connected() and not connected_at:
            connected_at = time.monotonic()
            if code:
                server.connected()[0].start(RankAssignment("127.0.0.1:1", 1, 0, 1))
        if connected_at and not received_signals and time.monotonic() - connected_at > 0.5:
            received_signals.append(signal.SIGTERM)
    workers.close()
    server.close(0)
    assert codes == [expected]


def test_goodput_is_recorded(supervise, tmp_path):
    script = """
step(0); time.sleep(1.0); step(10)
if number == 1: time.sleep(0.5); os.kill(os.getpid(), 9)
put("first_step", 4); time.sleep(1.0)
"""
    code, output = supervise(script, stall_seconds=60)
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["restart", "recovered", "goodput"]
    assert (rows[2]["restarts"], rows[2]["lost_steps"]) == (1, 6)
    assert abs(rows[2]["seconds"]["lost"] - 0.06) < 1e-6 and rows[2]["seconds"]["wall"] > 0.5
    assert "1 restarts · 6 steps lost" in output


def test_processes_are_removed_from_the_last_hosts_first():
    assert _remove_processes([2, 2], 0) == [2, 2]
    assert _remove_processes([2, 2], 1) == [2, 1]
    assert _remove_processes([2, 2], 3) == [1, 0]


def supervisors(tmp_path, code, count, *, secret="", port=None, **settings):
    """Runs a supervisor for each of `count` hosts, simulated by folders.

    Returns their exit codes.
    """
    port, codes = port or free_port(), {}

    def one(node):
        (folder := tmp_path / str(node)).mkdir(exist_ok=True)
        program = f"""
import os, sys
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.supervisor import Supervisor
settings = Settings(nnodes={count}, node_rank={node}, coordinator="127.0.0.1:{port}", **{settings})
command = [sys.executable, "-c", {WORKER + code!r}, {str(folder)!r}, {",".join(progress.FIELDS)!r}]
supervisor = Supervisor(settings, workdir=None, secret={secret!r})
sys.exit(supervisor.run(command, environ=dict(os.environ), logs=None))
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


@pytest.mark.parametrize("secret", ["", "s" * 32], ids=["insecure", "secret"])
def test_the_processes_of_an_attempt_have_a_token_of_their_own(tmp_path, secret):
    codes = supervisors(
        tmp_path,
        "open(f'{folder}/token-{number}', 'w').write(os.environ['MESHTRAIN_TOKEN'])\n"
        "step(3)\n"
        "sys.exit(number == 1)\n",
        2,
        secret=secret,
        join_seconds=30.0,
    )
    assert codes == [0, 0]
    first, second = (
        {(tmp_path / node / f"token-{number}").read_text() for node in "01"} for number in (1, 2)
    )
    assert len(first) == len(second) == 1 and first != second
    assert len(*first) == 64


def test_supervisors_of_several_hosts_restart_together(tmp_path):
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


def test_strangers_do_not_disturb_a_run_of_two_hosts(tmp_path):
    port, done, connections = free_port(), threading.Event(), []

    def attack():
        sent = itertools.cycle([line(HELLO), b"[" * 10**7, *NOT_HELLO, b""])
        while not done.is_set():
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                connections[-1].settimeout(0.2)
                connections[-1].sendall(next(sent))
            time.sleep(0.005)

    thread = threading.Thread(target=attack)
    thread.start()
    code = "run_steps(3)"
    codes = supervisors(tmp_path, code, 2, secret="s" * 32, port=port, join_seconds=30.0)
    done.set()
    thread.join()
    for connection in connections:
        connection.close()
    assert codes == [0, 0] and len(connections) > 100
    out = (tmp_path / "0" / "out").read_text()
    assert "· 0 restarts ·" in out
    assert 1 <= out.count("connection closed") <= 3  # one line for each kind, from one address
    assert "connected to node 0" in (tmp_path / "1" / "out").read_text()


def test_a_host_that_never_answers_kill_does_not_hold_the_others(tmp_path):
    """It reports all the time, and is asked before the processes here are killed."""
    port = free_port()
    program = f"""
import os, sys
from meshtrain.supervise import nodes
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.supervisor import Supervisor
nodes.KILL_SECONDS = 2.0
settings = Settings(nnodes=2, coordinator="127.0.0.1:{port}", max_restarts=0)
command = [sys.executable, "-c", "import time; time.sleep(99)"]
sys.exit(Supervisor(settings, workdir=None).run(command, environ=dict(os.environ), logs=None))
"""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    supervisor = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    try:
        wait_until_listening(supervisor, port)
        with socket.create_connection(("127.0.0.1", port)) as host, host.makefile("rb") as lines:
            host.sendall(line(HELLO))
            commands = (json.loads(text)["do"] for text in lines)
            assert "start" in commands  # reads until it arrives
            host.sendall(line({"exits": [dict(rank=1, code=1, status=STATUS, tail=[])]}))
            assert "kill" in commands
            deadline = time.monotonic() + 20
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline:
                    host.sendall(line({"statuses": []}))
                    time.sleep(0.05)
        assert supervisor.wait(10) == 1
    finally:
        supervisor.kill()
    output = supervisor.communicate()[0]
    assert "node 1: 127.0.0.1 has not killed its processes within 2 s" in output
    assert "rank 1 (pid 7) ended with exit code 1" in output


def test_a_missing_host_is_named(tmp_path, capfd):
    assert supervisors(tmp_path, "", 1) == [0]
    settings = Settings(nnodes=2, coordinator=f"127.0.0.1:{free_port()}", join_seconds=0.5)
    assert Supervisor(settings, workdir=None).run(["true"], environ={}, logs=None) == 1
    assert "1 of 2 nodes arrived, missing [1]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("no.such.host.invalid", "cannot look up no.such.host.invalid: Name or service not known"),
        ("127.0.0.1", "Connection refused"),
    ],
)
def test_a_node_0_that_is_not_reached_is_reported_with_the_reason(host, why, capfd):
    settings = Settings(
        nnodes=2, node_rank=1, coordinator=f"{host}:{free_port()}", join_seconds=0.5
    )
    supervisor = Supervisor(settings, workdir=None, secret="s" * 32)
    assert supervisor.run(["true"], environ={}, logs=None) == 1
    output = "".join(capfd.readouterr())
    assert "node 0 not reached within 0 s: " + why in output and "SECRET" not in output


def test_a_supervisor_of_another_run_is_rejected():
    port = free_port()
    server = nodes.Server("127.0.0.1", port, 2)
    reported, faults = [], []

    def follow(nnodes):
        workers = Workers(["true"], environ={}, logs=None, show=print)
        where = dict(host="127.0.0.1", port=port, node=1, nnodes=nnodes, nproc=1)
        rest = dict(seconds=5, grace=5, num_signals=lambda: 0, log=lambda line: None)
        try:
            nodes.follow_node_0(workers, **where, **rest)
        except ConfigError as error:
            reported.extend(error.faults)
        finally:
            workers.close()

    thread = threading.Thread(target=follow, args=(3,))
    thread.start()
    while thread.is_alive():
        faults += server.poll()
        time.sleep(0.01)
    server.close(0)
    assert reported == faults and "node 0 is one of 2 nodes and node 1 one of 3" in faults[0]
