"""Expert parallelism: each device holds some experts, and computes them for a group of devices.

The axis `expert` shards the batch as well. Within a group, devices that differ only along `expert`,
tokens are gathered; each device computes its own experts for all tokens of the group; an all-to-all
and a sum return to each device the results of its own tokens. With the rule
`("expert", ("expert", "tensor"))` the experts are sharded over `tensor` too. All collectives are
here, and so outside of the loop in ops/experts.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.parallel import sharding

# B batch, S sequence, E experts, k experts per token; e shards of the experts, g groups along batch
# and sequence, T tokens of a group, n experts of a shard

Axes = tuple[str, ...]


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


def run_experts(
    feed_forward: Callable[..., jax.Array],
    x_BSD: jax.Array,
    experts_BSk: jax.Array,
    weights_BSk: jax.Array,
    kernels: Sequence[jax.Array],
) -> jax.Array:
    """Returns the sum over all experts of `feed_forward(...)`: (B, S, D).

    `feed_forward(x_TD, experts_Tk, weights_Tk, first, kernels)` gets the kernels of the experts
    from `first` on. `kernels` are (E, ...), sharded by the logical name "expert" alone.
    """
    B, S = x_BSD.shape[:2]
    E = len(kernels[0])
    axes = layout(B, S, E)
    num_groups = axes.num_batch_groups * axes.num_sequence_groups
    stacked = [_stack(axes, kernel) for kernel in kernels]
    first = jnp.arange(axes.num_shards) * (E // axes.num_shards)
    x_egTD = _spread(axes, (B, S), x_BSD)
    weights_egTk = _spread(axes, (B, S), weights_BSk)
    experts_gTk = _split(axes, experts_BSk)
    # Mapped over shards of experts, and over groups: as one dim, so that gradients of experts are
    # summed at once.
    run = _over(feed_forward, num_groups, axes.outside, in_axes=(0, 0, 0, None, None))
    run = _over(run, axes.num_shards, axes.experts, in_axes=(0, None, 0, 0, 0))
    out_egTD = run(x_egTD, experts_gTk, weights_egTk, first, tuple(stacked))
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


def _over(function: Callable, size: int, axes: Axes, *, in_axes: tuple) -> Callable:
    """Returns `function` mapped over a leading dim of this size, which these mesh axes shard."""
    if size > 1:
        return jax.vmap(function, in_axes, spmd_axis_name=axes or None)

    def once(*args):
        only = []
        for arg, axis in zip(args, in_axes, strict=True):
            if axis is not None:
                arg = jax.tree.map(lambda leaf: leaf[0], arg)
            only.append(arg)
        return jax.tree.map(lambda leaf: leaf[None], function(*only))

    return once


def _split(axes: ExpertAxes, x_BS: jax.Array) -> jax.Array:
    """Returns x (B, S, ...) as the tokens of each group, gathered within it: (g, T, ...)."""
    (B, S), rest = x_BS.shape[:2], x_BS.shape[2:]
    gb, gs = axes.num_batch_groups, axes.num_sequence_groups
    x = x_BS.reshape(gb, B // gb, gs, S // gs, *rest)
    x = sharding.shard_over(x, axes.groups, (), axes.sequence)
    x = jnp.moveaxis(x, 2, 1).reshape(gb * gs, -1, *rest)
    return sharding.shard_over(x, axes.outside)


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
