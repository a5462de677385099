"""Muon, Lion, Adafactor and schedule-free AdamW: on a mesh as on one device, and against numpy."""

import functools
import inspect
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import meshtrain
from meshtrain.checkpoint import arrays, find
from meshtrain.config.build import build, resolve
from meshtrain.config.parse import parse
from meshtrain.data.loader import open_loader
from meshtrain.models import trees
from meshtrain.models.base import Model
from meshtrain.models.layers import normal_initializer
from meshtrain.optim import base as optim
from meshtrain.optim import muon
from meshtrain.optim import others as optim_others
from meshtrain.parallel.mesh import make_mesh
from meshtrain.program import assemble
from meshtrain.state import averages
from meshtrain.tools.verify.laws import optimizers as optimizer_laws
from meshtrain.tools.verify.reference import optimizers as optimizer_reference
from meshtrain.train import train
from tests.lib.compare import assert_same
from tests.lib.configs import packed

BUILDS = {
    "muon": "meshtrain.optim.muon:muon",
    "lion": "meshtrain.optim.others:lion",
    "adafactor": "meshtrain.optim.others:adafactor",
    "schedule_free_adamw": "meshtrain.optim.others:schedule_free_adamw",
}
KEYS = {"b1": 0.9, "b2": 0.95, "epsilon": 1e-6, "weight_decay": 0.1, "no_decay": ("scale", "bias")}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}

# D model, H heads, K head dim, F feed-forward, E experts; the mean of the outputs of all experts
SMALL = {
    "layers": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "expert": ("layers", "expert", "embed", "mlp"),
        "bias": ("layers", "mlp"),
        "down": ("layers", "mlp", "embed"),
    },
    "tokens": ("vocab", "embed"),
}
SIZES = {"layers": 4, "embed": 8, "heads": 2, "head_dim": 6, "expert": 2, "mlp": 12, "vocab": 16}


def small_model():
    """Returns a model with each kind of parameter, which compiles fast."""

    def init(key):
        def draw(path, names):
            number = zlib.crc32(jax.tree_util.keystr(path).encode())
            shape = tuple(SIZES[name] for name in names)
            return normal_initializer(0.3)(jax.random.fold_in(key, number), shape)

        return jax.tree.map_with_path(draw, SMALL, is_leaf=muon.is_entry)

    def block(x_BD, layer):
        heads_BHK = jnp.einsum("bd,dhk->bhk", x_BD, layer["query"])
        x_BD = x_BD + jnp.einsum("bhk,hkd->bd", jnp.tanh(heads_BHK), layer["out"])
        hidden_BF = jnp.einsum("bd,edf->bf", x_BD, layer["expert"]) + layer["bias"][None]
        return x_BD + jnp.tanh(hidden_BF) @ layer["down"], None

    def loss(params, batch, key):
        x_BD, _ = jax.lax.scan(block, params["tokens"][batch], params["layers"])
        return meshtrain.weighted(jnp.square(x_BD).mean(-1) - x_BD[:, 0])

    return Model(init, SMALL, loss=loss)


def config_of(name, **layout):
    c = packed()
    c.optim.build = BUILDS[name]
    c.optim.weight_decay = 0.3
    c.train.dtype = c.train.param_dtype = "float64"
    c.mesh.update({"data": 1, **layout})
    if name == "adafactor":
        with c.unlocked():
            c.optim.min_dim_size_to_factor = 8  # heads alone have 2 and 6
    return c


def three_steps(name, *, is_small=True, num_microbatches=1, only="*", **layout):
    """Returns parameters and optimizer state after three steps in float64."""
    c = config_of(name, **layout)
    c.train.update(num_microbatches=num_microbatches, trainable=only)
    num_devices = math.prod(layout.values())
    cfg = parse(c, num_devices=num_devices)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, SIZES["vocab"], 16) for _ in range(3)]
    given = {"model": small_model(), "data": batches} if is_small else {}
    parts = build(cfg, **given)
    program = assemble(cfg, parts, devices=jax.devices()[:num_devices])
    with program.active(), open_loader(parts.train_data, cfg, program.mesh, 0) as loader:
        state = program.initial_state(0)
        step = program.compile(loader.peek())
        for _ in range(3):
            state, _ = step(state, next(loader))
    return jax.device_get((state.params, state.opt_state))


