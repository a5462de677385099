"""What a run prints at its end: what can be done with it."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.monitor import summary
from tests.lib.configs import tiny_config


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")


TEXT = Source(lambda indices: None, identity={"tokenizer": "bytes"})
GENERATE = "meshtrain generate --workdir=runs/one"


@pytest.mark.parametrize(
    ("data", "change", "expected"),
    [
        (TEXT, {}, [f"{GENERATE} --prompt=TEXT", "--config.train.steps=6 continues it"]),
        (
            Source(lambda indices: None),
            {},
            ["--config.train.steps=6 continues it"],
        ),  # numbers, not text
        ([], {}, ["train.steps=6 continues it"]),  # an iterable of the caller
        (
            TEXT,
            {"data.build": "meshtrain.data.chat:build"},
            [f"{GENERATE} --chat --prompt=TEXT", "--config.train.steps=6 continues it"],
        ),
        (
            TEXT,
            {"train.epochs": 0.5},
            [f"{GENERATE} --prompt=TEXT", "--config.train.epochs=1 continues it"],
        ),
        # The steps that the run has taken count.
        (
            TEXT,
            {"train.steps": 1},
            [f"{GENERATE} --prompt=TEXT", "--config.train.steps=6 continues it"],
        ),
    ],
    ids=["text", "numbers", "iterable", "chat", "epochs", "fewer steps"],
)
def test_the_end_of_a_run_names_the_commands_that_fit_it(data, change, expected):
    config = tiny_config()
    model = build_model(parse(config))
    for key, value in change.items():
        config.update_from_flattened_dict({key: value})
    line = summary.next_line(parse(config), model, data, Path("runs/one"), 3)
    assert line == "next: " + " · ".join(
        ["meshtrain report runs/one --output=report.html", *expected]
    )


def test_no_text_is_generated_with_a_model_that_only_python_has():
    cfg = parse(tiny_config())
    model = build_model(cfg)
    without_cache = replace(model, cached_block=None)
    report = "next: meshtrain report runs/one --output=report.html"
    line = summary.next_line(cfg.of_own_model(), model, TEXT, Path("runs/one"), 3)
    assert line == f"{report} · train.steps=6 continues it"
    line = summary.next_line(cfg, without_cache, TEXT, Path("runs/one"), 3)
    assert line == f"{report} · --config.train.steps=6 continues it"


def test_the_commands_can_be_pasted_for_any_name_of_a_folder():
    cfg = parse(tiny_config())
    line = summary.next_line(cfg, build_model(cfg), TEXT, Path("runs/it's mine"), 3)
    assert "meshtrain report 'runs/it'\"'\"'s mine' --output=report.html · " in line


def test_a_program_that_is_not_on_the_path_is_named_by_its_path(tmp_path, monkeypatch):
    program = tmp_path / "a venv" / "bin" / "meshtrain"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert summary._program() == "'a venv/bin/meshtrain'"
