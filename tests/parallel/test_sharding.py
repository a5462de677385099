"""From logical names to mesh axes: which rule wins, and what happens if none fits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain import grads
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models import transformer
from meshtrain.parallel import mesh, sharding

SIZES = {"data": 2, "fsdp": 4, "context": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("names", "shape", "rules", "spec"),
    [
        pytest.param("a", (8,), [("a", "fsdp"), ("a", "tensor")], P("fsdp"), id="first rule wins"),
        pytest.param(
            "a", (8,), [("a", "tensor"), ("a", "fsdp")], P("tensor"), id="in order of rules"
        ),
        pytest.param(
            "ab", (8, 8), [("b", "fsdp"), ("a", "fsdp")], P(None, "fsdp"), id="rules before dims"
        ),
        pytest.param("aa", (8, 8), [("a", "fsdp")], P("fsdp", None), id="an axis shards one dim"),
        pytest.param("aa", (6, 8), [("a", "fsdp")], P(None, "fsdp"), id="the first divisible dim"),
        pytest.param(
            "ab",
            (8, 8),
            [("a", "fsdp"), ("b", "fsdp"), ("b", "tensor")],
            P("fsdp", "tensor"),
            id="axis already used: next rule",
        ),
        pytest.param(
            "a", (6,), [("a", "fsdp"), ("a", "tensor")], P("tensor"), id="not divisible: next rule"
        ),
        pytest.param(
            "a", (7,), [("a", "fsdp"), ("a", "tensor")], P(None), id="not divisible: unsharded"
        ),
        pytest.param("a", (8,), [("a", ("data", "fsdp"))], P(("data", "fsdp")), id="two axes"),
        pytest.param(
            "a", (8,), [("a", ["fsdp", "data"])], P(("fsdp", "data")), id="in their order"
        ),
        pytest.param("a", (8,), [("a", ("fsdp",))], P("fsdp"), id="a tuple of one"),
        pytest.param(
            "a", (4,), [("a", ("data", "fsdp")), ("a", "data")], P("data"), id="product too large"
        ),
        pytest.param(
            "ab",
            (8, 8),
            [("a", ("data", "fsdp")), ("b", ("fsdp", "tensor"))],
            P(("data", "fsdp"), None),
            id="one of two axes already used",
        ),
        pytest.param(
            "ab", (8, 8), [("a", None), ("b", "fsdp")], P(None, "fsdp"), id="None: unsharded"
        ),
        pytest.param("a", (8,), [("a", None), ("a", "fsdp")], P(None), id="None ends the search"),
        pytest.param(
            "a", (7,), [("a", "context")], P("context"), id="an axis of size 1 divides all"
        ),
        pytest.param(
            "ab",
            (8, 8),
            [("a", "context"), ("b", "context")],
            P("context", None),
            id="an axis of size 1 is used too",
        ),
        pytest.param(
            (None, "a"), (8, 8), [("a", "fsdp")], P(None, "fsdp"), id="a dim without a name"
        ),
        pytest.param("", (), [("a", "fsdp")], P(), id="a scalar"),
    ],
)
def test_a_dim_gets_the_first_rule_that_fits(names, shape, rules, spec):
    assert sharding.spec_for(tuple(names), shape, rules, SIZES) == spec


@pytest.mark.parametrize(
    ("names", "rules", "messages"),
    [
        (("embde",), [("embed", "fsdp")], ["'embde'", 'did you mean "embed"', "config.rules"]),
        (("embed",), [("embed", "fdsp")], ["'embed'", "'fdsp'", 'did you mean "fsdp"']),
        (("embed",), [("embed", ("fsdp", "rows"))], ["'embed'", "'rows'"]),
    ],
)
def test_unknown_names_are_rejected_with_the_nearest_known_name(names, rules, messages):
    with pytest.raises(ConfigError) as error:
        sharding.spec_for(names, (8,), rules, SIZES)
    assert [text for text in messages if text not in str(error.value)] == []


def test_rules_without_removes_an_axis_from_every_rule():
    rules = (("a", ("data", "fsdp")), ("b", "fsdp"), ("c", "tensor"), ("d", None))
    remaining = sharding.rules_without(rules, "fsdp")
    assert remaining == (("a", ("data",)), ("b", ()), ("c", ("tensor",)), ("d", ()))
    assert sharding.spec_for("abc", (8, 8, 8), remaining, SIZES) == P("data", None, "tensor")


def test_shardings_keep_the_tree():
    built = mesh.make_mesh(fsdp=4, tensor=2)
    shapes = {"x": np.zeros((4, 6)), "y": {"z": np.zeros(3)}}
    names = {"x": ("a", "b"), "y": {"z": ("a",)}}
    found = sharding.shardings(names, shapes, (("a", "fsdp"), ("b", "tensor")), built)
    assert found["x"].is_equivalent_to(jax.NamedSharding(built, P("fsdp", "tensor")), 2)
    assert found["y"]["z"].is_fully_replicated and found.keys() == shapes.keys()


def test_constrain_is_the_identity_without_a_mesh():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "no such", "name") is x


def test_without_rules_tokens_are_in_one_slice():
    assert sharding.token_slices(("fsdp", "context"), 8) == ((), 1, 1)
    with jax.set_mesh(mesh.make_mesh(fsdp=4, context=2)):
        assert sharding.token_slices(("fsdp", "context"), 8) == ((), 1, 1)
        with sharding.use_rules([("batch", "fsdp"), ("seq", "context")]):
            expected = (("fsdp", "context"), 4, 2)
            assert sharding.token_slices(("fsdp", "context"), 8) == expected


def test_constrain_follows_the_innermost_rules():
    with jax.set_mesh(mesh.make_mesh(fsdp=4, tensor=2)), sharding.use_rules([("a", "fsdp")]):
        with sharding.use_rules([("a", "tensor")]):
            inner = sharding.constrain(jnp.ones(8), "a")
        outer = sharding.constrain(jnp.ones(8), "a")
    assert (inner.sharding.spec, outer.sharding.spec) == (P("tensor"), P("fsdp"))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=lambda f: f.__name__)
def test_a_function_that_was_traced_with_other_rules_is_traced_again(wrap):
    """jax keeps traces by function object and by its own context, which must include the rules."""

    def constrained(x):
        return sharding.constrain(x, "a") * 2

    function = wrap(constrained)

    def axes_in_trace(rules):
        with jax.set_mesh(mesh.make_mesh(fsdp=4, tensor=2)), sharding.use_rules(rules):
            text = str(jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(jnp.ones(8)))
        return set(re.findall(r"spec=P\('(\w+)'", text.replace("PartitionSpec", "P")))

    assert axes_in_trace([("a", "fsdp")]) == {"fsdp"}
    assert axes_in_trace([("a", "tensor")]) == {"tensor"}
    assert axes_in_trace([("a", ["fsdp"])]) == {"fsdp"}


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_a_second_program_with_other_rules_gets_its_own_constraints(tiny, remat):
    section = {key: value for key, value in tiny.model.to_dict().items() if key != "build"}
    model = transformer.build(**section)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = Batch(*np.zeros((2, 4, 16), np.int32), np.ones((4, 16), np.float32), None, None)
    loss = grads.make_loss(model, remat=remat)
    with_residuals = (("residual_seq", ("context", "tensor")), *map(tuple, tiny.rules))

    def trace(rules):
        with jax.set_mesh(mesh.make_mesh(data=2, tensor=4)), sharding.use_rules(rules):
            gradient = jax.grad(lambda params: loss(params, batch, None).loss)
            return str(jax.make_jaxpr(gradient)(params))

    fresh = trace(with_residuals)
    jax.clear_caches()
    other, name = trace(tiny.rules), "('context', 'tensor')"
    assert other.count(name) < trace(with_residuals).count(name) == fresh.count(name)