@pytest.mark.parametrize("name", BUILDS)
def test_three_steps_on_a_mesh_equal_one_device_in_float64(name, x64):
    assert_same(three_steps(name, **MESH), three_steps(name), rtol=1e-10)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_that_read_names_see_only_what_is_trained(name, x64):
    params, _ = three_steps(name, only="layers/query,layers/bias", **MESH)
    before = jax.device_get(small_model().init(jax.random.key(0)))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, before)
    assert changed.pop("layers") == {name: name in ("query", "bias") for name in SMALL["layers"]}
    assert changed == {"tokens": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_three_steps_of_a_transformer_equal_one_device_in_float64(name, x64):
    expected = three_steps(name, is_small=False)
    assert_same(three_steps(name, is_small=False, **MESH), expected, rtol=1e-10)
    if name == "muon":
        pipeline = {"pipeline": 2, "fsdp": 2, "tensor": 2}
        found = three_steps(name, is_small=False, num_microbatches=2, **pipeline)
        assert_same(found, expected, rtol=1e-10)


def test_every_builder_of_the_package_has_a_formula():
    builders = set()
    for module in (optim, muon, optim_others):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = [*inspect.signature(function).parameters]
            if function.__module__ == module.__name__ and parameters[:1] == ["learning_rate"]:
                builders.add(f"{module.__name__}:{name}")
    assert builders == {*optimizer_laws.BUILDERS} == {*optimizer_reference.OPTIMIZERS}


@pytest.mark.parametrize("name", BUILDS)
def test_the_updates_are_those_of_numpy(name, x64):
    assert optimizer_laws.updates({"build": BUILDS[name], **KEYS}) is None


def test_each_parameter_has_its_own_number_of_layers_and_experts():
    """Adafactor maps its stacked parameters; their moments have the rows and columns of each."""
    axes = {"encoder": ("layers", "embed", "mlp"), "decoder": ("layers", "embed", "mlp")}
    axes |= {"gate": ("layers", "expert", "embed", None), "up": ("expert", "embed", "mlp")}
    shapes = {"encoder": (2, 6, 10), "decoder": (3, 6, 10), "gate": (2, 4, 6, 10), "up": (4, 6, 10)}
    optimizer = optim_others.adafactor(rate, axes=axes, **KEYS, min_dim_size_to_factor=4)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    opt_state = jax.eval_shape(optimizer.init, params)
    for field, size in (("v_row", 6), ("v_col", 10)):
        moments = {}
        for _, tree in optax.tree.get_all_with_path(opt_state, field):
            arrays_of_tree = {name: leaf.shape for name, leaf in tree.items() if leaf}
            moments |= arrays_of_tree
        assert moments == {name: (*shape[:-2], size) for name, shape in shapes.items()}


@pytest.mark.parametrize("build", optimizer_laws.BUILDERS)
def test_bfloat16_parameters_and_moments_are_rounded_from_the_exact_update(build):
    """Each update starts from what is stored, and is computed in float32.

    Parameters are rounded to nearest, moments stochastically: over all updates their errors have
    the mean and the variance of independent roundings, within five standard errors.
    """
    keys = {"b1": 0.7, "b2": 0.85, "epsilon": 1e-3, "weight_decay": 0.4, "no_decay": ("bias",)}
    if build == BUILDS["adafactor"]:
        keys["min_dim_size_to_factor"] = 6  # rows and columns are not rounded
    optimizer = optim.store_moments(
        optimizer_laws.optimizer_of(build, keys), moment_dtype="bfloat16", param_dtype="bfloat16"
    )
    params, grads = optimizer_laws.examples()
    params = {path: leaf.astype(jnp.bfloat16) for path, leaf in params.items()}
    params = optimizer_laws.nested(params)

    @jax.jit
    def update(params, state, grads):
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    state, expected = jax.jit(optimizer.init)(params), {path: {} for path in grads}
    errors, variances = [], []
    for number, rate in enumerate(optimizer_laws.RATES):
        given = {path: np.float32(grad[number]) for path, grad in grads.items()}
        after, state = jax.device_get(update(params, state, optimizer_laws.nested(given)))
        stored = moments_by_path(state)
        for path, leaf in optimizer_laws.LEAVES.items():
            exact, expected[path] = optimizer_reference.OPTIMIZERS[build](
                leaf,
                np.float64(trees.leaf(params, path)),
                np.float64(given[path]),
                expected[path],
                keys,
                rate=rate,
                decay=optimizer_reference.decay_of(path, keys),
            )
            new = trees.leaf(after, path)
            assert new.dtype == jnp.bfloat16
            # Half the distance of two numbers, and rounding in float32.
            limit = 0.501 * spacing(exact) + 1e-5 * np.abs(exact).max()
            assert (np.abs(np.float64(new) - exact) <= limit).all(), path
            for name, moment in stored[path].items():
                error, variance = rounding_errors(np.float64(moment), expected[path][name])
                errors.append(error.ravel())
                variances.append(variance.ravel())
                expected[path] |= {name: np.float64(moment)}
        params = after
    error, variance = np.concatenate(errors), np.concatenate(variances)
    assert error.size > 2000
    assert abs(error.sum()) <= 5 * variance.sum() ** 0.5
    # The square of an error has the variance p (1 - p) (1 - 2 p)^2.
    deviation = (variance * (1 - 4 * variance)).sum() ** 0.5
    assert abs((error**2 - variance).sum()) <= 5 * deviation


MOMENTS = {"mu": "m", "trace": "m", "nu": "v", "v": "v", "z": "z"}  # names in optax and in papers


def moments_by_path(opt_state):
    """Returns by path the arrays of the state that have the shape of their parameter, by name."""
    found = {path: {} for path in optimizer_laws.LEAVES}
    for field, name in MOMENTS.items():
        for _, tree in optax.tree.get_all_with_path(opt_state, field):
            for keys, moment in jax.tree.leaves_with_path(tree):
                path = trees.name_of(keys)
                if moment.shape == optimizer_laws.LEAVES[path].shape:
                    assert moment.dtype == jnp.bfloat16
                    found[path][name] = moment
    return found


def spacing(x):
    """Returns the distance of bfloat16 numbers of this size."""
    exponents = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126)))
    return 2.0 ** (exponents - 7)


