"""Dispatch: each token is sent to the devices that hold its experts, and to no others.

The other way, which parallel/expert.py has too, is to gather all tokens of a group on each of its
devices. A token that several experts of a device use is sent there once.

A device sends to each other one a buffer of a fixed number of tokens, by an all-to-all, and the
results return in one. Buffers are SLACK times what a device needs if all experts are used equally.
If they are not, what is left is sent in further rounds: as many as the fullest buffer of all
devices needs. So nothing is dropped and memory does not depend on the routing: only the time does.
The first round is outside of the loop, so that XLA can run other work, such as shared experts,
beside its exchanges. The backward pass keeps what the first round received, and repeats the others.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.parallel import sharding

# t tokens of a device, k experts per token, e devices that exchange tokens, s shards of the experts
# (e times the shards along axes that shard no tokens), g groups of devices, n experts of a shard, C
# tokens of a buffer, m places of a token in buffers, q experts of a sent token, D model

Axes = tuple[str, ...]

# Size of a buffer, relative to the tokens that are sent if all experts are used equally.
SLACK = 1.25

DROPPED = -1  # in place of the number of an expert: none

# Name of the loop over further rounds in compiled programs, for the audit.
ROUNDS = "further_rounds"


class Exchange(NamedTuple):
    """Between which devices tokens are sent, and how many in a round."""

    gathered: Axes  # between whose devices tokens are sent
    others: Axes  # that shard the experts, but no tokens
    outside: Axes  # along which groups differ
    num_devices: int  # that exchange tokens
    num_others: int
    shard_size: int  # n
    buffer_size: int  # C
    # Rows of ops/experts.py in a group: places of a buffer are not all filled.
    num_rows: int

    @property
    def experts(self) -> Axes:
        """The mesh axes that shard the experts."""
        return (*self.gathered, *self.others)


# ---- sizes ----


def share_of_tokens(
    num_experts: int, per_token: int, num_shards: int, expert_groups: Sequence[int] = ()
) -> float:
    """Returns which share of the tokens uses an expert of a shard, if all are used equally.

    A token chooses `per_token` experts of `expert_groups[1]` of the `expert_groups[0]` groups.
    """
    shard_size = num_experts // num_shards
    num_groups, num_chosen = expert_groups or (1, 1)
    group_size = num_experts // num_groups
    if shard_size % group_size and group_size % shard_size:
        num_groups, num_chosen, group_size = 1, 1, num_experts
    num_open = num_chosen * group_size  # experts from which a token chooses

    def share_of_none(num_own: int) -> float:
        """Returns the probability that none of `num_own` of the open experts is chosen."""
        return math.comb(num_open - num_own, per_token) / math.comb(num_open, per_token)

    if shard_size < group_size:
        return num_chosen / num_groups * (1 - share_of_none(shard_size))
    num_held = shard_size // group_size  # groups of a shard
    share = 0.0
    for own in range(min(num_held, num_chosen) + 1):
        ways = math.comb(num_held, own) * math.comb(num_groups - num_held, num_chosen - own)
        share += ways / math.comb(num_groups, num_chosen) * (1 - share_of_none(own * group_size))
    return share


def buffer_size(num_tokens: int, share: float) -> int:
    """Returns how many of `num_tokens` tokens a device sends to another in a round, at most."""
    return min(num_tokens, max(1, math.floor(SLACK * share * num_tokens)))


def num_routes(per_token: int, shard_size: int) -> int:
    """Returns how many experts of a shard a token can use."""
    return min(per_token, shard_size)


def bytes_per_place(d_model: int, routes: int, itemsize: int) -> int:
    """Returns the bytes of a token in a buffer: its activations, and experts with their weights."""
    return d_model * itemsize + 2 * routes * max(4, itemsize)


# ---- all rounds ----


def run(
    exchange: Exchange,
    feed_forward: Callable[..., jax.Array],
    x_egtD: jax.Array,
    experts_egtk: jax.Array,
    weights_egtk: jax.Array,
    kernels: tuple[jax.Array, ...],
) -> jax.Array:
    """Returns for each token the sum over its experts, (e, g, t, D).

    `feed_forward` is that of `expert.run_experts`; `kernels` are by shard (s, n, ...).
    """
    x_sgtD = _on_others(exchange, x_egtD)
    experts_sgtk = _on_others(exchange, experts_egtk)
    weights_sgtk = _on_others(exchange, weights_egtk)
    y_sgtD = _all_rounds(exchange, feed_forward, x_sgtD, weights_sgtk, kernels, experts_sgtk)
    y = y_sgtD.reshape(exchange.num_devices, exchange.num_others, *y_sgtD.shape[1:])
    y = sharding.shard_over(y, exchange.gathered, exchange.others, exchange.outside)
    return sharding.shard_over(y.sum(1), exchange.gathered, exchange.outside)


def _on_others(c: Exchange, x_egt: jax.Array) -> jax.Array:
    """Returns x (e, g, t, ...) for each shard of the experts: (s, g, t, ...)."""
    e, *rest = x_egt.shape
    x = jnp.broadcast_to(x_egt[:, None], (e, c.num_others, *rest))
    x = sharding.shard_over(x, c.gathered, c.others, c.outside)
    return sharding.shard_over(x.reshape(-1, *rest), c.experts, c.outside)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_rounds(c, feed_forward, x_sgtD, weights_sgtk, kernels, experts_sgtk):
    return _forward(c, feed_forward, x_sgtD, weights_sgtk, kernels, experts_sgtk)[0]


def _forward(c, feed_forward, x_sgtD, weights_sgtk, kernels, experts_sgtk):
    first_sge = _first_experts(c, experts_sgtk.shape[1])
    plan = _on_devices(c, partial(_plan, c))(first_sge, experts_sgtk)
    compute = partial(_round, c, feed_forward, plan)
    y_sgtD, vjp = jax.vjp(partial(compute, 0), x_sgtD, weights_sgtk, *kernels)

    def compute_round(number):
        return (compute(number, x_sgtD, weights_sgtk, *kernels),)

    (y_sgtD,) = _with_further_rounds(c, plan, compute_round, (y_sgtD,))
    return y_sgtD, (vjp, plan, x_sgtD, weights_sgtk, kernels)


def _backward(c, feed_forward, kept, grad_sgtD):
    vjp, plan, x_sgtD, weights_sgtk, kernels = kept
    compute = partial(_round, c, feed_forward, plan)

    def compute_round(number):
        _, vjp = jax.vjp(partial(compute, number), x_sgtD, weights_sgtk, *kernels)
        return vjp(grad_sgtD)

    sums = _with_further_rounds(c, plan, compute_round, vjp(grad_sgtD))
    grad_x, grad_weights, *grad_kernels = sums
    return grad_x, grad_weights, tuple(grad_kernels), None


_all_rounds.defvjp(_forward, _backward)


def _with_further_rounds(
    c: Exchange, plan: "Plan", compute: Callable[[jax.Array], tuple], first: tuple
) -> tuple:
    """Returns `first`, the results of the first round, plus `compute(number)` of each other one."""
    num_rounds = -(-plan.count_d.max() // c.buffer_size)
    return sharding.sum_on_all(compute, first, end=num_rounds, scope=ROUNDS)


# ---- one round ----


def _round(
    c: Exchange,
    feed_forward: Callable,
    plan: "Plan",
    number: jax.Array | int,
    x_sgtD: jax.Array,
    weights_sgtk: jax.Array,
    *kernels: jax.Array,
) -> jax.Array:
    """Returns what the tokens of round `number` get from the experts: (s, g, t, D)."""
    on_devices = partial(_on_devices, c)
    places = on_devices(partial(_places, c, number))(plan)
    sent_x = on_devices(send)(x_sgtD, places)
    sent_weights = on_devices(send)(weights_sgtk, places)
    first_sge = _first_experts(c, x_sgtD.shape[1])
    routes = on_devices(partial(_routes, c))(first_sge, places, plan.experts_tk, sent_weights)
    x_sgeCD = _swap(c, sent_x)
    routes_sgeCq = _swap(c, routes)

    def compute(x_eCD, routes_eCq, kernels):
        # Of a device: the tokens of all its buffers.
        x_TD = x_eCD.reshape(-1, x_eCD.shape[-1])
        numbers_Tq, weights_Tq = jnp.split(routes_eCq.reshape(len(x_TD), -1), 2, axis=-1)
        y_TD = feed_forward(
            x_TD,
            jax.lax.stop_gradient(numbers_Tq).astype(jnp.int32),
            weights_Tq.astype(x_TD.dtype),
            0,
            kernels,
            num_rows=c.num_rows,
        )
        return y_TD.reshape(x_eCD.shape)

    num_groups = x_sgtD.shape[1]
    compute = sharding.mapped_over(compute, num_groups, c.outside, in_axes=(0, 0, 0))
    compute = sharding.mapped_over(compute, len(x_sgtD), c.experts, in_axes=(0, 0, 0))
    copies = tuple(sharding.copied(num_groups, c.experts, c.outside, one) for one in kernels)
    y_sgeCD = compute(x_sgeCD, routes_sgeCq, copies)
    return on_devices(collect)(_swap(c, y_sgeCD), places)


def _on_devices(c: Exchange, function: Callable) -> Callable:
    """Returns `function`, which each device runs on its own entries of (s, g, ...)."""

    def run(*args):
        num_shards, num_groups = jax.tree.leaves(args)[-1].shape[:2]
        in_axes = (0,) * len(args)
        own = sharding.mapped_over(function, num_groups, c.outside, in_axes=in_axes)
        own = sharding.mapped_over(own, num_shards, c.experts, in_axes=in_axes)
        return jax.tree.map(
            lambda leaf: sharding.shard_over(leaf, c.experts, c.outside), own(*args)
        )

    return run


# The transpose of this exchange is itself; a constraint on both of its sides, in both passes.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swap(c: Exchange, x_sgeC: jax.Array) -> jax.Array:
    """Returns the buffers that devices receive, of those that they send: both (s, g, e, C, ...)."""
    shape = x_sgeC.shape
    x = x_sgeC.reshape(c.num_devices, c.num_others, *shape[1:])
    x = sharding.shard_over(x, c.gathered, c.others, c.outside)
    # An all-to-all: from all buffers of a sender to all buffers of a receiver.
    x = sharding.shard_over(x, (), c.others, c.outside, c.gathered)
    x = jnp.swapaxes(x, 0, 3)
    x = sharding.shard_over(x, c.gathered, c.others, c.outside)
    return sharding.shard_over(x.reshape(shape), c.experts, c.outside)


_swap.defvjp(lambda c, x: (_swap(c, x), None), lambda c, _, grad: (_swap(c, grad),))


def _first_experts(c: Exchange, num_groups: int) -> jax.Array:
    """Returns the first expert of each shard that a device sends tokens to: (s, g, e)."""
    num_shards = c.num_devices * c.num_others
    # The shards of a device that it sends to differ from its own in the axes `gathered` alone.
    own_s = jnp.arange(num_shards) % c.num_others
    shard_se = jnp.arange(c.num_devices)[None] * c.num_others + own_s[:, None]
    shape = num_shards, num_groups, c.num_devices
    return jnp.broadcast_to(shard_se[:, None] * c.shard_size, shape)


# ---- what one device sends ----


class Plan(NamedTuple):
    """Where the tokens of a device go."""

    experts_tk: jax.Array  # the experts of each token
    order_dt: jax.Array  # (e, t) tokens, those that go to device d first, in their order
    count_d: jax.Array  # (e,) how many go there
    # (t, m) of each token: a device that it goes to, its number among the tokens that go there, and
    # whether there is one.
    device_tm: jax.Array
    number_tm: jax.Array
    is_sent_tm: jax.Array


class Places(NamedTuple):
    """The buffers of a round."""

    token_dC: jax.Array  # (e, C) tokens in the buffers
    is_filled_dC: jax.Array
    # (t, m) of each token: its places, numbered through all buffers, and whether there is one.
    place_tm: jax.Array
    is_sent_tm: jax.Array


def _plan(c: Exchange, first_d: jax.Array, experts_tk: jax.Array) -> Plan:
    local_dtk = experts_tk[None] - first_d[:, None, None]
    uses_dtk = (local_dtk >= 0) & (local_dtk < c.shard_size)
    is_sent_dt = uses_dtk.any(-1)
    number_dt = jnp.cumsum(is_sent_dt, axis=1, dtype=jnp.int32) - 1
    num_devices, k = len(first_d), experts_tk.shape[1]
    if num_devices <= k:
        device_tm = jnp.broadcast_to(jnp.arange(num_devices)[None], is_sent_dt.T.shape)
        number_tm, is_sent_tm = number_dt.T, is_sent_dt.T
    else:
        device_tm = jnp.argmax(uses_dtk, axis=0)
        token_t1 = jnp.arange(len(experts_tk))[:, None]
        number_tm = number_dt[device_tm, token_t1]
        # Once for all of a token's experts on a device: the first one counts.
        is_same_tkk = (device_tm[:, :, None] == device_tm[:, None]) & uses_dtk.any(0)[:, None]
        is_earlier_kk = jnp.arange(k)[None] < jnp.arange(k)[:, None]
        is_sent_tm = uses_dtk.any(0) & ~(is_same_tkk & is_earlier_kk[None]).any(-1)
    return Plan(
        experts_tk=experts_tk,
        order_dt=jnp.argsort(~is_sent_dt, axis=1, stable=True),
        count_d=is_sent_dt.sum(1),
        device_tm=device_tm,
        number_tm=number_tm,
        is_sent_tm=is_sent_tm,
    )


def _places(c: Exchange, number: jax.Array | int, plan: Plan) -> Places:
    start = number * c.buffer_size
    # The last round may be shorter.
    order = jnp.pad(plan.order_dt, ((0, 0), (0, c.buffer_size)))
    place_C = start + jnp.arange(c.buffer_size)
    own_tm = plan.number_tm - start
    is_sent_tm = plan.is_sent_tm & (own_tm >= 0) & (own_tm < c.buffer_size)
    return Places(
        token_dC=jax.lax.dynamic_slice_in_dim(order, start, c.buffer_size, axis=1),
        is_filled_dC=place_C[None] < plan.count_d[:, None],
        place_tm=jnp.where(is_sent_tm, plan.device_tm * c.buffer_size + own_tm, 0),
        is_sent_tm=is_sent_tm,
    )


def _routes(c: Exchange, first_d, places: Places, experts_tk, weights_dCk) -> jax.Array:
    """Returns the experts of each sent token by their number in the shard, then their weights.

    (e, C, 2 q). In float32 or wider, which is exact for both.
    """
    wide = jnp.promote_types(weights_dCk.dtype, jnp.float32)
    weights_dCk = weights_dCk.astype(wide)
    local_dCk = experts_tk[places.token_dC] - first_d[:, None, None]
    is_own_dCk = (local_dCk >= 0) & (local_dCk < c.shard_size) & places.is_filled_dC[..., None]
    if c.shard_size >= local_dCk.shape[-1]:
        numbers = jnp.where(is_own_dCk, local_dCk, DROPPED)
        return jnp.concatenate([numbers.astype(wide), weights_dCk], axis=-1)
    own_n = jnp.arange(c.shard_size)[None, None]
    uses_dCkn = is_own_dCk[..., None] & (local_dCk[..., None] == own_n[None])
    numbers = jnp.where(uses_dCkn.any(-2), own_n, DROPPED)
    weights = jnp.where(uses_dCkn, weights_dCk[..., None], 0).sum(-2)
    return jnp.concatenate([numbers.astype(wide), weights], axis=-1)


# The gradients of these two are each other; what jax derives would add rows by scattering them.
@jax.custom_vjp
def send(x_t: jax.Array, places: Places) -> jax.Array:
    """Returns the buffers of a round: x (t, D) -> (e, C, D). Places that are free hold any row."""
    return x_t[places.token_dC]


@jax.custom_vjp
def collect(y_dC: jax.Array, places: Places) -> jax.Array:
    """Returns the sum over the places of each token: y (e, C, D) -> (t, D)."""
    rows = y_dC.reshape(-1, *y_dC.shape[2:])
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total_t = jnp.zeros((len(places.place_tm), *rows.shape[1:]), wide)
    # One after the other, in one kernel; at once it would write an array (t, m, D).
    for place_t, is_sent_t in zip(places.place_tm.T, places.is_sent_tm.T, strict=True):
        total_t += jnp.where(is_sent_t[:, None], rows[place_t].astype(wide), 0)
    return total_t.astype(rows.dtype)


send.defvjp(
    lambda x_t, places: (send(x_t, places), places),
    lambda places, grad: (collect(grad, places), None),
)

collect.defvjp(
    lambda y_dC, places: (collect(y_dC, places), places),
    lambda places, grad: (send(grad, places), None),
)
