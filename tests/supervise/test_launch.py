"""Runs of several processes, with and without the supervisor: faults, signals, the final result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import meshtrain
from benchmarks.faults import injection as faults
from meshtrain.config import load as configfile
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT
from tests.lib.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 240


def test_after_every_fault_the_run_resumes_and_ends_like_an_uninterrupted_one(tmp_path):
    uninterrupted = faults.start(tmp_path / "uninterrupted", STEPS, 0.0)
    assert uninterrupted.wait(300) == 0
    workdir = tmp_path / "interrupted"
    run = faults.start(workdir, STEPS, 0.02, "--stall_seconds=8", "--max_restarts=9")
    restarts = []  # of each fault

    def events(name, folder=workdir):
        return [row for row in faults.read_jsonl(folder, "events.jsonl") if row["event"] == name]

    try:
        for kind, rank in [("kill", 1), ("kill", 0), ("stop", 1), ("sleep", 0), ("terminate", 1)]:
            target = faults.newest_step(workdir) + 25
            faults.wait_for(lambda target=target: faults.newest_step(workdir) >= target, 120, run)
            before = {name: len(events(name)) for name in ("restart", "recovered")}
            faults.inject(kind, rank, workdir)
            for name, count in before.items():
                faults.wait_for(lambda n=name, c=count: len(events(n)) > c, 120, run)
            restarts.append(events("restart")[before["restart"]])
        assert run.wait(300) == 0
    finally:
        run.kill()
    assert faults.final_state(workdir) == faults.final_state(tmp_path / "uninterrupted")
    log = Path(f"{workdir}.log").read_text()
    for cause in ("rank 1 (pid", "killed by signal 9", "rank 0 (pid", "no progress", "goodput"):
        assert cause in log
    # A busy machine may add the restart of a stall; without a limit that short there is none.
    assert [row["code"] for row in restarts] == [-9, -9, 18, 18, 75]
    assert [row["rank"] for row in restarts[:4]] == [1, 0, 1, 0]
    assert restarts[3]["phase"] == "data"
    assert not events("restart", tmp_path / "uninterrupted")


def settings(workdir, **more):
    config = configfile.load_config("configs/default.py").to_dict()
    tiny = tiny_config().to_dict()
    values = {
        f"--config.{section}.{key}": value
        for section in ("train", "model", "data", "optim", "eval")
        for key, value in tiny[section].items()
        if config[section][key] != value
    }
    values |= {f"--config.{key}": value for key, value in more.items()}
    return ["--config=configs/default.py", f"--workdir={workdir}"] + [
        f"{key}={value}" for key, value in values.items()
    ]


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize(
    "sizes",
    [{"mesh.data": 8}, {"mesh.data": 1, "mesh.context": 8}, {"mesh.auto": True}],
    ids=["data", "context", "auto"],
)
def test_two_processes_with_four_devices_each_give_the_losses_of_one_with_eight(sizes, tmp_path):
    """Over context each sequence is on both processes, and keys travel between them.

    Both choose one mesh.
    """
    config = tiny_config()
    # Several evaluation batches: in flight at the same time they would hang.
    config.train.steps, config.eval.batches = 10, 8
    train(config, workdir=tmp_path / "one")
    arguments = settings(tmp_path / "two", **{"train.steps": 10, "eval.batches": 8, **sizes})
    assert meshtrain.launch(arguments, nproc=2, simulate_devices=4) == 0
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(one) == list(two) == list(range(10))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-6)


def start_two(*arguments, second=None):
    """Starts two processes without a supervisor.

    `second` are the arguments of the second, if others.
    """
    port, found = free_port(), []
    for number, own in enumerate([arguments, second or arguments]):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={number}"]
        command = [
            sys.executable,
            "-m",
            "meshtrain.main",
            *flags,
            "--simulate_devices=1",
            *own,
        ]
        pipe = subprocess.PIPE
        found.append(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
    return found


def wait_for(processes, seconds=120):
    """Returns the exit codes, and what each process printed to stderr."""
    stderr = [process.communicate(timeout=seconds)[1] for process in processes]
    return [process.returncode for process in processes], stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_saves_on_all_in_the_same_step(tmp_path, rank):
    processes = start_two(*settings(tmp_path, **{"train.steps": 100000}))
    until = time.monotonic() + 120
    while not ((tmp_path / "metrics.jsonl").exists() and len(losses(tmp_path)) > 10):
        assert time.monotonic() < until
        time.sleep(0.05)
    processes[rank].send_signal(signal.SIGTERM)
    assert wait_for(processes, 30)[0] == [75, 75]
    (newest,) = (tmp_path / "checkpoints").glob("[0-9]*")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["step"]) == ("preempted", int(newest.name))
    assert max(losses(tmp_path)) == int(newest.name) - 1


def test_processes_with_different_configs_report_the_difference(tmp_path):
    first, second = (settings(tmp_path, **{"optim.learning_rate": rate}) for rate in (1e-3, 2e-3))
    codes, stderr = wait_for(start_two(*first, second=second))
    assert codes == [2, 2]
    line = (
        "config.optim.learning_rate differs between processes: 0.001 on process 0, 0.002 on "
        "process 1"
    )
    assert all(text.splitlines() == [f"{line}; use the same"] for text in stderr)


def test_a_config_error_of_one_process_ends_all(tmp_path):
    first, second = (settings(tmp_path, **{"mesh.fsdp": size}) for size in (1, 3))
    codes, stderr = wait_for(start_two(*first, second=second))
    assert codes == [2, 2]
    assert all(text.startswith("process 1: mesh.") for text in stderr)


def test_a_workdir_that_differs_between_hosts_is_reported(tmp_path):
    """Two folders with the same name, as on hosts without a shared file system.

    Each process has its own cwd.
    """
    port, processes = free_port(), []
    for number in range(2):
        (cwd := tmp_path / str(number)).mkdir()
        program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import jax
from tests.lib.configs import tiny_config
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
from meshtrain import ConfigError
from meshtrain.train import train
from meshtrain.cluster import distributed
from meshtrain.checkpoint import lock
lock.VISIBLE_WITHIN = 1.0
distributed.initialize("127.0.0.1:{port}", 2, {number})
try:
    train(tiny_config(), workdir="run")
except ConfigError as error:
    print(error, flush=True)
"""
        command = [sys.executable, "-c", program]
        processes.append(subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=120)[0] for process in processes]
    fault = "process 1: --workdir=run: is not the folder of process 0; use one that all hosts share"
    assert all(fault in text for text in printed)


