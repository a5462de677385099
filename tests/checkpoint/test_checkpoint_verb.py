"""`meshtrain checkpoint`: list, verify, compare and prune."""

import sys

from meshtrain import __main__
from meshtrain.checkpoint import find
from meshtrain.cli import app
from tests.lib.checkpoints import checkpoints, flip, largest_file


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
