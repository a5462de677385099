"""Steps on parts of sequences, compiled for H200 GPUs: the calls of cuDNN's attention.

The heads of the model, 28, divide by no product of 8. No GPU is needed, only the wheels of the
extra aot-gpu.
"""

import collections
import functools

import pytest

from meshtrain.tools.hlo import traffic
from tests.lib import programs

pytestmark = pytest.mark.slow
TARGET, NUM_DEVICES, NUM_LAYERS = "h200:8", 8, 2
# The heads of Qwen 2.5 7B. Rows of 8,192 tokens.
MODEL = dict(num_heads=28, num_kv_heads=4, head_dim=128, d_model=1024, d_ff=2048, vocab_size=1024)
ROWS = ["--config.data.seq_len=8192", "--config.train.global_batch=4"]
PLAIN, PACKED = "--config.data.packing=windows", "--config.data.packing=best_fit"
RING, GATHER = "--config.context.method=ring", "--config.context.method=gather"


@functools.cache
def compiled(*overrides):
    flags = [f"--config.model.num_layers={NUM_LAYERS}", "--config.train.num_microbatches=1"]
    flags += [f"--config.model.{key}={value}" for key, value in MODEL.items()]
    return programs.audited("llama3_128k", TARGET, *ROWS, *flags, *overrides)


def attention_calls(module):
    """Returns how often cuDNN runs, by pass and mask, and the shapes of queries and keys."""
    runs, shapes = collections.Counter(), set()
    for computation, count in traffic.executed(module):
        body = module.computations[computation]
        for one in body.values():
            match = one.opcode == "custom-call" and traffic.ATTENTION.search(one.attributes)
            if not match:
                continue
            mask = "causal" if "CAUSAL" in one.attributes else "full"
            runs["backward" if "Backward" in match[1] else "forward", mask] += count
            shapes.add(tuple(body[name].results[0].shape for name in one.operands[:2]))
    return runs, shapes


@pytest.mark.parametrize("rows", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("method", [RING, GATHER], ids=["ring", "gather"])
@pytest.mark.parametrize("again", [1, 2], ids=["attention kept", "recomputed"])
def test_a_layer_calls_the_kernel_once_for_the_keys_of_each_device(method, rows, again):
    remat = "full" if again == 2 else "names:attention"
    found = compiled("--config.mesh.context=8", method, rows, f"--config.train.remat={remat}")
    runs, shapes = attention_calls(found.module)
    num_rounds = (NUM_DEVICES - 1) * NUM_LAYERS
    assert runs == {
        ("forward", "causal"): again * NUM_LAYERS,
        ("forward", "full"): again * num_rounds,
        ("backward", "causal"): NUM_LAYERS,
        ("backward", "full"): num_rounds,
    }
    dims = 128 + (8 if rows == PACKED else 0)
    # Of 4 rows: the chunks of a device together, and two pairs of chunks.
    assert shapes == {
        ((4, 1024, 28, dims), (4, 1024, 4, dims)),
        ((8, 512, 28, dims), (8, 512, 4, dims)),
    }
    assert found.figures["roofline"]["mfu"]
    assert found.figures["warnings"] == []


@pytest.mark.parametrize(("method", "rows"), [(RING, PLAIN), (RING, PACKED), (GATHER, PACKED)])
def test_inside_a_pipeline_and_on_shards_of_the_batch(method, rows):
    layout = ["--config.mesh.pipeline=2", "--config.mesh.data=2", "--config.mesh.context=2"]
    found = compiled(*layout, method, rows, "--config.train.num_microbatches=2")
    runs, shapes = attention_calls(found.module)
    # As often at home as for the other device.
    for which in ("forward", "backward"):
        assert runs[which, "causal"] == runs[which, "full"] > 0
    dims = 128 + (8 if rows == PACKED else 0)
    # Of one row: nothing is gathered over the axes of the batch, the stages or the sequence.
    assert shapes == {
        ((1, 4096, 28, dims), (1, 4096, 4, dims)),
        ((2, 2048, 28, dims), (2, 2048, 4, dims)),
    }
    assert found.figures["roofline"]["mfu"]


def test_heads_over_tensor():
    """Each device has 14 heads; 8 shards of sequence and heads together do not divide 28."""
    layout = ["--config.mesh.context=4", "--config.mesh.tensor=2"]
    runs, shapes = attention_calls(compiled(*layout, PLAIN).module)
    assert runs["backward", "causal"] == NUM_LAYERS
    assert runs["backward", "full"] == 3 * NUM_LAYERS
    assert shapes == {
        ((4, 2048, 14, 128), (4, 2048, 2, 128)),
        ((8, 1024, 14, 128), (8, 1024, 2, 128)),
    }


def test_a_window_is_computed_in_blocks():
    window = ["--config.model.attention=l", "--config.model.window=512"]
    found = compiled("--config.mesh.context=8", RING, PLAIN, *window)
    runs, _ = attention_calls(found.module)
    assert not runs
