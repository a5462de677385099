"""XLA compiler options by preset."""

import dataclasses
from types import SimpleNamespace

import jax
import jaxlib
import numpy as np
import pytest

from meshtrain import hardware
from meshtrain.config import schema
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.parallel import accelerator, remat, xla
from meshtrain.program import assemble
from meshtrain.train import train
from tests.lib.configs import tiny_config


def fake_mesh(platform, size, kind="a GPU that no table has"):
    devices = np.array([SimpleNamespace(platform=platform, device_kind=kind)] * size)
    return SimpleNamespace(devices=devices, size=size)


@pytest.mark.parametrize("preset", schema.XLA_PRESETS)
def test_this_version_of_xla_knows_every_option_of_a_preset(preset):
    found = xla.options(preset, fake_mesh("gpu", 8))
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=found)(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options=found | {"xla_gpu_of_a_later_year": True})


def test_passes_that_the_user_disables_stay_disabled(monkeypatch):
    mesh = fake_mesh("gpu", 8)
    assert xla.options("overlap", mesh)["xla_disable_hlo_passes"] == "rematerialization"
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_disable_hlo_passes=algsimp,cse --xla_b=2")
    found = xla.options("overlap", mesh)["xla_disable_hlo_passes"]
    assert found == "algsimp,cse,rematerialization"
    assert "xla_disable_hlo_passes" not in xla.options("none", mesh)


def test_options_that_this_version_removed_are_left_out(monkeypatch):
    name = "xla_gpu_enable_pipelined_all_gather"
    for version, is_known in [("0.10.2", True), ("0.11.0", False), ("0.12.0.1", False)]:
        monkeypatch.setattr(jaxlib, "__version__", version)
        found = xla.options("overlap", fake_mesh("gpu", 8))
        assert (name in found) == is_known
        assert (xla.OPTIMIZATION_LEVEL in found) == (version == "0.12.0.1")


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0"])
def test_options_that_slow_a_step_down_are_left_out(version, tiny, monkeypatch):
    """Pipelined all-gathers with micro-batches, the optimization level with experts."""
    monkeypatch.setattr(jaxlib, "__version__", version)
    tiny.train.xla_preset = "overlap"
    expected = xla.options("overlap", fake_mesh("cpu", 1))
    for num_experts, num_microbatches in [(4, 2), (4, 1), (0, 2), (0, 1)]:
        left_out = [xla.PIPELINED_ALL_GATHER] * (num_microbatches > 1)
        left_out += [xla.OPTIMIZATION_LEVEL] * (num_experts > 0)
        tiny.model.num_experts, tiny.train.num_microbatches = num_experts, num_microbatches
        cfg = parse(tiny, num_devices=8)
        found = assemble(cfg, build(cfg)).compiler_options
        assert found == {name: value for name, value in expected.items() if name not in left_out}


@pytest.mark.parametrize(
    ("platform", "size", "expected"),
    [("cpu", 8, []), ("gpu", 1, ["cublas"]), ("gpu", 8, ["cublas", "overlap"]), ("tpu", 8, [])],
)
def test_auto_selects_presets_by_platform_and_size(platform, size, expected):
    mesh = fake_mesh(platform, size)
    options = {}
    for preset in expected:
        options |= xla.options(preset, mesh)
    assert xla.options("auto", mesh) == options


def test_auto_leaves_an_option_to_the_users_xla_flags(monkeypatch):
    name = "xla_gpu_enable_triton_gemm"
    assert xla.options("auto", fake_mesh("gpu", 1)) == {name: False}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=true")
    assert xla.options("auto", fake_mesh("gpu", 1)) == {}
    assert xla.options("cublas", fake_mesh("gpu", 1)) == {name: False}


