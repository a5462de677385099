"""A path is neither a pattern nor a URL, in any verb; a leading ~ is the home folder."""

import re
from pathlib import Path

import pytest

import meshtrain
from meshtrain import storage
from meshtrain.checkpoint import find
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.config.parse import parse
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flip, largest_file, text_run

ODD = (
    "exp[lr=3e-3]",  # a pattern, in which Orbax found nothing
    "[]",
    "*",
    "a**b",
    "{a,b}",
    "!x",
    "a?b",  # parts of a URL
    "a#b",
    "a|b",
    "50%",
    "a%20b",
    "gs:",
    "s3:",
    "file:",
    "2026-01-31T09:30",  # as in --config=FILE:ARGUMENT
    ":",
    "~",  # within a path it is a name
    "~x",
    " a b ",  # of a shell
    "a'b\"c",
    "$HOME",
    "`a`;b&c",
    "-dash",
    "--workdir=x",
    "new\nline",
    "tab\tbell\a",
    "日本é",
    "a,b=c",
    "1",  # as the name of a checkpoint
    "checkpoints",
)


@pytest.mark.slow
def test_every_verb_reads_and_writes_a_path_of_odd_names(tmp_path, capsys):
    folder = tmp_path.joinpath(*ODD)

    def run(*arguments):
        verb, *rest = map(str, arguments)
        code = app.main(verb, rest)
        output = capsys.readouterr()
        assert code == 0, (arguments, output.err)
        return output.out

    workdir = folder / "run"
    train(text_run(folder, steps=1), workdir=workdir)
    assert train(text_run(folder, steps=2), workdir=workdir).step == 2
    assert find.steps(checkpoints(workdir)) == [2, 1]
    assert run("checkpoint", "verify", workdir).count(" valid ") == 2
    assert "0 of " in run("checkpoint", "diff", workdir, checkpoints(workdir) / "2")
    run("evaluate", f"--workdir={workdir}")
    run("generate", f"--workdir={workdir}", "--length=2", "--prompt=to")
    run("convert", workdir, folder / "hf")
    run("convert", folder / "hf", folder / "back")
    run("report", workdir, f"--output={folder / 'report.html'}")
    run("prepare", folder / "data", f"--output={folder / 'tokens'}", "--num_workers=1")
    run("prepare", "--verify", folder / "tokens")
    other = text_run(folder, steps=1)
    other.data.path = str(folder / "tokens")
    other.checkpoint.init_from = str(workdir)
    train(other, workdir=folder / "other")
    capsys.readouterr()
    flip(largest_file(checkpoints(workdir) / "1"))
    assert app.main("checkpoint", ["verify", str(workdir)]) == 1
    assert re.search(r"^ *1  corrupt  arrays/", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a\\b", "a backslash"),
        ("a\\b/c", "a backslash"),
        ("a\0b", "a NUL character"),
        ("a.__lock/b", ".__lock at the end of a name"),
        ("\udcff", "bytes that are not UTF-8"),
    ],
)
def test_a_path_that_checkpoints_cannot_have_is_one_line(name, what, tmp_path, capsys):
    path = f"{tmp_path}/{name}"
    with pytest.raises(meshtrain.ConfigError, match=f"^--workdir=.*: has {what}, .* use another"):
        train(text_run(tmp_path, steps=1), workdir=path)
    for verb, arguments in (
        ("train", ["--config=quickstart", f"--workdir={path}"]),
        ("generate", [f"--workdir={path}"]),
        ("checkpoint", ["ls", path]),
        ("convert", [str(tmp_path), path]),
    ):
        assert app.main(verb, arguments) == 2
        assert re.fullmatch(rf".*: has {what}, .* use another folder\n", capsys.readouterr().err)


@pytest.mark.slow
def test_a_leading_tilde_is_the_home_folder_everywhere(tmp_path, capsys, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    (home / "c.py").write_text(
        "from tests.lib.configs import quick\n"
        "def get_config(steps):\n"
        "    return quick(steps=int(steps))\n"
    )
    assert load.read("~/c.py:7", [])[0].train.steps == 7
    c = text_run(home, steps=1)
    c.data.path = "~/data"
    train(c, workdir="~/run")
    c.checkpoint.init_from = "~/run"
    assert app.main("checkpoint", ["verify", "~/run"]) == 0
    assert app.main("report", ["~/run", "--output=~/report.html"]) == 0
    assert app.main("convert", ["~/run", "~/hf"]) == 0
    assert app.main("prepare", ["~/data", "--output=~/tokens", "--num_workers=1"]) == 0
    names = {path.name for path in home.iterdir()}
    assert names >= {"run", "report.html", "hf", "tokens"} and not [*elsewhere.iterdir()]
    c.data.mixture = (("~/data", 1.0), ("~nobody-of-this-name/data", 1.0))
    recorded = parse(c).to_dict()
    assert recorded["data"]["path"] == str(home / "data")
    assert recorded["checkpoint"]["init_from"] == str(home / "run")
    assert [path for path, _ in recorded["data"]["mixture"]] == [
        str(home / "data"),
        str(elsewhere / "~nobody-of-this-name" / "data"),
    ]
    assert storage.open_workdir("~/run").folder == Path(home / "run")


def test_a_config_whose_path_has_colons_is_found_and_gets_its_argument(tmp_path):
    text = (
        "from tests.lib.configs import quick\n"
        "def get_config(x='1'):\n"
        "    return quick(steps=len(x))\n"
    )
    file = tmp_path / "09:30" / "c:py.py"
    file.parent.mkdir()
    file.write_text(text)
    assert load.read(str(file), [])[0].train.steps == 1
    assert load.read(f"{file}:abc", [])[0].train.steps == 3
    assert load.read(f"{file}:a:b:c", [])[0].train.steps == 5
    with pytest.raises(meshtrain.ConfigError, match="no such file"):
        load.read(f"{tmp_path}/09:30/absent.py:abc", [])
