"""A step uses each random key once: for one draw, or to make other keys."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshtrain
from meshtrain.config.build import RunParts
from meshtrain.config.parse import parse
from meshtrain.metrics import weighted
from meshtrain.models.layers import normal_initializer
from meshtrain.models.lora import lora
from meshtrain.program import assemble
from tests.lib import random_keys
from tests.lib.configs import quick
from tests.lib.runs import Run

STEPS = 2
D = 8  # inputs of the model below


class Net(nnx.Module):
    """Two dropout layers, and kernels that are sharded over `tensor`, or not."""

    def __init__(self, rngs: nnx.Rngs):
        over_tensor = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
        self.up = nnx.Linear(D, 16, use_bias=False, kernel_init=over_tensor, rngs=rngs)
        self.down = nnx.Linear(16, 1, use_bias=False, rngs=rngs)
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.down(self.second(self.up(self.first(x))))


def run_steps(program, batch, record):
    """Runs STEPS steps, of which `record` gets the keys."""
    with program.active():
        state = program.initial_state(0)
        jax.effects_barrier()
        record.clear()
        step = program.compile(batch)
        for _ in range(STEPS):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
    jax.effects_barrier()


# Mesh, micro-batches, pattern of the synchronisation.
SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param(dict(data=4), 3, "xla", marks=SLOW),
    (dict(data=2, tensor=2), 2, "xla"),
    pytest.param(dict(data=4, tensor=2, slices=2), 2, "hierarchical", marks=SLOW),
]


@pytest.mark.parametrize(("layout", "num_microbatches", "pattern"), LAYOUTS, ids=str)
def test_a_step_of_an_own_loss_uses_each_key_once(layout, num_microbatches, pattern, monkeypatch):
    """Keys of steps, micro-batches, batch shards, dropout layers, buckets, devices and moments."""
    num_shards, num_parts = layout["data"], layout.get("tensor", 1)
    num_devices = num_shards * num_parts
    global_batch = 2 * num_shards * num_microbatches
    c = quick(global_batch=global_batch, num_microbatches=num_microbatches, zero_stage=0)
    c.mesh.update(layout)
    c.sync.update(pattern=pattern, dtype="int4", feedback="off", block_size=2, uncompressed=())
    c.optim.moment_dtype = "bfloat16"
    record = random_keys.record(monkeypatch)
    model = meshtrain.from_nnx(Net, lambda net, batch: weighted(net(batch["x"])[:, 0] ** 2))
    cfg = parse(c, num_devices=num_devices)
    parts = RunParts(model, optax.adam)
    program = assemble(cfg, parts, devices=jax.devices()[:num_devices])
    run_steps(program, {"x": np.ones((global_batch, D), np.float32)}, record)

    assert record.faults() == []
    masks = 2 * num_microbatches * num_shards
    # A bucket for each way to shard; a device rounds twice: its sums, and its part of the total.
    buckets = 1 + num_parts if num_parts > 1 else 1
    roundings = 2 * buckets * num_shards
    moments = 1
    assert record.num_drawn() == STEPS * (masks + roundings + moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    [
        dict(schedule="gpipe"),
        dict(schedule="1f1b", keep="residuals"),
        dict(schedule="interleaved", num_chunks=2),
    ],
    ids=str,
)
def test_a_step_of_a_pipeline_uses_each_key_once(pipeline, monkeypatch):
    """Keys of rows, which all layers and sites hash, of buckets, devices and moments."""
    num_rows = 8
    c = quick(global_batch=num_rows, num_microbatches=2, zero_stage=1)
    c.model.update(num_layers=2 * pipeline.get("num_chunks", 1), dropout=0.25)
    c.pipeline.update(pipeline)
    c.sync.update(dtype="int4", feedback="off", block_size=2, uncompressed=())
    c.optim.moment_dtype = "bfloat16"
    record = random_keys.record(monkeypatch)
    run = Run(c, data=2, pipeline=2)
    run_steps(run.program, run.batch(), record)

    assert record.faults() == []
    # Outer parameters are in one bucket; the two stages have other layers in another one.
    assert record.num_drawn() == STEPS * (2 * 2 * (1 + 2) + 1)
    numbers = [number for origins in record.origins.values() for _, number in origins]
    assert all(numbers.count(row) >= STEPS for row in range(num_rows))


def test_an_adapter_and_the_model_draw_different_numbers():
    """The matrix A of a layer was the kernel of another one, number for number."""
    model = meshtrain.from_nnx(Square, lambda net, batch: None)
    params = lora(model, rank=16, alpha=16, targets=("*",)).init(jax.random.key(0))
    numbers = [np.ravel(leaf) for leaf in jax.tree.leaves(params) if np.any(leaf)]
    assert len(numbers) == 4
    correlations = np.corrcoef(numbers) - np.eye(4)
    assert np.abs(correlations).max() < 5 / np.sqrt(numbers[0].size)


def test_an_adapter_draws_other_numbers_than_a_model_that_folds_in_the_same_ones():
    """A model may draw its second parameter of part 0 from fold_in(fold_in(key, 0), 1)."""

    def init(key):
        part = jax.random.fold_in(key, 0)
        names = ("down", "up")  # in the order of the layers of the adapter
        kernels = [jax.random.normal(jax.random.fold_in(part, n), (64, 16)) for n in range(2)]
        return {name: {"kernel": kernel} for name, kernel in zip(names, kernels, strict=True)}

    model = meshtrain.from_nnx(Square, lambda net, batch: None)
    model = dataclasses.replace(model, init=init)
    params = lora(model, rank=16, alpha=16, targets=("*",)).init(jax.random.key(0))
    numbers = [np.ravel(leaf) for leaf in jax.tree.leaves(params) if np.any(leaf)]
    correlations = np.corrcoef(numbers) - np.eye(4)
    assert np.abs(correlations).max() < 5 / np.sqrt(numbers[0].size)


class Square(nnx.Module):
    """Two kernels of the shape of A."""

    def __init__(self, rngs: nnx.Rngs):
        options = dict(use_bias=False, kernel_init=normal_initializer(0.02), rngs=rngs)
        self.up = nnx.Linear(64, 16, **options)
        self.down = nnx.Linear(64, 16, **options)
