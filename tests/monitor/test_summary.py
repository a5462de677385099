"""What a run prints at its end: what can be done with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.monitor import summary
from tests.lib.configs import tiny_config

TEXT = Source(lambda indices: None, identity={"tokenizer": "bytes"})
GENERATE = "meshtrain generate --workdir=runs/one"


@pytest.mark.parametrize(
    ("data", "change", "expected"),
    [
        (TEXT, {}, [f"{GENERATE} --prompt=TEXT", "train.steps=6 continues it"]),
        (Source(lambda indices: None), {}, ["train.steps=6 continues it"]),  # numbers, not text
        ([], {}, ["train.steps=6 continues it"]),  # an iterable of the caller
        (
            TEXT,
            {"data.build": "meshtrain.data.chat:build"},
            [f"{GENERATE} --chat --prompt=TEXT", "train.steps=6 continues it"],
        ),
        (
            TEXT,
            {"train.epochs": 0.5},
            [f"{GENERATE} --prompt=TEXT", "train.epochs=1 continues it"],
        ),
        (TEXT, {"train.steps": 0}, [f"{GENERATE} --prompt=TEXT"]),
    ],
    ids=["text", "numbers", "iterable", "chat", "epochs", "no steps"],
)
def test_the_end_of_a_run_names_the_commands_that_fit_it(data, change, expected):
    config = tiny_config()
    model = build_model(parse(config))
    for key, value in change.items():
        config.update_from_flattened_dict({key: value})
    line = summary.next_line(parse(config), model, data, Path("runs/one"))
    assert line == "next: " + " · ".join(["meshtrain report runs/one", *expected])


def test_no_text_is_generated_with_a_model_that_only_python_has():
    cfg = parse(tiny_config())
    model = build_model(cfg)
    without_cache = replace(model, cached_block=None)
    for given, its_cfg in ((model, cfg.of_own_model()), (without_cache, cfg)):
        line = summary.next_line(its_cfg, given, TEXT, Path("runs/one"))
        assert line == "next: meshtrain report runs/one · train.steps=6 continues it"


def test_the_commands_can_be_pasted_for_any_name_of_a_folder():
    cfg = parse(tiny_config())
    line = summary.next_line(cfg, build_model(cfg), TEXT, Path("runs/it's mine"))
    assert "meshtrain report 'runs/it'\"'\"'s mine' · " in line
