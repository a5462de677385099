"""The command line: which verbs there are, and that mistakes are reported before jax is loaded."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

import meshtrain
from meshtrain import cli

HEAVY = ("jax", "flax", "orbax", "optax", "rich", "tokenizers", "pyarrow")
QUICKSTART = "--config=configs/quickstart.py"
PROGRAM = f"""
import sys
try:
    from meshtrain import __main__
    code = __main__.main()
except SystemExit as error:  # --help
    code = error.code
print("loaded:", code, [name for name in {HEAVY} if name in sys.modules])
"""


def run(*arguments):
    """Returns the exit code of `meshtrain ARGUMENTS...`, the HEAVY modules it loaded, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded: "))
    code, _, loaded = line.removeprefix("loaded: ").partition(" ")
    return int(code), ast.literal_eval(loaded), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, ""),
        (["help"], 0, ""),
        (["--version"], 0, ""),
        *(([verb, "--help"], 0, "") for verb in cli.VERBS),
        (["schedule", "--schedule=1f1b", "--stages=2", "--microbatches=4"], 0, ""),
        (["launch", "--", "--config=configs/nope.py"], 2, "rank 0"),
        (["trian"], 2, "trian: unknown verb; use one of train, launch"),
        ([QUICKSTART, "--config.train.stepz=3"], 2, 'did you mean "train.steps"?'),
        ([QUICKSTART, "--config.train.dtype=int8"], 2, "train.dtype='int8': use one of"),
        ([QUICKSTART, "--config.mesh.fsdp=3", "--simulate_devices=4"], 2, "mesh.fsdp=3 needs"),
        (["verify", "--config=configs/nope.py"], 2, "configs/nope.py: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_needs_no_devices_does_not_load_jax(arguments, code, message):
    found, loaded, errors = run(*arguments)
    assert (found, loaded) == (code, [])
    assert message in errors


def test_the_package_loads_jax_when_a_name_needs_it():
    program = "import sys, meshtrain; assert 'jax' not in sys.modules; meshtrain.Metrics; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", meshtrain.__all__)
def test_every_public_name_is_there_and_shadows_no_module(name):
    assert getattr(meshtrain, name).__name__ == name
    assert not (ROOT / "meshtrain" / name).exists()
    assert not (ROOT / "meshtrain" / f"{name}.py").exists()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        meshtrain.trainn  # noqa: B018


def test_help_lists_the_verbs_and_describes_one(capsys):
    def printed(*arguments):
        assert cli.command([*arguments]) == 0
        return capsys.readouterr().out

    overview = printed("--help")
    assert printed("help") == printed("-h") == overview
    listed = {line.split()[0]: line for line in overview.splitlines() if line.startswith("  ")}
    assert [*listed] == [*cli.VERBS] and max(map(len, overview.splitlines())) < 80
    assert all(cli.VERBS[verb].summary in line for verb, line in listed.items())
    for arguments in (["help", "audit"], ["audit", "--help"], ["audit", "-h"]):
        assert printed(*arguments).startswith("usage: meshtrain audit")
    assert printed("--config=x.py", "--help").startswith("usage: meshtrain train")
    assert printed("--version") == f"meshtrain {meshtrain.__version__}\n"
    assert cli.command(["help", "trian"]) == 2
    assert "trian: unknown verb" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_a_help_text(verb, capsys):
    assert cli.main(verb, ["--help"]) == 0
    assert f"usage: meshtrain {verb}" in capsys.readouterr().out
