"""Mixtures of experts: what they measure and balance is the same on every mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import state as states
from meshtrain.errors import ConfigError
from meshtrain.models import transformer
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.tools.verify.reference import model as reference_model
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
    ("loss of the batch", {"expert": 8}),
    pytest.param("loss of the batch", {"pipeline": 2, "expert": 2, "fsdp": 2}, marks=slow),
    pytest.param("loss of a sequence", {"expert": 2, "context": 2, "tensor": 2}, marks=slow),
    pytest.param("loss of a sequence", {"data": 2, "fsdp": 2, "expert": 2}, marks=slow),
    pytest.param("bias and groups", {"pipeline": 2, "expert": 2, "tensor": 2}, marks=slow),
    pytest.param("bias and groups", {"expert": 2, "tensor": 4}, marks=slow),
    pytest.param("capacity", {"expert": 2, "context": 4}, marks=slow),
    pytest.param("capacity", {"data": 2, "tensor": 4}, marks=slow),
]
# Meshes on which devices exchange tokens; "auto" gathers on the last three.
DISPATCHED = [
    ("loss of a sequence", {"expert": 4, "tensor": 2}),
    pytest.param("loss of the batch", {"expert": 8}, marks=slow),
    pytest.param("loss of the batch", {"pipeline": 2, "data": 2, "expert": 2}, marks=slow),
    pytest.param("bias and groups", {"fsdp": 2, "context": 2, "expert": 2}, marks=slow),
    pytest.param("capacity", {"pipeline": 2, "expert": 2, "tensor": 2}, marks=slow),
]


def mixture(method="auto", **model):
    c = tiny_config()
    c.expert.method = method
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
    c = mixture("gather", **SETTINGS[name])
    c.train.num_microbatches = 2
    assert_same(Run(c, "float64", **layout).one_step(), expected, 1e-10)


@pytest.mark.parametrize(("name", "layout"), DISPATCHED, ids=str)
def test_dispatched_tokens_train_like_one_device_on_packed_rows(name, layout):
    def settings(method):
        c = mixture(method, **SETTINGS[name])
        c.data.separator = 7
        return c

    expected = Run(settings("auto"), "float64").one_step()
    c = settings("dispatch")
    c.train.num_microbatches = 2
    assert_same(Run(c, "float64", **layout).one_step(), expected, 1e-10)


# As the two above, with grouped products.
GROUPED = [
    ("loss of a sequence", {}, "gather"),
    pytest.param("loss of the batch", {"expert": 8}, "gather", marks=slow),
    pytest.param("capacity", {"pipeline": 2, "expert": 2, "tensor": 2}, "gather", marks=slow),
    pytest.param("bias and groups", {"fsdp": 2, "context": 2, "expert": 2}, "dispatch", marks=slow),
    pytest.param("loss of the batch", {"pipeline": 2, "expert": 4}, "dispatch", marks=slow),
]


@pytest.mark.parametrize(("name", "layout", "method"), GROUPED, ids=str)
def test_grouped_products_train_like_batched_ones_on_one_device(name, layout, method):
    def settings(method, kernel):
        c = mixture(method, **SETTINGS[name])
        c.expert.kernel = kernel
        if name != "capacity":  # which counts the tokens of a row
            c.data.separator = 7
        return c

    expected = Run(settings("auto", "batched"), "float64").one_step()
    c = settings(method, "grouped")
    c.train.num_microbatches = 2
    assert_same(Run(c, "float64", **layout).one_step(), expected, 1e-10)


@slow
@pytest.mark.parametrize("kernel", ["batched", "grouped"])
@pytest.mark.parametrize("method", ["gather", "dispatch"])
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "expert": 4},
        {"pipeline": 2, "expert": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_no_token_is_dropped_if_all_choose_the_same_experts(layout, method, kernel):
    expected = SkewedRun(mixture(), "float64").one_step()
    c = mixture(method)
    c.expert.kernel = kernel
    c.train.num_microbatches = 2
    found = SkewedRun(c, "float64", **layout).one_step()
    assert_same(found, expected, 1e-10)
    load = measured_of(found[1])["load"]
    np.testing.assert_allclose(load, np.tile([1 / K] * K + [0] * (E - K), (NUM_LAYERS, 1)))
    assert not found[2]["expert_dropped"].any()
    np.testing.assert_allclose(found[2]["expert_load_max"], E / K)


@pytest.mark.slow
def test_a_capacity_drops_what_exceeds_it_and_reports_the_share():
    found = SkewedRun(mixture(capacity_factor=1.0), "float64").one_step()[2]
    # Of 16 tokens in a row an expert accepts 1.0 x 16 x 2 / 8 = 4.
    np.testing.assert_allclose(found["expert_dropped"], 1 - 4 / 16)


STATISTICS = {
    "batch": dict(balance="batch", balance_weight=0.5, router_z_loss=0.1),
    "sequence": dict(balance="sequence", balance_weight=0.5, router="sigmoid"),
    "bias": dict(balance="bias", balance_weight=0.03, router="softmax"),
    "capacity": dict(balance="none", capacity_factor=0.75, router_z_loss=0.1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * (name != "bias")) for name in STATISTICS]
)
@pytest.mark.slow
def test_statistics_of_several_steps_equal_formulas_in_numpy(name):
    """On packed rows with uneven weights, in micro-batches and shards."""
    c = mixture(**STATISTICS[name])
    c.model.num_layers, c.optim.learning_rate, c.optim.weight_decay = 2, 0.1, 0.5
    c.train.num_microbatches, c.train.trainable = 2, "layers/mlp/*"
    if name != "capacity":  # which counts the tokens of a row
        c.data.separator = 7
    run = Run(c, "float64", data=2, expert=2)
    weights = np.random.default_rng(0).choice([0.0, 0.25, 1.0], (16, 16)).astype(np.float32)
    with run.program.active():
        state = run.start()
        attention = state.params["layers"]["attention"]
        # Without attention the maths fits into a test.
        silent = {**attention, "out": jax.tree.map(jnp.zeros_like, attention["out"])}
        params = {**state.params, "layers": {**state.params["layers"], "attention": silent}}
        state = state._replace(params=params)
        batches = [run.batch(number) for number in range(3)]
        batches = [b._replace(weights=b.weights * weights) for b in batches]
        step = run.program.compile(batches[0])
        evaluate = jax.jit(run.program.eval_step) if name == "bias" else None
        for number, batch in enumerate(batches):
            before, host = jax.device_get((state.params, batch))
            expected = numpy_mixture(before, host, c.model)
            if evaluate is not None:
                sums = evaluate(state.params, batch)
                np.testing.assert_allclose(sums.loss / sums.weight, expected["loss"], rtol=1e-12)
            state, scalars = jax.device_get(step(state, batch))
            measured = measured_of(state)
            for key, value in expected["measured"].items():
                np.testing.assert_allclose(
                    measured[key], value, rtol=1e-9, atol=1e-12, err_msg=f"{key}, step {number}"
                )
            for key in expected.keys() - {"measured"}:
                np.testing.assert_allclose(scalars[key], expected[key], rtol=1e-9, err_msg=key)
            state = jax.device_put(state, states.shardings_of(run.program.abstract_state))
    assert (measured["dropped"] > 0).all() == (name == "capacity")
    assert np.ptp(measured["load"], axis=-1).min() > 0.01


def numpy_mixture(params, batch, c):
    """Returns the mean losses of a step and what it measures, token by token.

    Sources: Switch Transformers (arXiv 2101.03961, equation 4), ST-MoE (2202.08906, equation 5: the
    z loss), DeepSeek-V3 (2412.19437, section 2.1.2: bias, and the loss of each sequence), Qiu et
    al. (2501.11873: the load of the global batch; here that of the step before).
    """
    x_BSD = params["tokens"]["embedding"][batch.tokens]
    weights, total = batch.weights.astype(np.float64), batch.weights.sum(dtype=np.float64)
    num_rows, length = weights.shape
    documents = np.zeros((num_rows, length), int) if batch.segments is None else batch.segments
    added = np.zeros(weights.shape)
    measured = {key: [] for key in ("load", "score", "log_z", "dropped", "bias")}
    layers = params["layers"]
    for number in range(c.num_layers):
        mlp = jax.tree.map(lambda leaf, number=number: leaf[number], layers["mlp"])
        normed = rms(x_BSD, layers["mlp_norm"]["scale"][number], c)
        load, score = np.zeros((2, num_rows, length, E))
        log_z, dropped = np.zeros((2, num_rows, length))
        for row in range(num_rows):
            accepted = np.zeros(E)
            for place in range(length):
                logits = normed[row, place] @ mlp["router"]["kernel"]
                log_z[row, place] = np.log(np.exp(logits).sum())
                scores = np.exp(logits) / np.exp(logits).sum()
                if c.router == "sigmoid":
                    scores = 1 / (1 + np.exp(-logits))
                score[row, place] = scores / scores.sum()
                chosen = np.argsort(-(scores + mlp["measured"]["bias"]), kind="stable")[:K]
                gates = scores[chosen]
                if c.router != "softmax":
                    gates = gates / gates.sum()
                for one, gate in zip(chosen, gates, strict=True):
                    load[row, place, one] = 1 / K
                    accepted[one] += 1
                    if c.capacity_factor and accepted[one] > c.capacity_factor * length * K / E:
                        dropped[row, place] += 1 / K
                        continue
                    x = normed[row, place]
                    hidden = x @ mlp["gate"]["kernel"][one]
                    hidden = hidden / (1 + np.exp(-hidden)) * (x @ mlp["up"]["kernel"][one])
                    x_BSD[row, place] += gate * hidden @ mlp["down"]["kernel"][one]
        added += c.router_z_loss * log_z**2
        if c.balance == "batch":
            added += c.balance_weight * E * score @ mlp["measured"]["load"]
        if c.balance == "sequence":
            for row in range(num_rows):
                for document in {*documents[row]}:
                    inside = documents[row] == document
                    weight = weights[row, inside]
                    mean = weight @ load[row, inside] / (weight.sum() or 1)
                    added[row, inside] += c.balance_weight * E * score[row, inside] @ mean
        means = {"load": load, "score": score, "log_z": log_z, "dropped": dropped}
        for key, values in means.items():
            measured[key].append(np.einsum("bs,bs...->...", weights, values) / total)
        moved = c.balance_weight * np.sign(1 / E - measured["load"][-1].round(12))
        measured["bias"].append(mlp["measured"]["bias"] + (c.balance == "bias") * moved)
    x_BSD = rms(x_BSD, params["final_norm"]["scale"], c)
    logits = (x_BSD @ params["output"]["kernel"])[..., : c.vocab_size]
    at_target = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    cross_entropy = np.log(np.exp(logits).sum(-1)) - at_target
    measured = {key: np.array(values) for key, values in measured.items()}
    found = {
        "loss": (weights * (cross_entropy + added)).sum() / total,
        "cross_entropy": (weights * cross_entropy).sum() / total,
        "balance_loss": E * (measured["load"] * measured["score"]).sum(-1),
        "expert_load_max": E * measured["load"].max(-1),
        "expert_dropped": measured["dropped"],
        "router_log_z": measured["log_z"],
        "measured": measured,
    }
    if c.balance == "bias":
        found["router_bias_range"] = np.ptp(measured["bias"], axis=-1)
    return found


def rms(x, scale, c):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon) * scale


@pytest.mark.slow
def test_what_is_measured_is_in_no_norm():
    c = mixture(balance="none")
    grads, _, scalars = Run(c, "float64").one_step()
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    assert 0 < largest <= scalars["grad_norm"]
    of_norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(of_norm, min(1.0, scalars["grad_norm"]))
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads["layers"]["mlp"]["measured"]))


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_dense_layers_at_the_start_rotate_by_the_length_of_their_row():
    c = tiny_config()
    c.model.update(num_experts=E, d_expert=24, first_dense_layers=1)
    c.model.rope_scaling = ("dynamic", 4.0, 8.0)
    c.model.rope_theta = 10.0
    run = Run(c, "float64")
    params = jax.device_get(run.start().params)
    batch = run.batch()
    model = TransformerConfig(**{k: v for k, v in c.model.to_dict().items() if k != "build"})
    with run.program.active():
        sums = jax.jit(run.program.eval_step)(params, batch)
    expected = jax.jit(reference_model.loss, static_argnums=2)(params, jax.device_get(batch), model)
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-12)


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
