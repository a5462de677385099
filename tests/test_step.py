"""A train step against plain numpy: mean, clipping, learning rate, update, skipped steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.config.schema import OptimConfig
from meshtrain.metrics import Metrics
from meshtrain.optim import base as optim
from meshtrain.state import LossScale, TrainState
from meshtrain.step import make_train_step
from meshtrain.tools.verify.laws import optimizers as laws
from meshtrain.tools.verify.reference import optimizers as reference

PATHS = ("tokens/embedding", "layers/query/kernel", "layers/query/bias", "final_norm/scale")
HYPER = {"b1": 0.8, "b2": 0.9, "epsilon": 1e-3, "weight_decay": 0.3, "no_decay": ("bias", "scale")}
SECTION = {
    "learning_rate": 0.1,
    "schedule": "wsd",
    "warmup_steps": 2,
    "decay_fraction": 0.5,
    "final_fraction": 0.2,
    "moment_dtype": "float64",
}
NUM_STEPS = 6  # of the schedule; there are more batches

# Weight of each batch. The gradients of the third are not finite, the fifth has no tokens, and only
# the loss of the seventh is infinite.
WEIGHTS = (4.0, 0.5, 2.0, 1.0, 0.0, 8.0, 1.0, 3.0, 1.0, 1.0)
BROKEN, EMPTY, INFINITE = 2, 4, 6
LOST = 0.25  # of the sum of gradients in each step


def batches():
    """Returns for each step the summed gradients and the weight; gradients of a step have a size.

    Some are larger than the largest norm, some are smaller.
    """
    random = np.random.default_rng(0)
    result = []
    for number, weight in enumerate(WEIGHTS):
        size = 0.0 if number == EMPTY else weight * 10.0 ** random.uniform(-1.5, 1)
        grads = {path: size * random.normal(size=laws.LEAVES[path].shape) for path in PATHS}
        if number == BROKEN:
            grads["final_norm/scale"][0] = np.inf
        result.append((grads, weight))
    return result


@pytest.mark.parametrize("clip_norm", [2.0, math.inf])
@pytest.mark.parametrize("loss_scale", [None, 2.0**-3], ids=["", "loss scale"])
def test_steps_equal_numpy_with_clipping_and_skipped_and_empty_batches(clip_norm, loss_scale, x64):
    def grad_fn(params, batch, key, scale, residual):
        sums, weight, loss = batch
        grads = jax.tree.map(lambda leaf: leaf * scale, sums)
        residual = jax.tree.map(lambda leaf: leaf + scale * LOST, residual)
        return grads, Metrics(loss * weight, weight), residual

    cfg = OptimConfig(**SECTION, clip_norm=clip_norm)
    schedule = optim.make_schedule(cfg, steps=NUM_STEPS)
    optimizer = optim.adamw(schedule, **HYPER)
    step = jax.jit(make_train_step(grad_fn, optimizer, schedule, clip_norm=clip_norm, seed=0))

    initial, _ = laws.examples()
    expected = {path: initial[path] for path in PATHS}
    # Frozen parameters have neither gradients nor moments.
    frozen = {"frozen": np.ones(3)}
    state = TrainState(
        step=jnp.int32(0),
        params=laws.nested(expected) | frozen,
        opt_state=optimizer.init(laws.nested(expected)),
        loss_scale=loss_scale and LossScale(jnp.float32(loss_scale), jnp.int32(0)),
        residual={"w": jnp.ones(3)},
    )
    moments = {path: {} for path in PATHS}
    num_updates, clipped = 0, set()
    for number, (sums, weight) in enumerate(batches()):
        loss = math.inf if number == INFINITE else 3.0
        state, scalars = step(state, (laws.nested(sums), weight, loss))
        grads = {path: leaf / (weight or 1) for path, leaf in sums.items()}
        norm = math.sqrt(sum(np.sum(leaf**2) for leaf in grads.values()))
        rate = reference.learning_rate(num_updates, SECTION, NUM_STEPS)
        is_skipped = number in (BROKEN, INFINITE)
        if not is_skipped:
            clipped.add(norm > clip_norm)
            grads = reference.clipped(grads, clip_norm)
            for path in PATHS:
                expected[path], moments[path] = reference.adamw(
                    laws.LEAVES[path],
                    expected[path],
                    grads[path],
                    moments[path],
                    HYPER,
                    rate=rate,
                    decay=reference.decay_of(path, HYPER),
                )
            num_updates += 1
        assert scalars["skipped"] == is_skipped
        np.testing.assert_allclose(scalars["grad_norm"], norm, rtol=1e-12)
        np.testing.assert_allclose(scalars["learning_rate"], rate, rtol=1e-6)
        np.testing.assert_equal(float(scalars["loss"]), np.nan if number == EMPTY else loss)
        wanted = laws.nested(expected) | frozen
        # The learning rate is in float32.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            state.params,
            wanted,
        )
    assert state.step == len(WEIGHTS)
    np.testing.assert_array_equal(state.residual["w"], 1 + LOST * num_updates)
    assert clipped == ({False} if clip_norm == math.inf else {False, True})


def test_what_a_model_measures_is_neither_clipped_nor_updated_and_stays_in_an_empty_batch(x64):
    """Its gradient is the measurement, which counts neither for the norm nor for the moments."""

    def grad_fn(params, batch, key, scale, residual):
        grads, weight = batch
        return grads, Metrics(weight, weight), residual

    def measure(params, grads):
        load = grads["measured"]["load"]
        return {**params, "measured": {"load": 10 * load}}, {"largest": load.max()}

    optimizer = optim.adamw(lambda step: 0.1, **HYPER)
    step = jax.jit(
        make_train_step(
            grad_fn, optimizer, lambda step: 0.1, clip_norm=1.0, seed=0, measure=measure
        )
    )
    params = {"kernel": np.array([1.0, 2.0]), "measured": {"load": np.array([5.0, 6.0])}}
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    grads = {"kernel": np.array([2.0, 0.0]), "measured": {"load": np.array([200.0, 400.0])}}
    after, scalars = step(state, (grads, 4.0))
    np.testing.assert_array_equal(after.params["measured"]["load"], [500.0, 1000.0])
    assert (scalars["grad_norm"], scalars["largest"]) == (0.5, 100.0)
    expected, _ = reference.adamw(
        reference.Leaf((None,), (2,)),
        params["kernel"],
        grads["kernel"] / 4,
        {},
        HYPER,
        rate=0.1,
        decay=HYPER["weight_decay"],
    )
    np.testing.assert_allclose(after.params["kernel"], expected, rtol=1e-12)
    for moment in ("mu", "nu"):
        stored = optax.tree.get(after.opt_state, moment)
        assert not np.any(stored["measured"]["load"]) and np.any(stored["kernel"])

    nothing = jax.tree.map(np.zeros_like, grads)
    last, scalars = step(after, (nothing, 0.0))
    np.testing.assert_array_equal(last.params["measured"]["load"], [500.0, 1000.0])
    assert np.isnan(scalars["largest"]) and np.isnan(scalars["loss"]) and not scalars["skipped"]
