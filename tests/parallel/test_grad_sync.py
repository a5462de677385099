"""How gradients are added: patterns of messages, low precision, and the residual of it."""

import functools
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.parallel import grad_sync
from meshtrain.parallel.grad_sync import Wire
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools.audit.audit import audit
from meshtrain.tools.verify.laws import grad_sync as sync_laws
from meshtrain.train import train
from tests.lib.compare import assert_same
from tests.lib.configs import packed, tiny_config
from tests.lib.runs import Run

WIRES = {
    "bfloat16": Wire(16, 256),
    "int8": Wire(8, 256),
    "int4": Wire(4, 256),
}


def reduced(x, levels, wire=None, key=None, axes=("data", "fsdp"), **sizes):
    """Returns the sums of all members (N, L), and what they lack (N, L) or None."""
    mesh = make_mesh(**sizes, devices=jax.devices()[: len(x)])

    def member(x, key):
        total, error = grad_sync.all_reduce(x[0], axes, levels, wire, key)
        return total[None], None if error is None else error[None]

    with jax.set_mesh(mesh):
        specs = dict(in_specs=(jax.P(axes), jax.P()), out_specs=jax.P(axes), check_vma=False)
        return jax.device_get(jax.jit(jax.shard_map(member, **specs))(x, key))


# ---- patterns ----


@pytest.mark.parametrize(
    "pattern, num_networks", [("ring", 1), ("tree", 2), ("hierarchical", 2), ("hierarchical", 4)]
)
@pytest.mark.parametrize("sizes", [dict(data=4, fsdp=2), dict(data=6)], ids=str)
def test_a_pattern_adds_like_the_flat_sum_on_all_members(x64, pattern, num_networks, sizes):
    num = np.prod([*sizes.values()])
    if num % num_networks:
        pytest.skip("6 devices are not 4 equal networks")
    levels = grad_sync.levels_of(pattern, num, num_networks)
    random = np.random.default_rng(0)
    x = random.normal(size=(num, 101))
    whole = random.integers(-1000, 1000, (num, 101))
    for values, tolerance in ((x, 1e-12), (whole, 0)):
        found, _ = reduced(values, levels, **sizes)
        np.testing.assert_allclose(found[0], values.sum(0), rtol=0, atol=tolerance)
        assert (found == found[0]).all()


def test_a_tree_halves_within_hosts_before_it_crosses_them():
    levels = grad_sync.levels_of("tree", 12, 3)
    assert [(level.size, level.stride) for level in levels] == [(2, 1), (2, 2), (3, 4)]
    assert levels[0].groups(12)[:2] == [[0, 1], [2, 3]]
    assert levels[-1].groups(12)[:2] == [[0, 4, 8], [1, 5, 9]]


def test_a_hierarchy_has_members_of_one_host_and_then_one_of_each_host():
    inside, across = grad_sync.levels_of("hierarchical", 8, 2)
    assert inside.groups(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert across.groups(8) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    "pattern, wire, expected",
    [
        ("xla", None, 7 / 4 * 4),
        ("ring", None, 7 / 4 * 4),
        ("tree", None, 7 / 4 * 4),
        ("xla", WIRES["bfloat16"], 7 / 4 * 2),
        ("xla", WIRES["int8"], 7 / 4 * (1 + 4 / 256)),
        ("xla", WIRES["int4"]._replace(block=128), 7 / 4 * (0.5 + 4 / 128)),
        ("hierarchical", None, 3 / 2 * 4 + 1 / 4 * 4),
        ("hierarchical", WIRES["int8"], 3 / 2 * 4 + 1 / 4 * (1 + 4 / 256)),
    ],
)
def test_bytes_that_a_device_sends_for_an_element(pattern, wire, expected):
    """Of 8 devices on 2 hosts: twice (N - 1) / N of what a level works on."""
    assert grad_sync.bytes_sent(grad_sync.levels_of(pattern, 8, 2), wire, 4) == pytest.approx(
        expected
    )


# ---- formats ----


