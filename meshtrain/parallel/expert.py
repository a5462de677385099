"""Expert parallelism: each device holds some experts, and computes them for a group of devices.

The axis `expert` shards the batch as well. A group are devices that differ only along `expert`.

  gather     the tokens of the group are gathered; each device computes its own experts for all of
             them; an all-to-all and a sum return to each device the results of its own tokens
  dispatch   each token is sent only to the devices that hold its experts (dispatch.py)

With the rule `("expert", ("expert", "tensor"))` the experts are sharded over `tensor` too. All
collectives are in these two files, and so outside of the loop in ops/experts.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.parallel import dispatch, sharding

# B batch, S sequence, E experts, k experts per token; e shards of the experts, g groups along batch
# and sequence, T tokens of a group, n experts of a shard

Axes = tuple[str, ...]

# The value of config key `expert.method`; a part of the key of jax's caches of traces, as the rules
# are.
active_method = jax.make_user_context(default_value="gather")

# "auto" selects dispatch if it sends at most this many times the bytes of gather: it also reads and
# writes each token once more for every device that it goes to.
WORTHWHILE = 0.9


class ExpertAxes(NamedTuple):
    """The mesh axes over which the active rules shard tokens and experts, and their sizes."""

    # of the batch, outside of a group
    groups: Axes
    # of the sequence
    sequence: Axes
    # that shard the batch and the experts
    gathered: Axes
    # that shard only the experts
    others: Axes
    num_batch_groups: int
    num_sequence_groups: int
    num_gathered: int
    num_others: int

    @property
    def experts(self) -> Axes:
        """The mesh axes that shard the experts."""
        return (*self.gathered, *self.others)

    @property
    def outside(self) -> Axes:
        """The mesh axes along which groups differ."""
        return (*self.groups, *self.sequence)

    @property
    def num_shards(self) -> int:
        """Number of shards of the experts."""
        return self.num_gathered * self.num_others


def layout(num_rows: int, length: int, num_experts: int) -> ExpertAxes:
    """Returns the layout of a batch (B, S) and E experts under the active rules."""
    batch = sharding.axes_for("batch", num_rows)
    experts = sharding.axes_for("expert", num_experts)
    gathered = tuple(axis for axis in batch if axis in experts)
    groups = tuple(axis for axis in batch if axis not in experts)
    sequence = tuple(axis for axis in sharding.axes_for("seq", length) if axis not in experts)
    # Tokens are gathered here only if the axes are the inner ones of the batch and the outer ones
    # of the experts; otherwise XLA moves the tokens.
    if experts[: len(gathered)] != gathered or batch != (*groups, *gathered):
        gathered = ()
    others = tuple(axis for axis in experts if axis not in gathered)
    return ExpertAxes(
        groups=groups,
        sequence=sequence,
        gathered=gathered,
        others=others,
        num_batch_groups=sharding.num_devices(groups),
        num_sequence_groups=sharding.num_devices(sequence),
        num_gathered=sharding.num_devices(gathered),
        num_others=sharding.num_devices(others),
    )


class Choice(NamedTuple):
    """How the tokens of a group reach the experts, and what this sends."""

    method: str  # "gather" or "dispatch"
    # Tokens that a device sends to each other one: all of its own, or those of a buffer.
    num_places: int
    # The share of the tokens that use an expert of a shard, if all experts are used equally.
    share: float


def choose(
    axes: ExpertAxes,
    *,
    num_tokens: int,
    d_model: int,
    itemsize: int,
    num_experts: int,
    per_token: int,
    expert_groups: Sequence[int] = (),
) -> Choice:
    """Returns the method for devices with `num_tokens` tokens each, by the active `expert.method`.

    Raises ConfigError if "dispatch" is asked for, and the rules do not let a group exchange tokens.
    """
    method = active_method.value
    share = dispatch.share_of_tokens(num_experts, per_token, axes.num_shards, expert_groups)
    routes = dispatch.num_routes(per_token, num_experts // axes.num_shards)
    place = dispatch.bytes_per_place(d_model, routes, itemsize)
    buffer_size = dispatch.buffer_size(num_tokens, share)
    relative_bytes = buffer_size * place / (num_tokens * d_model * itemsize)
    if axes.num_gathered == 1:
        others = [axis for axis in axes.others if axis == "expert"]
        if method == "dispatch" and sharding.num_devices(others) > 1:
            raise ConfigError(
                "expert.method='dispatch': with these config.rules a group of devices exchanges no "
                "tokens; put 'expert' last in the rule of 'batch' and first in that of 'expert', "
                "or use 'gather'"
            )
        method = "gather"
    elif method == "auto":
        method = "dispatch" if relative_bytes <= WORTHWHILE else "gather"
    return Choice(method, num_tokens if method == "gather" else buffer_size, share)


def run_experts(
    feed_forward: Callable[..., jax.Array],
    x_BSD: jax.Array,
    experts_BSk: jax.Array,
    weights_BSk: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    expert_groups: Sequence[int] = (),
) -> jax.Array:
    """Returns the sum over all experts of `feed_forward(...)`: (B, S, D).

    `feed_forward(x_TD, experts_Tk, weights_Tk, first, kernels)` gets the kernels of the experts
    from `first` on; of a dispatch also `num_rows`, see ops/experts.py. `kernels` are (E, ...),
    sharded by the logical name "expert" alone. `expert_groups` are those of the router.
    """
    (B, S, D), k = x_BSD.shape, experts_BSk.shape[-1]
    E = len(kernels[0])
    axes = layout(B, S, E)
    num_groups = axes.num_batch_groups * axes.num_sequence_groups
    stacked = tuple(_stack(axes, kernel) for kernel in kernels)
    num_tokens = B * S // (num_groups * axes.num_gathered)  # of a device
    choice = choose(
        axes,
        num_tokens=num_tokens,
        d_model=D,
        itemsize=x_BSD.dtype.itemsize,
        num_experts=E,
        per_token=k,
        expert_groups=expert_groups,
    )
    if choice.method == "dispatch":
        exchange = dispatch.Exchange(
            gathered=axes.gathered,
            others=axes.others,
            outside=axes.outside,
            num_devices=axes.num_gathered,
            num_others=axes.num_others,
            shard_size=E // axes.num_shards,
            buffer_size=choice.num_places,
            num_rows=num_tokens * axes.num_gathered * k,
        )
        y_egtD = dispatch.run(
            exchange,
            feed_forward,
            _by_device(axes, x_BSD),
            _by_device(axes, experts_BSk),
            _by_device(axes, weights_BSk),
            stacked,
        )
        return _from_devices(axes, (B, S), y_egtD)
    first = jnp.arange(axes.num_shards) * (E // axes.num_shards)
    x_egTD = _spread(axes, (B, S), x_BSD)
    weights_egTk = _spread(axes, (B, S), weights_BSk)
    experts_gTk = _split(axes, experts_BSk)
    # Mapped over shards of experts, and over groups: as one dim, so that gradients of experts are
    # summed at once.
    run = sharding.mapped_over(feed_forward, num_groups, axes.outside, in_axes=(0, 0, 0, None, 0))
    run = sharding.mapped_over(run, axes.num_shards, axes.experts, in_axes=(0, None, 0, 0, 0))
    copies = tuple(
        sharding.copied(num_groups, axes.experts, axes.outside, kernel) for kernel in stacked
    )
    out_egTD = run(x_egTD, experts_gTk, weights_egTk, first, copies)
    return _collect(axes, (B, S), out_egTD)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(axes: ExpertAxes, kernel: jax.Array) -> jax.Array:
    """Returns a kernel (E, ...) by shard of the experts: (e, E / e, ...)."""
    stacked = kernel.reshape(axes.num_shards, -1, *kernel.shape[1:])
    return sharding.shard_over(stacked, axes.experts)


# Its gradient gets no constraint here, so that XLA can reduce-scatter it to the shards of the
# parameter.
_stack.defvjp(
    lambda axes, kernel: (_stack(axes, kernel), None),
    lambda axes, _, grad: (grad.reshape(-1, *grad.shape[2:]),),
)


def _split(axes: ExpertAxes, x_BS: jax.Array) -> jax.Array:
    """Returns x (B, S, ...) as the tokens of each group, gathered within it: (g, T, ...)."""
    (B, S), rest = x_BS.shape[:2], x_BS.shape[2:]
    gb, gs = axes.num_batch_groups, axes.num_sequence_groups
    x = x_BS.reshape(gb, B // gb, gs, S // gs, *rest)
    x = sharding.shard_over(x, axes.groups, (), axes.sequence)
    x = jnp.moveaxis(x, 2, 1).reshape(gb * gs, -1, *rest)
    return sharding.shard_over(x, axes.outside)


def _by_device(axes: ExpertAxes, x_BS: jax.Array) -> jax.Array:
    """Returns x (B, S, ...) as the tokens of each device: (e, g, t, ...)."""
    (B, S), rest = x_BS.shape[:2], x_BS.shape[2:]
    gb, gs, e = axes.num_batch_groups, axes.num_sequence_groups, axes.num_gathered
    x = x_BS.reshape(gb, e, B // (gb * e), gs, S // gs, *rest)
    x = sharding.shard_over(x, axes.groups, axes.gathered, (), axes.sequence)
    # Groups of the batch and of the sequence next to each other.
    x = jnp.moveaxis(x, (1, 3), (0, 2)).reshape(e, gb * gs, -1, *rest)
    return sharding.shard_over(x, axes.gathered, axes.outside)


def _from_devices(axes: ExpertAxes, shape: tuple[int, int], x_egt: jax.Array) -> jax.Array:
    """Returns x (B, S, ...) of x (e, g, t, ...), the inverse of `_by_device`."""
    (B, S), rest = shape, x_egt.shape[3:]
    gb, gs, e = axes.num_batch_groups, axes.num_sequence_groups, axes.num_gathered
    x = x_egt.reshape(e, gb, gs, B // (gb * e), S // gs, *rest)
    x = sharding.shard_over(x, axes.gathered, axes.groups, axes.sequence)
    x = jnp.moveaxis(x, (0, 2), (1, 3)).reshape(B, S, *rest)
    return sharding.shard_over(x, (*axes.groups, *axes.gathered), axes.sequence)


# The gradients of these two are each other. What XLA derives would all-reduce the gradients of all
# tokens of a group.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _spread(axes: ExpertAxes, shape: tuple[int, int], x_BS: jax.Array) -> jax.Array:
    """Returns `_split(x)` for each shard of the experts: (e, g, T, ...)."""
    x = _split(axes, x_BS)[None]
    x = jnp.broadcast_to(x, (axes.num_shards, *x.shape[1:]))
    return sharding.shard_over(x, axes.experts, axes.outside)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _collect(axes: ExpertAxes, shape: tuple[int, int], y_egT: jax.Array) -> jax.Array:
    """Returns the sum over the shards of the experts: (e, g, T, ...) -> (B, S, ...)."""
    (B, S), rest = shape, y_egT.shape[3:]
    gb, gs = axes.num_batch_groups, axes.num_sequence_groups
    # The dims: gathered, others, groups of the batch, groups of the sequence, and of the tokens of
    # a group: gathered again, rows, positions.
    y = sharding.shard_over(y_egT, axes.experts, axes.outside)
    y = y.reshape(axes.num_gathered, axes.num_others, gb, gs, axes.num_gathered, -1, S // gs, *rest)
    y = sharding.shard_over(y, axes.gathered, axes.others, axes.groups, axes.sequence)
    # An all-to-all: from a device's experts for all rows of the group to all experts for its rows.
    y = sharding.shard_over(y, (), axes.others, axes.groups, axes.sequence, axes.gathered)
    y = y.sum(0).sum(0)
    y = sharding.shard_over(y, axes.groups, axes.sequence, axes.gathered)
    y = jnp.moveaxis(y, 1, 3).reshape(B, S, *rest)
    return sharding.shard_over(y, (*axes.groups, *axes.gathered), axes.sequence)


_spread.defvjp(
    lambda axes, shape, x_BS: (_spread(axes, shape, x_BS), None),
    lambda axes, shape, _, grad: (_collect(axes, shape, grad),),
)

_collect.defvjp(
    lambda axes, shape, y_egT: (_collect(axes, shape, y_egT), None),
    lambda axes, shape, _, grad: (_spread(axes, shape, grad),),
)
