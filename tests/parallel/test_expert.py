"""Experts over the mesh: which axes shard tokens and experts, and what the experts compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.configs import default
from meshtrain.parallel import expert, mesh, sharding

RULES = tuple(default.get_config().rules)


def larger_than_1(axes, shape):
    return tuple(axis for axis in axes if shape[axis] > 1)


@pytest.mark.parametrize(
    ("sizes", "groups", "sequence", "gathered", "others"),
    [
        (dict(data=8), ("data",), (), (), ()),
        (dict(expert=8), (), (), ("expert",), ()),
        (dict(data=2, expert=4), ("data",), (), ("expert",), ()),
        (dict(data=2, fsdp=2, expert=2), ("data", "fsdp"), (), ("expert",), ()),
        (dict(expert=4, tensor=2), (), (), ("expert",), ("tensor",)),
        (dict(data=2, context=2, expert=2), ("data",), ("context",), ("expert",), ()),
        (dict(context=4, tensor=2), (), ("context",), (), ("tensor",)),
    ],
    ids=str,
)
def test_tokens_are_gathered_along_axes_of_batch_and_experts(
    sizes, groups, sequence, gathered, others
):
    built = mesh.make_mesh(**{"data": 1} | sizes)
    with jax.set_mesh(built), sharding.use_rules(RULES):
        found = expert.layout(num_rows=16, length=32, num_experts=8)
    for axes, expected in [
        (found.groups, groups),
        (found.sequence, sequence),
        (found.gathered, gathered),
        (found.others, others),
        (found.experts, (*gathered, *others)),
        (found.outside, (*groups, *sequence)),
    ]:
        assert larger_than_1(axes, built.shape) == expected
    assert found.num_shards == sizes.get("expert", 1) * sizes.get("tensor", 1)
    assert found.num_batch_groups == sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert found.num_sequence_groups == sizes.get("context", 1)


@pytest.mark.parametrize(
    "rules",
    [
        [("batch", ("expert", "data")), ("expert", "expert")],
        [("batch", ("data", "expert")), ("expert", ("tensor", "expert"))],
    ],
    ids=["outer axis of the batch", "inner axis of the experts"],
)
def test_tokens_are_not_gathered_along_other_axes(rules):
    built = mesh.make_mesh(data=2, expert=2, tensor=2)
    with jax.set_mesh(built), sharding.use_rules([*rules, ("seq", None)]):
        found = expert.layout(num_rows=16, length=32, num_experts=8)
    assert found.gathered == () and found.num_gathered == 1
    assert "expert" in found.others and found.groups == ("data",)


def of_shard(x_TD, experts_Tk, weights_Tk, first, kernels):
    """Returns the weighted sum of x @ kernel over the experts of a token that are in this shard."""
    (kernels_EDD,) = kernels
    y_ETD = jnp.einsum("td,edf->etf", x_TD, kernels_EDD)
    # The shard has none of the other experts: their rows are zeros.
    share_TkE = jax.nn.one_hot(experts_Tk - first, len(kernels_EDD), dtype=x_TD.dtype)
    return jnp.einsum("tk,tke,etd->td", weights_Tk, share_TkE, y_ETD)


@functools.cache
def operands():
    random, B, S, D, E, k = np.random.default_rng(0), 8, 16, 4, 8, 2
    x_BSD = random.normal(size=(B, S, D))
    experts_BSk = random.integers(E, size=(B, S, k)).astype(np.int32)
    weights_BSk, kernel = random.random((B, S, k)), random.normal(size=(E, D, D))
    return x_BSD, experts_BSk, weights_BSk, kernel, random.normal(size=(B, S, D))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(data=2, context=2, expert=2),
        dict(fsdp=2, expert=4),
        dict(context=4, tensor=2),
        dict(expert=2, tensor=4),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_plain_sums(sizes, x64):
    x_BSD, experts_BSk, weights_BSk, kernel, cotangent_BSD = operands()

    def plain(x_BSD, weights_BSk, kernel):
        y_BSkD = jnp.einsum("bsd,bskdf->bskf", x_BSD, kernel[experts_BSk])
        return (y_BSkD * weights_BSk[..., None]).sum(2)

    def on_mesh(x_BSD, weights_BSk, kernel):
        return expert.run_experts(of_shard, x_BSD, jnp.asarray(experts_BSk), weights_BSk, [kernel])

    def with_gradients(function):
        out, vjp = jax.vjp(function, x_BSD, weights_BSk, kernel)
        return out, *vjp(cotangent_BSD)

    expected = with_gradients(plain)
    with jax.set_mesh(mesh.make_mesh(**{"data": 1} | sizes)), sharding.use_rules(RULES):
        found = jax.jit(lambda: with_gradients(on_mesh))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
