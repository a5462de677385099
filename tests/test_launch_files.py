"""Files in launch/ are well-formed; the Kubernetes manifests train, with processes in place of pods."""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_train import losses, rows

from meshtrain.cli.launch import add_flags
from meshtrain.cluster import environment
from meshtrain.config import load as configfile
from meshtrain.errors import EXIT_FAILED, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER
from meshtrain.supervise import messages
from meshtrain.supervise.restart_policy import Settings
from meshtrain.train import train

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*ROOT.glob("launch/*.sh"), *ROOT.glob("tests/**/*.sh"), *ROOT.glob("launch/*.sbatch")]
SCRIPTS.append(ROOT / ".ci" / "run")
SECRET = secrets.token_hex(32)
MANIFESTS = sorted(ROOT.glob("launch/kubernetes/*.yaml"))
JOB, JOB_SET = (ROOT / "launch" / "kubernetes" / name for name in ("job.yaml", "jobset.yaml"))
KUBERNETES = "1.34"  # job.yaml must match the schemas of this version
LONGEST_BACKOFF = 360  # seconds until Kubernetes replaces a pod that failed repeatedly

# A run whose loss falls; SLOW_DATA makes it slow enough to interrupt.
TINY = [
    "--config=configs/default.py",
    "--config.train.global_batch=16",
    "--config.train.log_every=1",
    "--config.model.num_layers=1",
    "--config.model.d_model=32",
    "--config.model.num_heads=4",
    "--config.model.num_kv_heads=2",
    "--config.model.d_ff=64",
    "--config.model.vocab_size=64",
    "--config.data.seq_len=16",
    "--config.optim.schedule=constant",
    "--config.optim.warmup_steps=0",
    "--config.eval.batches=0",
    "--config.checkpoint.every=10",
]
SLOW_DATA = """
import time
from meshtrain.data import synthetic
from meshtrain.data.source import Source

def build(**keys):
    read = synthetic.build(**keys).read
    return Source(lambda indices: (time.sleep(0.1), read(indices))[1])
"""


def tiny_run(folder, *, steps):
    """Returns the arguments and the environment of a run in `folder`."""
    (folder / "slow_data.py").write_text(SLOW_DATA)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [*TINY, f"--config.train.steps={steps}", "--config.data.build=slow_data:build"]
    return [*arguments, f"--workdir={folder / 'run'}"], {**os.environ, **environ}


def assert_losses_equal_uninterrupted(folder, *, steps):
    """Asserts that the losses equal a run of one process without interruption."""
    overrides = [
        f"--config.train.steps={steps}",
        "--config.data.build=meshtrain.data.synthetic:build",
    ]
    config = configfile.load_config(str(ROOT / "configs" / "default.py"), [*TINY[1:], *overrides])
    train(config, workdir=folder / "uninterrupted")
    found, expected = losses(folder / "run"), losses(folder / "uninterrupted")
    assert list(found) == list(expected) == list(range(steps))
    assert expected[steps - 1] < expected[0]
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def newest_step(workdir):
    try:
        return max(losses(workdir), default=-1)
    except (OSError, ValueError):  # no file yet, or an incomplete line
        return -1


# ---- syntax ----