def rounding_errors(found, exact):
    """Returns the errors, in distances of two numbers, and their variances."""
    error = (np.abs(found) - np.abs(exact)) / spacing(exact)
    assert (np.abs(error) < 1.001).all()
    share = np.abs(exact) / spacing(exact) % 1
    return error, share * (1 - share)


def rate(step):
    return jnp.float64(0.1) / (1 + step)


HEADS = {
    "query": (("layers", "embed", "heads", "head_dim"), (2, 6, 3, 4), (2, 6, 12)),
    "out": (("layers", "heads", "head_dim", "embed"), (2, 3, 4, 6), (2, 12, 6)),
    # Factored without this, or too small with it.
    "wide": (("layers", "embed", "heads", "head_dim"), (2, 6, 3, 5), (2, 6, 3, 5)),
    "few": (("layers", "embed", "heads", "head_dim"), (2, 6, 2, 2), (2, 6, 2, 2)),
}


def test_adafactor_factors_kernels_of_heads_as_matrices(x64):
    """An attention kernel whose heads and head size are small has a row and a column too."""
    rng = np.random.default_rng(0)
    names = {name: names for name, (names, _, _) in HEADS.items()}
    found = {name: rng.normal(size=shape) for name, (_, shape, _) in HEADS.items()}
    merged = {name: found[name].reshape(shape) for name, (_, _, shape) in HEADS.items()}
    build = functools.partial(optim_others.adafactor, rate, **KEYS, min_dim_size_to_factor=5)
    optimizer = build(axes=names)
    plain = build(
        axes={name: ("layers", *[None] * (leaf.ndim - 1)) for name, leaf in merged.items()}
    )
    state, plain_state = optimizer.init(found), plain.init(merged)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [
        leaf.shape for leaf in jax.tree.leaves(plain_state)
    ]
    sizes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert (2, 6) in sizes and (2, 12) in sizes and (2, 6, 3, 4) not in sizes
    for _ in range(3):
        grads = {name: rng.normal(size=leaf.shape) for name, leaf in found.items()}
        updates, state = jax.jit(optimizer.update)(grads, state, found)
        merged_grads = {name: grads[name].reshape(leaf.shape) for name, leaf in merged.items()}
        expected, plain_state = jax.jit(plain.update)(merged_grads, plain_state, merged)
        for name in HEADS:
            assert updates[name].shape == found[name].shape
            flat = np.reshape(updates[name], merged[name].shape)
            np.testing.assert_allclose(flat, expected[name], rtol=1e-10)


