"""bfloat16 and float16: which dtypes compute and store what, and how much precision is lost."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import meshtrain
from meshtrain import grads, metrics, state
from meshtrain.cli import app
from meshtrain.config import load as configfile
from meshtrain.optim import base as optim
from meshtrain.program import assemble
from meshtrain.tools.verify.laws import rounding as rounding_laws
from meshtrain.train import train
from tests.lib.compare import assert_same
from tests.lib.configs import GPT2, packed, tiny_config
from tests.lib.runs import Run

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def rows(workdir, name="metrics.jsonl"):
    def reject(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = (workdir / name).read_text().splitlines()
    return [json.loads(line, parse_constant=reject) for line in lines]


def assert_bit_equal(a, b):
    chex.assert_trees_all_equal(a, b, strict=True)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


# ---- bfloat16 ----


def test_bfloat16_gradients_are_near_float32_and_parameters_stay_float32():
    exact = Run(tiny_config()).one_step()
    c = tiny_config()
    c.train.dtype = "bfloat16"
    mixed = Run(c).one_step()
    assert dtypes((mixed[0], mixed[1].params)) == {"float32"}
    assert_same([mixed[0]], [exact[0]], rtol=0.1)
    pairs = zip(*map(jax.tree.leaves, (mixed[0], exact[0])), strict=True)
    assert all(np.any(a != b) for a, b in pairs)


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    def loss(params, batch, key):
        return metrics.Metrics(jnp.sum(batch * params["w"]).astype(jnp.float32), jnp.float32(1))

    replicated = NamedSharding(Run(tiny_config()).program.mesh, PartitionSpec())
    options = dict(dtype="bfloat16", num_microbatches=512, grad_shardings={"w": replicated})
    grad_fn = grads.accumulate(loss, **options)
    # 256 + 0.5 is 256 in bfloat16, whose next number is 258.
    batch = jnp.full(512, 0.5, jnp.bfloat16).at[0].set(256)
    found, _, _ = grad_fn({"w": jnp.bfloat16(1)}, batch, jax.random.key(0))
    assert found["w"].dtype == jnp.float32 and found["w"] == 256 + 511 / 2


# ---- moments ----


@pytest.mark.parametrize("name", rounding_laws.laws())
def test_stochastic_rounding_is_unbiased_and_its_errors_are_independent(name):
    assert rounding_laws.laws()[name]() is None


@jax.jit(static_argnames=("dtype", "num_steps"))
def descend(dtype, num_steps=1000):
    """Runs Adam on a quadratic whose gradient noise falls to a tenth after a fifth of the steps."""
    optimizer = optim.store_moments(
        optax.adam(1e-3, b2=0.999), moment_dtype=dtype, param_dtype="float32"
    )
    goal = jax.random.normal(jax.random.key(1), (2048,))
    params = {"w": jnp.zeros(2048)}

    def step(carry, number):
        params, opt_state = carry
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(2), number), (2048,))
        noise = noise * jnp.where(number < num_steps // 5, 1.0, 0.1)
        grad = {"w": 0.1 * (params["w"] - goal) + noise}
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    start = params, optimizer.init(params)
    (params, opt_state), _ = jax.lax.scan(step, start, jnp.arange(num_steps))
    return params["w"], optax.tree.get(opt_state, "nu")["w"]


@pytest.mark.slow
def test_bfloat16_moments_follow_float32_where_nearest_rounding_stalls(monkeypatch):
    params, nu = descend("float32")
    stochastic, stochastic_nu = descend("bfloat16")
    assert (nu.dtype, stochastic_nu.dtype) == (jnp.float32, jnp.bfloat16)
    ratio = np.asarray(stochastic_nu, np.float32) / nu
    assert abs(ratio.mean() - 1) < 0.01 and ratio.std() < 0.08
    error = jnp.linalg.norm(stochastic - params)
    assert error < 0.02 * jnp.linalg.norm(params)

    monkeypatch.setattr(optim, "round_to", lambda x, dtype, seed: x.astype(dtype))
    descend.clear_cache()
    nearest, nearest_nu = descend("bfloat16")
    descend.clear_cache()
    # nu falls by 0.1 % per step, less than half the distance between bfloat16 numbers.
    assert (np.asarray(nearest_nu, np.float32) / nu).mean() > 1.5
    assert jnp.linalg.norm(nearest - params) > 2 * error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_moments_in_the_dtype_of_parameters_the_optimizer_is_unchanged(dtype):
    optimizer = optax.adam(1.0)
    assert optim.store_moments(optimizer, moment_dtype=dtype, param_dtype=dtype) is optimizer


def test_bfloat16_parameters_are_updated_in_float32():
    exact = optax.adam(1e-2, eps=1e-4)
    wrapped = optim.store_moments(exact, moment_dtype="float32", param_dtype="bfloat16")
    params = {"w": jnp.bfloat16([1.0, -2.0, 0.5])}
    grad = {"w": jnp.float32([1 + 2**-12, 1e-4, -3.0])}
    updates, opt_state = wrapped.update(grad, wrapped.init(params), params)
    in_float32 = {"w": params["w"].astype(jnp.float32)}
    expected, expected_state = exact.update(grad, exact.init(in_float32), in_float32)
    assert dtypes(updates) == {"float32"}
    assert_bit_equal((updates, opt_state.state), (expected, expected_state))


def planned_opt_state(build, moment_dtype="bfloat16"):
    c = tiny_config()
    c.optim.moment_dtype = moment_dtype
    run = Run(c, fsdp=8)
    parts = run.parts._replace(make_optimizer=build)
    return assemble(run.cfg, parts).abstract_state.opt_state


@pytest.mark.parametrize(
    "build",
    [optax.adam, optax.lion, optax.contrib.muon, optax.contrib.schedule_free_adamw],
    ids=["adam", "lion", "muon", "schedule_free"],
)
def test_bfloat16_moments_take_half_the_memory_and_stay_sharded(build):
    full, half = planned_opt_state(build, "float32"), planned_opt_state(build)
    moments = [leaf for leaf in jax.tree.leaves(half) if leaf.size > 3]  # no scalars
    assert dtypes(moments) == {"bfloat16"}
    # Scalars are not halved.
    expected = pytest.approx(state.bytes_per_device(full) / 2, abs=100)
    assert state.bytes_per_device(half) == expected
    shardings = [leaf.sharding for leaf in jax.tree.leaves(full) if leaf.size > 3]
    assert [leaf.sharding for leaf in moments] == shardings
    assert any(not sharding.is_fully_replicated for sharding in shardings)


def test_factored_moments_stay_float32():
    opt_state = planned_opt_state(lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8))
    factored = optax.tree.get(opt_state, "v_row")["layers"]["mlp"]["up"]["kernel"]
    unfactored = optax.tree.get(opt_state, "v")["layers"]["mlp_norm"]["scale"]
    assert (factored.dtype, unfactored.dtype) == (jnp.float32, jnp.bfloat16)


def test_stochastic_rounding_does_not_depend_on_the_sharding():
    optimizer = optim.store_moments(
        optax.adam(1e-2), moment_dtype="bfloat16", param_dtype="float32"
    )
    mesh = Run(tiny_config(), fsdp=4, tensor=2).program.mesh
    params = {name: jnp.linspace(-1, 1, 512).reshape(16, 32) for name in "ab"}

    def two_updates(params):
        _, first = optimizer.update(params, optimizer.init(params), params)
        return first, optimizer.update(params, first, params)[1]

    sharded_params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    unsharded, sharded = jax.jit(two_updates)(params), jax.jit(two_updates)(sharded_params)
    assert not optax.tree.get(sharded[1], "mu")["a"].sharding.is_fully_replicated
    assert_bit_equal(unsharded, sharded)
    first, second = (optax.tree.get(opt_state, "nu") for opt_state in unsharded)
    # Random bits differ between arrays and between updates.
    assert np.any(first["a"] != first["b"])
    errors = [
        np.asarray(nu["a"], np.float32) / (params["a"] ** 2 * factor) - 1
        for nu, factor in ((first, 0.001), (second, 0.001999))
    ]
    assert abs(np.corrcoef(errors[0].ravel(), errors[1].ravel())[0, 1]) < 0.9


@pytest.mark.slow
def test_a_run_with_bfloat16_moments_and_parameters_resumes_bit_equal(tmp_path):
    def run(steps, folder):
        c = tiny_config()
        c.train.update(steps=steps, dtype="bfloat16", param_dtype="bfloat16")
        c.mesh.update(CUBE)
        c.model.num_layers = 1
        c.optim.schedule, c.optim.learning_rate, c.eval.batches = "constant", 1e-2, 0
        return train(c, workdir=tmp_path / folder).state

    uninterrupted = run(8, "uninterrupted")
    run(3, "resumed")
    assert_bit_equal(run(8, "resumed"), uninterrupted)
    assert dtypes(uninterrupted.params) == {"bfloat16"}
    losses = [row["loss"] for row in rows(tmp_path / "uninterrupted")]
    assert losses[-1] < losses[0] - 0.2


def test_moments_default_to_the_dtype_of_parameters():
    def load(*overrides):
        c = configfile.load_config("configs/default.py", [f"--config.{o}" for o in overrides])
        return c.train.param_dtype, c.optim.moment_dtype

    assert load() == ("float32", "float32")
    assert load("train.param_dtype=bfloat16") == ("bfloat16", "bfloat16")
    assert load("optim.moment_dtype=bfloat16") == ("float32", "bfloat16")


@pytest.mark.parametrize(
    "key, value, messages",
    [
        ("moment_dtype", "float16", ["optim.moment_dtype='float16': use one of float32, bfl"]),
        ("moment_dtype", "float64", ["optim.moment_dtype=float64: jax computes it in float32"]),
        ("param_dtype", "float16", ["train.param_dtype='float16'", "optim.moment_dtype='float16'"]),
    ],
)
def test_an_unsupported_dtype_is_rejected(key, value, messages):
    c = tiny_config()
    (c.optim if key == "moment_dtype" else c.train)[key] = value
    with pytest.raises(meshtrain.ConfigError) as error:
        train(c)
    faults = error.value.faults
    assert all(message in fault for fault, message in zip(faults, messages, strict=True))


# ---- float16 ----


@pytest.fixture(scope="module")
def compiled_float16():
    """Returns a float16 run on a mesh of three axes, its initial state, a batch and its step."""
    c = packed(**GPT2)
    c.train.dtype = "float16"
    run = Run(c, **CUBE)
    return run, run.start(), run.batch(), jax.jit(run.program.train_step)


@pytest.fixture
def float16_run(compiled_float16):
    run, *_ = compiled_float16
    with run.program.active():
        yield compiled_float16


def with_scale(start, scale, good_steps=0):
    return start._replace(loss_scale=state.LossScale(jnp.float32(scale), jnp.int32(good_steps)))


def assert_skipped(before, after, report):
    assert report["skipped"] and after.step == before.step + 1
    assert_bit_equal((after.params, after.opt_state), (before.params, before.opt_state))
    expected = state.LossScale(np.float32(before.loss_scale.scale / 2), np.int32(0))
    assert_bit_equal(after.loss_scale, expected)


def test_a_backward_overflow_skips_the_update_and_halves_the_scale(float16_run):
    _, start, batch, step = float16_run
    before = with_scale(start, 2.0**40, good_steps=7)
    after, report = step(before, batch)
    assert np.isfinite(report["loss"]) and not np.isfinite(report["grad_norm"])
    assert_skipped(before, after, report)

    trained, report = step(with_scale(after, 2.0**6), batch)
    assert not report["skipped"] and trained.loss_scale.good_steps == 1
    pairs = zip(*map(jax.tree.leaves, (trained.params, after.params)), strict=True)
    assert all(np.any(a != b) for a, b in pairs)


def test_a_forward_overflow_skips_the_update(float16_run):
    _, start, batch, step = float16_run
    large = jax.tree.map(lambda p: 1e5 * p, start.params)  # more than float16's 65504
    before = with_scale(start._replace(params=large), 1.0)
    after, report = step(before, batch)
    assert not np.isfinite(report["loss"])
    assert_skipped(before, after, report)


def test_an_overflow_in_one_row_is_skipped_on_every_device(float16_run):
    _, start, batch, step = float16_run
    weights = batch.weights.at[0].multiply(1e6)
    before = with_scale(start, 2.0**6)
    after, report = step(before, batch._replace(weights=weights))
    assert_skipped(before, after, report)
    for leaf in (report["skipped"], after.loss_scale.scale, after.loss_scale.good_steps):
        shards = [shard.data.item() for shard in leaf.addressable_shards]
        assert len(shards) == 8 and len(set(shards)) == 1


def test_the_scale_doubles_after_enough_finite_steps(float16_run):
    _, start, batch, step = float16_run
    last = state.GROWTH_INTERVAL - 1
    before, _ = step(with_scale(start, 0.25, last - 1), batch)
    assert (before.loss_scale.scale, before.loss_scale.good_steps) == (0.25, last)
    after, _ = step(before, batch)
    assert (after.loss_scale.scale, after.loss_scale.good_steps) == (0.5, 0)


@pytest.mark.slow
def test_unscaled_float16_gradients_are_near_float32(float16_run):
    run, start, batch, _ = float16_run
    exact = Run(packed(**GPT2), **CUBE).program
    key = jax.random.key(0)
    with exact.active():
        expected, expected_sums, _ = jax.jit(exact.grad_fn)(start.params, batch, key)
    grad_fn = jax.jit(run.program.grad_fn)
    for scale in (1.0, 2.0**10, 2.0**-3):
        found, sums, _ = grad_fn(start.params, batch, key, jnp.float32(scale))
        assert dtypes(found) == {"float32"}
        found = optax.tree.scale(1 / scale, found)
        assert_same([jax.device_get(found)], [jax.device_get(expected)], rtol=1e-2)
        np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-3)
        assert sums.weight == expected_sums.weight


def test_the_scale_does_not_change_norm_and_update(float16_run):
    _, start, batch, step = float16_run
    (unscaled, expected), (scaled, report) = (
        step(with_scale(start, scale), batch) for scale in (1.0, 2.0**6)
    )
    np.testing.assert_allclose(report["grad_norm"], expected["grad_norm"], rtol=1e-2)
    expected_mu, mu = (optax.tree.get(s.opt_state, "mu") for s in (unscaled, scaled))
    assert_same([jax.device_get(mu)], [jax.device_get(expected_mu)], rtol=1e-2)


def test_the_loss_scale_starts_at_the_documented_power_of_two():
    """Were it twice as large, the first step would overflow, and be skipped, more often."""
    assert_bit_equal(state.start_loss_scale(), state.LossScale(np.float32(16), np.int32(0)))


def float16_config(**train):
    c = tiny_config()
    c.train.update(dtype="float16", **train)
    c.model.num_layers = 1
    c.optim.schedule, c.optim.learning_rate, c.eval.batches = "constant", 1e-2, 0
    return c


@pytest.mark.slow
def test_a_run_recovers_from_overflows_and_resumes_with_its_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FIRST_LOSS_SCALE", 2.0**24)
    folder = tmp_path / "uninterrupted"
    uninterrupted = train(float16_config(steps=30), workdir=folder).state
    table = rows(folder)
    skips = [e for e in rows(folder, "events.jsonl") if e["event"] == "skip"]
    assert [e["step"] for e in skips] == [row["step"] for row in table if row["skipped"]]
    assert 10 < len(skips) < 25 and [e["step"] for e in skips[:10]] == list(range(10))
    assert [e["loss_scale"] for e in skips] == [2.0 ** (24 - n) for n in range(len(skips))]
    assert table[0]["grad_norm"] is None and table[-1]["loss"] < table[0]["loss"] - 0.2

    train(float16_config(steps=20), workdir=tmp_path / "resumed")
    resumed = train(float16_config(steps=30), workdir=tmp_path / "resumed").state
    assert_bit_equal(resumed, uninterrupted)
    assert uninterrupted.loss_scale.scale == 2.0 ** (24 - len(skips))

    # To float32 and back to float16: the scale is dropped, then starts from its first value.
    c = float16_config(steps=31)
    c.train.dtype = "float32"
    in_float32 = train(c, workdir=tmp_path / "resumed").state
    assert in_float32.loss_scale is None
    in_float16 = train(float16_config(steps=32), workdir=tmp_path / "resumed").state
    assert_bit_equal(in_float16.loss_scale, state.LossScale(np.float32(2**23), np.int32(0)))


def test_a_run_that_skips_every_step_ends_with_exit_code_17(tmp_path, capsys):
    overrides = {
        "data.build": "meshtrain.data.synthetic:build",
        "data.seq_len": 16,
        "model.num_layers": 1,
        "model.d_model": 32,
        "model.d_ff": 32,
        "train.dtype": "float16",
        "train.global_batch": 8,
        "train.steps": 60,
        "optim.learning_rate": 1e38,
        "eval.batches": 0,
    }
    arguments = [f"--config.{key}={value}" for key, value in overrides.items()]
    code = app.main("train", ["--config=configs/default.py", f"--workdir={tmp_path}", *arguments])
    assert code == 17
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "not finite for 25 steps in a row; the parameters were not changed; the loss scale was"
        in line
    )
    assert "lower optim.learning_rate" in line and "train.dtype=bfloat16" in line
    events = rows(tmp_path, "events.jsonl")
    # The parameters are as good as before the skips, so they are saved.
    assert [e["event"] for e in events[-27:]] == ["skip"] * 25 + ["save", "end"]


def test_parameters_are_cast_once_outside_all_loops():
    c = tiny_config()
    c.train.dtype, c.train.num_microbatches, c.train.unroll = "bfloat16", 2, 1
    run = Run(c)

    def shapes_cast_in_loops(jaxpr, in_loop):
        """Yields the shapes that are cast to bfloat16 within a loop."""
        for eqn in jaxpr.eqns:
            name, is_loop = eqn.primitive.name, eqn.primitive.name in ("scan", "while")
            if in_loop and name == "convert_element_type" and eqn.params["new_dtype"] == "bfloat16":
                yield eqn.invars[0].aval.shape
            for inner in jaxprs_in_params(eqn.params):
                yield from shapes_cast_in_loops(inner, in_loop or is_loop)

    with run.program.active():
        params = run.program.abstract_state.params
        traced = jax.make_jaxpr(run.program.grad_fn)(params, run.batch(), jax.random.key(0))
    found = set(shapes_cast_in_loops(traced.jaxpr, False))
    kernels = [leaf.shape for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2]
    assert found and not found & {*kernels, *(shape[1:] for shape in kernels)}