def lint(tool, *arguments):
    path = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not path:
        pytest.skip(f"{tool} is not installed; pip install meshtrain[dev]")
    done = subprocess.run([path, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    lint("shellcheck", path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stops_at_the_first_error_and_documents_its_usage(path):
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


def test_hadolint_finds_nothing():
    lint("hadolint", ROOT / "launch" / "Dockerfile")


def test_every_file_copied_into_the_image_exists_and_is_not_ignored():
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "launch" / "Dockerfile").read_text(), re.M)
    ignored = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().splitlines()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists() and f"!{name}" in ignored


def test_the_job_matches_the_schema_of_kubernetes():
    lint("kubernetes-validate", "--strict", "-k", KUBERNETES, ROOT / "launch/kubernetes/job.yaml")


@pytest.mark.parametrize("path", [p for p in MANIFESTS if p != JOB], ids=lambda path: path.name)
def test_a_job_set_matches_the_schema_of_jobset(path):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = documents(path.name)
    parsed = models.JobsetV1alpha2JobSet.from_dict(document)  # raises for a wrong type
    assert unknown_keys(document, parsed.to_dict()) == []
    document["spec"]["replicatedJobs"][0]["replicass"] = 2
    parsed = models.JobsetV1alpha2JobSet.from_dict(document)
    assert unknown_keys(document, parsed.to_dict()) == ["/spec/replicatedJobs/0/replicass"]


def unknown_keys(document, parsed, path=""):
    """Returns the paths of the keys that parsing dropped."""
    items = enumerate(document) if isinstance(document, list) else document.items()
    found = []
    for key, value in items:
        if isinstance(parsed, dict) and key not in parsed:
            found.append(f"{path}/{key}")
        elif isinstance(value, dict | list):
            found += unknown_keys(value, parsed[key], f"{path}/{key}")
    return found


# ---- gpu_check.sh ----


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_check_of_gpus_saves_its_table(tmp_path):
    """Two parts at toy size; other tests run the others. launch/setup.sh, which would install packages, is replaced."""
    for path in ROOT.iterdir():
        if path.name not in ("launch", "runs"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "launch").mkdir()
    script = shutil.copy(ROOT / "launch" / "gpu_check.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text(f'test "$1" = dev\necho {sys.executable}\n')
    output = tmp_path / "saved"
    output.mkdir()
    command = ["bash", script, "--toy", f"--output={output}", "--parts", "info", "bandwidth"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = output.glob("gpu-check_*.json")
    rows = json.loads(file.read_text())["rows"]
    checks = {row["check"].partition(" ")[0] for row in rows}
    assert checks == {"info", "bandwidth"}
    assert {row["result"] for row in rows} == {"passed"}
    assert file.with_suffix(".txt").read_text() in done.stdout


# ---- contents of the manifests ----


def documents(name):
    return list(yaml.safe_load_all((ROOT / "launch" / "kubernetes" / name).read_text()))


def job_of(path):
    """Returns the Job, the host names of the pods of all its replicas, and how often a JobSet restarts all."""
    *services, top = documents(path.name)
    if top["kind"] == "Job":
        (service,) = services
        job, name, domain = top["spec"], top["metadata"]["name"], service["metadata"]["name"]
        assert job["template"]["spec"].pop("subdomain") == domain
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        names, restarts = [name], 0
    else:
        (group,) = top["spec"]["replicatedJobs"]
        job, domain = group["template"]["spec"], top["metadata"]["name"]
        names = [f"{domain}-{group['name']}-{number}" for number in range(group["replicas"])]
        restarts = top["spec"]["failurePolicy"]["maxRestarts"]
    hosts = [f"{name}-{number}.{domain}" for name in names for number in range(job["completions"])]
    return job, hosts, restarts


def container_of(job):
    (container,) = job["template"]["spec"]["containers"]
    return container


def environ_of(job, hosts, number):
    """Returns the variables of pod `number` of all; the value of a Secret is another for each run of the tests.

    JobSet sets the labels, Kubernetes the index, and GKE the variables of pods that request TPUs.
    """
    replica, index = divmod(number, job["completions"])
    replicas = len(hosts) // job["completions"]
    labels = {"job-index": replica, "replicatedjob-replicas": replicas}

    def value_of(source):
        if "fieldRef" not in source:
            return SECRET
        (name,) = re.findall(r"jobset.sigs.k8s.io/([\w-]+)'\]$", source["fieldRef"]["fieldPath"])
        return str(labels[name])

    container = container_of(job)
    found = {
        one["name"]: one.get("value") or value_of(one["valueFrom"]) for one in container["env"]
    }
    if "google.com/tpu" in container["resources"]["limits"]:
        slice_hosts = hosts[replica * job["completions"] :][: job["completions"]]
        found |= {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": ",".join(slice_hosts)}
    return {**found, "JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_supervisors_sign_their_messages_if_the_secret_exists(path):
    (one,) = (one for one in container_of(job_of(path)[0])["env"] if "secretKeyRef" in str(one))
    assert one["name"] == messages.SECRET_VARIABLE
    assert one["valueFrom"] == {
        "secretKeyRef": {"name": "meshtrain", "key": "secret", "optional": True}
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_finds_its_process_id_and_the_timeouts_fit_together(path):
    job, hosts, _ = job_of(path)
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    for number in range(len(hosts)):
        found = environment.process_info(environ_of(job, hosts, number))
        assert (found.host, found.num_processes, found.process_id) == (hosts[0], len(hosts), number)

    pod, container = job["template"]["spec"], container_of(job)
    assert container["command"] == ["python", "-m", "meshtrain", "launch"]
    launch_flags = container["args"][: container["args"].index("--")]
    flags = argparse.ArgumentParser()
    add_flags(flags)
    given = vars(flags.parse_args(launch_flags))
    assert given.pop("hosts") is None  # each pod starts one supervisor
    settings = Settings(**given)
    assert settings.grace < pod["terminationGracePeriodSeconds"]
    assert settings.join_seconds > LONGEST_BACKOFF
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it


def test_both_manifests_start_the_same_pods():
    (job, hosts, _), (other, other_hosts, _) = map(job_of, (JOB, JOB_SET))
    assert job["podFailurePolicy"] == other["podFailurePolicy"]
    pod, other_pod = job["template"]["spec"], other["template"]["spec"]
    assert repr(other_pod).replace(other_hosts[0], hosts[0]) == repr(pod)


def action_of(job, code):
    """Returns the action of Kubernetes for a pod with this exit code: from the first matching rule."""
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes")
        if on and on["operator"] == "In" and code in on["values"]:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_permanent_failures_fail_the_job_and_preemption_is_ignored(path):
    job, *_ = job_of(path)
    found = {code: action_of(job, code) for code in (EXIT_USER, EXIT_NOT_FINITE, EXIT_PREEMPTED)}
    assert list(found.values()) == ["FailJob", "FailJob", "Ignore"]
    for code in (EXIT_FAILED, EXIT_STALLED, 128 + signal.SIGKILL):
        assert action_of(job, code) == "Count"


def test_slurm_signals_earlier_than_the_grace_period_of_the_supervisor():
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.M)
    assert int(seconds) > Settings().grace


# ---- simulated jobs ----


class Pods:
    """Runs local processes as Kubernetes runs the pods of a Job or JobSet."""

    def __init__(self, path, arguments, environ):
        self.job, self._hosts, self.restarts_left = job_of(path)
        self._local_address = self._on_loopback()
        self._arguments, self._environ = arguments, environ
        self.running, self.codes = {}, {number: [] for number in range(len(self._hosts))}
        self._failures, self._start_at = 0, dict.fromkeys(self.codes, 0.0)

    def _on_loopback(self):
        """Returns variables that replace those of the manifest with host names."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = environ_of(self.job, self._hosts, 0)["JAX_COORDINATOR_ADDRESS"]
        assert address.startswith(self._hosts[0] + ":")
        return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}

    def start(self, number):
        container = container_of(self.job)
        launch_flags = container["args"][: container["args"].index("--") + 1]
        command = [sys.executable, *container["command"][1:], *launch_flags, *self._arguments]
        own = environ_of(self.job, self._hosts, number)
        environ = {**self._environ, **own, **self._local_address}
        self.running[number] = subprocess.Popen(command, cwd=ROOT, env=environ)

    def tick(self):
        """Returns True if the job completed, False if it failed, None while it runs."""
        for number, at in list(self._start_at.items()):
            if time.monotonic() >= at:
                del self._start_at[number]
                self.start(number)
        for number, process in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[number]
            code = process.returncode
            code = 128 - code if code < 0 else code
            self.codes[number].append(code)
            if code and not self._handle_failure(number, action_of(self.job, code)):
                return False
        return None if self.running or self._start_at else True

    def _handle_failure(self, number, action):
        """Replaces the pod or all pods; returns whether the job continues."""
        self._failures += action == "Count"
        if action == "FailJob":
            return False
        if self._failures <= self.job["backoffLimit"]:
            self._start_at[number] = time.monotonic() + 2  # 10 s in Kubernetes
            return True
        if not self.restarts_left:
            return False
        self.restarts_left, self._failures = self.restarts_left - 1, 0
        self.end(signal.SIGTERM)
        self._start_at = dict.fromkeys(self.codes, time.monotonic())
        return True

    def end(self, number=signal.SIGKILL):
        for process in self.running.values():
            process.send_signal(number)
        for process in self.running.values():
            process.wait(timeout=100)
        self.running.clear()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "victim", "signal_number", "codes"),
    [
        ("job.yaml", 0, signal.SIGKILL, {0: [137, 0], 1: [0]}),
        ("job.yaml", 1, signal.SIGTERM, {0: [0], 1: [75, 0]}),  # as when its node is drained
        ("jobset.yaml", 1, signal.SIGKILL, None),  # all pods are restarted
    ],
)
def test_a_job_completes_after_losing_a_pod(tmp_path, name, victim, signal_number, codes):
    steps, sent, deadline = 40, False, time.monotonic() + 150
    pods = Pods(ROOT / "launch" / "kubernetes" / name, *tiny_run(tmp_path, steps=steps))
    restarts = pods.restarts_left
    try:
        while (completed := pods.tick()) is None:
            if not sent and newest_step(tmp_path / "run") >= 15:
                pods.running[victim].send_signal(signal_number)
                sent = True
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.1)
    finally:
        pods.end()
    assert completed and sent
    if codes:
        assert pods.codes == codes
    else:
        assert pods.restarts_left == restarts - 1
    restores = [row for row in rows(tmp_path / "run", "events.jsonl") if row["event"] == "restore"]
    assert len(restores) == 1 and restores[0]["step"] >= 10
    assert_losses_equal_uninterrupted(tmp_path, steps=steps)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_invalid_config_fails_the_job_at_once(tmp_path):
    arguments, environ = tiny_run(tmp_path, steps=5)
    pods = Pods(JOB, [*arguments, "--config.mesh.fsdp=3"], environ)
    deadline = time.monotonic() + 100
    try:
        while (completed := pods.tick()) is None:
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.1)
    finally:
        pods.end()
    assert completed is False and [EXIT_USER] in pods.codes.values()
