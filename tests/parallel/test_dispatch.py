"""Tokens that are sent to their experts: exact for any load, each sent once, few bytes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.configs import default
from meshtrain.errors import ConfigError
from meshtrain.ops import experts
from meshtrain.parallel import dispatch, expert, mesh, sharding
from meshtrain.tools.hlo import collective_ops, hlo

RULES = tuple(default.get_config().rules)
B, S, D, F = 8, 16, 4, 6
slow = pytest.mark.slow


def loads(num_experts, k):
    """Returns the experts of each token by the name of their load: (B, S, k)."""
    random = np.random.default_rng(0)
    balanced = np.stack([random.permutation(num_experts)[:k] for _ in range(B * S)])
    balanced = balanced.reshape(B, S, k).astype(np.int32)
    first = np.arange(k, dtype=np.int32)
    half = balanced.copy()
    half[:, : S // 2] = first
    dropped = balanced.copy()
    dropped[:, ::3, 0] = experts.DROPPED
    return {
        "balanced": balanced,
        # The others have no token.
        "all to the same": np.broadcast_to(first + num_experts - k, balanced.shape),
        "half to the same": half,
        "one device sends all to one": np.where(np.arange(B)[:, None, None] == 3, first, balanced),
        "some dropped": dropped,
    }


def combine(up):
    return jnp.tanh(up)


@functools.cache
def operands(num_experts, k):
    random = np.random.default_rng(1)
    x_BSD, weights_BSk = random.normal(size=(B, S, D)), random.random((B, S, k))
    up, down = random.normal(size=(num_experts, D, F)), random.normal(size=(num_experts, F, D))
    return (x_BSD, weights_BSk, up, down), random.normal(size=(B, S, D))


def plain(experts_BSk, x_BSD, weights_BSk, up, down):
    hidden = combine(jnp.einsum("bsd,edf->bsef", x_BSD, up))
    y_BSED = jnp.einsum("bsef,efd->bsed", hidden, down)
    share_BSkE = (experts_BSk[..., None] == np.arange(len(up))).astype(x_BSD.dtype)
    return jnp.einsum("bsk,bske,bsed->bsd", weights_BSk, share_BSkE, y_BSED)


def dispatched(experts_BSk, x_BSD, weights_BSk, up, down):
    feed_forward = functools.partial(experts.feed_forward, combine, len(up), block=3)
    return expert.run_experts(
        feed_forward, x_BSD, jnp.asarray(experts_BSk), weights_BSk, [up, down]
    )


def with_gradients(function, num_experts, k):
    args, cotangent_BSD = operands(num_experts, k)
    out, vjp = jax.vjp(function, *args)
    return out, *vjp(cotangent_BSD)


def on_mesh(**sizes):
    return jax.set_mesh(mesh.make_mesh(**{"data": 1} | sizes))


MESHES = [
    dict(expert=8),
    dict(fsdp=2, expert=4),
    dict(data=2, context=2, expert=2),
    dict(expert=2, tensor=4),
    dict(expert=2, fsdp=2, tensor=2),
]
SIZES = [(8, 2), (16, 3), (8, 8)]  # experts, experts per token
CASES = [*itertools.product(MESHES, SIZES, loads(8, 2))]
FAST = [
    (MESHES[0], SIZES[0], "all to the same"),
    (MESHES[1], SIZES[1], "one device sends all to one"),
    (MESHES[4], SIZES[2], "some dropped"),
]


@pytest.mark.parametrize(
    ("sizes", "num_experts_and_k", "load"),
    [pytest.param(*case, marks=[] if case in FAST else slow) for case in CASES],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_plain_maths(sizes, num_experts_and_k, load, x64):
    num_experts, k = num_experts_and_k
    experts_BSk = loads(num_experts, k)[load]
    expected = with_gradients(functools.partial(plain, experts_BSk), num_experts, k)
    method = expert.active_method("dispatch")
    with on_mesh(**sizes), sharding.use_rules(RULES), method:
        function = functools.partial(dispatched, experts_BSk)
        found = jax.jit(lambda: with_gradients(function, num_experts, k))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_in_two_maps_that_shard_their_dims_the_outputs_are_those_of_plain_maths(x64):
    """As in the trainer, whose rules lack the axes of the maps."""
    num_experts, k = 8, 2
    all_loads = loads(num_experts, k)
    experts_PNBSk = np.stack(
        [
            np.stack([all_loads["balanced"], all_loads["all to the same"]]),
            np.stack([all_loads["half to the same"], all_loads["some dropped"]]),
        ]
    )
    (x_BSD, weights_BSk, up, down), _ = operands(num_experts, k)
    kernels = (jnp.stack([up, up + 1]), jnp.stack([down, down - 1]))

    def loss(function, stacked, x_BSD, kernels):
        def one(experts_BSk, up, down):
            return function(experts_BSk, x_BSD, weights_BSk, up, down)

        over_data = jax.vmap(one, (0, None, None), spmd_axis_name="data")
        y = jax.vmap(over_data, spmd_axis_name="pipeline")(stacked, *kernels)
        return jnp.sin(y).sum()

    def run(function, stacked):
        return jax.value_and_grad(functools.partial(loss, function, stacked), (0, 1))(
            x_BSD, kernels
        )

    def with_numbers(experts_BSk, x_BSD, weights_BSk, up, down):
        share = jax.nn.one_hot(experts_BSk, len(up), dtype=x_BSD.dtype)
        hidden = combine(jnp.einsum("bsd,edf->bsef", x_BSD, up))
        y_BSED = jnp.einsum("bsef,efd->bsed", hidden, down)
        return jnp.einsum("bsk,bske,bsed->bsd", weights_BSk, share, y_BSED)

    expected = run(with_numbers, experts_PNBSk)
    rules = sharding.rules_without(RULES, "data", "pipeline")
    method = expert.active_method("dispatch")
    with on_mesh(pipeline=2, data=2, expert=2), sharding.use_rules(rules), method:
        found = jax.jit(lambda stacked: run(dispatched, stacked))(experts_PNBSk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, expected)


# ---- what is sent ----


def exchange(num_devices, shard_size, buffer_size):
    return dispatch.Exchange(
        gathered=("expert",),
        others=(),
        outside=(),
        num_devices=num_devices,
        num_others=1,
        shard_size=shard_size,
        buffer_size=buffer_size,
        num_rows=1,
    )


@pytest.mark.parametrize(("num_devices", "shard_size", "k"), [(4, 2, 3), (2, 4, 3), (8, 1, 2)])
def test_a_token_is_sent_once_to_each_device_with_an_expert_of_it(num_devices, shard_size, k):
    num_experts, num_tokens = num_devices * shard_size, 20
    random = np.random.default_rng(0)
    experts_tk = np.stack([random.permutation(num_experts)[:k] for _ in range(num_tokens)])
    c = exchange(num_devices, shard_size, buffer_size=3)
    plan = dispatch._plan(c, jnp.arange(num_devices) * shard_size, jnp.asarray(experts_tk))
    sent, returned = [], []
    num_rounds = -(-int(plan.count_d.max()) // c.buffer_size)
    for number in range(num_rounds):
        places = dispatch._places(c, number, plan)
        for device, place in np.argwhere(places.is_filled_dC):
            sent.append((int(places.token_dC[device, place]), int(device)))
        for token, m in np.argwhere(places.is_sent_tm):
            device, place = divmod(int(places.place_tm[token, m]), c.buffer_size)
            assert places.token_dC[device, place] == token and places.is_filled_dC[device, place]
            returned.append((int(token), device))
    needed = {
        (token, int(one) // shard_size) for token in range(num_tokens) for one in experts_tk[token]
    }
    assert sorted(sent) == sorted(returned) == sorted(needed)


@pytest.mark.parametrize(
    ("num_experts", "k", "num_shards", "groups"),
    [
        (8, 2, 8, ()),
        (8, 3, 4, ()),
        (8, 2, 2, ()),
        (8, 2, 8, (4, 2)),
        (8, 3, 4, (4, 2)),
        (12, 3, 3, (6, 3)),
        (12, 3, 4, (2, 1)),
    ],
)
def test_the_share_of_tokens_is_the_mean_over_all_choices(num_experts, k, num_shards, groups):
    num_groups, num_chosen = groups or (1, 1)
    group_size, shard_size = num_experts // num_groups, num_experts // num_shards
    uses = []
    for chosen in itertools.combinations(range(num_groups), num_chosen):
        allowed = [one for one in range(num_experts) if one // group_size in chosen]
        for own in itertools.combinations(allowed, k):
            uses.append(any(one < shard_size for one in own))
    share = dispatch.share_of_tokens(num_experts, k, num_shards, groups)
    np.testing.assert_allclose(share, np.mean(uses), rtol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 4096])
def test_a_buffer_has_at_most_a_quarter_more_places_than_an_equal_share(num_tokens):
    for share in (1 / 8, 0.3, 1.0):
        size = dispatch.buffer_size(num_tokens, share)
        assert 1 <= size <= max(1, min(num_tokens, 1.25 * share * num_tokens))
        assert size > 1.2 * share * num_tokens or num_tokens < 4096 or share == 1.0


def chosen(method="auto", *, rules=RULES, sizes=None, num_experts, k, d_model=2048, groups=()):
    with on_mesh(**(sizes or dict(expert=8))), sharding.use_rules(rules):
        with expert.active_method(method):
            return expert.choose(
                expert.layout(64, 4096, num_experts),
                num_tokens=8192,
                d_model=d_model,
                itemsize=2,
                num_experts=num_experts,
                per_token=k,
                expert_groups=groups,
            )


@pytest.mark.parametrize(
    ("num_experts", "k", "sizes", "method"),
    [
        (8, 2, dict(expert=8), "dispatch"),
        (128, 8, dict(expert=8), "dispatch"),
        (64, 8, dict(expert=8), "dispatch"),
        (8, 2, dict(expert=4, data=2), "dispatch"),
        (8, 2, dict(expert=2, data=4), "gather"),
        (8, 8, dict(expert=8), "gather"),
        (8, 2, dict(data=8), "gather"),
        (8, 2, dict(data=2, tensor=4), "gather"),
    ],
)
def test_auto_dispatches_where_it_sends_fewer_bytes(num_experts, k, sizes, method):
    assert chosen(num_experts=num_experts, k=k, sizes=sizes).method == method


@pytest.mark.parametrize(
    ("num_experts", "k", "groups"), [(8, 2, ()), (64, 8, ()), (256, 8, (8, 4)), (64, 6, ())]
)
def test_a_buffer_is_within_a_third_of_the_bytes_that_are_needed(num_experts, k, groups):
    choice = chosen("dispatch", num_experts=num_experts, k=k, groups=groups)
    routes = dispatch.num_routes(k, num_experts // 8)
    sent = choice.num_places * dispatch.bytes_per_place(2048, routes, 2)
    needed = choice.share * 8192 * 2048 * 2
    assert 1.2 < sent / needed <= 1.35


def test_asking_for_dispatch_where_rules_prevent_it_is_an_error():
    rules = [("batch", ("expert", "data")), ("expert", "expert"), ("seq", None)]
    sizes = dict(data=2, expert=2, tensor=2)
    assert chosen(rules=rules, sizes=sizes, num_experts=8, k=2).method == "gather"
    with pytest.raises(ConfigError, match="expert.method='dispatch'.*rule of 'batch'"):
        chosen("dispatch", rules=rules, sizes=sizes, num_experts=8, k=2)
    # Nothing to exchange, and so nothing to complain of.
    assert chosen("dispatch", sizes=dict(data=8), num_experts=8, k=2).method == "gather"


def test_the_compiled_program_sends_buffers_and_gathers_no_tokens(x64):
    num_experts, k, num_devices = 8, 1, 4
    experts_BSk = loads(num_experts, k)["balanced"]
    with on_mesh(fsdp=2, expert=num_devices), sharding.use_rules(RULES):
        with expert.active_method("dispatch"):
            function = functools.partial(dispatched, experts_BSk)
            run = jax.jit(lambda: with_gradients(function, num_experts, k))
            module = hlo.parse(run.lower().compile().as_text())
            axes = jax.sharding.get_abstract_mesh().shape
    share = dispatch.share_of_tokens(num_experts, k, num_devices)
    buffer_size = dispatch.buffer_size(B * S // 8, share)

    def counts(module):
        found = collective_ops.find_collectives(module, axes)
        over_expert = [c for c in found if c.axes == ("expert",) and c.kind != "all-reduce"]
        assert {c.kind for c in over_expert} == {"all-to-all"}
        return [c.array.size for c in over_expert].count(num_devices * buffer_size * D)

    # Tokens, results and the gradients of both.
    first_round = dataclasses.replace(module, skipped=(dispatch.ROUNDS,), _runs={})
    assert counts(first_round) == 4
    # In further rounds the backward pass sends tokens again.
    assert counts(module) == 4 + 5
