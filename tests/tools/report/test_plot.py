"""The curves of meshtrain.plot: what a run kept of its steps, and its mistakes in one line."""

import importlib
import json

import numpy as np
import pytest

import meshtrain
from meshtrain import ConfigError


def write_run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def curves(figure):
    """Returns the points of each curve by its label, and the titles of the axes."""
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [*lines]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    return lines


def test_a_run_has_a_curve_of_training_and_of_heldout_loss_without_steps_that_it_repeated(tmp_path):
    rows = [{"step": step, "loss": 9.0 - step} for step in range(5)]
    rows[2] |= {"eval_loss": 8.0}
    # After a restart or a rollback the steps from 3 on are taken again.
    rows += [{"step": 3, "loss": 5.5}, {"step": 4, "loss": 77.0, "skipped": 1}]
    rows += [{"step": 5, "loss": 5.0}, {"step": 6, "eval_loss": 4.5}]
    figure = meshtrain.plot(write_run(tmp_path / "run", rows))
    found = curves(figure)
    assert [*found] == ["training loss 5.0000", "held-out loss 4.5000"]
    expected = [[0, 9], [1, 8], [2, 7], [3, 5.5], [4, np.nan], [5, 5]]
    np.testing.assert_array_equal(found["training loss 5.0000"], expected)
    assert found["held-out loss 4.5000"] == [[2, 8], [6, 4.5]]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_several_runs_have_a_colour_each_and_their_names(tmp_path):
    one = write_run(tmp_path / "one", [{"step": 0, "loss": 2.0}, {"step": 1, "eval_loss": 1.5}])
    two = write_run(tmp_path / "two", [{"step": 0, "loss": 3.0}])
    figure = meshtrain.plot(one, str(two))
    labels = ["one: training loss 2.0000", "one: held-out loss 1.5000", "two: training loss 3.0000"]
    assert [*curves(figure)] == labels
    colors = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colors[0] == colors[1] != colors[2]
    # Runs with the same name have their paths.
    (tmp_path / "x").mkdir()
    other = write_run(tmp_path / "x" / "one", [{"step": 0, "loss": 2.5}])
    assert f"{other}: training loss 2.5000" in curves(meshtrain.plot(one, other))


def test_a_workdir_without_a_loss_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^\S+/none: not a run .*; give the --workdir of a run$"):
        meshtrain.plot(tmp_path / "none")
    empty = write_run(tmp_path / "empty", [{"step": 0, "grad_norm": 1.0}])
    with pytest.raises(ConfigError, match=r"^\S+/empty: its metrics.jsonl has no loss yet; train"):
        meshtrain.plot(empty)
    # A loss that is not finite is null in the file.
    diverged = write_run(tmp_path / "diverged", [{"step": step, "loss": None} for step in range(3)])
    with pytest.raises(
        ConfigError, match=r"diverged: each of the 3 losses in .* is not finite, or"
    ):
        meshtrain.plot(diverged)


def test_names_that_matplotlib_reads_in_another_way_are_in_the_legend(tmp_path, monkeypatch):
    names = ["_under", "m$x_{$", "runs"]
    folders = [write_run(tmp_path / name, [{"step": 0, "loss": 2.0}]) for name in names]
    monkeypatch.chdir(folders[-1])
    figure = meshtrain.plot(*folders[:-1], ".")
    assert [*curves(figure)] == [f"{name}: training loss 2.0000" for name in names]
    assert figure._repr_png_().startswith(b"\x89PNG")
    # Their text is not only accepted: it is drawn as it is, not as a formula.
    assert not any(text.get_parse_math() for text in figure.axes[0].get_legend().get_texts())


def test_a_huge_loss_has_a_short_label(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 0, "loss": 1e300}, {"step": 1, "eval_loss": 2e5}])
    figure = meshtrain.plot(run)
    assert [*curves(figure)] == ["training loss 1e+300", "held-out loss 200000.0000"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_names_the_extra(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    run = write_run(tmp_path / "run", [{"step": 0, "loss": 2.0}])
    plot = meshtrain.plot
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"^the package matplotlib is missing; .*notebook"):
        plot(run)
