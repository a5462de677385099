"""`meshtrain config`: keys, their meanings and differences, without jax."""

import subprocess
import sys

import pytest
import yaml

import meshtrain
from meshtrain.cli import app
from meshtrain.configs import default
from tests.lib.paths import ROOT

CONFIGS = sorted(path.stem for path in (ROOT / "meshtrain/configs").glob("[!_]*.py"))


def shown(capsys, *arguments):
    """Returns what the verb prints."""
    assert app.main("config", list(arguments)) == 0
    return capsys.readouterr().out


def fault(capsys, *arguments):
    assert app.main("config", list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_printed_is_a_config_with_the_same_keys(name, tmp_path, capsys):
    text = shown(capsys, f"--config={name}", "--config.train.steps=2.1e3")
    assert "  steps: 2100  " in text and text.startswith("base: default\n")
    (tmp_path / "all.yaml").write_text(text)
    expected = meshtrain.load_config(name, ["--config.train.steps=2100"]).to_dict()
    found = meshtrain.load_config(str(tmp_path / "all.yaml"), trust_code=True).to_dict()
    assert found == expected
    assert shown(capsys, "--diff", name, str(tmp_path / "all.yaml"), "--trust_code").startswith(
        "train.steps: "
    )


def test_changed_keys_are_marked_with_their_default(capsys):
    lines = shown(capsys, "--config=default", "--config.optim.b1=0.8").splitlines()
    marked = [line for line in lines if "#" in line]
    assert [line.split() for line in marked] == [["b1:", "0.8", "#", "default:", "0.9"]]
    sections = [line for line in lines if line.endswith(":")]
    assert sections[0] == "mesh:"  # as in configs/default.py
    assert [*yaml.safe_load("\n".join(lines))] == ["base", *default_sections()]


def default_sections():
    source = (ROOT / "meshtrain/configs/default.py").read_text()
    names = default.get_config().to_dict()
    return sorted(names, key=lambda name: source.index(f"config.{name} ="))


def test_differences_are_one_line_each(capsys):
    assert shown(capsys, "--diff", "default", "default") == "no key differs\n"
    lines = shown(capsys, "--diff", "gpt2", "llama2").splitlines()
    assert "model.positions: 'learned' -> 'rope'" in lines
    assert all(" -> " in line for line in lines)


def test_a_pattern_selects_keys_by_name_or_meaning(capsys):
    names = [key for key in shown(capsys, "--keys").splitlines() if not key.startswith(" ")]
    assert len(names) > 100
    assert shown(capsys, "--keys", "train.seed").startswith("train.seed: 0  (int)\n    ")
    only = shown(capsys, "--keys", "adapter.*").splitlines()
    assert {line.split(".")[0] for line in only if not line.startswith(" ")} == {"adapter"}
    assert "mesh.fsdp: " in shown(capsys, "--keys", "OPTIMIZER STATE")  # in its meaning


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nothing to show: use one of --config=FILE, --diff A B and --keys [PATTERN]"),
        (["--config=default", "--keys"], "--keys and --config: use one of"),
        (["--keys=learnign_rate"], "--keys=learnign_rate: no key has this"),
        (["--config=default", "--config.train.stepz=3"], "--config.train.stepz: unknown key"),
        (["--config=default", "--config.train.steps=1e-3"], "--config.train.steps=1e-3: not of"),
        (["--diff", "default", "nope"], "--diff: nope: no such file"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(arguments, line, capsys):
    text = fault(capsys, *arguments)
    assert text.startswith(line) and text.count("\n") == 1


def test_nothing_loads_jax():
    program = """
import sys
from meshtrain.cli import app
assert app.main("config", ["--config=quickstart"]) == 0
assert app.main("config", ["--keys", "train.*"]) == 0
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000), ("2.5e2", 250), ("1E+1", 10), ("12", 12), ("-1e0", -1)]
)
def test_whole_numbers_may_have_an_exponent(text, value, tmp_path):
    override = f"--config.train.num_microbatches={text}"
    assert meshtrain.load_config("default", [override]).train.num_microbatches == value
    (tmp_path / "a.yaml").write_text(f"train: {{num_microbatches: {text}}}\n")
    assert meshtrain.load_config(str(tmp_path / "a.yaml")).train.num_microbatches == value


@pytest.mark.parametrize("text", ["2.5e0", "1e-1", "1e", "1e999", "e3"])
def test_other_numbers_are_no_whole_ones(text):
    with pytest.raises(meshtrain.ConfigError, match="not of type int"):
        meshtrain.load_config("default", [f"--config.train.steps={text}"])
