"""Steps of a mixture with grouped products, compiled for H200 GPUs and TPUs: the kernels' calls.

No accelerator is needed, only the wheels of the extra aot-gpu, or aot-tpu.
"""

import collections
import functools
import re

import pytest

from meshtrain.ops import experts
from meshtrain.parallel import dispatch
from meshtrain.tools.hlo import traffic
from tests.lib import programs

pytestmark = pytest.mark.slow
NUM_LAYERS, NUM_EXPERTS, PER_TOKEN, D, F = 2, 8, 2, 512, 256
NUM_ROWS, LENGTH = 8, 1024
MODEL = dict(
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    experts_per_token=PER_TOKEN,
    d_model=D,
    d_expert=F,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=1024,
)
TARGETS = {
    "h200": ("h200:8", "mosaic_gpu_v2"),
    "v5e": ("v5e:2x4", "tpu_custom_call"),
    "v5p": ("v5p:2x2x2", "tpu_custom_call"),
}


@functools.cache
def compiled(name, *overrides):
    flags = [f"--config.data.seq_len={LENGTH}", f"--config.train.global_batch={NUM_ROWS}"]
    flags += ["--config.mesh.data=1", "--config.mesh.fsdp=1"]
    flags += [f"--config.model.{key}={value}" for key, value in MODEL.items()]
    return programs.audited("mixtral", TARGETS[name][0], *flags, *overrides)


def grouped_calls(module, name):
    """Returns the runs of grouped kernels in a balanced step, by the rows of their buffer.

    And the FLOPs of all of them.
    """
    runs, flops = collections.Counter(), 0.0
    for computation, count in traffic.executed(module):
        inside = [computation]
        # On GPUs the slice of a layer's matrices is fused with the call.
        for one in module.computations[computation].values():
            inside += one.called if one.opcode == "fusion" else []
        for inner in inside:
            body = module.computations[inner]
            for one in body.values():
                scope = re.search(r"grouped_dot_of_(\d+)", one.attributes)
                if one.opcode != "custom-call" or not scope:
                    continue
                if re.search(f"{experts.LEFTOVER}|{dispatch.ROUNDS}", one.attributes):
                    continue  # with balanced routing these loops have no iterations
                assert f'custom_call_target="{TARGETS[name][1]}"' in one.attributes
                arrays = [body[operand].results[0] for operand in one.operands]
                rows = next(array for array in arrays if array.dtype == "bf16")
                runs[rows.shape[-2]] += count
                flops += count * sum(traffic.matmul_flops(module, inner, one).values())
    return runs, flops


# Three products: up, gate and down; and for each of them, two backward.
FORWARD, BACKWARD = 3 * NUM_LAYERS, 6 * NUM_LAYERS
# Of one device: an equal share of the rows.
FLOPS = 2 * D * F * NUM_ROWS * LENGTH * PER_TOKEN / 8


@pytest.mark.parametrize(
    ("name", "method", "sizes", "size"),
    [
        # Each device has all experts, and its own rows.
        ("h200", "gather", {"fsdp": 8, "expert": 1}, LENGTH * PER_TOKEN),
        # 1.25 times an equal share of all rows.
        ("h200", "gather", {"expert": 8}, 2560),
        ("h200", "dispatch", {"expert": 8}, 2560),
        ("v5e", "dispatch", {"expert": 8}, 2560),
        ("v5p", "gather", {"expert": 8}, 2560),
    ],
    ids=str,
)
def test_a_layer_calls_the_kernel_for_each_product(name, method, sizes, size):
    flags = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
    flags += [f"--config.expert.method={method}", "--config.train.num_microbatches=1"]
    flags += ["--config.train.remat=full", "--config.expert.kernel=grouped"]
    found = compiled(name, *flags)
    runs, flops = grouped_calls(found.module, name)
    # Remat computes the forward pass again, of which the last product is not needed.
    again = FORWARD - NUM_LAYERS
    assert runs == {size: FORWARD + BACKWARD + again}
    assert flops == FLOPS * (FORWARD + BACKWARD + again)
    assert found.figures["roofline"]["mfu"]


@pytest.mark.parametrize("name", TARGETS)
def test_inside_a_pipeline_and_on_shards_of_the_batch(name):
    sizes = ["--config.mesh.pipeline=2", "--config.mesh.data=2", "--config.mesh.expert=2"]
    flags = ["--config.train.num_microbatches=2", "--config.expert.kernel=grouped"]
    found = compiled(name, *sizes, *flags)
    runs, _ = grouped_calls(found.module, name)
    # Of a micro-batch: 2 rows of a group, on 2 devices, each with half of the experts.
    assert set(runs) == {2560} and runs[2560] > 0


@pytest.mark.parametrize("name", ["h200"])
def test_batched_products_are_the_default(name):
    found = compiled(name, "--config.mesh.expert=8", "--config.train.num_microbatches=1")
    assert grouped_calls(found.module, name) == ({}, 0)
