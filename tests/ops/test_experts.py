"""Experts compute the weighted sum that plain maths computes, for any load of the experts."""

from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.ops import experts

T, D, F, E, K = 24, 6, 10, 5, 2  # tokens, model, feed-forward, experts, experts per token
RNG = np.random.default_rng(0)
BALANCED = np.stack([np.arange(T) % E, (np.arange(T) + 1) % E], 1)
ASSIGNMENTS = {
    "balanced": BALANCED,
    "all to one expert": np.full((T, K), 3),
    "two experts and three without a token": np.stack([np.full(T, 4), np.full(T, 0)], 1),
    "some dropped": np.where(np.arange(T)[:, None] % 3 == 0, experts.DROPPED, BALANCED),
    "all dropped": np.full((T, K), experts.DROPPED),
    "fewer rows than experts": BALANCED[:2],
}


def swiglu(up, gate):
    return jax.nn.silu(gate) * up


def plain(x_TD, weights_Tk, kernels, experts_Tk):
    up, gate, down = kernels
    y_ETD = jax.vmap(lambda u, g, d: swiglu(x_TD @ u, x_TD @ g) @ d)(up, gate, down)
    share_TkE = experts_Tk[..., None] == np.arange(len(up))
    return jnp.einsum("tk,tke,etd->td", weights_Tk, share_TkE.astype(x_TD.dtype), y_ETD)


def operands(num_tokens, num_experts=E):
    def draw(*shape):
        return jnp.asarray(RNG.normal(size=shape), jnp.float32)

    kernels = draw(num_experts, D, F), draw(num_experts, D, F), draw(num_experts, F, D)
    return draw(num_tokens, D), draw(num_tokens, K), kernels


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_outputs_and_gradients_equal_plain_maths(name, block):
    assigned = ASSIGNMENTS[name].astype(np.int32)
    x, weights, kernels = operands(len(assigned))
    direction = jnp.asarray(RNG.normal(size=x.shape), jnp.float32)

    def of_experts(x, weights, kernels):
        return experts.feed_forward(swiglu, E, x, assigned, weights, 0, kernels, block=block)

    def loss(function):
        return jax.value_and_grad(lambda *args: (function(*args) * direction).sum(), (0, 1, 2))

    found = jax.jit(loss(of_experts))(x, weights, kernels)
    expected = loss(lambda *args: plain(*args, assigned))(x, weights, kernels)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4), found, expected
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_grouped_outputs_and_gradients_equal_plain_maths(name, dtype):
    """All experts on a device, and shards of them, which may need several passes."""
    assigned = ASSIGNMENTS[name].astype(np.int32)
    with jax.enable_x64(dtype == "float64"):
        x, weights, kernels = jax.tree.map(lambda x: x.astype(dtype), operands(len(assigned)))
        direction = jnp.asarray(RNG.normal(size=x.shape), dtype)

        def loss(function):
            return jax.value_and_grad(lambda *args: (function(*args) * direction).sum(), (0, 1, 2))

        def of_experts(x, weights, kernels, parts):
            results = []
            for first, last in parts:
                own = tuple(one[first:last] for one in kernels)
                result = experts.feed_forward(swiglu, E, x, assigned, weights, first, own)
                results.append(result)
            return sum(results)

        expected = loss(lambda *args: plain(*args, assigned))(x, weights, kernels)
        tolerance = 1e-12 if dtype == "float64" else 2e-4
        all_at_once, shards = [(0, E)], [(0, 1), (1, 3), (3, E)]
        # Interpreted kernels, those of float32, take seconds to compile.
        for parts in [all_at_once, shards] if dtype == "float64" else [all_at_once]:
            compute = partial(of_experts, parts=parts)
            with experts.active_kernel("grouped"):
                found = jax.jit(loss(compute))(x, weights, kernels)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=tolerance),
                found,
                expected,
            )


@pytest.mark.parametrize(
    ("num_own", "assigned", "num_passes"),
    [
        (E, np.full((T, K), 3), 1),
        # 48 rows: a device with one expert has a buffer of 1.25 x 10 of them.
        (1, np.full((T, K), 0), 4),
        (2, BALANCED, 1),
        (2, np.full((T, K), experts.DROPPED), 1),
    ],
)
def test_a_device_runs_as_many_grouped_passes_as_its_rows_need(num_own, assigned, num_passes):
    assigned = jnp.asarray(assigned, jnp.int32)
    passes = experts._Passes.of(assigned, T * K, E, num_own, has_bias=False)
    num_rows = int(((assigned >= 0) & (assigned < num_own)).sum())
    assert max(1, -(-num_rows // passes.size)) == num_passes
    assert passes.expected == min(T * K, -(-T * K * num_own // E))
    assert passes.has_more == (num_own < E)


def test_shards_of_the_experts_add_up():
    x, weights, kernels = operands(T, num_experts=6)
    assigned = RNG.integers(0, 6, (T, K)).astype(np.int32)
    parts = [
        experts.feed_forward(
            swiglu, 6, x, assigned, weights, n, [one[n : n + 2] for one in kernels]
        )
        for n in (0, 2, 4)
    ]
    np.testing.assert_allclose(sum(parts), plain(x, weights, kernels, assigned), atol=1e-4)


def test_no_array_is_as_large_as_tokens_times_experts_times_features():
    """In both passes, every intermediate array is at most as large as the rows, or the weights."""
    num_tokens, num_experts = 512, 64
    x, weights, kernels = operands(num_tokens, num_experts)
    assigned = RNG.integers(0, num_experts, (num_tokens, K)).astype(np.int32)

    def loss(x, weights, kernels):
        out = experts.feed_forward(swiglu, num_experts, x, assigned, weights, 0, kernels)
        return (out**2).sum()

    largest = max(num_tokens * K * F, num_tokens * num_experts * K, num_experts * D * F)
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, weights, kernels)
    sizes = [one.aval.size for equation in equations(jaxpr.jaxpr) for one in equation.outvars]
    assert max(sizes) <= 2 * largest < num_tokens * num_experts * D


def equations(jaxpr):
    """Yields all equations, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_iterations_are_the_same_on_all_that_are_mapped():
    """The loop's condition is not mapped.

    Otherwise it would copy everything that it carries in each iteration.
    """
    x, weights, kernels = operands(T)
    assigned = np.stack([ASSIGNMENTS["balanced"], ASSIGNMENTS["all to one expert"]]).astype(
        np.int32
    )

    def both(assigned):
        def one(assigned):
            return experts.feed_forward(swiglu, E, x, assigned, weights, 0, kernels, block=3)

        return jax.vmap(one)(assigned)

    jaxpr = jax.make_jaxpr(both)(assigned).jaxpr
    loops = [one for one in equations(jaxpr) if one.primitive.name == "while"]
    loop = max(loops, key=lambda one: len(one.outvars))
    assert loop.params["cond_jaxpr"].out_avals[0].shape == ()
    counter, *carried = loop.outvars
    assert counter.aval.shape == () and all(one.aval.shape[0] == 2 for one in carried)
    np.testing.assert_allclose(
        both(assigned)[1], plain(x, weights, kernels, assigned[1]), atol=1e-4
    )
