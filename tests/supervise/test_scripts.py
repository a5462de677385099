"""Scripts of one's own in several processes: under launch, torchrun's variables and mpirun."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.errors import ConfigError, lost_process_fault
from meshtrain.supervise import launch as launch_module
from meshtrain.supervise import messages
from tests.lib.paths import ROOT
from tests.lib.processes import free_port
from tests.lib.rows import losses, newest_step
from tests.lib.tiny_run import TINY

# ---- what is a script ----


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["python", "a.py", "--x=1"], [sys.executable, "a.py", "--x=1"]),
        (["python3.12", "-u", "a.py"], [sys.executable, "-u", "a.py"]),
        (["python", "-m", "a.b"], [sys.executable, "-m", "a.b"]),
        (["a.py", "--x=1"], [sys.executable, "a.py", "--x=1"]),
        (["./run.sh", "a.py"], ["./run.sh", "a.py"]),
        (["--config=a.py"], None),
        (["--config=./a.py"], None),
        (["info"], None),  # also a program of Unix
        (["train", "python"], None),
    ],
)
def test_what_is_not_a_verb_is_python_or_a_path(arguments, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    (tmp_path / "run.sh").touch(mode=0o755)
    assert launch_module.program_of(arguments) == command


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["python", "b.py"], "b.py: no such file"),
        (["b.py"], "b.py: no such file"),
        (["python3"], "python3: nothing to run; give a script: python3 SCRIPT.py"),
        (["./a.txt"], "./a.txt: is not a program; make it executable"),
    ],
    ids=str,
)
def test_a_script_that_cannot_be_run_is_one_line(arguments, fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=f"^{fault}"):
        launch_module.launch(arguments)


def test_a_script_gets_devices_by_variables_and_keeps_its_flags(tmp_path, monkeypatch):
    found = {}

    class Supervisor:
        def __init__(self, settings, *, workdir, secret):
            found.update(grace=settings.grace, workdir=workdir)

        def run(self, command, *, environ, **options):
            found.update(command=command, environ=environ)
            return 0

    monkeypatch.setattr(launch_module, "Supervisor", Supervisor)
    script = tmp_path / "a.py"
    script.touch()
    flags = ["--num_processes=3", f"--workdir={tmp_path / 'run'}"]
    assert launch_module.launch([str(script), *flags], nproc=2, simulate_devices=4, grace=7.0) == 0
    assert found["command"] == [sys.executable, str(script), *flags]
    assert found["environ"]["JAX_PLATFORMS"] == "cpu"
    assert found["environ"]["JAX_NUM_CPU_DEVICES"] == "4"
    assert found["grace"] == 7.0 and found["workdir"] == tmp_path / "run"


@pytest.mark.parametrize(("node_rank", "downloads"), [(0, 1), (1, 0)])
def test_node_0_alone_downloads_the_events_of_earlier_runs(
    node_rank, downloads, tmp_path, monkeypatch
):
    class Supervisor:
        def __init__(self, settings, **options):
            pass

        def run(self, command, **options):
            return 2

    found = []
    monkeypatch.setattr(launch_module, "Supervisor", Supervisor)
    monkeypatch.setattr(launch_module, "_download_events", found.append)
    monkeypatch.setenv(messages.SECRET_VARIABLE, secrets.token_hex(32))
    hosts = dict(nnodes=2, node_rank=node_rank, coordinator="127.0.0.1:8476")
    assert launch_module.launch(["train", f"--workdir={tmp_path / 'run'}"], **hosts) == 2
    assert [workdir.folder for workdir in found] == [tmp_path / "run"] * downloads


# ---- what its processes do ----


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Returns the script that `meshtrain init` writes."""
    folder = tmp_path_factory.mktemp("init") / "project"
    assert app.main("init", [str(folder)]) == 0
    return folder / "train.py"


def environ(**variables):
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        **variables,
    }