def test_what_is_no_matrix_gets_adamw():
    """Embeddings, heads, norms and biases; heads and their dims are one side of a matrix."""
    axes = SMALL
    found = muon.matrices(axes)
    assert found["layers"]["query"] == ((0,), (1,), (2, 3))
    assert found["layers"]["out"] == ((0,), (1, 2), (3,))
    assert found["layers"]["expert"] == ((0, 1), (2,), (3,))
    others = {"tokens": ("vocab", "embed"), "embedding": (None, "embed"), "unnamed": (None, None)}
    others |= {"bias": ("layers", "heads", "head_dim"), "kernel": (None, None, "in", "out")}
    assert set(muon.matrices(others).values()) == {None}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("muon", {"momentum": 1.0}, "optim.momentum=1.0: must be from 0 to below 1"),
        ("muon", {"ns_steps": 0}, "optim.ns_steps=0: must be at least 1"),
        ("muon", {"rms": 0.0}, "optim.rms=0.0: must be above 0"),
        ("muon", {"axes": {"w": (None, None)}}, "make no parameter a matrix; name them"),
        ("muon", {"b2": 1.0}, "optim.b2=1.0: must be"),
        ("lion", {"b1": -0.1}, "optim.b1=-0.1: must be"),
        ("adafactor", {"b1": -0.1}, "optim.b1=-0.1: must be"),
        ("adafactor", {"decay_rate": 0.0}, "optim.decay_rate=0.0: must be above 0"),
        ("schedule_free_adamw", {"b1": 0.0}, "optim.b1=0: schedule-free AdamW divides by it"),
    ],
    ids=str,
)
def test_a_number_out_of_range_is_a_config_error(name, change, message):
    axes = {"axes": SMALL} if name in ("muon", "adafactor") else {}
    with pytest.raises(meshtrain.ConfigError, match=message):
        resolve(BUILDS[name], key="optim.build")(rate, **{**axes, **KEYS, **change})


def test_the_averages_of_a_schedule_free_run_are_evaluated_and_restored(tmp_path):
    """The held-out loss in training and what a checkpoint gives to other verbs are of x.

    Frozen leaves have only y.
    """
    c = config_of("schedule_free_adamw", fsdp=2, data=4)
    c.train.dtype = c.train.param_dtype = "float32"
    c.optim.update(learning_rate=0.05, schedule="constant")
    c.train.trainable = "layers/*"
    batches = [np.random.default_rng(n).integers(0, SIZES["vocab"], 16) for n in range(3)]
    data = {"model": small_model(), "data": batches, "eval_data": batches[:1]}
    result = train(c, workdir=tmp_path, **data)
    params, opt_state = jax.device_get((result.state.params, result.state.opt_state))
    y, z = params["layers"], opt_state.z.pop("layers")
    assert not opt_state.z
    x = {**params, "layers": jax.tree.map(lambda y, z: (y - (1 - 0.9) * z) / 0.9, y, z)}
    compute = jax.jit(lambda params: small_model().loss(params, batches[0], None).mean()["loss"])
    loss, at_y = float(compute(x)), float(compute(params))
    assert result.eval_loss == pytest.approx(loss, rel=1e-5)
    assert result.eval_loss != pytest.approx(at_y, rel=1e-3)
    directory, saved = find.find_valid(tmp_path, log=print)
    restored, *_ = arrays.restore_params(directory, saved.arrays, result.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), restored, x)


def test_averages_have_the_dtypes_and_shardings_of_the_parameters():
    """Whatever those of z are: with ZeRO they differ, and moments may have another dtype."""
    mesh = make_mesh(fsdp=8)
    whole, by_rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("fsdp")))
    values = np.arange(32.0).reshape(8, 4)
    y = {"a": jnp.array(values, jnp.bfloat16), "b": jnp.array(values, jnp.float32)}
    y = jax.device_put(y, {"a": whole, "b": by_rows})
    z = jax.device_put({"a": -values, "b": values / 3}, {"a": by_rows, "b": whole})
    z = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), z)
    x = averages(y, z, jnp.float32(0.9))
    for name, rtol in [("a", 2**-8), ("b", 1e-6)]:
        assert x[name].dtype == y[name].dtype
        assert x[name].sharding.is_equivalent_to(y[name].sharding, 2)
        expected = (np.float64(y[name]) - 0.1 * np.float64(z[name])) / 0.9
        np.testing.assert_allclose(np.float64(x[name]), expected, rtol=rtol)