def test_sums_in_narrow_formats_are_those_of_numpy_on_all_devices(x64):
    assert sync_laws.compressed() is None


@pytest.mark.parametrize("bits, largest", [(8, 127), (4, 7)])
def test_the_error_is_at_most_half_a_scale_and_nothing_is_clipped(bits, largest):
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    rows[1, :16] = 0
    rows[2, 5] = 1e-30
    wire = Wire(bits, 16)
    found = wire.decode(wire.encode(rows), 64, np.float32)
    scale = np.abs(rows.reshape(3, 4, 16)).max(-1) / largest
    error = np.abs(found - rows).reshape(3, 4, 16).max(-1)
    assert (error <= scale * 0.5001).all()
    assert (found[1, :16] == 0).all()
    # The largest value of a block has an integer of its own, so it returns as it was.
    peak = np.abs(rows).reshape(3, 4, 16).max(-1)
    np.testing.assert_allclose(np.abs(found).reshape(3, 4, 16).max(-1), peak, rtol=1e-6)


def test_a_scale_is_rounded_up_in_float64(x64):
    """Rounded down, the largest value would be more than the largest integer times the scale."""
    rows = np.random.default_rng(0).random((64, 16))
    wire = Wire(8, 16)
    sent = np.asarray(wire.encode(rows))
    scale = np.ascontiguousarray(sent[:, 16:]).view(np.float32)[:, 0].astype(np.float64)
    assert (scale * 127 >= rows.max(1)).all()
    assert (scale * 127 <= rows.max(1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_arrive(name, value):
    """Also in a block so large that XLA on CPU drops a NaN from its maximum."""
    wire = WIRES[name]._replace(block=8192)
    rows = np.ones((1, 8192), np.float32)
    rows[0, 5000] = value
    assert not np.isfinite(wire.decode(wire.encode(rows), 8192, np.float32)[0, 5000])


def test_stochastic_rounding_is_unbiased():
    rows = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    wire = Wire(4, 16, stochastic=True)
    keys = jax.random.split(jax.random.key(0), 4000)
    decoded = jax.vmap(lambda key: wire.decode(wire.encode(rows, key), 32, jnp.float32))(keys)
    decoded = np.asarray(decoded, np.float64)
    deviation = decoded.std(0) / len(keys) ** 0.5
    is_random = deviation > 1e-6  # the largest of a block has an integer of its own
    z = (decoded.mean(0) - rows)[is_random] / deviation[is_random]
    assert is_random.sum() > 50 and 0.7 < np.sqrt((z**2).mean()) < 1.3 and np.abs(z).max() < 5
    with pytest.raises(ValueError, match="needs a key"):
        wire.encode(rows)


def test_members_round_with_different_numbers():
    x = np.full((8, 64), 0.3, np.float32)
    x[:, 0] = 7  # the scale is 1
    levels = grad_sync.levels_of("xla", 8, 1)
    wire = Wire(4, 64, stochastic=True)
    _, error = reduced(x, levels, wire, jax.random.key(0), data=8)
    assert len({row[1:].tobytes() for row in error}) == 8


def test_errors_of_members_buckets_elements_and_steps_are_independent(monkeypatch):
    """Of all pairs: each correlation is within 6.5 standard errors of zero, which a pair exceeds
    once in 10^10; there are 4 million. Means and variances are within 5.
    """
    num_steps, block, length = 400, 16, 128
    monkeypatch.setattr(grad_sync, "BUCKET", length)  # each leaf is a bucket of its own
    random = np.random.default_rng(0)
    share_L = random.uniform(0.25, 0.75, length).astype(np.float32)
    values_L = random.integers(-4, 4, length) + share_L
    values_L[::block] = 7  # the scale of a block is 1, and this element is exact
    sums = {name: np.tile(np.float32(values_L), (8, 1)) for name in ("a", "b")}
    levels = grad_sync.levels_of("xla", 8, 1)
    wire = Wire(4, block, stochastic=True)
    sync = grad_sync.Sync(("data",), levels, wire, exact=(), feedback=True)
    mesh = make_mesh(data=8)
    shardings = dict.fromkeys(sums, jax.NamedSharding(mesh, jax.P()))

    def errors(sums):
        start = sync.start_residual({name: leaf[0] for name, leaf in sums.items()})
        one = Metrics(jnp.ones(8), jnp.full(8, 1 / 8))

        def step(number):
            key = jax.random.fold_in(jax.random.key(0), number)
            _, _, residual = grad_sync.synchronise(
                sums, one, shardings, grad_sync=sync, residual=start, key=key
            )
            return residual

        return jax.lax.map(step, jnp.arange(num_steps))

    with jax.set_mesh(mesh):
        found = jax.device_get(jax.jit(errors)(sums))
    # U steps, B buckets, N members, L elements, X all but the steps
    error_UBNL = np.stack([found["a"], found["b"]], axis=1).astype(np.float64)
    # A member does not send its own part; there it has the error of the sum.
    is_own_NL = np.arange(length) // (length // 8) == np.arange(8)[:, None]
    is_random_NL = ~is_own_NL & (np.arange(length) % block != 0)
    first = error_UBNL[:, :, is_random_NL]
    expected = np.broadcast_to(share_L * (1 - share_L), (8, length))[is_random_NL]
    assert ((np.abs(first) > 0.24) & (np.abs(first) < 0.76)).all()
    # The square of an error has the variance p (1 - p) (1 - 2 p)^2.
    deviation = (expected * (1 - 4 * expected)).mean() ** 0.5
    assert abs((first**2 - expected).mean()) * first.size**0.5 <= 5 * deviation

    error_UX = error_UBNL.reshape(num_steps, -1)
    error_UX = error_UX[:, error_UX.std(0) > 0.01]
    assert error_UX.shape[1] > 1900
    normal_UX = error_UX / error_UX.std(0)
    assert np.abs(normal_UX.mean(0)).max() * num_steps**0.5 <= 5
    for apart in (0, 1):
        now, before = normal_UX[apart:], normal_UX[: num_steps - apart]
        z_XX = now.T @ before / len(now) ** 0.5
        if apart == 0:
            np.fill_diagonal(z_XX, 0)
        assert np.abs(z_XX).max() <= 6.5


def test_what_a_sum_lacks_is_returned_with_it(x64):
    """Over many steps, the sum of all results and what is still held is the sum of all inputs."""
    random, levels = np.random.default_rng(0), grad_sync.levels_of("hierarchical", 8, 2)
    held, given, received = np.zeros((8, 50)), 0.0, 0.0
    for _ in range(5):
        x = random.normal(size=(8, 50))
        total, held = reduced(x + held, levels, Wire(4, 8), data=8)
        given, received = given + x.sum(0), received + total[0]
    np.testing.assert_allclose(received + held.sum(0), given, rtol=0, atol=1e-12)
    assert np.abs(held).max() > 0.01


# ---- steps ----

LAYOUTS = {
    "ring": dict(data=4, tensor=2),
    "tree": dict(data=2, pipeline=2, fsdp=2),
    "hierarchical": dict(data=4, fsdp=2, slices=2),
}


@functools.cache
def one_device():
    c = packed()
    c.train.num_microbatches = 2
    return Run(c, "float64").one_step()


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(name, marks=[] if name == "ring" else pytest.mark.slow) for name in LAYOUTS],
)
def test_a_step_in_a_pattern_equals_one_device(x64, pattern):
    c = packed()
    c.train.num_microbatches, c.sync.pattern = 2, pattern
    c.train.zero_stage = 1 if pattern == "hierarchical" else 3
    run = Run(c, "float64", **LAYOUTS[pattern])
    assert run.program.sync.levels == grad_sync.levels_of(
        pattern, run.program.sync.num_shards, LAYOUTS[pattern].get("slices", 1)
    )
    found = run.one_step()
    assert_same(found[:1], one_device()[:1], rtol=1e-10)
    assert_same([found[1].params], [one_device()[1].params], rtol=1e-10)