def run(command, **variables):
    """Returns the exit code and the output of a command."""
    done = subprocess.run(
        command,
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


LAUNCH = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=2"]


@pytest.fixture(scope="module")
def expected(script, tmp_path_factory):
    """Returns the losses of the script in one process."""
    workdir = tmp_path_factory.mktemp("one")
    code, output = run([sys.executable, script, f"--workdir={workdir}", "--steps=6"])
    assert code == 0, output
    return list(losses(workdir).values())


def assert_losses(workdir, expected):
    np.testing.assert_allclose(list(losses(workdir).values()), expected, rtol=1e-5)


def start(command, **variables):
    """Starts a process with its output in a pipe."""
    return subprocess.Popen(
        command,
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_script_of_init_has_the_same_losses_under_launch(script, expected, tmp_path):
    code, output = run([*LAUNCH, "--", script, f"--workdir={tmp_path}", "--steps=6"])
    assert code == 0, output
    assert "data 4" in output and (tmp_path / "logs/rank-1.log").exists()
    assert_losses(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_script_of_init_has_the_same_losses_on_two_hosts(script, expected, tmp_path):
    """Two supervisors on loopback, each with two processes, as docs/guides/hosts.md starts them."""
    flags = ["--nnodes=2", f"--coordinator=127.0.0.1:{free_port()}"]
    secret = {messages.SECRET_VARIABLE: secrets.token_hex(32)}
    hosts = []
    for rank in range(2):
        command = [*LAUNCH, *flags, f"--node_rank={rank}", "--", script]
        hosts.append(start([*command, f"--workdir={tmp_path}", "--steps=6"], **secret))
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "data 8" in outputs[0] and (tmp_path / "logs/rank-3.log").exists()
    assert_losses(tmp_path, expected)


def torchrun(command):
    """Starts two processes with torchrun's variables."""
    address = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", LOCAL_WORLD_SIZE="2") for rank in range(2)]
    return [start(command, **address, **rank) for rank in ranks]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_script_of_init_has_the_same_losses_under_torchrun(script, expected, tmp_path):
    processes = torchrun([sys.executable, script, f"--workdir={tmp_path}", "--steps=6"])
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_losses(tmp_path, expected)


def mpirun(command):
    """Returns the exit code and the output of two processes of Open MPI."""
    path = shutil.which("mpirun")
    if not path:
        pytest.skip("mpirun is not installed; Debian: apt-get install openmpi-bin")
    # The last two matter in containers and on small machines.
    return run([path, "-n", "2", "--allow-run-as-root", "--oversubscribe", *map(str, command)])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_script_of_init_has_the_same_losses_under_mpirun(script, expected, tmp_path):
    code, output = mpirun([sys.executable, script, f"--workdir={tmp_path}", "--steps=6"])
    assert code == 0, output
    assert "data 2" in output
    assert_losses(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_train_verb_runs_under_mpirun_and_its_mistakes_are_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "meshtrain.main",
        "--config=default",
        *TINY[1:],
        f"--workdir={tmp_path}",
    ]
    command += ["--config.data.build=meshtrain.data.synthetic:build", "--config.train.steps=2"]
    code, output = mpirun([*command, "--config.mesh.data=2"])
    assert code == 0, output
    assert "data 2 · 2 cpu" in output and newest_step(tmp_path) == 1

    code, output = mpirun([*command, "--config.mesh.data=3"])
    assert code == 2, output
    assert "mesh.data=3" in output and "Traceback" not in output


@pytest.mark.parametrize(
    "message",
    [
        "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read "
        "error [127.0.0.1]:51378: Connection reset by peer",
        "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat "
        "timeout. This indicates that the remote task has failed\n\nRPC: /xla.coordination",
        "INTERNAL: NCCL operation ncclAllReduce failed: ncclRemoteError: remote process exited or "
        "there was a network error",
    ],
)
def test_what_libraries_say_of_a_lost_process_is_one_line(message):
    fault = lost_process_fault(ValueError(message))
    assert fault.startswith(
        f"lost contact with another process of this run: ValueError: {message[:40]}"
    )
    assert "\n" not in fault


def test_other_errors_are_not_a_lost_process():
    assert lost_process_fault(ConnectionResetError("Connection reset by peer")) is None
    assert lost_process_fault(RuntimeError("a heartbeat timeout of my own loader")) is None


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_supervisor_a_process_that_loses_the_other_ends_with_a_line(
    lost, script, tmp_path
):
    command = [sys.executable, script, f"--workdir={tmp_path}", "--steps=1000000"]
    processes = torchrun(command)
    try:
        deadline = time.monotonic() + 200
        while newest_step(tmp_path) < 50:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        processes[lost].send_signal(signal.SIGKILL)
        output, _ = processes[1 - lost].communicate(timeout=30)  # at the next step: under a second
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    code = processes[1 - lost].returncode
    if lost == 0 and code == -signal.SIGABRT:
        # jax's client, whose coordinator was in process 0, was faster than Gloo.
        assert "the JAX distributed service detected fatal errors" in output
        return
    assert code == 1, output
    (line,) = (line for line in output.splitlines() if "lost contact" in line)
    assert "another process of this run: ValueError: UNKNOWN: Gloo all-reduce failed" in line
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_script_that_crashes_once_is_restarted_and_resumes(script, tmp_path):
    """Process 1 fails; process 0, which waits for it in a collective, is ended too."""
    faulty = tmp_path / "faulty.py"
    text = script.read_text()
    hook = """
def crash_once(row):
    if row.get("step") == 4 and not pathlib.Path(FLAG).exists():
        pathlib.Path(FLAG).touch()
        raise RuntimeError("planted")

"""
    text = text.replace(
        "def main():", f"import pathlib\nFLAG = {str(tmp_path / 'flag')!r}\n{hook}\ndef main():"
    )
    text = text.replace("eval_data=held_out)", "eval_data=held_out, on_metrics=crash_once)")
    text = text.replace('"train.log_every": 50', '"train.log_every": 1, "checkpoint.every": 2')
    faulty.write_text(text)
    workdir = tmp_path / "run"
    code, output = run([*LAUNCH, "--", faulty, f"--workdir={workdir}", "--steps=8"])
    assert code == 0, output
    assert "RuntimeError: planted" in output and "restored step 4" in output
    events = [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in events].count("restart") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            ("    meshtrain.initialize()", "    import jax\n    jax.devices()\n    #"),
            "JAX_NUM_PROCESSES=2: jax has started the devices of this process alone",
        ),
        (
            ('"mesh.data": -1', '"mesh.data": 3'),
            "train.global_batch=128 is not divisible by mesh.data=3",
        ),
    ],
    ids=["devices first", "config"],
)
def test_a_mistake_in_a_script_is_one_line_and_is_not_restarted(change, fault, script, tmp_path):
    faulty = tmp_path / "faulty.py"
    text = script.read_text()
    assert change[0] in text
    faulty.write_text(text.replace(*change))
    code, output = run([*LAUNCH, "--", faulty, "--steps=2"])
    assert code == 2, output
    assert fault in output and "Traceback" not in output


def test_variables_of_a_launcher_that_are_missing_are_one_line():
    command = [sys.executable, "-c", "import meshtrain; meshtrain.initialize()"]
    environ = {**os.environ, "RANK": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert found.returncode == 2, found.stderr
    assert found.stderr.startswith("RANK=1: WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set")
    assert found.stderr.count("\n") == 1