def test_a_second_run_in_a_workdir_is_rejected(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-m", "meshtrain", *settings(tmp_path, **{"train.steps": 100000})],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        faults.wait_for(lambda: faults.newest_step(tmp_path) > 3, 60, run)
        command = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=1"]
        second = subprocess.run(
            [*command, "--", *settings(tmp_path)], cwd=ROOT, capture_output=True, text=True
        )
    finally:
        run.kill()
        run.wait()
    assert second.returncode == 2 and f"another run is in it, pid {run.pid}" in second.stderr


def test_fewer_processes_continue_with_the_same_batches(tmp_path):
    """A process that cannot restart is left out: the mesh shrinks, batch and data order stay."""
    workdir = tmp_path / "run"
    run = faults.start(workdir, 10**6, 0.01, "--min_nproc=1", "--max_restarts=9")
    command = Path(f"/proc/{run.pid}/cmdline")
    try:
        faults.wait_for(lambda: faults.newest_step(workdir) > 30, 120, run)
        victim = faults.worker_pids(workdir)[1]
        os.kill(victim, signal.SIGKILL)
        faults.wait_for(lambda: faults.worker_pids(workdir).get(1, victim) != victim, 30, run)
        os.kill(faults.worker_pids(workdir)[1], signal.SIGKILL)  # before its first step

        def starts():
            events = faults.read_jsonl(workdir, "events.jsonl")
            return [row["mesh"]["data"] for row in events if row["event"] == "start"]

        faults.wait_for(lambda: len(starts()) == 2, 60, run)
        target = faults.newest_step(workdir) + 30
        faults.wait_for(lambda: faults.newest_step(workdir) > target, 60, run)
        assert list(faults.worker_pids(workdir)) == [0]
        os.kill(faults.worker_pids(workdir)[0], signal.SIGKILL)
        faults.wait_for(lambda: len(starts()) == 3, 60, run)
        assert starts() == [2, 1, 2] and command.exists()
        run.terminate()
        assert run.wait(60) == 75
    finally:
        run.kill()
    found = losses(workdir)
    uninterrupted = faults.start(tmp_path / "uninterrupted", len(found), 0.0)
    assert uninterrupted.wait(300) == 0
    expected = losses(tmp_path / "uninterrupted")
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
