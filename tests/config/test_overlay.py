"""Keys from a YAML file and from environment variables."""

import json
import os
import subprocess
import sys

import pytest

from meshtrain.cli import app
from meshtrain.config import load as config_load
from meshtrain.configs import default, quickstart
from meshtrain.errors import ConfigError
from tests.lib.paths import ROOT


def load(folder, text, *overrides, **options):
    (folder / "run.yaml").write_text(text)
    return config_load.load_config(str(folder / "run.yaml"), overrides, **options)


def test_a_yaml_file_changes_keys_of_its_base(tmp_path):
    text = """
# A comment
base: quickstart
train: {steps: 7, param_dtype: bfloat16}
optim:
  learning_rate: 1e-3     # text, for YAML
sync:
  feedback: on            # true, for YAML
  exact: [scale, "1", 'it''s', null, true, "~"]
model:
  expert_groups: [4, 2]
data:
  path: ""
"""
    found, expected = load(tmp_path, text), quickstart.get_config()
    expected.train.update(steps=7, param_dtype="bfloat16")
    expected.optim.learning_rate = 1e-3
    expected.sync.update(feedback="on", uncompressed=("scale", "1", "it's", None, True, "~"))
    expected.model.expert_groups, expected.data.path = (4, 2), ""
    assert found.to_dict() == expected.copy_and_resolve_references().to_dict()
    assert found.optim.moment_dtype == "bfloat16"  # follows train.param_dtype
    assert load(tmp_path, text, "--config.train.steps=9").train.steps == 9


