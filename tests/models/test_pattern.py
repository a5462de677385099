"""Blocks of two kinds in a repeating pattern: the model of docs/guides/model.md in pipelines."""

import re

import jax
import numpy as np
import pytest

from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.tools.verify import case, verify
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

VOCAB_SIZE, SEQ_LEN, NUM_PERIODS = 11, 6, 4


def guide():
    """Returns the names that the block of the guide defines."""
    text = (ROOT / "docs" / "guides" / "model.md").read_text()
    (block,) = re.findall(
        r"<!-- not run: tests/models/test_pattern.py .*?-->\n```python\n(.*?)```", text, re.DOTALL
    )
    names = {}
    exec(compile(block, "model.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def names():
    return guide()


def build(names):
    return names["build"](num_periods=NUM_PERIODS, vocab_size=VOCAB_SIZE, width=8)


def samples(indices):
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=(256, SEQ_LEN + 1), dtype=np.int32)
    return {"tokens": tokens[indices, :-1], "targets": tokens[indices, 1:]}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pattern_in_a_pipeline_equals_one_device(names, schedule):
    row = dict(pipeline=2, data=2, fsdp=2, zero_stage=3, num_microbatches=4, remat="none")
    row |= dict(schedule=schedule, num_chunks=2 if schedule == "interleaved" else 1)
    row |= dict(keep="residuals", dropout=True)
    row |= dict(packing=False, masks=False, sequence_parallel=False)
    with jax.enable_x64(True):
        own = case.VerifyCase(tiny_config(), build(names), Source(samples), keep_sizes=False)
        result = verify.check_layout(own, row)
    assert result.fault is None
    assert {"loss", "gradients", "parameters"} <= {*result.differences}
    assert max(result.differences.values()) < 1e-12


def test_a_period_is_stacked_with_the_parameters_of_all_its_layers(names):
    shapes = jax.eval_shape(build(names).init, jax.random.key(0))["layers"]["layers"]
    assert shapes["0"]["taps"].shape == shapes["1"]["taps"].shape == (NUM_PERIODS, 3, 8)
    assert shapes["2"]["qkv"]["kernel"].shape == (NUM_PERIODS, 8, 24)


def test_stages_that_do_not_divide_the_periods_are_a_mistake(names):
    c = tiny_config()
    c.mesh.update(pipeline=8, data=1)
    c.train.update(global_batch=8, num_microbatches=8, steps=1)
    with pytest.raises(ConfigError, match="num_layers=4 is not divisible by mesh.pipeline=8"):
        train(c, model=build(names), data=[samples(np.arange(8))])
