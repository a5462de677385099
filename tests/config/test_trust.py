"""A config file is code that the user names; a config.json is data, which must not run any."""

import json
import subprocess
import sys

import optax
import pytest

from meshtrain.cli import app
from meshtrain.config import build, load
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

HOSTILE = {
    "model": {"build": "os:system", "command": "touch PWNED"},
    "data": {"build": "subprocess:check_call", "args": "touch PWNED", "shell": True},
    "optim": {"build": "builtins:exec", "source": "open('PWNED', 'w')"},
}
# Functions of meshtrain that build nothing, among them some that remove files or start processes.
NOT_BUILDERS = (
    "meshtrain.checkpoint.find:remove",
    "meshtrain.supervise.launch:launch",
    "meshtrain.config.build:importlib",
    "meshtrain.errors:import_optional",
    "meshtrain.config.build:resolve",
    "meshtrain.cli.app:signal",
)


def not_a_part(*args, **kwargs):
    return 3


def write_run(folder, **sections):
    """Writes the config.json of a run, with sections replaced."""
    folder.mkdir(exist_ok=True)
    config = {**tiny_config().to_dict(), **sections}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize("section", HOSTILE)
def test_a_config_json_names_only_functions_of_meshtrain(tmp_path, section):
    file = str(write_run(tmp_path, **{section: HOSTILE[section]}))
    with pytest.raises(ConfigError, match=rf"{section}.build=.*outside meshtrain.*--trust_code"):
        load.load_config(file)
    trusted = load.load_config(file, trust_code=True)
    assert trusted[section].build == HOSTILE[section]["build"]


def test_no_verb_runs_what_a_config_json_names(tmp_path):
    write_run(tmp_path / "run", **HOSTILE)
    verbs = {
        "train": ["--config=run/config.json"],
        "verify": ["--config=run/config.json"],
        "audit": ["--config=run/config.json"],
        "profile": ["--config=run/config.json"],
        "generate": ["--workdir=run"],
        "evaluate": ["--workdir=run"],
    }
    program = f"""
import sys
from meshtrain.cli import app
sys.exit(any(app.main(verb, arguments) != 2 for verb, arguments in {verbs!r}.items()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("outside meshtrain") == 3 * len(verbs)
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("section", HOSTILE)
@pytest.mark.parametrize("name", NOT_BUILDERS)
def test_of_meshtrain_only_builders_are_called(tmp_path, section, name):
    written = write_run(tmp_path, **{section: {"build": name}})
    config = tiny_config().to_dict()
    config[section]["build"] = load.load_config(str(written))[section].build
    with pytest.raises(ConfigError, match=f"{section}.build={name}: is "):
        build.build(parse(config))


@pytest.mark.parametrize("section", HOSTILE)
def test_what_a_function_of_the_user_returns_is_checked(section):
    config = tiny_config().to_dict()
    config[section] = {**config[section], "build": f"{__name__}:not_a_part"}
    with pytest.raises(ConfigError, match=f"{section}.build=.*: returned a int, not a "):
        build.build(parse(config)).make_optimizer(optax.constant_schedule(0.1))


def test_a_function_that_has_nothing_to_do_with_a_section_is_reported_in_a_line():
    config = tiny_config().to_dict()
    for section in HOSTILE:
        config[section]["build"] = "os:system"
    with pytest.raises(ConfigError) as error:
        build.build(parse(config))
    assert [fault.partition(":")[0] for fault in error.value.faults] == [
        "model.build",
        "optim.build",
        "data.build",
    ]


def no_key_split(*, seq_len, vocab_size, separator, seed, heldout=0, path="", mixture=()):
    return 3


def test_a_data_function_without_a_split_is_reported():
    config = tiny_config().to_dict()
    keys = ("seq_len", "vocab_size", "separator", "seed")
    config["data"] = {key: config["data"][key] for key in keys}
    config["data"]["build"] = f"{__name__}:no_key_split"
    with pytest.raises(ConfigError, match="^data.build=.*no_key_split: has no parameter `split`"):
        build.build_data(parse(config).data, "train")


def test_a_function_that_does_not_say_its_keys_is_reported():
    config = tiny_config().to_dict()
    config["optim"]["build"] = "builtins:dict"
    with pytest.raises(ConfigError, match="optim.build: .* does not say which keys it takes"):
        build.build(parse(config))


@pytest.mark.parametrize(("section", "may_be_missing"), [("context", True), ("model", False)])
def test_a_config_json_may_lack_only_the_section_that_earlier_versions_lack(
    tmp_path, section, may_be_missing
):
    file = write_run(tmp_path)
    config = json.loads(file.read_text())
    del config[section]
    file.write_text(json.dumps(config))
    raw = load.load_config(str(file)).to_dict()
    if may_be_missing:
        assert parse(raw).context == parse(tiny_config().to_dict()).context
    else:
        with pytest.raises(ConfigError, match=section):
            parse(raw)


@pytest.mark.parametrize(("key", "value"), [("kernels", "plain"), ("trainable", "*/bias")])
def test_a_key_that_an_earlier_config_json_lacks_can_be_set(tmp_path, key, value):
    file = write_run(tmp_path)
    config = json.loads(file.read_text())
    del config["train"][key]
    file.write_text(json.dumps(config))
    assert load.load_config(str(file), [f"--config.train.{key}={value}"]).train[key] == value


@pytest.mark.parametrize(
    "content", ["{}", "[]", "3", "null", '{"model": 3}', "{", "\0", "[" * 10**5]
)
def test_a_damaged_config_json_is_reported_in_a_line(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content)
    assert app.main("train", [f"--config={tmp_path / 'config.json'}"]) == 2
    assert "Traceback" not in capsys.readouterr().err
