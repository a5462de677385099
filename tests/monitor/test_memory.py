"""The memory of a compiled step, split into its parts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.cluster import limits
from meshtrain.config.schema import MeshConfig
from meshtrain.monitor import memory
from meshtrain.parallel.mesh import make_mesh

PARAMETERS, BATCH, TEMPORARIES = 4_000_000 // 8, 1000, 7_000_000


@pytest.fixture
def program():
    mesh = make_mesh(MeshConfig(fsdp=8))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None))
    leaf = jax.ShapeDtypeStruct((1_000_000,), "float32", sharding=sharded)
    state = SimpleNamespace(params={"w": leaf}, opt_state=[leaf, leaf])
    # As at ZeRO stage 1: gradients are replicated.
    return SimpleNamespace(mesh=mesh, abstract_state=state, grad_shardings={"w": replicated})


def compiled(**sizes):
    fields = ("argument", "output", "alias", "temp")
    stats = {f"{name}_size_in_bytes": sizes.get(name, 0) for name in fields}
    stats["peak_memory_in_bytes"] = sizes.get("peak", 0)
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**stats))


def test_the_parts_add_up_to_the_peak(program, monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 8 * 20e6)
    arguments = 3 * PARAMETERS + BATCH
    step = compiled(argument=arguments, temp=TEMPORARIES, peak=arguments + TEMPORARIES)
    found = memory.memory_of(program, step)
    assert (found.parameters, found.optimizer_state) == (PARAMETERS, 2 * PARAMETERS)
    assert (found.batch, found.gradients) == (BATCH, 4_000_000)
    assert found.temporaries == TEMPORARIES - 4_000_000
    assert found.peak == arguments + TEMPORARIES and found.fits
    # The eight devices share the memory of the host.
    assert found.capacity == 20e6
    assert memory.memory_of(program, step, allocated=5).capacity == 20e6 + 5


def test_a_gpu_reports_its_peak_and_a_cpu_has_the_sum_of_the_buffers(program):
    step = compiled(argument=3 * PARAMETERS, temp=TEMPORARIES, peak=3 * PARAMETERS + 100)
    assert memory.memory_of(program, step).peak == 3 * PARAMETERS + TEMPORARIES
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    program.mesh = SimpleNamespace(devices=np.array([gpu]))
    found = memory.memory_of(program, step)
    assert (found.peak, found.capacity) == (3 * PARAMETERS + 100, 141e9)


def test_without_a_peak_it_is_the_sum_of_the_buffers(program):
    step = compiled(argument=3 * PARAMETERS, output=50, alias=30, temp=TEMPORARIES)
    assert memory.memory_of(program, step).peak == 3 * PARAMETERS + 20 + TEMPORARIES
    # The gradients may never be in memory all at once.
    small = memory.memory_of(program, compiled(argument=3 * PARAMETERS, temp=1000))
    assert (small.gradients, small.temporaries) == (1000, 0)


def test_a_step_that_does_not_fit_says_by_how_much(program, monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 8 * 3e9)
    state = SimpleNamespace(**vars(program.abstract_state))
    monkeypatch.setattr(
        memory.states, "bytes_per_device", lambda tree: 10**9 if tree is state else PARAMETERS
    )
    program.abstract_state = state
    step = compiled(argument=3 * PARAMETERS, temp=6_000_000_000)
    assert memory.start_line(program, step) == (
        "the step needs 6 of 4 GB on each device: 2 GB too much: state 0.001, "
        "gradients 0.0005, activations and temporaries 6"
    )


def test_a_compiler_that_reports_nothing_has_no_line(program, monkeypatch):
    monkeypatch.setattr(memory.states, "bytes_per_device", lambda tree: 0)
    assert memory.start_line(program, SimpleNamespace(memory_analysis=lambda: None)) == ""
