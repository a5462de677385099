"""Config key mesh.auto: the layout that the planner chooses for the devices of a run."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshtrain
from meshtrain import hardware
from meshtrain.cli import app
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.configs import quickstart
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
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


def classifier():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            self.layer = nnx.Linear(64, 10, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    return meshtrain.from_nnx(Net, lambda net, batch: meshtrain.weighted(net(batch["x"]).max(-1)))


def stack():
    """Returns a stack whose dims have no names, so that no layout may shard it."""

    def embed(params, batch):
        return batch["x"] @ params["embedding"]

    def block(layer, x, batch):
        return x + jnp.tanh(x @ layer["kernel"])

    def init(key):
        return {"embedding": jnp.ones((64, 8)), "layers": {"kernel": jnp.ones((4, 8, 8))}}

    axes = {"embedding": (None, None), "layers": {"kernel": ("layers", None, None)}}
    return Model(
        init,
        axes,
        embed=embed,
        block=block,
        head=lambda params, x, batch: meshtrain.weighted(x.sum(-1)),
    )


def batches():
    for _ in range(3):
        yield {"x": np.ones((16, 64), np.float32)}


OWN_DATA = {
    "list": lambda: list(batches()),
    "iterator": batches,
    "source": lambda: Source(lambda indices: {"x": np.ones((len(indices), 64), np.float32)}),
}


@pytest.mark.parametrize(
    ("make_model", "data"), [(classifier, "list"), (classifier, "iterator"), (stack, "source")]
)
def test_a_model_and_data_of_ones_own_get_a_mesh(make_model, data, config, tmp_path):
    config.eval.batches = 0
    result = train(config, workdir=tmp_path, model=make_model(), data=OWN_DATA[data]())
    assert result.step == 3  # also of what can be iterated only once
    used = json.loads((tmp_path / "config.json").read_text())
    assert math.prod(used["mesh"][axis] for axis in AXES) == jax.device_count()


def test_rows_of_one_token_get_a_mesh(config):
    config.data.seq_len = 1
    assert auto.resolve(parse(config)).mesh.context == 1


def test_data_without_a_batch_is_one_line(config):
    with pytest.raises(ConfigError, match=r"^data: has no batch"):
        train(config, data=[])


@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"data": 2}])
def test_the_batch_per_device_is_that_of_the_plan_and_of_the_step(sizes, config):
    """It was that of the mesh before the choice: 6 rows, or 12 with data=2."""
    config.train.batch_per_device = 6
    config.mesh.update({"data": 1, **sizes})
    cfg = auto.resolve(parse(config))
    assert cfg.train.global_batch == 6 * jax.device_count() and not cfg.train.batch_per_device
    assert math.prod(getattr(cfg.mesh, axis) for axis in AXES) == 8


def test_commands_that_choose_no_mesh_say_so():
    with pytest.raises(ConfigError, match="mesh.auto=True: only train, audit and profile"):
        parse({**quickstart.get_config().to_dict(), "mesh": {"auto": True}}, num_devices=8)


@pytest.mark.slow
def test_audit_chooses_the_mesh_of_its_target(tmp_path, capsys):
    assert app.main("audit", ["--config=quickstart", "--config.mesh.auto=True"]) == 0
    assert capsys.readouterr().out
