"""Every layout trains like one device: equal initial parameters, losses, gradients and updates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshtrain import grads, state
from meshtrain.ops import blockwise, losses
from tests.lib.compare import assert_same
from tests.lib.configs import GPT2, packed, tiny_config
from tests.lib.runs import Run, one_device

LAYOUTS = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]

ALL_HEADS = dict(qk_norm=True, qk_norm_heads="all", num_kv_heads=2)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[-1], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[:-1])],
    ids=str,
)
def test_the_same_seed_gives_bit_equal_parameters_on_every_mesh(layout):
    found, expected = Run(tiny_config(), **layout).start(), Run(tiny_config()).start()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


MODELS = {"llama": {}, "gpt2": GPT2, "all heads": ALL_HEADS}
DEFAULT = [(LAYOUTS[-1], "llama")]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(*step, marks=[] if step in DEFAULT else pytest.mark.slow)
        for step in itertools.product(LAYOUTS, MODELS)
    ],
    ids=str,
)
def test_gradients_and_updates_equal_one_device_in_float64(layout, name, x64):
    found = Run(packed(**MODELS[name]), dtype="float64", **layout).one_step()
    assert_same(found, one_device(**MODELS[name]), rtol=1e-10)


GEMMA = dict(
    norm="rms_1p",
    mlp="geglu",
    post_norm=True,
    tie_embeddings=True,
    logit_softcap=3.0,
    vocab_size=60,  # padded, so that a device has padding
)
FUSED = {"llama": dict(qk_norm=True), "gpt2": GPT2, "all heads": ALL_HEADS, "gemma": GEMMA}
FUSED_MESHES = [
    LAYOUTS[-1],
    {"tensor": 4},
    {"data": 2, "context": 2, "tensor": 2},
    {"pipeline": 2, "data": 2, "tensor": 2},
]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(*step, marks=[] if step == (LAYOUTS[-1], "gpt2") else pytest.mark.slow)
        for step in itertools.product(FUSED_MESHES, FUSED)
    ],
    ids=str,
)
def test_with_fused_kernels_gradients_and_updates_equal_the_plain_ones(layout, name, x64):
    c = packed(**FUSED[name])
    c.train.kernels = "fused"
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**FUSED[name]), rtol=1e-10)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(*step, marks=[] if step == (FUSED_MESHES[2], "gpt2") else pytest.mark.slow)
        for step in itertools.product([{}, *FUSED_MESHES], FUSED)
    ],
    ids=str,
)
def test_with_pallas_kernels_gradients_and_updates_equal_the_plain_ones(layout, name, x64):
    c = packed(**FUSED[name])
    c.train.kernels = "pallas"
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**FUSED[name]), rtol=1e-10)


@pytest.mark.parametrize("formulas", ["fused", "pallas"])
def test_in_a_pipeline_the_first_dense_layers_shard_backward_as_forward(formulas, x64):
    """The backward pass of the embedding, to which they belong, is traced with other rules."""
    model = dict(mlp="swiglu", num_layers=3, num_experts=4, d_expert=24, first_dense_layers=1)
    c = packed(**model)
    c.train.kernels = formulas
    found = Run(c, dtype="float64", pipeline=2, data=2, tensor=2).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


def test_on_cpu_the_kernels_are_the_plain_ones():
    def step(name):
        c = tiny_config()
        c.train.kernels = name
        run = Run(c)
        with run.program.active():
            state = run.program.abstract_state
            return str(jax.make_jaxpr(run.program.train_step)(state, run.batch()))

    plain = step("plain")
    assert step("auto") == plain and "optimization_barrier" not in plain
    assert "optimization_barrier" in step("fused")


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", [pytest.param({}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2}], ids=str
)
def test_micro_batches_add_up_to_the_batch(layout, num_microbatches, x64):
    c = packed()
    c.train.num_microbatches = num_microbatches
    assert_same(Run(c, dtype="float64", **layout).one_step(), one_device(), rtol=1e-10)


def test_without_micro_batches_the_gradient_is_traced_once(monkeypatch):
    calls, plain = [], grads.run_blocks

    def run_blocks(*args, **kwargs):
        calls.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(grads, "run_blocks", run_blocks)
    run = Run(tiny_config(), data=8)
    with run.program.active():
        jax.eval_shape(run.program.train_step, run.program.abstract_state, run.batch())
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        dict(data=2, fsdp=4, slices=2),
        dict(pipeline=2, data=2, fsdp=2, slices=2),
        dict(pipeline=2, data=4, slices=2),
    ],
    ids=str,
)
def test_slices_train_like_one_device(layout, x64):
    c = packed()
    c.train.num_microbatches = 2
    run = Run(c, dtype="float64", **layout)
    mesh = run.program.mesh
    parts = np.split(mesh.devices, layout["slices"], axis=mesh.axis_names.index("data"))
    ids = [sorted(device.id for device in part.flat) for part in parts]
    assert ids == np.arange(8).reshape(layout["slices"], -1).tolist()
    assert_same(run.one_step(), one_device(), rtol=1e-10)


@pytest.mark.parametrize(
    "zero_stage",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
)
def test_zero_stages_change_only_shardings(zero_stage, x64):
    c = packed()
    c.train.zero_stage = zero_stage
    run = Run(c, dtype="float64", data=2, fsdp=4)
    assert_same(run.one_step(), one_device(), rtol=1e-10)
    sharded = run.program.abstract_state
    unsharded = Run(packed(), dtype="float64").program.abstract_state
    sharded, unsharded = (
        [state.bytes_per_device(tree) for tree in (each.params, each.opt_state)]
        for each in (sharded, unsharded)
    )
    assert sharded[0] == unsharded[0]
    assert sharded[1] == pytest.approx(unsharded[1] / (4 if zero_stage else 1), rel=0.01)


@pytest.mark.parametrize(
    "remat",
    ["full", *(pytest.param(r, marks=pytest.mark.slow) for r in ("dots", "names:attention,mlp"))],
)
def test_remat_does_not_change_gradients(remat, x64):
    c = packed()
    c.train.remat = remat
    assert_same(Run(c, dtype="float64").one_step(), one_device(), rtol=1e-10)


OFFLOADS = [
    ("offload", 1, {}),
    ("offload:attention,layer_input", 2, {"data": 2, "fsdp": 2}),
    pytest.param("offload:mlp", 2, {"context": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("offload", 2, {"context": 2, "tensor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("remat, num_microbatches, layout", OFFLOADS, ids=str)
def test_activations_in_host_memory_do_not_change_gradients(remat, num_microbatches, layout, x64):
    c = packed()
    c.train.remat, c.train.num_microbatches = remat, num_microbatches
    assert_same(Run(c, dtype="float64", **layout).one_step(), one_device(), rtol=1e-10)


def test_offloaded_activations_take_no_memory_of_the_device():
    def function(layer, x):
        return jnp.sin(layer * checkpoint_name(jnp.sin(x), "inner"))

    def arrays_kept(remat):
        def residuals(layer, x):
            return jax.vjp(grads.rematerialised(function, remat), layer, x)[1]

        layer, x = jnp.zeros(()), jnp.zeros(3)
        kept = [aval for aval in jax.make_jaxpr(residuals)(layer, x).out_avals if aval.shape]
        on_host = [aval.memory_space == jax.memory.Space.Host for aval in kept]
        return on_host.count(False), on_host.count(True)

    assert arrays_kept("full") == (1, 0)
    assert arrays_kept("names:inner") == (2, 0)
    assert arrays_kept("offload") == (0, 1)
    assert arrays_kept("offload:inner") == (1, 1)
    assert arrays_kept("offload:inner,layer_input") == (0, 2)


def test_remat_needs_less_memory():
    def temporary_bytes(remat):
        c = tiny_config()
        c.data.seq_len, c.train.remat = 64, remat
        run = Run(c)
        with run.program.active():
            grad = jax.jit(run.program.grad_fn)
            key = jax.random.key(0)
            compiled = grad.lower(run.program.abstract_state.params, run.batch(), key).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < 0.8 * temporary_bytes("none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}],
    ids=str,
)
def test_blockwise_attention_and_loss_chunks_do_not_change_gradients(layout, x64, monkeypatch):
    monkeypatch.setattr(losses, "MIB", 2048)
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    mixed = {"attention": "lg", "window": 5}
    c = packed(attention_impl="blockwise", loss_chunk_mib=1, **mixed)
    c.train.num_microbatches = 2
    assert_same(Run(c, dtype="float64", **layout).one_step(), one_device(**mixed), rtol=1e-10)


def test_remat_by_names_saves_the_named_values_alone():
    def function(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "inner"))

    def num_sines(remat):
        return str(jax.make_jaxpr(jax.grad(grads.rematerialised(function, remat)))(1.0)).count(
            " sin "
        )

    assert num_sines("names:inner") == num_sines("none") == 2
    assert num_sines("names:another") == num_sines("full") == 3
