"""`meshtrain.verify_loss`: plain jax losses with and without bugs in their sharding."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import meshtrain
from meshtrain.tools.verify import loss as losses
from meshtrain.tools.verify import pytest_plugin
from tests.lib.paths import ROOT

ROWS, WIDTH, HIDDEN = 16, 8, 16
MESH = {"data": 2, "tensor": 4}
RULES = [("up", P(None, "tensor")), ("down", P("tensor", None))]
SPECS = {"up": P(None, "tensor"), "down": P("tensor", None), "bias": P()}
BATCH_SPECS = {"x": P("data"), "y": P("data"), "mask": P("data")}


def arguments():
    random = np.random.default_rng(0)
    params = {
        "up": random.normal(size=(WIDTH, HIDDEN)).astype("f"),
        "down": random.normal(size=(HIDDEN, WIDTH)).astype("f"),
        "bias": np.zeros(WIDTH, "f"),
    }
    x, y = random.normal(size=(2, ROWS, WIDTH)).astype("f")
    return params, {"x": x, "y": y, "mask": np.ones(ROWS, "f")}


def check(loss, rules=RULES, meshes=MESH, **options):
    return meshtrain.verify_loss(loss, *arguments(), rules, meshes=meshes, **options)


def errors_of(outputs, batch):
    return (((outputs - batch["y"]) ** 2).sum(-1) * batch["mask"]).sum()


def outputs_of(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def mean(params, batch):
    return errors_of(outputs_of(params, batch) + params["bias"][None], batch) / batch["mask"].sum()


def sharded(outputs=None, total=None, check_vma=True):
    """Returns the loss as a `shard_map`, with other `outputs` or another `total` over data."""

    def correct_outputs(params, batch):
        return jax.lax.psum(outputs_of(params, batch), "tensor") + params["bias"][None]

    def correct_total(errors, weight):
        return jax.lax.psum(errors, "data") / jax.lax.psum(weight, "data")

    def body(params, batch):
        errors = errors_of((outputs or correct_outputs)(params, batch), batch)
        return (total or correct_total)(errors, batch["mask"].sum())

    return jax.shard_map(body, in_specs=(SPECS, BATCH_SPECS), out_specs=P(), check_vma=check_vma)


def test_correct_losses_pass_on_all_kinds_of_meshes():
    report = check(mean, meshes=None)
    names = [result.mesh for result in report.results]
    assert sorted(names) == ["data=2 x tensor=4", "data=4 x tensor=2", "data=8", "tensor=8"]
    assert report.passed and report.tolerance == 1e-10 and not report.notes
    kinds = {"loss", "gradients", "parameters"}
    for result in report.results:
        assert result.differences.keys() == kinds and max(result.differences.values()) < 1e-12
    assert str(report).splitlines()[0].split() == ["mesh", "loss", "gradients", "parameters"]
    assert report.table.count(" ok") == 4


@pytest.mark.parametrize("with_aux", [False, True])
def test_a_loss_may_have_collectives_and_aux(with_aux):
    loss = sharded()
    if with_aux:
        report = check(
            lambda params, batch: (loss(params, batch), {"twice": 2 * mean(*arguments())})
        )
        assert "aux" in report.results[0].differences
    else:
        assert check(loss).passed


FIXED = jax.make_mesh((4, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)


@functools.partial(jax.shard_map, mesh=FIXED, in_specs=(P(), P("data")), out_specs=P())
def on_a_fixed_mesh(params, batch):
    return jax.lax.psum(errors_of(outputs_of(params, batch), batch), "data")


def constrained(params, batch):
    outputs = jax.lax.with_sharding_constraint(
        outputs_of(params, batch), jax.NamedSharding(FIXED, P("data"))
    )
    return errors_of(outputs, batch) + on_a_fixed_mesh(params, batch)


def test_a_mesh_that_a_loss_holds_is_replaced():
    report = check(constrained, meshes=[MESH, {"data": 8}, FIXED])
    assert [result.mesh for result in report.results] == [
        "data=2 x tensor=4",
        "data=8",
        "data=4 x tensor=2",
    ]
    with jax.set_mesh(FIXED):  # the loss itself is unchanged
        jax.eval_shape(constrained, *arguments())


def test_a_loss_with_a_parameter_mesh_gets_it():
    def loss(params, batch, mesh):
        specs = SPECS, BATCH_SPECS
        total = jax.shard_map(errors, mesh=mesh, in_specs=specs, out_specs=P())(params, batch)
        return total / ROWS

    def errors(params, batch):
        outputs = jax.lax.psum(outputs_of(params, batch), "tensor")
        return jax.lax.psum(errors_of(outputs, batch), "data")

    explicit = jax.make_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    assert check(loss, meshes=[explicit]).passed


def only_on_meshes_of(size):
    def loss(params, batch):
        factor = 1.001 if jax.sharding.get_abstract_mesh().shape["data"] == size else 1.0
        return factor * mean(params, batch)

    return loss


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, grad: (x * grad,))


@jax.custom_vjp
def without_gradient(x):
    return x


without_gradient.defvjp(lambda x: (x, None), lambda _, grad: (0 * grad,))


@jax.custom_vjp
def summed(x):
    return jax.lax.psum(x, "tensor")


summed.defvjp(lambda x: (jax.lax.psum(x, "tensor"), None), lambda _, grad: (grad,))


def bias_on_each_device(params, batch):
    return jax.lax.psum(outputs_of(params, batch) + params["bias"][None], "tensor")


def rows_of_another_device(params, batch):
    outputs = jax.lax.psum(outputs_of(params, batch), "tensor") + params["bias"][None]
    num = jax.lax.axis_size("data")
    return jax.lax.ppermute(outputs, "data", [(n, (n + 1) % num) for n in range(num)])


BUGS = {
    "no sum over tensor": (
        sharded(
            lambda params, batch: outputs_of(params, batch) + params["bias"][None], check_vma=False
        ),
        r"^data=2 x tensor=4: loss: [\d.]+ here, [\d.]+ on one device \(step 0\)",
    ),
    "no sum over data": (
        sharded(total=lambda errors, weight: errors / weight, check_vma=False),
        "^data=2 x tensor=4: loss: ",
    ),
    "a mean instead of a sum": (
        sharded(lambda params, batch: jax.lax.pmean(outputs_of(params, batch), "tensor")),
        "^data=2 x tensor=4: loss: ",
    ),
    "a sum that jax finds missing": (
        sharded(outputs_of),
        "^on one device: loss_fn raises ValueError: shard_map applied .* require replication",
    ),
    "a bias that each device adds": (sharded(bias_on_each_device), "^data=2 x tensor=4: loss: "),
    "a mean of means": (
        sharded(total=lambda errors, weight: jax.lax.pmean(errors / weight, "data")),
        r"^data=2 x tensor=4: loss: .* \(step 0, with other masks\)",
    ),
    "rows of another device": (sharded(rows_of_another_device), "^data=2 x tensor=4: loss: "),
    "a gradient that is not summed": (
        sharded(lambda params, batch: summed(outputs_of(params, batch)), check_vma=False),
        r"^data=2 x tensor=4: gradients \w+\[\d+, \d+\]: ",
    ),
    "a wrong custom_vjp": (
        lambda params, batch: squared(outputs_of(params, batch)).sum(),
        r"^on one device: gradient: \w+: directional derivative .* by central differences",
    ),
    "a missing gradient": (
        lambda params, batch: mean({**params, "up": without_gradient(params["up"])}, batch),
        "^on one device: gradient: up: directional derivative 0, but .* by central differences",
    ),
    "numbers from outside of jax": (
        lambda params, batch: mean(params, batch) * np.random.rand(),
        r"^on one device: not deterministic: .* at test_loss.py:\d+ \(<lambda>\)",
    ),
    "a collective without shard_map": (
        lambda params, batch: jax.lax.psum(mean(params, batch), "data"),
        "raises NameError .*call a collective in jax.shard_map",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug):
    loss, message = BUGS[bug]
    with pytest.raises(losses.LossDiffers, match=message) as found:
        check(loss)
    report = found.value.report
    assert not report.passed and str(report) in str(found.value)


def test_a_bug_on_some_meshes_is_found_on_them_only():
    with pytest.raises(AssertionError, match="^data=4: loss: ") as found:
        check(only_on_meshes_of(4), rules=[], meshes=[{"data": 2}, {"data": 4}])
    faults = [result.fault for result in found.value.report.results]
    assert faults[0] is None and "FAILED loss: " in found.value.report.table


def test_replicas_that_differ_are_found():
    def body(params, batch):
        # The first device has the right value.
        return mean(params, batch) + 0.1 * (jax.lax.axis_index("data") == 1)

    loss = jax.shard_map(body, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    with pytest.raises(AssertionError, match="^data=2: loss: "):
        check(loss, rules=[], meshes={"data": 2}, batch_spec=P(), without=["gradient"])


def test_a_cast_is_named_and_widens_the_tolerance():
    def cast(factor):
        def loss(params, batch):
            size = jax.sharding.get_abstract_mesh().shape["data"]
            narrow = jax.jit(lambda x: x.astype(jnp.float32))
            return narrow(mean(params, batch)) * (factor if size > 1 else 1.0)

        return loss

    report = check(cast(1.00001), rules=[], meshes={"data": 2})
    (note,) = report.notes
    assert re.match(r"casts float64 to float32 at test_loss.py:\d+ \(<lambda>\), so that", note)
    assert report.tolerance == 1e-4
    with pytest.raises(AssertionError, match="^data=2: loss: "):
        check(cast(1.01), rules=[], meshes={"data": 2})


def test_stop_gradient_is_named_and_can_be_left_out():
    def loss(params, batch):
        outputs = outputs_of(params, batch)
        return errors_of(outputs - 0.5 * jax.lax.stop_gradient(outputs), batch)

    with pytest.raises(AssertionError, match=r"stop_gradient at test_loss.py:\d+ .*without=\["):
        check(loss)
    assert check(loss, without=["gradient"]).passed


def test_equal_rows_are_noted():
    params, batch = arguments()
    batch = jax.tree.map(np.ones_like, batch)
    report = meshtrain.verify_loss(mean, params, batch, [], meshes={"data": 2}, without=["masks"])
    assert "all rows of the batch are equal" in str(report)


def specs_for(rules, key="rules"):
    params, batch = arguments()
    subject = losses._Subject(mean, {"layer": params, "size": 3}, batch)
    return losses._specs(key, rules, subject.params)


def test_rules_are_trees_prefixes_patterns_or_functions():
    expected = [P(), P("tensor", None), P(None, "tensor")]  # bias, down, up
    tree = {"layer": SPECS, "size": None}
    assert specs_for(tree) == specs_for(RULES) == specs_for(dict(RULES)) == expected
    assert specs_for(lambda path, leaf: SPECS[path.split("/")[1]]) == expected
    assert specs_for([("up$", (None, "tensor")), ("n/?$", P("tensor", None))]) == expected
    assert specs_for({"layer": P("data"), "size": None}) == [P("data")] * 3
    assert specs_for(P("data")) == [P("data")] * 3 and specs_for(None) == [P()] * 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"rules": [("sidebar", P())]},
            "rules: 'sidebar' is found in no path; the paths are",
        ),
        ({"rules": {"up": P()}, "meshes": None}, None),
        ({"rules": {"up": {"w": P()}}}, "rules: no tree like params .*pass a tree of PartitionSp"),
        ({"rules": [("up", 3)]}, "rules: up: 3 is no PartitionSpec"),
        ({"rules": [("up", P(None, "tensr"))]}, "'tensr' is an axis of no mesh.*mean \"tensor\""),
        ({"rules": [("bias", P(None, "data"))]}, "params bias: .* has 2 dims, but the array has 1"),
        (
            {"rules": [], "meshes": {"data": 3}},
            "batch mask: dim 0 of size 16 is not divisible by data=3",
        ),
        (
            {"rules": [], "meshes": {"data": 16}},
            r"meshes\[0\].* has 16 devices, but 8 are there; before jax",
        ),
        ({"meshes": []}, r"meshes=\[\]: pass meshes"),
        ({"without": ["magic"]}, "without='magic': use one of gradient, masks"),
        ({"loss": lambda params, batch: batch["x"]}, r"loss_fn returned float64\[16, 8\]; return"),
        ({"loss": lambda params, batch: mean(params, batch) * np.nan}, "loss_fn is not finite"),
        ({"loss": "mse"}, "loss_fn='mse': pass a function"),
    ],
)
def test_a_mistake_is_one_line(options, line):
    loss = options.pop("loss", mean)
    if line is None:
        assert check(loss, **options).passed
        return
    with pytest.raises(meshtrain.ConfigError, match=line) as found:
        check(loss, **options)
    assert "\n" not in str(found.value)


def test_one_device_says_how_to_simulate_others(monkeypatch):
    only = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: only)
    with pytest.raises(meshtrain.ConfigError, match="there is 1 device; before jax .*jax_num_cpu"):
        check(mean, meshes=None)


verify_loss = pytest_plugin.verify_loss  # here the entry point may be older than the source


def test_the_fixture_is_the_function(verify_loss):
    assert verify_loss(mean, *arguments(), RULES, meshes=MESH).passed


def test_the_plugin_leaves_devices_alone_that_are_chosen():
    pytest_plugin.simulate_devices()
    assert jax.config.jax_num_cpu_devices == 8


A_TEST = """
import jax
import numpy as np

def loss(params, batch):
    return ((batch @ params) ** 2).sum()

def test_mine(verify_loss):
    params, batch = np.ones((3, 2)), np.random.default_rng(0).normal(size=(8, 3))
    assert verify_loss(loss, params, batch, jax.P()).results[0].mesh == "data=8"
"""


@pytest.mark.slow
def test_the_plugin_gives_a_test_its_devices(tmp_path):
    (tmp_path / "test_mine.py").write_text(A_TEST)
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
