"""A run that cannot fit in memory is one line, before its data is read or anything is compiled."""

import jax
import pytest

from meshtrain.cluster import limits
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data import loader
from meshtrain.errors import ConfigError
from meshtrain.models import blocks
from meshtrain.monitor import capacity
from meshtrain.program import assemble
from meshtrain.tools.audit import audit
from meshtrain.tools.hlo.memory import memory_of
from meshtrain.train import train
from tests.lib.configs import tiny_config

ABSURD = {
    "train.global_batch": (
        10**8,
        "train.global_batch=100000000 x data.seq_len=16: the rows of each process take 19.2 GB, "
        "and this machine has 16.0 GB; lower them",
    ),
    "data.seq_len": (
        10**8,
        "train.global_batch=16 x data.seq_len=100000000: the rows of each process take 19.2 GB, "
        "and this machine has 16.0 GB; lower them",
    ),
    "model.num_layers": (
        10**6,
        "model: parameters and optimizer state take 111.4 GB on each device, which has 2.0 GB; "
        "use a smaller model (model.num_layers=1000000, model.d_model=32, model.d_ff=64, "
        "model.vocab_size=64), or shard it over more devices with mesh.fsdp",
    ),
    "model.d_model": (
        10**7,
        "model: parameters and .* model.d_model=10000000",
    ),
    "model.d_ff": (10**9, "model: parameters and .* model.d_ff=1000000000"),
    "model.num_experts": (10**6, "model: parameters and .* model.num_experts=1000000"),
    "train.microbatches": (
        2 * 10**7,
        "train.global_batch=20000000 x data.seq_len=16: the inputs of the layers, which the "
        "backward pass reads, take 10.2 GB on each device, which has 2.0 GB; lower them, raise "
        "train.num_microbatches=1, or use more devices",
    ),
}


def failing(*args, **kwargs):
    raise AssertionError("not called")


@pytest.mark.parametrize("key", ABSURD)
def test_what_cannot_fit_is_one_line_before_data_is_read(tmp_path, monkeypatch, key):
    monkeypatch.setattr(limits, "total_memory", lambda: 16e9)  # of 8 devices
    monkeypatch.setattr(loader.Loader, "__init__", failing)
    value, message = ABSURD[key]
    c = tiny_config()
    section, name = key.replace("microbatches", "global_batch").split(".")
    c[section][name] = value
    if name == "num_experts":
        c.model.experts_per_token = 2
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")) as error:
        train(c, workdir=tmp_path / "run")
    assert len(error.value.faults) == 1
    assert not (tmp_path / "run").exists()


# Settings, and the bytes of the inputs of layers that a device keeps at least.
LAYOUTS = {
    "remat full": ({"train.remat": "full", "train.num_microbatches": 2}, 256 * 32 * 4 * 2),
    "sharded": (
        {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2},
        512 * 32 * 4 * 2,
    ),
    "pipeline": (
        {
            "mesh.data": 1,
            "mesh.pipeline": 2,
            "mesh.fsdp": 4,
            "train.num_microbatches": 4,
            "pipeline.keep": "inputs",
        },
        256 * 32 * 4,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "sharded")) for name in LAYOUTS]
)
@pytest.mark.slow
def test_the_bound_is_below_what_the_compiled_step_needs(monkeypatch, name):
    """A run that fits is never rejected."""
    c = tiny_config()
    c.update(data=dict(seq_len=64), train=dict(global_batch=64, unroll=1))
    layout, expected = LAYOUTS[name]
    c.update_from_flattened_dict(layout)
    cfg = parse(c, num_devices=8)
    parts = build(cfg)
    program = assemble(cfg, parts)
    with program.active():
        compiled = program.compile(audit._batch_like(cfg, program, parts.train_data))
    needed = memory_of(program, compiled)
    state = needed.parameters + needed.optimizer_state
    least = capacity._least_kept_bytes(cfg, parts.model, program.abstract_state.params, 64)
    assert least == expected < needed.peak - state
    monkeypatch.setattr(limits, "total_memory", lambda: 8.0 * needed.peak)
    capacity.check_fits(cfg, parts.model, program.abstract_state)
    monkeypatch.setattr(limits, "total_memory", lambda: 8 * (state + least / 2))
    with pytest.raises(ConfigError, match="the inputs of the layers"):
        capacity.check_fits(cfg, parts.model, program.abstract_state)


def test_the_memory_of_a_machine_is_that_of_its_container_with_its_swap_space(
    tmp_path, monkeypatch
):
    (tmp_path / "max").write_text("3000\n")
    monkeypatch.setattr(limits, "CGROUP_FILES", ((str(tmp_path / "max"), ""),))
    read = limits._read
    info = "MemTotal:  8 kB\nMemAvailable: 1 kB\nSwapTotal: 2 kB\n"
    monkeypatch.setattr(limits, "_read", lambda p: info if p == "/proc/meminfo" else read(p))
    assert limits.total_memory() == 3000 + 2048
    (tmp_path / "max").write_text("max\n")
    assert limits.total_memory() == 10 * 1024
    monkeypatch.setattr(limits, "_read", lambda path: "")
    assert limits.total_memory() == float("inf")


def test_train_unroll_may_be_larger_than_the_number_of_layers():
    ones = {"w": jax.numpy.ones(4)}
    found = blocks.run_blocks(lambda layer, x, _: x + layer["w"], ones, 0.0, None, unroll=10**9)
    assert found == 4
