"""The files of a workdir."""

import json
import math

import numpy as np
import pytest

from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.monitor import writer as writer_module
from meshtrain.monitor.writer import Units, Writer
from meshtrain.storage import LocalFolder
from tests.lib.configs import quick


def strict_json(text):
    """Returns the value of a text that has none of Python's extensions of JSON."""

    def reject(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=reject)


def test_rows_and_events_are_json_whatever_is_not_finite(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    nan, inf = math.nan, math.inf
    writer.event("x", load=[[1.0, nan], (inf, -inf)], settings={"a.b": [1, inf]}, loss=nan)
    found = strict_json((tmp_path / "events.jsonl").read_text())
    assert found["load"] == [[1.0, None], [None, None]] and found["loss"] is None
    assert found["settings"] == {"a.b": [1, None]}


def test_an_infinite_setting_is_json_and_is_read_as_infinite(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    c = quick()
    c.divergence.spike_sigmas = math.inf
    writer.write_config({**c.to_dict(), "more": {"values": (-math.inf, 1.5)}})
    found = strict_json((tmp_path / "config.json").read_text())
    assert found["divergence"]["spike_sigmas"] == math.inf
    assert found["more"]["values"] == [-math.inf, 1.5]
    writer.write_config(c.to_dict())
    read = load.load_config(str(tmp_path / "config.json"), [])
    assert read.divergence.spike_sigmas == math.inf and read.to_dict() == c.to_dict()


def test_the_history_of_configs_bears_files_of_others(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    (tmp_path / "config_history").mkdir()
    (tmp_path / "config_history" / "0001 copy.json").touch()
    for seed in range(3):
        writer.write_config({"seed": seed})
    names = {"0001 copy.json", "0001.json", "0002.json"}
    assert {path.name for path in (tmp_path / "config_history").iterdir()} == names


def test_a_history_of_configs_that_is_no_folder_is_one_fault(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    (tmp_path / "config_history").touch()
    writer.write_config({})
    with pytest.raises(ConfigError, match="config_history/0001.json: File exists"):
        writer.write_config({"seed": 1})


def test_a_file_is_not_replaced_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "config.json.new").symlink_to(tmp_path / "mine")
    Writer(LocalFolder(tmp_path), leader=True).write_config({"seed": 0})
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "config.json").is_symlink()


class Scalar(np.ndarray):
    """A number that the device has computed, or that it still computes when it is looked at."""

    def __new__(cls, value, ready):
        self = np.asarray(value).view(cls)
        self.ready = ready
        return self

    def is_ready(self):
        return self.ready


@pytest.mark.parametrize("log_every", [1, 3])
def test_steps_that_are_seen_to_end_together_count_as_equally_long(
    tmp_path, monkeypatch, log_every
):
    now = [0.0]
    monkeypatch.setattr(writer_module.time, "perf_counter", lambda: now[0])
    writer = Writer(LocalFolder(tmp_path), leader=True)
    c = quick()
    c.train.steps = 6
    writer.begin(0, c, Units("tokens", 8, None), waited=0.0, observe=lambda *_: None)
    # Step 0 is seen to end at 1 s; of steps 1 and 2 only that they have ended at 3 s; and so on.
    for step in range(6):
        now[0] += 1.0
        others = dict.fromkeys(("skipped", "grad_norm", "learning_rate"), np.zeros(()))
        report = {"loss": Scalar(1.0, ready=step % 2 == 0), **others}
        writer.step(step, report, {}, waited=0.0, num_samples=1, log=(step + 1) % log_every == 0)
    writer.flush()
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(log_every - 1, 6, log_every)]
    assert [row["step_time"] for row in rows] == pytest.approx([1.0] * len(rows))


def test_an_event_after_part_of_a_line_is_not_lost(tmp_path):
    """A crash in the middle of a write leaves such a part."""
    (tmp_path / "events.jsonl").write_text('{"event": "first"}\n{"event": "se')
    writer = Writer(LocalFolder(tmp_path), leader=True)
    writer.event("third")
    writer.event("fourth")
    first, part, *others = (tmp_path / "events.jsonl").read_text().splitlines()
    assert part == '{"event": "se'
    assert [json.loads(line)["event"] for line in (first, *others)] == ["first", "third", "fourth"]


def test_rows_without_a_step_are_removed_when_a_run_resumes(tmp_path):
    others = ["null", "[1]", '{"loss": 1}', '{"step": "1"}', '{"step": [1]}', '{"step": {}}']
    lines = ['{"step": 1}', '{"step": null}', *others, "[" * 10**5, '{"step": 2}', '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": ']))
    writer = Writer(LocalFolder(tmp_path), leader=True)
    writer.final_evaluation(3, {"eval_loss": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3, "eval_loss": 1.0}]
