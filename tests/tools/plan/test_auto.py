"""Config key mesh.auto: the layout that the planner chooses for the devices of a run."""

import dataclasses
import json
import math

import jax
import pytest

from meshtrain import hardware
from meshtrain.cli import app
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.configs import quickstart
from meshtrain.errors import ConfigError
from meshtrain.tools.plan import auto
from meshtrain.tools.plan import machine as machines
from meshtrain.train import train

H100 = hardware.devices()["h100"]


@pytest.fixture
def config(tiny):
    tiny.mesh.auto = True
    return tiny


def test_a_config_without_it_stays_as_it_is(tiny):
    cfg = auto.resolve(parse(tiny))
    assert cfg == parse(tiny, num_devices=8)
    assert cfg.layout_reasons == ()


@pytest.mark.slow
def test_a_run_uses_and_logs_the_choice(config, tmp_path, capsys):
    result = train(config, workdir=tmp_path)
    assert result.step == 3
    used = json.loads((tmp_path / "config.json").read_text())
    assert used["mesh"].pop("auto") is False
    assert math.prod(used["mesh"][axis] for axis in AXES) == jax.device_count()
    assert "mesh.auto   " in capsys.readouterr().out


def test_devices_of_the_table_are_not_measured(config, monkeypatch):
    """The same choice as that of the command, without a measurement."""
    monkeypatch.setitem(hardware.devices_by_kind(), "cpu", H100)
    monkeypatch.setattr(machines, "measure_host", None)
    cfg = auto.resolve(parse(config))
    assert "layouts by `meshtrain plan`" in cfg.layout_reasons[0]
    assert math.prod(getattr(cfg.mesh, axis) for axis in AXES) == 8


def test_sizes_above_one_are_kept(config):
    config.mesh.tensor = 2
    cfg = auto.resolve(parse(config))
    assert cfg.mesh.tensor == 2
    assert math.prod(getattr(cfg.mesh, axis) for axis in AXES) == 8


def test_slow_links_are_avoided(config, monkeypatch):
    """If links take as long as a thousand layers, the axis with the fewest messages is chosen."""
    device = dataclasses.replace(H100, chip=None, link=1e6, network=1e6, latency=1.0)
    monkeypatch.setattr(machines, "measure_host", lambda: device)
    cfg = auto.resolve(parse(config))
    assert cfg.mesh.tensor == cfg.mesh.context == cfg.mesh.pipeline == 1
    assert cfg.train.num_microbatches == 1


def test_the_devices_are_measured():
    device = machines.measure_host()
    figures = device.flops_16, device.bandwidth, device.link, device.latency, device.memory
    assert device.name == "cpu" and all(0 < figure < 1e15 for figure in figures)


def test_a_batch_that_the_devices_do_not_divide_is_one_line(config):
    config.train.global_batch = 3
    config.mesh.data = 8
    with pytest.raises(ConfigError, match="train.global_batch=3 is not divisible by mesh.data=8"):
        auto.resolve(parse(config))


def test_a_model_that_does_not_fit_is_one_line(config, monkeypatch):
    device = dataclasses.replace(H100, memory=1e4)
    monkeypatch.setitem(hardware.devices_by_kind(), "cpu", device)
    with pytest.raises(ConfigError, match="no layout fits 0 GB on each; the nearest needs"):
        auto.resolve(parse(config))


def test_commands_that_choose_no_mesh_say_so():
    with pytest.raises(ConfigError, match="mesh.auto=True: only train, audit and profile"):
        parse({**quickstart.get_config().to_dict(), "mesh": {"auto": True}}, num_devices=8)


def test_audit_chooses_the_mesh_of_its_target(tmp_path, capsys):
    assert app.main("audit", ["--config=quickstart", "--config.mesh.auto=True"]) == 0
    assert capsys.readouterr().out
