"""Rows of metrics.jsonl in other places: a function, TensorBoard, Weights & Biases."""

import json
import struct
import time

import pytest
from tensorboardX.proto.event_pb2 import Event
from wandb.proto import wandb_internal_pb2

from meshtrain import ConfigError
from meshtrain.config.parse import parse
from meshtrain.monitor import sinks
from meshtrain.monitor.sinks import scalars
from meshtrain.train import train
from tests.lib.configs import tiny_config


def config(steps=3, **monitor):
    c = tiny_config()
    c.train.steps, c.train.log_every, c.checkpoint.every = steps, 1, 2
    c.optim.schedule = "constant"
    c.monitor.update(monitor)
    return c


def rows_of(workdir):
    return [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """Yields the events of TensorBoard's files in order: length, its CRC, event, its CRC."""
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def curve(folder, name):
    """Returns the values of a curve by step, without those that a later start made void."""
    found = {}
    for event in events(folder):
        if event.HasField("session_log"):
            found = {step: value for step, value in found.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == name:
                found[event.step] = value.simple_value
    return found


@pytest.mark.slow
def test_a_function_gets_each_row_and_tensorboard_its_numbers_also_after_a_crash(tmp_path):
    found = []

    def crash(row):
        found.append(row)
        assert row["step"] < 5

    c = config(steps=7, tensorboard=True)
    c.checkpoint.every = 3
    with pytest.raises(AssertionError):
        train(c, workdir=tmp_path, on_metrics=crash)
    assert found == rows_of(tmp_path) and len(found) == 6
    c.train.log_every = 2
    train(c, workdir=tmp_path)
    rows = rows_of(tmp_path)
    # Step 3 was after the checkpoint; the last row is that of the final evaluation.
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 6, 7]
    for name in ("loss", "step_time", "eval_loss"):
        expected = {row["step"]: row[name] for row in rows if name in row}
        assert curve(tmp_path / "tensorboard", name) == pytest.approx(expected, rel=1e-6)


def test_no_file_of_tensorboard_replaces_one_of_the_same_second(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    (sink,) = sinks.open_sinks(config(tensorboard=True), tmp_path, None)
    sink.begin(0)
    for step in range(3):
        sink.write({"step": step, "loss": float(step)})
    sink.begin(2)
    sink.write({"step": 2, "loss": 9.0})
    sink.close()
    assert curve(tmp_path / "tensorboard", "loss") == {0: 0.0, 1: 1.0, 2: 9.0}


@pytest.mark.slow
def test_an_error_of_the_function_ends_the_run_and_one_of_a_service_does_not(
    tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        train(config(), on_metrics=fail)
    monkeypatch.setattr(sinks._TensorBoard, "write", fail)
    train(config(tensorboard=True), workdir=tmp_path)
    assert len(rows_of(tmp_path)) == 4
    assert capsys.readouterr().out.count("TensorBoard gets no more rows: no space") == 1


def records(data, block=32768):
    """Yields the records of a file of Weights & Biases: LevelDB's log format after 7 bytes."""
    start, parts = 7, b""
    while start < len(data):
        if block - start % block < 7:  # padding at the end of a block
            start += block - start % block
            continue
        _, size, kind = struct.unpack("<IHB", data[start : start + 7])
        parts += data[start + 7 : start + 7 + size]
        start += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_weights_and_biases_gets_the_rows_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (3, 5):
        train(config(steps=steps, wandb="test"), workdir=tmp_path)
    losses, eval_losses, ids = {}, {}, set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            items = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
            if "loss" in items:
                losses[int(items["step"])] = float(items["loss"])
            if "eval_loss" in items:
                eval_losses[int(items["step"])] = float(items["eval_loss"])
    *rows, final = rows_of(tmp_path)
    assert losses == pytest.approx({row["step"]: row["loss"] for row in rows})
    assert eval_losses[5] == pytest.approx(final["eval_loss"])
    assert ids == {(tmp_path / sinks.RUN_ID).read_text()}


def test_lists_are_curves_of_layers_and_what_is_no_number_is_left_out():
    row = {"step": 3, "loss": 1.5, "mfu": None, "grad_norm": float("nan"), "load": [1.0, 2.0]}
    assert dict(scalars(row)) == {"loss": 1.5, "load/0": 1.0, "load/1": 2.0}


def test_a_sink_that_a_run_cannot_have_is_one_line(tmp_path, monkeypatch):
    cfg = parse(config(tensorboard=True, wandb="test"), num_devices=1)
    assert len(sinks.sink_faults(cfg, None)) == 2
    with pytest.raises(ConfigError, match="monitor.tensorboard=True: there is no folder"):
        train(config(tensorboard=True))
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"tensorboardX is not installed; .* launch/setup.sh ten"):
        train(config(tensorboard=True), workdir=tmp_path)
    assert not list(tmp_path.iterdir())
