"""Runs launch/slurm.sbatch as it is, under a real SLURM with two nodes on this machine."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from meshtrain.checkpoint import manifest
from tests.lib.paths import ROOT
from tests.lib.rows import newest_step, rows
from tests.lib.tiny_run import assert_losses_equal_uninterrupted, tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
FOREVER = 100_000  # steps
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def install():
    if all(map(shutil.which, PROGRAMS)):
        return
    if not shutil.which("apt-get"):
        pytest.skip("SLURM is not installed, and there is no apt-get to install it with")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *arguments], env=environ, capture_output=True, text=True)
    if done.returncode or not all(map(shutil.which, PROGRAMS)):
        pytest.skip(f"SLURM cannot be installed: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Returns the environment variables of a SLURM with two nodes."""
    if os.geteuid() != 0:
        pytest.skip(
            "starting SLURM needs root: to install it, and to write node names to /etc/hosts"
        )
    install()
    folder = tmp_path_factory.mktemp("slurm")
    script = [ROOT / "tests" / "cluster" / "slurm_up.sh"]
    try:
        with open(folder / "up.log", "w") as log:  # not a pipe: the daemons would keep it open
            up = subprocess.run([*script, "up", folder], stdout=log, stderr=log, timeout=60)
        assert up.returncode == 0, (folder / "up.log").read_text()
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([*script, "down", folder], timeout=120, check=True)


class Job:
    """A run that was submitted in `folder`."""

    def __init__(self, cluster, folder, *arguments, steps):
        # In place of a virtual environment: runs this Python.
        bin_folder = folder / "venv" / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (bin_folder / "python").chmod(0o755)
        own, environ = tiny_run(folder, steps=steps)
        self._environ = {**environ, **cluster, "VENV": str(folder / "venv")}
        self.workdir, self._output = folder / "run", folder / "output"
        options = ["--parsable", f"--output={self._output}", "launch/slurm.sbatch"]
        self.id = self.command("sbatch", *options, *own, *arguments).strip()

    def command(self, *arguments):
        done = subprocess.run(
            arguments, cwd=ROOT, env=self._environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def facts(self):
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S+)", self.command("scontrol", "show", "job", self.id)))

    @property
    def output(self):
        return self._output.read_text() if self._output.exists() else ""

    def wait(self, condition, seconds=90):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{self.facts}\n{self.output}"
            time.sleep(0.2)

    def wait_for_step(self, step):
        self.wait(lambda: newest_step(self.workdir) >= step)

    def wait_for_state(self, state):
        def arrived():
            now = self.facts["JobState"]
            assert now == state or now not in ENDED, f"{now}, not {state}\n{self.output}"
            return now == state

        self.wait(arrived)

    def start_now(self):
        """Starts a requeued job, after both nodes have cleaned up; SLURM would wait two minutes."""
        self.wait(lambda: len(self.command("sinfo", "-h", "-N", "-t", "idle").splitlines()) == 2)
        time.sleep(2)
        self.command("scontrol", "update", f"jobid={self.id}", "StartTime=now")


@pytest.fixture
def submit(cluster, tmp_path):
    """Returns a function that submits a run; the run is cancelled after the test."""
    jobs = []

    def start(*arguments, steps):
        jobs.append(Job(cluster, tmp_path, *arguments, steps=steps))
        return jobs[-1]

    yield start
    for job in jobs:
        job.command("scancel", job.id)


def events(job, name):
    return [row for row in rows(job.workdir, "events.jsonl") if row["event"] == name]


def test_a_preempted_job_saves_requeues_and_ends_like_an_uninterrupted_one(submit, tmp_path):
    steps = 60
    job = submit(steps=steps)
    job.wait_for_step(15)
    job.command("scancel", "--signal=TERM", job.id)  # as SLURM does before the time limit
    job.wait_for_state("PENDING")
    assert re.findall(r"Exited with exit code (\d+)", job.output) == ["75", "75"]
    assert job.facts["Restarts"] == "1"
    (preempted,) = events(job, "preempted")
    saved = manifest.verify(job.workdir / "checkpoints" / str(preempted["step"]))
    assert saved.processes == 2 and 15 < preempted["step"] < steps

    job.start_now()
    job.wait_for_state("COMPLETED")
    (restored,) = events(job, "restore")
    assert restored["step"] == preempted["step"]
    assert_losses_equal_uninterrupted(tmp_path, steps=steps)


def test_after_a_process_is_killed_all_restart_on_both_nodes(submit, tmp_path):
    steps = 40
    job = submit(steps=steps)
    job.wait_for_step(15)
    (pid,) = re.findall(r"pid (\d+)", (job.workdir / "logs" / "rank-1.log").read_text())
    os.kill(int(pid), signal.SIGKILL)
    job.wait_for_state("COMPLETED")
    (restart,) = events(job, "restart")
    assert restart["rank"] == 1 and "SIGKILL" in restart["why"]
    for rank in range(2):
        log = (job.workdir / "logs" / f"rank-{rank}.log").read_text()
        assert len(re.findall(r"attempt \d", log)) == 2
    assert job.facts["Restarts"] == "0"  # the job itself was not requeued
    assert_losses_equal_uninterrupted(tmp_path, steps=steps)


def test_a_cancelled_job_is_not_requeued(submit):
    job = submit(steps=FOREVER)
    job.wait_for_step(3)
    job.command("scancel", job.id)
    job.wait(lambda: not job.command("squeue", "-h", "-j", job.id))
    assert (job.facts["JobState"], job.facts["Restarts"]) == ("CANCELLED", "0")
    assert "requeueing the job" not in job.output


def test_a_job_with_a_config_error_fails_and_is_not_requeued(submit):
    job = submit("--config.optim.clip_norn=2", steps=FOREVER)
    job.wait_for_state("FAILED")
    assert (job.facts["ExitCode"], job.facts["Restarts"]) == ("2:0", "0")
    assert 'did you mean "optim.clip_norm"?' in job.output