def test_by_default_xla_sums_and_nothing_is_held(tiny):
    run = Run(tiny, data=8)
    assert run.program.sync is None and run.program.abstract_state.residual is None


def int4(c, **changes):
    c.sync.dtype, c.sync.block_size = "int4", 16
    c.sync.update(changes)
    return c


@pytest.mark.slow
def test_a_skipped_step_keeps_the_residual(tiny):
    run = Run(int4(tiny), data=8)
    with run.program.active():
        batch = run.batch()
        step = run.program.compile(batch)
        state, _ = step(run.start(), batch)
        before = jax.device_get(state.residual)
        broken = batch._replace(weights=batch.weights.at[0, 0].set(jnp.nan))
        state, scalars = step(state, broken)
    assert scalars["skipped"] and any(leaf.any() for leaf in before.values())
    chex.assert_trees_all_equal(state.residual, before, strict=True)


def test_a_residual_is_kept_per_unit_of_weight_and_loss_scale():
    """With twice the loss scale, or the same rows twice, the same is lost of the mean gradient."""

    def residual(scale, weight):
        run = Run(int4(tiny_config()), data=8)
        with run.program.active():
            batch = run.batch()
            batch = batch._replace(weights=batch.weights * weight)
            start = run.start()
            _, _, found = jax.jit(run.program.grad_fn)(
                start.params, batch, jax.random.key(0), scale, start.residual
            )
            return jax.tree.map(lambda leaf: leaf / scale, jax.device_get(found))

    plain = residual(1.0, 1.0)
    for other in (residual(4.0, 1.0), residual(1.0, 0.5)):
        chex.assert_trees_all_close(other, plain, rtol=1e-7, atol=1e-9)


