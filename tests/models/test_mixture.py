"""Mixtures of experts: what they measure and balance is the same on every mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.models import transformer
from meshtrain.train import train
from tests.lib.compare import assert_same
from tests.lib.configs import tiny_config
from tests.lib.runs import Run

E, K, NUM_LAYERS = 8, 2, 4
SKEW = 50.0  # of the bias of two experts: every token chooses them
SETTINGS = {
    "loss of the batch": dict(balance="batch", balance_weight=0.5, router_z_loss=1e-2),
    "loss of a sequence": dict(
        balance="sequence",
        balance_weight=0.5,
        router="sigmoid",
        num_shared_experts=1,
        first_dense_layers=1,
    ),
    "bias and groups": dict(
        balance="bias",
        balance_weight=1e-2,
        router="softmax",
        expert_groups=(4, 2),
        first_dense_layers=2,
    ),
    "capacity": dict(capacity_factor=1.0, mlp="gelu"),
}
# Each setting on two meshes; `verify` combines them further.
slow = pytest.mark.slow
CASES = [
    pytest.param("loss of the batch", {"expert": 8}, marks=slow),
    ("loss of the batch", {"pipeline": 2, "expert": 2, "fsdp": 2}),
    pytest.param("loss of a sequence", {"expert": 2, "context": 2, "tensor": 2}, marks=slow),
    pytest.param("loss of a sequence", {"data": 2, "fsdp": 2, "expert": 2}, marks=slow),
    pytest.param("bias and groups", {"pipeline": 2, "expert": 2, "tensor": 2}, marks=slow),
    pytest.param("bias and groups", {"expert": 2, "tensor": 4}, marks=slow),
    pytest.param("capacity", {"expert": 2, "context": 4}, marks=slow),
    pytest.param("capacity", {"data": 2, "tensor": 4}, marks=slow),
]


def mixture(**model):
    c = tiny_config()
    c.model.update(num_experts=E, d_expert=24, num_layers=NUM_LAYERS, **model)
    return c


class SkewedRun(Run):
    """A run whose parameters send every token to the same two experts."""

    def start(self):
        state = super().start()
        measured = state.params["layers"]["mlp"]["measured"]
        bias = measured["bias"].at[:, :K].set(SKEW)
        mlp = {**state.params["layers"]["mlp"], "measured": {**measured, "bias": bias}}
        params = {**state.params, "layers": {**state.params["layers"], "mlp": mlp}}
        return state._replace(params=params)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def measured_of(state):
    return state.params["layers"]["mlp"]["measured"]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_layout_trains_like_one_device(name, layout):
    expected = Run(mixture(**SETTINGS[name]), "float64").one_step()
    c = mixture(**SETTINGS[name])
    c.train.num_microbatches = 2
    assert_same(Run(c, "float64", **layout).one_step(), expected, 1e-10)


@slow
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "expert": 4},
        {"pipeline": 2, "expert": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_no_token_is_dropped_if_all_choose_the_same_experts(layout):
    expected = SkewedRun(mixture(), "float64").one_step()
    c = mixture()
    c.train.num_microbatches = 2
    found = SkewedRun(c, "float64", **layout).one_step()
    assert_same(found, expected, 1e-10)
    load = measured_of(found[1])["load"]
    np.testing.assert_allclose(load, np.tile([1 / K] * K + [0] * (E - K), (NUM_LAYERS, 1)))
    assert not found[2]["expert_dropped"].any()
    np.testing.assert_allclose(found[2]["expert_load_max"], E / K)


def test_a_capacity_drops_what_exceeds_it_and_reports_the_share():
    found = SkewedRun(mixture(capacity_factor=1.0), "float64").one_step()[2]
    # Of 16 tokens in a row an expert accepts 1.0 x 16 x 2 / 8 = 4.
    np.testing.assert_allclose(found["expert_dropped"], 1 - 4 / 16)


def test_a_bias_changes_once_per_step_towards_an_equal_load_and_is_not_trained():
    c = mixture(balance="bias", balance_weight=0.125)
    c.optim.weight_decay, c.train.num_microbatches = 0.5, 4
    run = Run(c, "float64", data=2)
    with run.program.active():
        start = run.start()
        before = jax.device_get(measured_of(start)["bias"])
        state, scalars = run.program.compile(run.batch())(start, run.batch())
        after = jax.device_get(measured_of(state))
    expected = 0.125 * np.sign(np.round(1 / E - after["load"], 12))
    np.testing.assert_array_equal(after["bias"] - before, expected)
    assert np.isclose(after["load"].sum(-1), 1).all() and (after["load"] > 0).any()
    np.testing.assert_allclose(scalars["router_bias_range"], np.ptp(after["bias"], axis=-1))


def test_what_is_measured_is_in_no_norm():
    c = mixture(balance="none")
    grads, _, scalars = Run(c, "float64").one_step()
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    assert 0 < largest <= scalars["grad_norm"]
    of_norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(of_norm, min(1.0, scalars["grad_norm"]))
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads["layers"]["mlp"]["measured"]))


def test_a_step_without_weight_measures_nothing():
    run = Run(mixture(balance="bias"), "float64")
    with run.program.active():
        start, batch = run.start(), run.batch()
        before = jax.device_get(measured_of(start))
        empty = batch._replace(weights=0 * batch.weights)
        state, _ = run.program.compile(empty)(start, empty)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(measured_of(state)), before)


@slow
def test_a_run_resumes_on_another_mesh_with_what_it_measured(tmp_path):
    def settings(steps, **mesh):
        c = mixture(balance="bias")
        c.train.update(steps=steps, dtype="float64", param_dtype="float64")
        c.optim.update(moment_dtype="float64", schedule="constant")
        c.mesh.update({"data": 1, **mesh})
        return c

    expected = train(settings(4, expert=8), workdir=tmp_path / "undisturbed").state
    train(settings(2, expert=4, fsdp=2), workdir=tmp_path / "resumed")
    state = train(settings(4, pipeline=2, expert=2, tensor=2), workdir=tmp_path / "resumed").state
    for name, leaf in measured_of(expected).items():
        np.testing.assert_allclose(measured_of(state)[name], leaf, rtol=1e-9, err_msg=name)
    lines = (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "loss" in row] == [0, 1, 2, 3]
    bias = np.abs(measured_of(expected)["bias"]).max()
    assert 0 < bias <= 4 * 0.01 and len(rows[3]["router_bias_range"]) == NUM_LAYERS


def test_parameters_in_bfloat16_measure_in_float32():
    c = mixture()
    c.train.update(dtype="bfloat16", param_dtype="bfloat16")
    state = Run(c).one_step()[1]
    for name in ("load", "score"):  # shares: in bfloat16 they would not add up to 1
        share = measured_of(state)[name]
        assert share.dtype == jnp.float32 and np.allclose(share.sum(-1), 1, atol=1e-5)
    assert state.params["layers"]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16


def test_flops_count_the_experts_that_a_token_uses():
    used, dense = (Run(c).program.model for c in (mixture(num_shared_experts=1), tiny_config()))
    sizes = {name: one.flops_per_token(16) for name, one in (("used", used), ("dense", dense))}
    experts = 6 * NUM_LAYERS * (3 * 32 * 24 * (K + 1) + 32 * E)
    dense_mlp = 6 * 2 * 3 * 32 * 64
    attention = (sizes["dense"] - dense_mlp - 6 * 32 * 64) / 2
    assert sizes["used"] == experts + NUM_LAYERS * attention + 6 * 32 * 64
    assert used.num_inactive == NUM_LAYERS * (E - K) * 3 * 32 * 24 and dense.num_inactive == 0


def test_flops_of_dense_layers_at_the_start_count_their_own_width():
    build = [dict(first_dense_layers=2), dict()]
    some, none = (Run(mixture(num_shared_experts=1, **one)).program.model for one in build)
    sparse, dense = 3 * 32 * 24 * (K + 1) + 32 * E, 3 * 32 * 64
    assert some.flops_per_token(16) - none.flops_per_token(16) == 6 * 2 * (dense - sparse)
    assert some.num_inactive == (NUM_LAYERS - 2) * (E - K) * 3 * 32 * 24


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(first_dense_layers=1), "model.first_dense_layers=1: without model.num_experts"),
        (dict(num_experts=4, first_dense_layers=2), "leaves none of model.num_layers=2 layers"),
        (dict(num_experts=4, first_dense_layers=-1), "model.first_dense_layers=-1: use 0 or more"),
    ],
)
def test_a_number_of_dense_layers_that_no_model_can_have_is_rejected(changes, fault, tiny):
    with pytest.raises(ConfigError) as error:
        transformer.build(**{k: v for k, v in {**tiny.model, **changes}.items() if k != "build"})
    assert [fault in line for line in error.value.faults] == [True]


def test_stages_share_the_layers_behind_the_dense_ones():
    c = mixture(first_dense_layers=1)
    c.mesh.update(data=1, pipeline=2, fsdp=4)
    with pytest.raises(ConfigError) as error:
        train(c)
    assert error.value.faults == (
        "model.num_layers=4, less model.first_dense_layers=1, is not divisible by "
        "mesh.pipeline=2 x pipeline.num_chunks=1; use 3 or 5",
    )
