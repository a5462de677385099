"""Files in launch/ are well-formed.

The Kubernetes manifests train, with processes in place of pods.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from meshtrain.cli.launch import add_flags
from meshtrain.cluster import environment
from meshtrain.errors import EXIT_FAILED, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER
from meshtrain.supervise import messages
from meshtrain.supervise.restart_policy import Settings
from tests.lib.manifests import (
    JOB,
    JOB_SET,
    Pods,
    action_of,
    container_of,
    documents,
    environ_of,
    job_of,
)
from tests.lib.paths import ROOT
from tests.lib.rows import newest_step, rows
from tests.lib.tiny_run import assert_losses_equal_uninterrupted, tiny_run

SCRIPTS = [*ROOT.glob("launch/*.sh"), *ROOT.glob("tests/**/*.sh"), *ROOT.glob("launch/*.sbatch")]
SCRIPTS.append(ROOT / ".ci" / "run")
DEV_POD = ROOT / "launch" / "kubernetes" / "dev_pod.yaml"  # trains nothing by itself
MANIFESTS = sorted({*ROOT.glob("launch/kubernetes/*.yaml")} - {DEV_POD})
KUBERNETES = "1.34"  # job.yaml must match the schemas of this version
LONGEST_BACKOFF = 360  # seconds until Kubernetes replaces a pod that failed repeatedly


# ---- syntax ----


def lint(tool, *arguments):
    path = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not path:
        pytest.skip(f"{tool} is not installed; bash launch/setup.sh dev")
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


def test_the_image_installs_an_extra_of_extras_without_looking_this_package_up():
    text = (ROOT / "launch" / "Dockerfile").read_text().replace("${EXTRAS}", "dev,cuda12")
    code = re.search(r'RUN python -c "(.*?)"', text, re.DOTALL)[1].replace("\\\n", "")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needed = [re.match(r"[\w-]+(\[\w+\])?", line)[0] for line in done.stdout.splitlines()]
    assert {"optax", "pytest", "tokenizers", "jinja2", "pyarrow", "jax[cuda12]"} <= {*needed}
    assert not [name for name in needed if name.startswith("meshtrain")]


@pytest.mark.parametrize("path", [JOB, DEV_POD], ids=lambda path: path.name)
def test_a_manifest_matches_the_schema_of_kubernetes(path):
    lint("kubernetes-validate", "--strict", "-k", KUBERNETES, path)


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
    """Two entries at toy size; a second call finds them done.

    launch/setup.sh, which would install packages, is replaced.
    """
    for path in ROOT.iterdir():
        if path.name not in ("launch", "runs"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "launch").mkdir()
    script = shutil.copy(ROOT / "launch" / "gpu_check.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text(f'test "$1" = dev\necho {sys.executable}\n')
    output = tmp_path / "saved"
    output.mkdir()
    command = ["bash", script, "--toy", f"--output={output}", "--parts", "info", "bandwidth"]

    def check():
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (file,) = output.glob("gpu-check_*.txt")
        assert file.read_text() in done.stdout
        return done.stdout

    assert "info ...\n" in check()
    for name in ("info", "bandwidth"):
        (file,) = output.glob(f"{name}-*_cpu-*.json")
        saved = json.loads(file.read_text())
        assert {row["entry"] for row in saved["rows"]} == {name}
        assert {row["result"] for row in saved["rows"]} == {"passed"}
    assert "..." not in check()


@pytest.mark.slow
def test_the_check_of_gpus_uses_the_wheels_of_a_folder(tmp_path):
    """A package of ours, installed without a network; the queue is replaced."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    wheels = tmp_path / "wheels"
    for folder in (wheels, tmp_path / "launch", tmp_path / "benchmarks" / "gpu"):
        folder.mkdir(parents=True)
    info = "of_the_folder-1.0.dist-info"
    with zipfile.ZipFile(wheels / "of_the_folder-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("of_the_folder.py", "NAME = 'installed'\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: of-the-folder\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (wheels / "requirements.txt").write_text("of-the-folder==1.0\n")
    script = shutil.copy(ROOT / "launch" / "gpu_check.sh", tmp_path / "launch")
    program = "import sys, of_the_folder; print(of_the_folder.NAME, *sys.argv[1:])"
    (tmp_path / "benchmarks" / "gpu" / "run_queue.py").write_text(program)
    environ = {**os.environ, "WHEELS": str(wheels), "PYTHON": sys.executable}
    for _ in range(2):  # the second time it is installed already
        done = subprocess.run(
            ["bash", script, "--list"], env=environ, capture_output=True, text=True
        )
        assert done.stdout == "installed --list\n", done.stderr


# ---- contents of the manifests ----


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_pod_starts_without_the_secret_of_the_supervisors(path):
    (one,) = (one for one in container_of(job_of(path)[0])["env"] if "secretKeyRef" in str(one))
    assert one["name"] == messages.SECRET_VARIABLE
    assert one["valueFrom"] == {"secretKeyRef": {"name": "meshtrain", "key": "secret"}}


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


def test_the_pod_for_development_has_the_rights_of_a_pod_that_trains():
    (document,) = documents(DEV_POD.name)
    pod, trains = document["spec"], job_of(JOB)[0]["template"]["spec"]
    assert pod["securityContext"] == trains["securityContext"]
    (container,), (other,) = pod["containers"], trains["containers"]
    assert container["securityContext"] == other["securityContext"]
    assert container["image"] == f"{other['image']}-dev"
    assert not any("nvidia" in name for name in container["resources"]["limits"])


def test_both_manifests_start_the_same_pods():
    (job, hosts, _), (other, other_hosts, _) = map(job_of, (JOB, JOB_SET))
    assert job["podFailurePolicy"] == other["podFailurePolicy"]
    pod, other_pod = job["template"]["spec"], other["template"]["spec"]
    assert repr(other_pod).replace(other_hosts[0], hosts[0]) == repr(pod)


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