def test_measured_parameters_and_those_named_are_exact(tiny):
    how = Run(int4(tiny, uncompressed=("scale", "bias", "tokens")), data=8).program.sync
    compressed = {name for name in how.start_residual(Run(tiny).program.abstract_state.params)}
    assert not any("scale" in name or "tokens" in name for name in compressed)
    assert "layers.mlp.up.kernel" in compressed
    assert not how.is_compressed("layers.mlp.measured.load")


@pytest.mark.slow
def test_parameters_that_tensor_shards_have_blocks_of_their_own(tiny):
    """A block with both would be rounded otherwise on each device: replicas would differ."""
    run = Run(int4(tiny, feedback="off"), data=2, tensor=4)
    state = run.one_step()[1]
    with run.program.active():
        found = run.program.compile(run.batch())(run.start(), run.batch())[0].params
    for path, leaf in jax.tree.leaves_with_path(found):
        shards = {}
        for shard in leaf.addressable_shards:
            shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in shards.values():
            assert all((one == same[0]).all() for one in same), path
    assert state is not None


# ---- runs ----


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The workdir of a run of 2 steps on two slices, and the state of an undisturbed run of 4."""
    c = run_config(slices=2, data=4, tensor=2)
    folder = tmp_path_factory.mktemp("runs") / "a"
    c.train.steps = 2
    first = train(c, workdir=folder).state
    c.train.steps = 4
    return folder, jax.device_get(first), jax.device_get(train(c).state)


def run_config(**sizes):
    c = int4(tiny_config(), pattern="hierarchical")
    c.optim.schedule, c.mesh.data = "constant", 1
    c.mesh.update(sizes)
    c.train.steps = 4
    return c


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_its_residual(stopped, tmp_path):
    folder, _, undisturbed = stopped
    shutil.copytree(folder, tmp_path / "a")
    state = train(run_config(slices=2, data=4, tensor=2), workdir=tmp_path / "a").state
    chex.assert_trees_all_equal(state, undisturbed, strict=True)


@pytest.mark.parametrize(
    "sizes",
    [dict(slices=2, data=2, fsdp=2, tensor=2), dict(slices=4, data=8), dict(data=8)],
    ids=str,
)
@pytest.mark.slow
def test_on_another_mesh_the_residual_has_the_same_sum(stopped, tmp_path, sizes):
    folder, first, _ = stopped
    shutil.copytree(folder, tmp_path / "a")
    c = run_config(**sizes)
    c.train.steps = 2  # it only restores
    c.sync.pattern = "hierarchical" if "slices" in sizes else "xla"
    state = train(c, workdir=tmp_path / "a").state
    for name, leaf in state.residual.items():
        assert leaf.shape[0] == sizes["data"]
        np.testing.assert_allclose(leaf.sum(0), first.residual[name].sum(0), atol=1e-7)
        assert np.abs(leaf).max() > 0


@pytest.mark.slow
def test_a_run_may_begin_or_end_to_compress(stopped, tmp_path):
    folder, _, _ = stopped
    shutil.copytree(folder, tmp_path / "a")
    c = run_config(data=8)
    c.sync.update(dtype="float32", pattern="xla")
    assert train(c, workdir=tmp_path / "a").state.residual is None
    c = run_config(data=8)
    c.sync.update(pattern="xla")
    state = train(c, workdir=tmp_path / "a").state
    assert state.residual and not any(leaf.any() for leaf in state.residual.values())


@pytest.mark.slow
def test_the_audit_counts_what_is_sent(tiny):
    tiny.mesh.update(data=8, slices=2)
    tiny.sync.update(dtype="int8", pattern="hierarchical")
    result = audit(tiny)
    (over_data,) = [one for one in result.axes if one.name == "data"]
    assert over_data.bytes == pytest.approx(over_data.minimum, rel=0.05)  # padding
    (links,) = [one for one in result.links.by_axes if one.axes == "data"]
    params = sum(
        leaf.size for leaf in jax.tree.leaves(Run(tiny_config()).program.abstract_state.params)
    )
    assert links.slices == pytest.approx(params / 4 * (1 + 4 / 256), rel=0.1)
    assert links.host == pytest.approx(params * 3 / 2 * 4, rel=0.05)


# ---- what a run says ----


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(dtype="int7"), "sync.dtype='int7': use one of float32, bfloat16, int8, int4"),
        (dict(pattern="star"), "sync.pattern='star': use one of xla, hierarchical, ring, tree"),
        (dict(dtype="int8", pattern="ring"), "sync.pattern=ring: each of its steps would round"),
        (dict(feedback="on"), "sync.feedback=on: sync.dtype=float32 loses nothing"),
        (dict(block_size=7), "sync.block_size=7: use an even number"),
    ],
)
def test_settings_that_do_not_work_are_one_line(tiny, changes, fault):
    tiny.sync.update(changes)
    with pytest.raises(ConfigError) as found:
        parse(tiny, num_devices=8)
    assert len(found.value.faults) == 1 and fault in found.value.faults[0]


@pytest.mark.slow
def test_a_run_says_how_gradients_meet(tiny, capsys):
    tiny.train.steps = 1
    tiny.mesh.slices = 2
    tiny.sync.update(dtype="int8", pattern="hierarchical")
    train(tiny)
    line = (
        "summed over data: hierarchical, float32 among 4, then int8 among 2 (1.016 bytes per "
        "element)"
    )
    assert line in capsys.readouterr().out


def test_a_pattern_without_a_slow_network_says_so(tiny, capsys):
    tiny.train.steps = 0
    tiny.sync.pattern = "hierarchical"
    train(tiny)
    assert "sync.pattern=hierarchical has no slow network to apply to" in capsys.readouterr().out


def test_a_loss_over_all_rows_cannot_be_compressed(tmp_path, tiny):
    from meshtrain.metrics import weighted
    from meshtrain.models.base import Model

    model = Model(
        init=lambda key: {"w": jnp.ones(3)},
        axes={"w": (None,)},
        loss=lambda params, batch, key: weighted((batch.tokens[:, :3] * params["w"]).sum(-1)),
    )
    tiny.sync.dtype = "int8"
    with pytest.raises(ConfigError, match="sync.dtype=int8: the model is one loss"):
        train(tiny, model=model)