def test_quick_options_lower_the_llvm_level_on_cpus_unless_xla_flags_sets_it(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    (option,) = (found := xla.quick_compile_options(fake_mesh("cpu", 8)))
    assert jax.jit(lambda x: x + 1, compiler_options=found)(1.0) == 2
    assert xla.quick_compile_options(fake_mesh("gpu", 8)) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{option}=0")
    assert xla.quick_compile_options(fake_mesh("cpu", 8)) == {}


def test_an_unknown_preset_is_rejected():
    c = tiny_config()
    c.train.xla_preset = "fast"
    with pytest.raises(ConfigError, match="train.xla_preset='fast'"):
        parse(c, num_devices=8)


def test_several_presets_are_joined_and_each_is_checked(tiny):
    mesh = fake_mesh("gpu", 1)
    both = xla.options("cublas", mesh) | xla.options("cuda_graphs", mesh)
    assert len(both) == 3 and xla.options("cublas,cuda_graphs", mesh) == both
    assert xla.options("auto,cuda_graphs", mesh) == both
    tiny.train.xla_preset = "cublas,cuda_graph"
    with pytest.raises(ConfigError, match="train.xla_preset='cuda_graph'.*cuda_graphs"):
        parse(tiny, num_devices=8)


def test_auto_takes_the_presets_of_the_gpu_in_the_table(monkeypatch):
    h200 = hardware.devices()["h200"]
    mesh = fake_mesh("gpu", 8, h200.kinds[0])
    assert xla.presets_of(mesh) == [*h200.presets, "overlap"]
    measured = dataclasses.replace(h200, presets=("cuda_graphs",))
    monkeypatch.setattr(hardware, "device_of", {h200.kinds[0]: measured}.get)
    assert xla.presets_of(mesh) == ["cuda_graphs", "overlap"]
    assert xla.presets_of(fake_mesh("gpu", 1)) == ["cublas"]


def test_options_that_xla_does_not_know_are_left_out_with_a_line(monkeypatch, capsys):
    unknown = {"xla_gpu_of_a_later_year": True, "xla_gpu_of_an_earlier_year": 1}
    monkeypatch.setattr(xla, "options", lambda preset, mesh, without: unknown)
    train(tiny_config())
    lines = [line for line in capsys.readouterr().err.splitlines() if "has no option" in line]
    assert sorted(line.split()[-3] for line in lines) == [f"{name}:" for name in sorted(unknown)]
    assert all(line.startswith(f"train.xla_preset: jaxlib {jaxlib.__version__}") for line in lines)


def test_a_level_that_an_older_jaxlib_takes_as_a_number_is_left_out(capsys):
    def compile(compiler_options):
        if xla.OPTIMIZATION_LEVEL in compiler_options:
            raise TypeError("(): incompatible function arguments. The following argument types")
        return compiler_options

    lowered = SimpleNamespace(compile=compile)
    assert xla.compile_with(lowered, {xla.OPTIMIZATION_LEVEL: "O1", "xla_a": 1}) == {"xla_a": 1}
    assert f"has no option {xla.OPTIMIZATION_LEVEL}" in capsys.readouterr().err
    with pytest.raises(TypeError):
        xla.compile_with(SimpleNamespace(compile=_raise_type_error), {"xla_a": 1})


def _raise_type_error(compiler_options):
    raise TypeError("(): incompatible function arguments")


def test_other_compiler_errors_are_not_reported_as_unknown_options():
    with pytest.raises(jax.errors.JaxRuntimeError):
        xla.compile_with(jax.jit(lambda x: x).lower(1.0), {"xla_gpu_graph_min_graph_size": "few"})


def test_a_step_that_xla_cannot_double_buffer_is_compiled_without(capsys):
    def compile(compiler_options):
        if compiler_options[xla.DOUBLE_BUFFERING]:
            raise RuntimeError("fusion.1 is not scheduled after its control predecessor fusion.1")
        return compiler_options

    options = xla.options("overlap", fake_mesh("gpu", 8))
    found = xla.compile_with(SimpleNamespace(compile=compile), options)
    assert found == {**options, xla.DOUBLE_BUFFERING: False}
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("platform", "in_loop", "barrier"),
    [("gpu", True, False), ("gpu", False, True), ("cpu", True, True), ("tpu", True, True)],
)
def test_only_layers_in_a_loop_on_gpus_have_no_barrier(platform, in_loop, barrier, monkeypatch):
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    layer = remat.rematerialised(lambda x: x * x, "full", in_loop=in_loop)
    (equation,) = jax.make_jaxpr(layer)(1.0).eqns
    assert equation.params["prevent_cse"] == barrier