def test_without_a_base_all_keys_have_their_defaults(tmp_path):
    found = load(tmp_path, "train:\n  steps: 1000\n").to_dict()
    assert found == default.get_config().copy_and_resolve_references().to_dict()


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["no sections"]),
        ("- a", ["no sections"]),
        ("train: [1", ["line 1: expected ',' or ']'"]),
        ("train:\n\tsteps: 1", ["line 2: found character '\\t'"]),
        ("train: {steps: 1}\ntrain: {steps: 2}", ["line 2: train is there twice"]),
        ("train:\n  steps: 1\n  steps: 2", ["line 3: train.steps is there twice"]),
        ("train: {steps: &a 1, log_every: *a}", ["alias"]),
        ("? [a]\n: 1", ["line 1: a key is no name"]),
        ("\"model['build']\": 'evil:build'", ["line 1: a key is no name"]),
        ('train: {steps: 5}\n"train.steps": 6', ["line 2: a key is no name"]),
        ("model: {\uff42uild: 'evil:build'}", ["line 1: a key is no name"]),
        ("train: {steps: null}", ["line 1: train.steps has no value"]),
        ("data: {path: Null}", ["line 1: data.path has no value"]),
        ("data: {path: ~}", ["line 1: data.path has no value"]),
        ("data: {path: [a, b]}", ["line 1: data.path: is a list; not of type str"]),
        ("a: 1\n---\nb: 2", ["line 2: but found another document"]),
        ("train:\n  steps: |\n    1\n    2", ["line 2: train.steps=1 2"]),
        ('train: {steps: "a\\0"}', ["train.steps="]),
        ("sync: {exact: [{a: b}]}", ["line 1: a list holds values"]),
        (
            "train:\n  stepz: 1\n\n  steps: x",
            ["line 2: train.stepz: unknown key (did you mean", "line 4: train.steps=x: not of"],
        ),
        ("mesh: 8", ["line 1: mesh=8: is a section; set its keys"]),
        ("train:", ["line 1: train has no value"]),
        ("trian: {steps: 1}", ["line 1: trian.steps: unknown key"]),
        ("train: {steps: [1]}", ["line 1: train.steps=(1, ): not of type int"]),
        ("base: quikstart", ["base: --config=quikstart: no such file", "did you mean"]),
        ("base: other.yaml", ["base=other.yaml: use a name such as quickstart"]),
        ("model: {build: mine.build}", ["model.build=mine.build: is code outside meshtrain"]),
    ],
)
def test_mistakes_in_a_yaml_file_are_lines_that_say_where(tmp_path, text, faults):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    lines = error.value.faults
    assert len(lines) == (2 if "stepz" in text else 1)
    for fault in faults:
        assert any(fault in line and "run.yaml" in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_keys_that_follow_others_follow_those_of_variables_and_the_command_line(tmp_path):
    text = "base: quickstart\ntrain: {steps: 7}"
    flags = ["--config.train.seed=7", "--config.model.vocab_size=512"]
    (tmp_path / "run.yaml").write_text(text)
    environ = {"MESHTRAIN__TRAIN__PARAM_DTYPE": "bfloat16"}
    for path in (str(tmp_path / "run.yaml"), "quickstart"):
        config, faults = config_load.read(path, flags, environ=environ)
        assert (config.data.seed, config.data.vocab_size, faults) == (7, 512, [])
        assert config.optim.moment_dtype == "bfloat16"


def test_keys_that_replace_each_other_are_not_set_together(tmp_path):
    """A later layer may: the command line overrides a file, a file its base. 0 replaces nothing."""
    both = "train:\n  steps: 5\n  epochs: 2\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, both)
    (fault,) = caught.value.faults
    assert fault == (
        f"{tmp_path}/run.yaml: line 3: train.epochs and {tmp_path}/run.yaml: line 2: train.steps: "
        "train.epochs replaces train.steps; set one of them"
    )
    flags = ["--config.train.global_batch=8", "--config.train.batch_per_device=4"]
    _, faults = config_load.read("quickstart", [*flags, "--config.train.stepz=1"])
    assert faults[0] == (
        f"{flags[1]} and {flags[0]}: train.batch_per_device replaces train.global_batch; set one "
        "of them"
    )
    assert len(faults) == 2
    found = load(tmp_path, "train:\n  steps: 5\n", "--config.train.epochs=2")
    assert found.train.epochs == 2.0
    found = load(tmp_path, "train:\n  epochs: 2\n", "--config.train.steps=5")
    assert (found.train.steps, found.train.epochs) == (5, 0.0)
    environ = {"MESHTRAIN__TRAIN__EPOCHS": "2"}
    found, faults = config_load.read("quickstart", ["--config.train.steps=5"], environ=environ)
    assert (found.train.steps, found.train.epochs, faults) == (5, 0.0, [])
    found = load(tmp_path, "train: {batch_per_device: 2}", "--config.train.global_batch=8")
    assert (found.train.global_batch, found.train.batch_per_device) == (8, 0)
    found = load(tmp_path, "{train: {steps: 5, epochs: 0.0, batch_per_device: 0, global_batch: 8}}")
    assert (found.train.steps, found.train.epochs) == (5, 0.0)


def test_a_reference_that_cannot_be_computed_is_a_fault_of_its_key(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from meshtrain.configs import default\n"
        "def get_config():\n"
        "    c = default.get_config()\n"
        "    c.optim.warmup_steps = 1000 // c.train.get_ref('steps')\n"
        "    return c\n"
    )
    with pytest.raises(ConfigError, match="--config.train.steps=0: .*division"):
        config_load.load_config(str(tmp_path / "mine.py"), ["--config.train.steps=0"])


def test_a_value_that_looks_like_a_build_is_no_code(tmp_path):
    assert load(tmp_path, "data: {path: /x.build=y}").data.path == "/x.build=y"


def test_a_file_as_base_needs_trust(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from meshtrain.configs import default\n"
        "def get_config():\n"
        "    config = default.get_config()\n"
        "    config.train.steps = 5\n"
        "    return config\n"
    )
    text = "base: mine.py\ntrain: {log_every: 2}"
    with pytest.raises(ConfigError, match=r"run.yaml: base=mine.py: .* --trust_code"):
        load(tmp_path, text)
    found = load(tmp_path, text, trust_code=True).train
    assert (found.steps, found.log_every) == (5, 2)
    with pytest.raises(ConfigError, match="a name such as quickstart, or a .py file"):
        load(tmp_path, "base: mine.yaml", trust_code=True)


def test_variables_are_overrides_before_those_of_the_command_line():
    environ = {"MESHTRAIN__TRAIN__STEPS": "7", "MESHTRAIN__MODEL__D_MODEL": "64", "OTHER": "1"}
    config, faults = config_load.read("quickstart", ["--config.train.steps=9"], environ=environ)
    assert (config.train.steps, config.model.d_model, faults) == (9, 64, [])
    environ = {"MESHTRAIN__TRAIN__STEPZ": "7", "MESHTRAIN__OPTIM__LEARNING_RATE": "x"}
    config, faults = config_load.read("quickstart", ["--config.train.steps=9"], environ=environ)
    assert config.train.steps == 9
    assert [fault.partition(": ")[0] for fault in faults] == [
        "MESHTRAIN__OPTIM__LEARNING_RATE=x",
        "MESHTRAIN__TRAIN__STEPZ",
    ]


def test_the_command_line_reads_variables_and_reports_their_mistakes(monkeypatch, capsys):
    monkeypatch.setenv("MESHTRAIN__TRAIN__STEPZ", "7")
    assert app.main("train", ["--config=quickstart"]) == 2
    assert capsys.readouterr().err.startswith("MESHTRAIN__TRAIN__STEPZ: unknown key")


@pytest.mark.slow
def test_init_writes_a_project_that_trains_and_keeps_what_is_there(tmp_path, capsys):
    assert app.main("init", [str(tmp_path / "a b")]) == 0
    assert "train.sh" in capsys.readouterr().out
    assert app.main("init", [str(tmp_path / "a b")]) == 2
    assert "exists already; use a new folder" in capsys.readouterr().err
    done = subprocess.run(
        ["bash", tmp_path / "a b" / "train.sh", "--config.model.num_layers=1"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "MESHTRAIN__TRAIN__STEPS": "1",
            "MESHTRAIN__OPTIM__WARMUP_STEPS": "0",
            "MESHTRAIN__EVAL__BATCHES": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "a b" / "runs" / "first"
    train = json.loads((run / "config.json").read_text())["train"]
    assert (train["steps"], train["log_every"]) == (1, 25)
    assert (run / "checkpoints" / "1").is_dir()
    text = (tmp_path / "a b" / "README.md").read_text()
    verb = "meshtrain generate --workdir=runs/first "
    assert verb in text and text.startswith("# a b\n")
