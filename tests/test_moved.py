"""Old names of keys, functions and modules are still read, and reported in one line."""

import importlib
import json
import subprocess
import sys

import pytest

from meshtrain import moved
from meshtrain.config import load
from meshtrain.config.build import resolve
from meshtrain.config.parse import parse
from meshtrain.configs import default
from tests.lib.paths import ROOT


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(moved, "_reported", set())


def value_of(config, key):
    section, _, name = key.partition(".")
    return config[section][name]


@pytest.mark.parametrize(("old", "new"), moved.KEYS.items())
def test_a_key_is_read_under_its_old_name(old, new, tmp_path, capsys, monkeypatch):
    """As an override, a variable, and in files of each kind."""
    config = default.get_config()
    value = value_of(config, new)
    other = {"float32": "bfloat16", "inputs": "residuals"}.get(value, value)
    if isinstance(value, int | float):
        other = value + 2
    section, _, name = old.partition(".")

    config, faults = load.read("default", [f"--config.{old}={other}"])
    assert not faults and value_of(config, new) == other
    line = f"{old}: is called {new} now; the old name is still read\n"
    assert capsys.readouterr().err == line

    variable = f"MESHTRAIN__{section}__{name}".upper()
    config, faults = load.read("default", environ={variable: str(other)})
    assert not faults and value_of(config, new) == other

    file = tmp_path / "old.yaml"
    file.write_text(f"{section}:\n  {name}: {json.dumps(other)}\n")
    config, faults = load.read(str(file))
    assert not faults and value_of(config, new) == other

    raw = json.loads(json.dumps(default.get_config().to_dict()))
    del raw[section][new.partition(".")[2]]
    raw[section][name] = other
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    config, faults = load.read(str(file))
    assert not faults and value_of(config, new) == (tuple(other) if other == [] else other)

    file = tmp_path / "old.py"
    file.write_text(
        "from meshtrain.configs import default\n"
        "def get_config():\n"
        "    config = default.get_config()\n"
        f"    assert config.{old} == {value!r}\n"
        f"    config.{old} = {other!r}\n"
        "    return config\n"
    )
    config, faults = load.read(str(file))
    assert not faults and value_of(config, new) == other


@pytest.mark.parametrize(("old", "new"), moved.FUNCTIONS.items())
def test_a_build_function_is_read_under_its_old_path(old, new, capsys):
    config, faults = load.read("default", [f"--config.optim.build={old}"])
    assert not faults
    assert parse(config).optimizer.build == new
    assert callable(resolve(new, key="optim.build"))
    assert capsys.readouterr().err == f"{old}: is called {new} now; the old name is still read\n"


@pytest.mark.parametrize("new", [*moved.MODULES.values()])
def test_a_new_module_exists(new):
    assert importlib.import_module(new)


def test_old_modules_are_imported_under_their_old_names():
    program = (
        "from meshtrain.parallel import collectives\n"
        "from meshtrain.parallel.pipeline.schedules import SCHEDULES\n"
        "from meshtrain.cluster.restart_policy import Settings\n"
        "import meshtrain.config.files\n"
        "from meshtrain.verify.verify import verify\n"
        "assert collectives.__name__ == 'meshtrain.tools.collectives'\n"
        "import meshtrain.tools.verify.verify as new\n"
        "assert verify is new.verify and sys.modules['meshtrain.verify.verify'] is new\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 5


def test_a_module_that_never_was_is_not_found():
    for name in ("meshtrain.analysis.nothing", "meshtrain.optimiser"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
