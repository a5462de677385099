"""The machine that the planner plans for: a device of a file, or a run that was measured."""

import dataclasses
import json

import pytest

from meshtrain import hardware
from meshtrain.errors import ConfigError
from meshtrain.tools.plan import machine as machines
from meshtrain.train import train
from tests.lib.plans import H100, run


def test_a_device_of_a_file_differs_from_one_of_the_table(tmp_path, capsys):
    file = tmp_path / "slow.toml"
    file.write_text('base = "h200"\nnetwork = 1e9\nmemory = 100_000_000_000\n')
    found = hardware.device_named(str(file))
    table = hardware.devices()["h200"]
    assert found == dataclasses.replace(table, name="slow", network=1e9, memory=100e9)
    assert run(f"--device={file}", "--devices=16") == 0
    assert (
        "layouts of 16 slow, 8 on each host; a step may use 90 of 100 GB" in capsys.readouterr().out
    )
    fixed = "--fix=mesh.data=2", "--fix=mesh.pipeline=1"
    assert run(f"--device={file}", "--devices=16", *fixed) == 0
    assert "with sync.dtype=int8 and sync.pattern=hierarchical a step would" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    "content, fault",
    [
        ("network = 1e9", "base=None: use one of"),
        ('base = "h200"\nnetwrok = 1e9', 'netwrok: unknown (did you mean "network"?)'),
        ('base = "h200"\nlink = 0', "link=0: use a positive number"),
        ('base = "h200"\nlink = "fast"', "link='fast': use a positive number"),
        ("base =", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_mistake_in_a_file_of_a_device_is_one_line(content, fault, tmp_path, capsys):
    file = tmp_path / "slow.toml"
    if content is not None:
        file.write_text(content)
    assert run(f"--device={file}", "--devices=8") == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1


def test_a_measured_run_scales_all_predictions(tmp_path, capsys):
    rows = [{"step": n, "step_time": 3.0, "predicted_step_time": 2.0} for n in range(20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": 0}, *rows])))
    assert machines.measured_factor(tmp_path) == 1.5
    seconds = []
    for flags in ([], [f"--measured={tmp_path}"]):
        output = tmp_path / "plan.json"
        assert run("--device=h200", "--devices=8", *flags, f"--output={output}") == 0
        seconds.append(json.loads(output.read_text())["layouts"][0]["step_seconds"])
    assert seconds[1] == pytest.approx(seconds[0] * 1.5)
    assert "after the factor of the measured run" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="predicted_step_time"):
        machines.measured_factor(tmp_path)


@pytest.mark.slow
def test_a_run_on_known_devices_writes_its_predicted_step_time(tiny, tmp_path, monkeypatch):
    tiny.mesh.data = 2
    tiny.mesh.tensor = 4
    train(tiny, workdir=tmp_path / "unknown")
    monkeypatch.setitem(hardware.devices_by_kind(), "cpu", H100)
    train(tiny, workdir=tmp_path / "known")
    first, second = (
        [json.loads(row) for row in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("unknown", "known")
    )
    assert all("predicted_step_time" not in row for row in first)
    predicted = {row["predicted_step_time"] for row in second if "loss" in row}
    assert len(predicted) == 1 and 1e-5 < predicted.pop() < 1e-2
    assert machines.measured_factor(tmp_path / "known") > 1
