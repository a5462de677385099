"""Steps that keep activations and moments in host memory, compiled for H200 GPUs: copies, bytes.

No GPU is needed, only the wheels of the extra aot-gpu.
"""

import functools
import re

import pytest

from meshtrain.tools.hlo import activations, hlo
from tests.lib import programs

TARGET, NUM_LAYERS, SEQ_LEN, D_MODEL = "h200:8", 4, 8192, 4096
INPUTS = NUM_LAYERS * SEQ_LEN * D_MODEL * 2  # bytes of the inputs of all layers, bfloat16
ACTIVATIONS, MOMENTS = "--config.train.remat=offload", "--config.optim.offload=True"


@functools.cache
def compiled(*overrides):
    flags = ["--config.data.packing=windows", f"--config.data.seq_len={SEQ_LEN}"]
    flags += [f"--config.model.num_layers={NUM_LAYERS}"]
    flags += ["--config.train.global_batch=8", "--config.train.num_microbatches=1"]
    return programs.audited("llama3", TARGET, *flags, *overrides)


@pytest.mark.slow
def test_inputs_of_layers_are_copied_in_both_passes_while_layers_compute():
    offloaded = compiled(ACTIVATIONS)
    assert offloaded.figures["memory"]["activations_on_host"] == INPUTS
    assert compiled().figures["memory"]["activations_on_host"] == 0
    # Of each loop: it writes into, or reads from, the array of all inputs, in the host's memory.
    stacked = f"bf16[{NUM_LAYERS},1,{SEQ_LEN},{D_MODEL}]{{3,2,1,0:S(5)}}"
    lines = [line for line in offloaded.text.splitlines() if stacked in line]
    for operation in ("dynamic-update-slice", "dynamic-slice"):
        starts = [line for line in lines if f"%{operation}-start" in line.partition(" = ")[0]]
        assert starts and all(" fusion-start(" in line for line in starts), operation
    # Nothing but these copies touches it.
    kernels = [line for line in lines if re.search(r" (fusion|copy)\(", line)]
    assert not kernels


@pytest.mark.slow
def test_the_device_has_the_memory_of_offloaded_moments():
    plain = compiled().figures["memory"]
    offloaded = compiled(MOMENTS).figures["memory"]
    assert offloaded["optimizer_state_on_host"] == pytest.approx(plain["optimizer_state"], abs=64)
    assert offloaded["optimizer_state"] < 64
    saved = plain["peak"] - offloaded["peak"]
    assert saved > 0.5 * plain["optimizer_state"]


@pytest.mark.slow
def test_moments_are_copied_after_the_backward_pass():
    module = compiled(MOMENTS).module
    program = [*module.computations[module.entry].values()]
    copies = []
    for number, one in enumerate(program):
        if one.opcode == "copy-start" and any(array.is_on_host for array in one.results):
            copies.append((number, one.results[0].is_on_host))
    assert {to_host for _, to_host in copies} == {True, False}
    loops = [number for number, one in enumerate(program) if one.opcode == "while"]
    assert min(number for number, _ in copies) > max(loops)


def test_arrays_in_host_memory_have_its_number_in_their_layout():
    on_device, on_host, scalar = hlo.arrays("(f32[2,3]{1,0}, bf16[8]{0:T(8)S(5)}, s32[])")
    assert (on_device.is_on_host, on_host.is_on_host, scalar.is_on_host) == (False, True, False)
    assert on_host.shape == (8,)


def test_only_arrays_of_the_device_are_kept_on_it():
    def program(layout):
        return hlo.parse(f"""HloModule step

ENTRY %main (x: f32[64]) -> f32[64] {{
  %x = f32[64]{{0}} parameter(0)
  %kept = f32[64]{layout} sine(%x), metadata={{op_name="jit(step)/jvp()/sin"}}
  ROOT %y = f32[64]{{0}} cosine(%kept), metadata={{op_name="jit(step)/transpose(jvp())/cos"}}
}}
""")

    assert activations.kept_bytes(program("{0}"), {}) == 256
    assert activations.kept_bytes(program("{0:S(5)}"), {}) == 0
