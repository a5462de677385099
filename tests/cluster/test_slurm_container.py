"""launch/slurm.sbatch in containers: what it passes to `srun`.

A script that records it replaces `srun`.
"""

import os
import subprocess
import sys

import pytest

from tests.lib.paths import ROOT

SBATCH = ROOT / "launch" / "slurm.sbatch"
# Records its arguments, and runs what follows the options, as `srun` of one task without containers
# does.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$RECORD"
while [[ $1 == --* ]]; do shift; done
[[ $1 != /opt/venv/bin/python ]] || set -- "$PYTHON" "${@:2}"
exec "$@"
"""


@pytest.fixture
def submit(tmp_path):
    """Returns a function that runs the batch script.

    It returns the process, and the arguments of srun.
    """
    programs, record = tmp_path / "bin", tmp_path / "record"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    own = ("VENV", "CONTAINER_IMAGE", "CONTAINER_MOUNTS")
    environ = {name: value for name, value in os.environ.items() if name not in own}
    environ |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8"}
    environ |= {"RECORD": str(record), "PYTHON": sys.executable}

    def run(*arguments, **variables):
        command = ["bash", str(SBATCH), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env={**environ, **variables}, capture_output=True, text=True
        )
        return done, record.read_text().splitlines() if record.exists() else None

    return run


def test_a_container_has_the_repository_and_the_mounts(submit, tmp_path):
    image = tmp_path / "meshtrain.sqsh"
    image.touch()
    variables = dict(CONTAINER_IMAGE=str(image), CONTAINER_MOUNTS="/shared:/shared,/data:/data:ro")
    done, arguments = submit("--help", **variables)
    assert done.returncode == 0 and "usage: meshtrain VERB" in done.stdout, done.stderr
    start = arguments.index("--cpus-per-task=8") + 1
    assert arguments[start:] == [
        f"--container-image={image}",
        "--no-container-entrypoint",
        f"--container-workdir={ROOT}",
        f"--container-mounts={ROOT}:{ROOT},/shared:/shared,/data:/data:ro",
        *("/opt/venv/bin/python", "-m", "meshtrain", "launch", "--", "--help"),
    ]


def test_an_image_of_a_registry_and_another_environment(submit):
    image = "registry.example#meshtrain:0.1.0"
    _, arguments = submit("--", "--help", CONTAINER_IMAGE=image, VENV="/usr")
    assert f"--container-image={image}" in arguments
    assert f"--container-mounts={ROOT}:{ROOT}" in arguments
    assert arguments[-5:] == ["-m", "meshtrain", "launch", "--", "--help"]
    assert arguments[-6] == "/usr/bin/python"


def test_without_an_image_there_is_no_container(submit, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    _, arguments = submit("--help", VENV=str(tmp_path / "venv"))
    assert not [one for one in arguments if "container" in one]
    assert f"{tmp_path}/venv/bin/python" in arguments


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CONTAINER_IMAGE": "/nowhere/a.sqsh"}, "CONTAINER_IMAGE=/nowhere/a.sqsh: no such file"),
        ({"CONTAINER_MOUNTS": "/a:/a"}, "CONTAINER_MOUNTS=/a:/a: there is no container; set CON"),
    ],
)
def test_a_wrong_setting_is_reported_before_srun(variables, message, submit):
    done, arguments = submit("--config=configs/default.py", **variables)
    assert (done.returncode, arguments) == (2, None)
    assert done.stderr.startswith(f"slurm.sbatch: {message}")