def test_averages_of_arrays_on_the_host_are_computed_too():
    y, z = {"a": np.float32([1, 2])}, {"a": np.float32([3, 4])}
    np.testing.assert_allclose(averages(y, z, np.float32(0.5))["a"], [-1, 0])


def two_averages(learning_rate):
    """Returns two schedule-free optimizers, each of a part of the parameters, and plain SGD."""

    labels = {"layers": dict.fromkeys(SMALL["layers"], "slow"), "tokens": "fast"}
    labels["layers"]["bias"] = "others"
    optimizers = {
        "slow": contrib.schedule_free(optax.sgd(learning_rate), learning_rate, b1=0.9),
        "fast": contrib.schedule_free(optax.sgd(learning_rate), learning_rate, b1=0.5),
        "others": optax.sgd(learning_rate),
    }
    return optax.partition(optimizers, labels)


def test_the_averages_of_each_part_of_the_parameters_are_evaluated_and_restored(tmp_path):
    c = config_of("lion", fsdp=2, data=4)
    c.train.dtype = c.train.param_dtype = "float32"
    c.optim.update(learning_rate=0.5, schedule="constant")
    with c.unlocked():
        c.optim.build = f"{__name__}:two_averages"
        for key in KEYS:
            del c.optim[key]
    batches = [np.random.default_rng(n).integers(0, SIZES["vocab"], 16) for n in range(3)]
    data = {"model": small_model(), "data": batches, "eval_data": batches[:1]}
    result = train(c, workdir=tmp_path, **data)
    y, opt_state = jax.device_get((result.state.params, result.state.opt_state))
    z = {name: opt_state.inner_states[name].inner_state.z for name in ("slow", "fast")}

    def x_of(y, z, b1):
        return (y - (1 - b1) * z) / b1

    x = {"layers": {"bias": y["layers"]["bias"]}}
    for name in y["layers"].keys() - {"bias"}:
        x["layers"][name] = x_of(y["layers"][name], z["slow"]["layers"][name], 0.9)
    x["tokens"] = x_of(y["tokens"], z["fast"]["tokens"], 0.5)
    compute = jax.jit(lambda params: small_model().loss(params, batches[0], None).mean()["loss"])
    assert result.eval_loss == pytest.approx(float(compute(x)), rel=1e-5)
    for part in ("layers", "tokens"):  # each makes a difference
        assert result.eval_loss != pytest.approx(float(compute({**x, part: y[part]})), rel=1e-4)
    directory, saved = find.find_valid(tmp_path, log=print)
    restored, *_ = arrays.restore_params(directory, saved.arrays, result.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), restored, x)


def prodigy(learning_rate):
    return contrib.prodigy(learning_rate)


@pytest.mark.parametrize("build", [BUILDS["schedule_free_adamw"], f"{__name__}:prodigy"])
def test_an_optimizer_copies_the_parameters_that_were_loaded(build, tmp_path):
    """Not the random ones before: schedule-free AdamW would throw the loaded ones away."""
    batches = [np.random.default_rng(n).integers(0, SIZES["vocab"], 16) for n in range(3)]
    data = {"model": small_model(), "data": batches, "eval_data": batches[:1]}
    c = config_of("lion", fsdp=2, data=4)
    c.train.dtype = c.train.param_dtype = "float32"
    c.optim.learning_rate = 0.05
    source = train(c, workdir=tmp_path / "source", **data)

    with c.unlocked():
        c.optim.build = build
        if build not in BUILDS.values():
            for key in KEYS:
                del c.optim[key]
    c.checkpoint.init_from, c.train.steps = str(tmp_path / "source"), 0
    result = train(c, **data)
    assert result.eval_loss == pytest.approx(source.eval_loss, rel=1e-6)
    loaded = jax.tree.leaves(jax.device_get(source.state.params))
    copies = [jax.tree.leaves(copy) for copy in copies_in(result.state.opt_state)]
    assert len(copies) == 1
    for copy, leaf in zip(copies[0], loaded, strict=True):
        np.testing.assert_array_equal(copy, leaf)


def copies_in(opt_state):
    """Returns the copies of all parameters in a state of schedule-free AdamW or Prodigy."""
    names = {"ScheduleFreeState": "z", "ProdigyState": "params0"}

    def is_copying(node):
        return type(node).__name__ in names

    nodes = jax.tree.leaves(jax.device_get(opt_state), is_leaf=is_copying)
    return [getattr(node, names[type(node).__name__]) for node in nodes if is_copying(node)]
