"""The memory of a compiled step, split into its parts."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.cluster import limits
from meshtrain.config.schema import MeshConfig
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools.hlo import activations, hlo, memory

PARAMETERS, BATCH, TEMPORARIES = 4_000_000 // 8, 1000, 7_000_000


@pytest.fixture
def program():
    mesh = make_mesh(MeshConfig(fsdp=8))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None))
    leaf = jax.ShapeDtypeStruct((1_000_000,), "float32", sharding=sharded)
    state = SimpleNamespace(params={"w": leaf}, opt_state=[leaf, leaf], residual=None)
    # As at ZeRO stage 1: gradients are replicated.
    return SimpleNamespace(mesh=mesh, abstract_state=state, grad_shardings={"w": replicated})


def compiled(**sizes):
    fields = ("argument", "output", "alias", "temp")
    stats = {f"{name}_size_in_bytes": sizes.get(name, 0) for name in fields}
    stats["peak_memory_in_bytes"] = sizes.get("peak", 0)
    return SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(**stats), as_text=lambda: sizes.get("text", "")
    )


def test_the_parts_add_up_to_the_peak(program, monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 8 * 20e6)
    arguments = 3 * PARAMETERS + BATCH
    step = compiled(argument=arguments, temp=TEMPORARIES, text=STEP)
    found = memory.memory_of(program, step)
    assert (found.parameters, found.optimizer_state) == (PARAMETERS, 2 * PARAMETERS)
    assert (found.batch, found.gradients) == (BATCH, 4_000_000)
    assert found.activations == KEPT + HEAD
    assert found.temporaries == TEMPORARIES - 4_000_000 - KEPT - HEAD
    sizes = [getattr(found, field.name) for field in dataclasses.fields(found)]
    assert sum(sizes[:6]) == found.peak == sizes[6]
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
    small = memory.memory_of(program, compiled(argument=3 * PARAMETERS, temp=1000, text=STEP))
    assert (small.activations, small.gradients, small.temporaries) == (KEPT + HEAD, 680, 0)


def test_a_step_that_does_not_fit_says_by_how_much():
    found = memory.Memory(10**9, 10**9, 0, 3 * 10**9, 10**8, 9 * 10**8, 6 * 10**9, capacity=4e9)
    assert memory.describe_memory(found) == (
        "the step needs 6 of 4 GB on each device: 2 GB too much: state 2, gradients 0.1, "
        "activations 3, temporaries 0.9"
    )


def test_a_program_of_another_form_has_activations_among_its_temporaries(program):
    step = compiled(argument=3 * PARAMETERS, temp=TEMPORARIES, text=STEP.replace("%", "%other."))
    backward = 'metadata={op_name="jit(step)/transpose(jvp())/add"}'
    text = f"ENTRY %main () -> f32[3] {{\n  ROOT %a = f32[3] add(%missing), {backward}\n}}"
    step = compiled(argument=3 * PARAMETERS, temp=TEMPORARIES, text=text)
    found = memory.memory_of(program, step)
    assert (found.activations, found.temporaries) == (0, TEMPORARIES - 4_000_000)
    assert "gradients 0.004, activations and temporaries " in memory.describe_memory(found)


def test_a_compiler_that_reports_nothing_has_no_memory(program):
    step = SimpleNamespace(memory_analysis=lambda: None)
    assert memory.memory_of(program, step) is None


def test_kept_arrays_are_computed_in_the_forward_and_read_in_the_backward_pass():
    # 12 floats, which a loop stacks; 5 floats, which are read twice. Not: a weight that a loop
    # passes on, what the backward pass recomputes, and an array with the sizes of a parameter.
    params = {"w": jax.ShapeDtypeStruct((7, 9), "float32", sharding=one_device())}
    module = hlo.parse(STEP)
    assert activations.kept_bytes(module, params) == KEPT
    assert activations.kept_bytes(module, {}) == KEPT + HEAD


def test_of_micro_batches_one_is_counted_and_of_a_pipeline_the_buffers_of_its_ticks():
    assert activations.kept_bytes(hlo.parse(looped(STEP)), {}) == KEPT + HEAD
    put = 'f32[4,10]{1,0} dynamic-update-slice(%p), metadata={op_name="jit(step)/kept/update"}'
    text = looped(STEP).replace("  %half", f"  %put = {put}\n  %half", 1)
    assert activations.kept_bytes(hlo.parse(text), {}) == KEPT + HEAD + 4 * 40
    # A loop of one row, which XLA has inlined, keeps nothing more.
    inlined = '  %forwards = f32[9]{0} broadcast(), metadata={op_name="jit(step)/jvp()/x"}\n'
    inlined += (
        '  %last = f32[9]{0} negate(%forwards), metadata={op_name="jit(step)/transpose(jvp())/y"}\n'
    )
    with_row = text.replace("  ROOT %loop", inlined + "  ROOT %loop")
    assert activations.kept_bytes(hlo.parse(with_row), {}) == KEPT + HEAD + 4 * 40 + 4 * 9
    with_row = with_row.replace("  ROOT %loop", f"  %row = {put.replace('%p', '%b')}\n  ROOT %loop")
    assert activations.kept_bytes(hlo.parse(with_row), {}) == KEPT + HEAD + 4 * 40


def one_device():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def looped(text):
    """Returns the step as the body of a loop that belongs to neither pass."""
    loop = """
ENTRY %outer (b: f32[3]) -> f32[3] {
  %b = f32[3]{0} parameter(0)
  ROOT %loop = f32[3]{0} while(%b), condition=%cond, body=%main, \
metadata={op_name="jit(step)/while"}
}
"""
    return text.replace("ENTRY ", "") + loop


KEPT, HEAD = 4 * (12 + 5), 4 * 63
STEP = """HloModule jit_step, is_scheduled=true

%forward (p: (f32[6], f32[2,6])) -> (f32[6], f32[2,6]) {
  %p = (f32[6]{0}, f32[2,6]{1,0}) parameter(0)
  %weight = f32[6]{0} get-tuple-element(%p), index=0
  %stack = f32[2,6]{1,0} get-tuple-element(%p), index=1
  %write = f32[2,6]{1,0} fusion(%stack, %weight), kind=kLoop, calls=%c
  ROOT %next = (f32[6]{0}, f32[2,6]{1,0}) tuple(%weight, %write)
}

ENTRY %main (p: f32[6]) -> f32[3] {
  %p = f32[6]{0} parameter(0)
  %zeros = f32[2,6]{1,0} broadcast(), metadata={op_name="jit(step)/jvp()/zeros"}
  %half = f32[5]{0} fusion(%p), calls=%c, metadata={op_name="jit(step)/jvp()/mul"}
  %start = (f32[6]{0}, f32[2,6]{1,0}) tuple(%p, %zeros)
  %while = (f32[6]{0}, f32[2,6]{1,0}) while(%start), body=%forward, \
metadata={op_name="jit(step)/jvp()/while"}
  %w = f32[6]{0} get-tuple-element(%while), index=0
  %kept = f32[2,6]{1,0} get-tuple-element(%while), index=1
  %view = f32[12]{0} bitcast(%kept)
  %head = f32[9,7]{1,0} fusion(%p), calls=%c, metadata={op_name="jit(step)/jvp()/dot"}
  %again = f32[8]{0} fusion(%w, %half), calls=%c, \
metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %both = (f32[12]{0}, f32[9,7]{1,0}) tuple(%view, %head)
  ROOT %grad = f32[3]{0} fusion(%both, %again, %half), calls=%c, \
metadata={op_name="jit(step)/transpose(jvp())/dot"}
}
"""
