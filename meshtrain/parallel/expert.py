"""Expert parallelism: each device holds some of the experts, and computes them for the tokens of a group of devices.

The axis `expert` shards the batch as well. Within a group, devices that differ only along `expert`,
tokens are gathered; each device computes its own experts for all tokens of the group; an all-to-all
and a sum return to each device the results of its own tokens. With the rule `("expert", ("expert",
"tensor"))` the experts are sharded over `tensor` too. All collectives are here, and so outside of
the loop in ops/experts.py.
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
    """How the active rules shard tokens and experts; the mesh axes of each dim."""

    groups: Axes  # of the batch, outside of a group
    sequence: Axes
    gathered: Axes  # that shard the batch and the experts
    others: Axes  # that shard only the experts
    sizes: tuple[int, int, int, int]  # of these four

    @property
    def experts(self) -> Axes:
        return (*self.gathered, *self.others)

    @property
    def outside(self) -> Axes:
        """The mesh axes along which groups differ."""
        return (*self.groups, *self.sequence)

    @property
    def num_shards(self) -> int:
        return self.sizes[2] * self.sizes[3]


def layout(num_rows: int, length: int, num_experts: int) -> ExpertAxes:
    """Returns the layout of a batch (B, S) and E experts under the active rules."""
    batch = sharding.axes_for("batch", num_rows)
    experts = sharding.axes_for("expert", num_experts)
    gathered = tuple(axis for axis in batch if axis in experts)
    groups = tuple(axis for axis in batch if axis not in experts)
    sequence = tuple(axis for axis in sharding.axes_for("seq", length) if axis not in experts)
    if experts[: len(gathered)] != gathered or batch != (*groups, *gathered):
        gathered = ()  # not the inner dims of the batch: XLA moves the tokens
    others = tuple(axis for axis in experts if axis not in gathered)
    axes = (groups, sequence, gathered, others)
    return ExpertAxes(*axes, tuple(map(sharding.num_devices, axes)))


def run_experts(
    feed_forward: Callable[..., jax.Array],
    x_BSD: jax.Array,
    experts_BSk: jax.Array,
    weights_BSk: jax.Array,
    kernels: Sequence[jax.Array],
) -> jax.Array:
    """Returns the sum over all experts of `feed_forward(x_TD, experts_Tk, weights_Tk, first, kernels)`: (B, S, D).

    `kernels` are (E, ...), sharded by the logical name "expert" alone; `feed_forward` gets those of
    the experts from `first` on.
    """
    (B, S), E = x_BSD.shape[:2], len(kernels[0])
    where = layout(B, S, E)
    e, g = where.num_shards, where.sizes[0] * where.sizes[1]
    stacked = [_stack(where, one) for one in kernels]
    firsts = jnp.arange(e) * (E // e)
    x, weights = (_spread(where, (B, S), one) for one in (x_BSD, weights_BSk))
    args = x, _split(where, experts_BSk), weights, firsts
    # Mapped over shards of experts, and over groups: as one dim, so that gradients of experts are
    # summed at once.
    run = _over(feed_forward, g, where.outside, (0, 0, 0, None, None))
    run = _over(run, e, where.experts, (0, None, 0, 0, 0))
    return _collect(where, (B, S), run(*args, tuple(stacked)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(where: ExpertAxes, kernel: jax.Array) -> jax.Array:
    """Returns a kernel (E, ...) by shard of the experts: (e, E / e, ...)."""
    stacked = kernel.reshape(where.num_shards, -1, *kernel.shape[1:])
    return sharding.shard_over(stacked, where.experts)


# Its gradient gets no constraint here, so that XLA can reduce-scatter it to the shards of the
# parameter.
_stack.defvjp(
    lambda where, kernel: (_stack(where, kernel), None),
    lambda where, _, grad: (grad.reshape(-1, *grad.shape[2:]),),
)


def _over(function: Callable, size: int, axes: Axes, in_axes: tuple) -> Callable:
    """Returns `function` mapped over a leading dim of this size, which these mesh axes shard."""
    if size > 1:
        return jax.vmap(function, in_axes, spmd_axis_name=axes or None)

    def once(*args):
        only = [
            arg if axis is None else jax.tree.map(lambda leaf: leaf[0], arg)
            for arg, axis in zip(args, in_axes, strict=True)
        ]
        return jax.tree.map(lambda leaf: leaf[None], function(*only))

    return once


def _split(where: ExpertAxes, x_BS: jax.Array) -> jax.Array:
    """Returns x (B, S, ...) as the tokens of each group, gathered within it: (g, T, ...)."""
    num_groups, num_parts, *_ = where.sizes
    (B, S), rest = x_BS.shape[:2], x_BS.shape[2:]
    x = x_BS.reshape(num_groups, B // num_groups, num_parts, S // num_parts, *rest)
    x = sharding.shard_over(x, where.groups, (), where.sequence)
    x = jnp.moveaxis(x, 2, 1).reshape(num_groups * num_parts, -1, *rest)
    return sharding.shard_over(x, where.outside)


# The gradients of these two are each other. What XLA derives would all-reduce the gradients of all
# tokens of a group.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _spread(where: ExpertAxes, shape: tuple[int, int], x_BS: jax.Array) -> jax.Array:
    """Returns `_split(x)` for each shard of the experts: (e, g, T, ...)."""
    x = _split(where, x_BS)[None]
    x = jnp.broadcast_to(x, (where.num_shards, *x.shape[1:]))
    return sharding.shard_over(x, where.experts, where.outside)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _collect(where: ExpertAxes, shape: tuple[int, int], y: jax.Array) -> jax.Array:
    """Returns the sum over the shards of the experts: (e, g, T, ...) -> (B, S, ...)."""
    (B, S), rest = shape, y.shape[3:]
    num_groups, num_parts, num_gathered, num_others = where.sizes
    lead = (num_gathered, num_others, num_groups, num_parts)
    y = sharding.shard_over(y, where.experts, where.outside)
    y = y.reshape(*lead, num_gathered, -1, S // num_parts, *rest)
    sharded = (where.others, where.groups, where.sequence)
    y = sharding.shard_over(y, where.gathered, *sharded)
    y = sharding.shard_over(y, (), *sharded, where.gathered)  # an all-to-all
    y = y.sum(0).sum(0)
    y = sharding.shard_over(y, where.groups, where.sequence, where.gathered)
    y = jnp.moveaxis(y, 1, 3).reshape(B, S, *rest)
    return sharding.shard_over(y, (*where.groups, *where.gathered), where.sequence)


_spread.defvjp(
    lambda where, shape, x_BS: (_spread(where, shape, x_BS), None),
    lambda where, shape, _, grad: (_collect(where, shape, grad),),
)

_collect.defvjp(
    lambda where, shape, y: (_collect(where, shape, y), None),
    lambda where, shape, _, grad: (_spread(where, shape, grad),),
)
