"""Learning-rate schedules at their corners, AdamW against its formula, and the steps of a run."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.config.schema import OptimConfig
from meshtrain.configs import default
from meshtrain.errors import ConfigError
from meshtrain.metrics import weighted
from meshtrain.optim import base as optim
from meshtrain.state import TrainState
from meshtrain.step import make_train_step
from meshtrain.tools.verify.laws import optimizers as optimizer_laws

PEAK, FINAL = 0.5, 0.05


def schedule(name, *, steps, **changes):
    settings = {
        "moment_dtype": "float32",
        "warmup_steps": 0,
        "decay_fraction": 0.2,
        "final_fraction": 0.1,
    } | changes
    return optim.make_schedule(
        OptimConfig(learning_rate=PEAK, schedule=name, clip_norm=1.0, **settings), steps=steps
    )


def linear(fraction):
    """Returns the rate after this fraction of a linear decay from PEAK to FINAL."""
    return PEAK + fraction * (FINAL - PEAK)


def cosine(fraction):
    return linear((1 - math.cos(math.pi * fraction)) / 2)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", {20: PEAK, 99: PEAK, 100: PEAK, 200: PEAK}),
        ("cosine", {20: PEAK, 40: cosine(0.25), 60: linear(0.5), 99: cosine(79 / 80), 100: FINAL}),
        ("linear", {20: PEAK, 40: linear(0.25), 99: linear(79 / 80), 100: FINAL, 200: FINAL}),
        ("wsd", {20: PEAK, 80: PEAK, 85: linear(0.25), 99: linear(19 / 20), 100: FINAL}),
    ],
)
def test_a_schedule_warms_up_and_decays(name, rates):
    rate = schedule(name, steps=100, warmup_steps=20)
    rates = {0: PEAK / 21, 1: 2 * PEAK / 21, 19: 20 * PEAK / 21} | rates
    found = {step: float(rate(jnp.int32(step))) for step in rates}
    assert found == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_without_warm_up_the_first_step_has_the_highest_rate(name):
    assert float(schedule(name, steps=10)(0)) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("steps", "changes", "rates"),
    [
        (10, {"decay_fraction": 0.0}, {9: PEAK, 10: FINAL}),
        (10, {"decay_fraction": 1.0}, {0: PEAK, 5: linear(0.5), 10: FINAL}),
        (10, {"decay_fraction": 0.5, "warmup_steps": 8}, {8: PEAK, 9: linear(0.5), 10: FINAL}),
        (10, {"final_fraction": 1.0}, {9: PEAK, 10: PEAK}),
        (10, {"final_fraction": 0.0}, {9: PEAK / 2, 10: 0.0}),
    ],
)
def test_wsd_decays_over_its_fraction_and_never_during_warm_up(steps, changes, rates):
    rate = schedule("wsd", steps=steps, **changes)
    assert {step: float(rate(step)) for step in rates} == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_a_run_shorter_than_its_warm_up_only_warms_up(name):
    rate = schedule(name, steps=3, warmup_steps=9)
    np.testing.assert_allclose([rate(i) for i in range(3)], PEAK * np.arange(1, 4) / 10, rtol=1e-5)


def test_adamw_equals_its_formula_and_decays_only_the_selected_parameters(x64):
    section = default.get_config().optim.to_dict()
    assert optimizer_laws.updates({**section, "build": "meshtrain.optim.base:adamw"}) is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_numbers_of_every_dtype_are_rounded_to_a_neighbour_in_bfloat16(dtype, x64):
    x = jnp.linspace(1, 2, 1000).astype(dtype)
    rounded = optim.round_to(x, jnp.bfloat16, jnp.uint32(3))
    assert rounded.dtype == jnp.bfloat16
    errors = rounded.astype(jnp.float64) - x
    assert -(2**-7) < errors.min() < -(2**-9) and 2**-9 < errors.max() < 2**-7


def test_every_schedule_follows_its_formula_far_beyond_its_end(x64):
    section = default.get_config().optim.to_dict()
    for decay_fraction, final_fraction in ((0.2, 0.1), (0.1, 0.3), (0.0, 0.0), (1.0, 1.0)):
        section |= {"decay_fraction": decay_fraction, "final_fraction": final_fraction}
        assert optimizer_laws.schedule(section) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("b1", 1.0), ("b1", -0.1), ("b2", 1.5), ("epsilon", 0.0), ("weight_decay", -0.1)],
)
def test_adamw_rejects_a_number_out_of_range(key, value):
    hyper = {"b1": 0.9, "b2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "no_decay": ()}
    with pytest.raises(ConfigError, match=f"optim.{key}={value}: must be"):
        optim.adamw(lambda step: 0.1, **hyper | {key: value})


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_the_logged_learning_rate_is_the_one_that_the_step_applied(moment_dtype):
    """A skipped step changes nothing in the optimizer: the next one has its learning rate."""

    def rates(step):
        return jnp.array([1.0, 0.5, 0.25, 0.125])[step]

    def grad_fn(params, batch, key, scale, residual):
        return {"w": jnp.float32([1.0]) * batch}, weighted(batch[None]), residual

    optimizer = optim.store_moments(
        optax.sgd(rates), moment_dtype=moment_dtype, param_dtype="float32"
    )
    step = make_train_step(grad_fn, optimizer, rates, clip_norm=math.inf, seed=0)
    params = {"w": jnp.float32([0.0])}
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    logged, applied = [], []
    for batch in (1.0, math.nan, math.nan, 1.0):
        before = state
        state, scalars = step(state, jnp.float32(batch))
        if not scalars["skipped"]:
            logged.append(float(scalars["learning_rate"]))
            applied.append(float(before.params["w"][0] - state.params["w"][0]))
    assert logged == applied == [1.0, 0.5]
