"""The memory that the planner predicts."""

import jax
import pytest

from meshtrain import state as states
from meshtrain.config.build import RunParts, build_model, optimizer_builder
from meshtrain.config.parse import parse
from meshtrain.config.schema import SyncConfig
from meshtrain.configs import deepseek_v2_lite, gpt2, llama3, mixtral, quickstart
from meshtrain.program import optimizer_and_state
from meshtrain.tools.plan import from_config, memory
from meshtrain.tools.plan.layout import Layout


@pytest.mark.parametrize(
    "config, layout",
    [
        (quickstart, Layout(data=2, fsdp=2, tensor=2, zero_stage=1)),
        pytest.param(
            quickstart, Layout(pipeline=2, fsdp=2, context=2, zero_stage=2), marks=pytest.mark.slow
        ),
        (quickstart, Layout(fsdp=8, zero_stage=3)),
        pytest.param(gpt2, Layout(data=2, tensor=4, zero_stage=0), marks=pytest.mark.slow),
        (mixtral, Layout(expert=4, fsdp=2)),
        pytest.param(deepseek_v2_lite, Layout(expert=2, tensor=2, fsdp=2), marks=pytest.mark.slow),
    ],
)
def test_the_state_is_that_of_the_program(config, layout):
    c = config.get_config()
    c.mesh.update(layout.sizes())
    c.train.zero_stage = layout.zero_stage
    c.train.global_batch = 64
    cfg = parse(c, num_devices=8)
    model = build_model(cfg)
    parts = RunParts(model, optimizer_builder(cfg, model))
    names, numbers = zip(*layout.sizes().items(), strict=True)
    mesh = jax.sharding.AbstractMesh(numbers, names)
    abstract = optimizer_and_state(cfg, parts, mesh)
    state, grads = abstract.state, abstract.grad_shardings
    found = from_config.plan_input(parse(c), platform="gpu").stored.bytes(layout)
    gradients = jax.tree.map(lambda leaf, one: leaf.update(sharding=one), state.params, grads)
    expected = [
        states.bytes_per_device(tree) for tree in (state.params, state.opt_state, gradients)
    ]
    assert [*found] == expected


def test_memory_grows_with_what_is_kept():
    plan_input = from_config.plan_input(parse(llama3.get_config()), platform="gpu")

    def activations(**changes):
        layout = Layout(**{"fsdp": 8, "rows": 1, **changes})
        return memory.parts(plan_input.work, layout, plan_input.stored.bytes(layout), 8192)[
            "activations"
        ]

    assert activations(remat="none") > activations(remat="dots") > activations(remat="full") > 0
    # Full remat keeps the input of each layer.
    assert activations(remat="full") == pytest.approx(32 * 8192 * 4096 * 2, rel=0.01)
    pipelined = dict(fsdp=2, pipeline=4, num_microbatches=8, remat="none")
    assert activations(**pipelined, keep="inputs") < activations(**pipelined, keep="residuals")
    assert activations(remat="none", rows=2) == 2 * activations(remat="none")


def test_micro_batches_have_gradients_of_their_own():
    plan_input = from_config.plan_input(parse(llama3.get_config()), platform="gpu")

    def parts(**changes):
        layout = Layout(fsdp=8, rows=1, remat="full", loss_chunk_mib=2048, **changes)
        return memory.parts(plan_input.work, layout, plan_input.stored.bytes(layout), 8192)

    one, four = parts(), parts(num_microbatches=4)
    assert one["own gradients"] == 0 and four["own gradients"] == four["gradients"] > 0
    # The embedding is gathered once for all of them.
    more = four["temporaries"] - one["temporaries"]
    assert more == pytest.approx(2 * 128256 * 4096, rel=0.001)
    assert parts(num_microbatches=4)["activations"] == one["activations"]


def test_a_residual_is_as_large_as_the_gradients():
    plan_input = from_config.plan_input(parse(llama3.get_config()), platform="gpu")
    for layout, expected in [
        (Layout(data=8, sync=SyncConfig(dtype="int4")), True),
        (Layout(data=8, sync=SyncConfig(dtype="int8")), False),
        (Layout(fsdp=8, sync=SyncConfig(dtype="int4")), False),  # no partial sums at ZeRO stage 3
    ]:
        parts = memory.parts(plan_input.work, layout, plan_input.stored.bytes(layout), 8192)
        assert parts["residual"] == (parts["gradients"] if expected else 0)
