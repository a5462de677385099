"""`meshtrain checkpoint`: list, verify, compare and prune."""

import shutil
import sys

import pytest

from meshtrain import __main__
from meshtrain.checkpoint import find, manifest
from meshtrain.cli import app
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flip, largest_file, rewrite, text_run


def test_the_command_lists_verifies_compares_and_prunes(workdir, capsys, monkeypatch):
    def run(*arguments):
        code = app.main("checkpoint", [*map(str, arguments)])
        return code, capsys.readouterr()

    monkeypatch.setattr(sys, "argv", ["meshtrain", "checkpoint", "ls", str(workdir)])
    code, output = __main__.main(), capsys.readouterr()
    assert code == 0 and [line.split()[:2] for line in output.out.splitlines()] == [
        [s, "valid"] for s in "246"
    ]
    assert "data 8" in output.out and "loss" in output.out and "sample 96" in output.out
    code, output = run("diff", checkpoints(workdir) / "6", workdir)
    assert code == 0 and output.out.startswith("0 of ")
    code, output = run("diff", checkpoints(workdir) / "4", workdir)
    assert code == 1 and "params/final_norm/scale: 32 of 32 differ, by" in output.out
    flip(largest_file(checkpoints(workdir) / "4"))
    code, output = run("verify", workdir)
    assert code == 1 and "4  corrupt  arrays/" in output.out
    assert run("ls", workdir)[0] == 0
    code, output = run("prune", workdir, "--keep=1")
    # Checkpoint 4 is corrupt, so it is not removed.
    assert code == 0 and find.steps(checkpoints(workdir)) == [6, 4]
    for wrong in (
        ["prune", workdir],
        ["ls", workdir / "x"],
        ["diff", workdir],
        ["sl", workdir],
        ["prune", workdir, "--keep=0"],
        ["ls", workdir, "--keep=3"],
    ):
        code, output = run(*wrong)
        assert code == 2 and output.err.count("\n") == 1, wrong


def test_a_run_may_remove_and_save_checkpoints_while_they_are_listed(workdir, capsys, monkeypatch):
    folder = checkpoints(workdir)
    original = manifest.verify

    def verify(directory):
        if directory.name == "4":
            shutil.copytree(folder / "6", folder / "8")
            rewrite(folder / "8", step=8)
            find.remove(directory)
        return original(directory)

    monkeypatch.setattr(manifest, "verify", verify)
    assert app.main("checkpoint", ["verify", str(workdir)]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["2", "valid"], ["6", "valid"], ["8", "valid"]]


@pytest.mark.slow
def test_verbs_look_again_if_the_run_has_removed_what_they_read(tmp_path, capsys, monkeypatch):
    train(text_run(tmp_path, steps=2), workdir=tmp_path / "run")
    saved = tmp_path / "saved"
    (tmp_path / "run").rename(saved)
    original = find.find_valid

    def find_and_remove(path, **options):
        directory, found = original(path, **options)
        if directory.name == "2":
            find.remove(directory)
        return directory, found

    monkeypatch.setattr(find, "find_valid", find_and_remove)
    for verb, arguments in (
        ("evaluate", ["--workdir=RUN"]),
        ("generate", ["--workdir=RUN", "--length=2", "--prompt=to"]),
        ("convert", ["RUN", str(tmp_path / "hf")]),
        ("checkpoint", ["diff", "RUN", str(checkpoints(saved) / "1")]),
    ):
        workdir = shutil.copytree(saved, tmp_path / verb)
        arguments = [one.replace("RUN", str(workdir)) for one in arguments]
        code, output = app.main(verb, arguments), capsys.readouterr()
        assert code == 0, (verb, output.err)
        assert find.steps(checkpoints(workdir)) == [1]
