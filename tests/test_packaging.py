"""What is installed: the wheel has all files, and each extra can be resolved and installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.lib.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Wheels of gigabytes, and `dev`, which is the environment of the tests. These are only resolved.
HEAVY = {"cuda12", "cuda13", "tpu", "aot-gpu", "aot-tpu", "dev"}
PYTHONS = ("3.11", "3.13")  # the oldest, and the newest that is tested
# Imports a module of each distribution that is named.
IMPORT = """
import importlib, importlib.metadata, sys
modules = {}
for module, names in importlib.metadata.packages_distributions().items():
    for name in names:
        if module.isidentifier() and not module.startswith("_"):
            modules.setdefault(name.lower().replace("_", "-"), module)
for name in sys.argv[1:]:
    importlib.import_module(modules[name.lower().replace("_", "-")])
"""


def uv(*arguments, cwd=ROOT):
    """Runs uv; skips the test if uv is missing or no package index is reached."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("uv", path=path)
    if not program:
        pytest.skip("uv is not installed; bash launch/setup.sh dev")
    # For another version of Python uv would fetch an interpreter, which resolving does not need.
    command = [program, *map(str, arguments), "--no-python-downloads"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    unreachable = "error sending request|dns error|failed to fetch|error trying to connect"
    if done.returncode and re.search(unreachable, done.stderr, re.IGNORECASE):
        pytest.skip(f"no package index is reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_in(requirements):
    """Returns the distributions that requirements name, without this one."""
    names = [re.match(r"[\w.-]+", one)[0] for one in requirements]
    return [name for name in names if name != PROJECT["name"]]


def build_wheel(folder):
    """Builds the wheel from a copy: setuptools leaves its build folder behind."""
    copy = folder / "source"
    shutil.copytree(ROOT / "meshtrain", copy / "meshtrain", ignore=shutil.ignore_patterns("__py*"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    uv("build", "--quiet", "--wheel", f"--python={sys.executable}", f"--out-dir={folder}", copy)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def install(built, tmp_path):
    """Installs the wheel with an extra in a new environment, and returns its folder of programs."""

    def run(extra=""):
        uv("venv", "--quiet", f"--python={sys.executable}", tmp_path / "venv")
        requirement = f"{PROJECT['name']}{f'[{extra}]' if extra else ''} @ {built.as_uri()}"
        programs = tmp_path / "venv" / "bin"
        uv("pip", "install", "--quiet", f"--python={programs / 'python'}", requirement)
        return programs

    return run


def run(*command, cwd):
    """Runs a program that must succeed, without the modules of this checkout."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = list(map(str, command))
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_citation_is_that_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {*citation} >= {"cff-version", "message", "title", "authors"}  # what the format requires
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"].partition(" AND ")[0]
    assert citation["authors"] == PROJECT["authors"]


def test_the_image_has_the_version_and_the_license_of_the_package():
    text = (ROOT / "launch" / "Dockerfile").read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', text))
    assert labels["version"] == PROJECT["version"] and labels["licenses"] == PROJECT["license"]


def test_classifiers_do_not_repeat_the_license():
    """PyPI rejects a classifier of a license next to an expression."""
    assert PROJECT["license"] and not [c for c in PROJECT["classifiers"] if c.startswith("License")]


@pytest.mark.slow
def test_the_wheel_has_all_files_of_the_package_and_runs(built, install, tmp_path):
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "meshtrain").rglob("*.*")]
    expected = {name for name in files if "__pycache__" not in name}
    assert expected <= {*zipfile.ZipFile(built).namelist()}
    programs = install()
    assert "usage: meshtrain VERB" in run(programs / "meshtrain", "--help", cwd=tmp_path)
    run(programs / "meshtrain", "init", "mine", cwd=tmp_path)
    page = run(programs / "meshtrain", "config", "--config=mine/config.yaml", cwd=tmp_path)
    assert "global_batch: 16" in page


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_can_be_resolved(extra, python):
    compiled = uv(
        "pip", "compile", "--quiet", "--no-header", f"--python-version={python}",
        f"--python={sys.executable}", f"--extra={extra}", "pyproject.toml",
    )  # fmt: skip
    found = {re.match(r"[\w.-]+", line)[0] for line in compiled.splitlines() if line[:1].isalnum()}
    assert {name.lower() for name in names_in(EXTRAS[extra])} <= found


@pytest.mark.slow
@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in HEAVY])
def test_a_light_extra_can_be_installed_and_imported(extra, install, tmp_path):
    programs = install(extra)
    names = names_in(EXTRAS[extra])
    run(programs / "python", "-W", "ignore", "-c", IMPORT, "meshtrain-jax", *names, cwd=tmp_path)
