"""ZeRO in bytes: memory of the compiled step per device, by stage (arXiv 1910.02054, 16 N / n)."""

import contextlib

import jax
import pytest

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.loader import Loader
from meshtrain.program import assemble
from meshtrain.tools.verify.certificate import name_of
from tests.lib.configs import GPT2, tiny_config

# Replicated over fsdp: the rules shard none of their dims (`heads`, `mlp`) over it.
REPLICATED = [
    "layers/attention/key/bias",
    "layers/attention/query/bias",
    "layers/attention/value/bias",
    "layers/mlp/up/bias",
]


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def stages():
    """Returns the program and memory of its compiled step (four micro-batches) at each stage."""

    def compiled(zero_stage):
        c = tiny_config()
        c.model.update({**GPT2, "d_model": 128, "d_ff": 512})
        c.train.zero_stage, c.train.unroll, c.data.seq_len = zero_stage, 1, 4
        c.train.num_microbatches, c.train.global_batch = 4, 32
        c.mesh.update(data=1, fsdp=8)
        cfg = parse(c, num_devices=8)
        parts = build(cfg)
        program = assemble(cfg, parts)
        loader = Loader(
            parts.train_data, program.mesh, cfg.rules, global_batch=c.train.global_batch
        )
        with contextlib.closing(loader), program.active():
            return program, program.compile(loader.peek()).memory_analysis()

    return [compiled(zero_stage) for zero_stage in range(4)]


@pytest.mark.parametrize("zero_stage", range(4))
def test_each_device_holds_its_shards_and_the_replicated_parameters(stages, zero_stage):
    program, memory = stages[zero_stage]
    leaves = jax.tree.leaves_with_path(program.abstract_state.params)
    replicated = bytes_of([leaf for path, leaf in leaves if name_of(path) in REPLICATED])
    sharded = bytes_of([leaf for _, leaf in leaves]) - replicated
    params = replicated + sharded / (8 if zero_stage == 3 else 1)
    moments = 2 * (replicated + sharded / (8 if zero_stage >= 1 else 1))
    counters = 3 * 4  # the step, and two counts of optax
    # The state is donated, so the memory that outputs share with arguments is the state.
    assert memory.alias_size_in_bytes == params + moments + counters
    if zero_stage == 3:
        found = [name_of(path) for path, leaf in leaves if leaf.sharding.is_fully_replicated]
        assert sorted(found) == REPLICATED
        unsharded = stages[0][1].alias_size_in_bytes
        assert memory.alias_size_in_bytes / unsharded == pytest.approx(1 / 8, abs=0.01)


def test_from_stage_2_gradients_are_sharded_too(stages):
    gradients = bytes_of(stages[0][0].abstract_state.params)
    one, two = (stages[n][1].temp_size_in_bytes for n in (1, 2))
    assert one - two > 0.8 * gradients * 7 / 8
