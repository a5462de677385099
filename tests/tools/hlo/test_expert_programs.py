"""A step of a mixture of experts on fsdp, compiled for H200 GPUs: what is sent, and what is kept.

No GPU is needed, only the wheels of the extra aot-gpu.
"""

import functools

import pytest

from meshtrain.tools.hlo import traffic
from tests.lib import programs

pytestmark = pytest.mark.slow
TARGET, NUM_LAYERS, NUM_KERNELS = "h200:8", 4, 3
E, D, F = 8, 4096, 14336  # experts, model, feed-forward
KERNEL_DIMS = {E, D, F}


@functools.cache
def compiled():
    flags = ["--config.mesh.data=1", "--config.mesh.expert=1", "--config.mesh.fsdp=8"]
    flags += ["--config.train.global_batch=32", "--config.train.num_microbatches=1"]
    flags += ["--config.train.remat=none", "--config.data.packing=windows"]
    flags += [f"--config.model.num_layers={NUM_LAYERS}"]
    return programs.audited("mixtral", TARGET, *flags)


def sent_kernels(module, opcode):
    """Returns how often kernels of experts are sent by such operations, and their dtypes."""
    runs, dtypes = 0, set()
    for computation, count in traffic.executed(module):
        for one in module.computations[computation].values():
            if one.opcode != opcode:
                continue
            shapes = [shape for shape in one.results if KERNEL_DIMS <= set(shape.shape)]
            runs += count * bool(shapes)
            dtypes |= {shape.dtype for shape in shapes}
    return runs, dtypes


def test_gradients_of_experts_are_scattered_once_in_the_compute_dtype():
    found = sent_kernels(compiled().module, "reduce-scatter-start")
    assert found == (NUM_KERNELS * NUM_LAYERS, {"bf16"})


def test_gradients_are_scattered_while_those_of_the_layer_before_are_computed():
    """At the end of the step nothing would hide most of that: 48 % would be exposed."""
    sent = compiled().figures["roofline"]["transfers"]
    (scattered,) = [one for one in sent if one["kind"] == "reduce-scatter"]
    assert scattered["exposed"] < 0.2 * scattered["seconds"]
