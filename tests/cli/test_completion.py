"""`meshtrain completion SHELL`: the script completes verbs, flags, keys and values."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from meshtrain.cli import app, completion
from meshtrain.config import load
from meshtrain.config.parse import parse
from tests.lib.paths import ROOT

FUNCTION = r"""
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDBREAKS=$' \t\n"\'><=;|&(:' COMPREPLY=()
_meshtrain
printf '%s\n' "${COMPREPLY[@]}"
"""

# What is typed, and what completes it in bash: of a value, only the part after the =.
CASES = [
    ("meshtrain tr", ["train"]),
    ("meshtrain train --config.tr", ["--config.train."]),
    ("meshtrain train --config.train.st", ["--config.train.steps="]),
    ("meshtrain --config.train.st", ["--config.train.steps="]),
    ("meshtrain train --config.train.remat=", ["none", "full", "dots", "offload"]),
    ("meshtrain train --config.mesh.auto=T", ["True"]),
    ("meshtrain train --config.train.steps=1", []),
    ("meshtrain train --config=quick", ["quickstart"]),
    ("meshtrain train --platform c", ["cpu", "cuda"]),
    ("meshtrain train --co", ["--config=", "--coordinator=", "--config."]),
    ("meshtrain train --from", ["--from_scratch"]),
    ("meshtrain checkpoint pr", ["prune"]),
    ("meshtrain checkpoint --config.tr", []),
    ("meshtrain launch --np", ["--nproc="]),
    ("meshtrain launch --config.tr", []),
    ("meshtrain launch --nproc=2 -- --config.mesh.d", ["--config.mesh.data="]),
    ("meshtrain launch --nproc=2 -- ev", ["evaluate"]),
    ("meshtrain launch -- evaluate --spl", ["--split="]),
    ("meshtrain help la", ["launch"]),
    ('meshtrain train "--config.train.st', ["--config.train.steps="]),
    ('meshtrain train "--config.train.remat=d', ["--config.train.remat=dots"]),
    ("meshtrain train --config='quick", ["quickstart"]),
    ("meshtrain train --workdir='a b' --config.train.st", ["--config.train.steps="]),
    ("meshtrain train --workdir=a\\ b --platform c", ["cpu", "cuda"]),
    ("meshtrain schedule --schedule=g", ["gpipe"]),
    ("meshtrain plan --device=h2", ["h200"]),
    ("meshtrain plan --device h2", ["h200"]),
    ("meshtrain config --di", ["--diff"]),
    ("meshtrain config --diff olm", ["olmoe"]),
    ("meshtrain config --diff default olm", ["olmoe"]),
    ("meshtrain checkpoint ls v", []),
]

# What is typed, and the arguments that the command has then: names of files, in any quotes.
FILES = [
    ("meshtrain prepare mi\t", "<prepare><mine.txt>"),
    ("meshtrain checkpoint ls mi\t", "<checkpoint><ls><mine.txt>"),
    ("meshtrain config --diff mine\t", "<config><--diff><mine.txt>"),
    ("meshtrain launch -- python mi\t", "<launch><--><python><mine.txt>"),
    ("meshtrain launch --nproc=2 -- ./mi\t", "<launch><--nproc=2><--><./mine.txt>"),
    ("meshtrain train --config='a folder/o\t", "<train><--config=a folder/own.py>"),
    ("meshtrain train --config=a\\ folder/o\t", "<train><--config=a folder/own.py>"),
    ("meshtrain train --config='quick\t", "<train><--config=quickstart>"),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Returns a function that writes the script of a shell, and returns its path."""
    folder = tmp_path_factory.mktemp("scripts")

    def write(shell):
        lines = completion.fish_lines() if shell == "fish" else completion.shell_lines(shell)
        path = folder / f"meshtrain.{shell}"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with some files to complete."""
    for name in ("mine.txt", "a folder/own.py", "folder/within/file", "qu x/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def require(shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed here")


@pytest.mark.parametrize(("typed", "expected"), CASES, ids=[typed for typed, _ in CASES])
def test_bash_completes_what_is_typed(typed, expected, script):
    """Without any program, so at once: none is found on this PATH."""
    require("bash")
    command = [shutil.which("bash"), "--norc", "-c", FUNCTION, "bash", script("bash"), typed]
    environ = {"PATH": "/nowhere"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")


def test_bash_completes_names_of_files_with_spaces(script, folder):
    """Next to the names of configs that begin alike."""
    require("bash")
    typed = "meshtrain train --config=qu"
    command = ["bash", "--norc", "-c", FUNCTION, "bash", script("bash"), typed]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["quickstart", "qu x"], "")


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; "),
}


@contextlib.contextmanager
def typing(shell, script, folder):
    """Starts a shell on a terminal; yields a function that enters a line.

    It returns what the shell shows then: a command shows its arguments.
    """
    require(shell)
    command, setup = SHELLS[shell]
    setup += f"source {script(shell)}; meshtrain() {{ printf '<%s>' \"$@\"; echo END; }}; "
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "HOME": str(folder)},
    )
    os.close(other_end)

    def answer(text, end):
        """Types a text; returns what the shell shows up to `end`."""
        os.write(terminal, text.encode())
        shown = ""
        deadline = time.monotonic() + 20
        while end not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 1 << 16).decode(errors="replace")
        return shown

    try:
        answer(f"{setup}echo REA''DY\n", "READY\r\n")
        yield lambda line: answer(f"{line}\n", "END\r\n")
    finally:
        os.close(terminal)
        process.wait()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_line_is_typed_with_tabs(shell, script, folder):
    """In the shell itself, on a terminal: spaces, files and several completions in a word."""
    with typing(shell, script, folder) as enter:
        shown = enter(
            "meshtrain tra\t--config.tr\tst\t7 --config.train.rem\tdot\t --workdir=fol\twith\t"
        )
    words = "<train><--config.train.steps=7><--config.train.remat=dots><--workdir=folder/within"
    assert words in shown


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_files_are_typed_with_tabs(shell, script, folder):
    """Wherever a path may stand; in quotes, too."""
    with typing(shell, script, folder) as enter:
        for line, words in FILES:
            assert words in enter(line), line


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("meshtrain tr", ["train"]),
        ("meshtrain train --config.train.st", ["--config.train.steps"]),
        ("meshtrain --config.train.remat=n", ["--config.train.remat=none"]),
        ("meshtrain evaluate --spl", ["--split"]),
        ("meshtrain train --spl", []),
        ("meshtrain completion z", ["zsh"]),
        ("meshtrain completion bash f", []),
        ("meshtrain schedule --schedule=g", ["--schedule=gpipe"]),
        ("meshtrain launch --nproc=2 -- --config.train.ste", ["--config.train.steps"]),
        ("meshtrain launch -- --config.train.remat=n", ["--config.train.remat=none"]),
        ("meshtrain launch -- ev", ["evaluate"]),
        ("meshtrain launch -- evaluate --spl", ["--split"]),
        ("meshtrain prepare mi", ["mine.txt"]),
        ("meshtrain checkpoint ls mi", ["mine.txt"]),
        ("meshtrain checkpoint ls pr", []),
        ("meshtrain config --diff mi", ["mine.txt", "mistral", "mixtral"]),
        ("meshtrain config --diff default mi", ["mine.txt", "mistral", "mixtral"]),
        ("meshtrain launch -- python mi", ["mine.txt"]),
        ("meshtrain launch --nproc=2 -- ./mi", ["./mine.txt"]),
        ("meshtrain launch mi", []),
    ],
)
def test_fish_completes_what_is_typed(typed, expected, script, folder):
    require("fish")
    program = f"source {script('fish')}; complete -C '{typed}'"
    done = subprocess.run(["fish", "-c", program], cwd=folder, capture_output=True, text=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == expected
    assert done.stderr == ""


@pytest.mark.parametrize(
    "key",
    [key for key in completion.keys() if key.values and completion.FILES not in key.values],
    ids=lambda key: key.name,
)
def test_the_values_of_a_key_are_the_ones_that_its_check_accepts(key):
    """The checks may ask for more than the value, such as another key."""
    for value in key.values:
        config = load.load_config("default", [f"{key.name}={value}"])
        try:
            parse(config)
        except load.ConfigError as error:
            assert f"{key.name.removeprefix('--config.')}={value!r}: use one of" not in str(error)


def test_every_flag_of_the_parsers_is_completed():
    for verb in ("train", "launch", "evaluate"):
        names = {option.name for option in completion.options_of(verb) if option.name}
        known = {*app.parser_of(verb).known()}
        assert names == known and "--help" in names


def test_the_commands_of_the_help_make_their_folders(tmp_path):
    require("bash")
    lines = [line for line in completion.VERB.help.splitlines() if line.startswith("  ")]
    program = "\n".join(["meshtrain() { echo $*; }", *lines])
    environ = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-e", "-c", program], env=environ, check=True)
    written = {path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {f"completion {shell}\n" for shell in ("bash", "zsh", "fish")}
