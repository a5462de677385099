"""Messages between pipeline stages, and each stage's own index into its arrays.

Arrays have a leading dim of stages, sharded over the mesh axis `pipeline`. The maths of a stage
runs under `jax.vmap` over that dim. Only the functions here differ from stage to stage or send
something, so they are `jax.shard_map` regions, manual over `pipeline` alone. Stage indices are
passed as data, because XLA cannot always compute `jax.lax.axis_index` in such a region (PartitionId
is not supported).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "pipeline"

# P stages, V chunks per stage, K layers per chunk


def _each_stage(function):
    """Returns a function that runs `function` on each stage's shard, without the dim of stages."""

    def on_leaves(*args):
        own = jax.tree.map(lambda leaf: leaf[0], args)
        return jax.tree.map(lambda leaf: leaf[None], function(*own))

    @functools.wraps(function)
    def region(*args):
        P = jax.P(AXIS)
        return jax.shard_map(on_leaves, in_specs=P, out_specs=P, axis_names={AXIS})(*args)

    return region


@_each_stage
def pick(tree: Any, index: jax.Array) -> Any:
    """Returns each stage's entry `index` (P,) of the second dim of every leaf (P, n, ...): (P, ...)."""
    return jax.tree.map(lambda leaf: _entry(leaf, index), tree)


@_each_stage
def put(tree: Any, index: jax.Array, value: Any) -> Any:
    """Returns `tree` with entry `index` (P,) of each stage replaced by `value` (P, ...)."""
    with jax.named_scope("kept"):  # by this name `monitor.activations` finds the buffers
        return jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, value
        )


@_each_stage
def add(tree: Any, index: jax.Array, value: Any, active: jax.Array) -> Any:
    """Returns `tree` with `value` (P, ...) added to entry `index` (P,) of each `active` stage."""

    def added(leaf, new):
        new = _entry(leaf, index) + jnp.where(active, new.astype(leaf.dtype), 0)  # 0 * nan is nan
        return jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0)

    return jax.tree.map(added, tree, value)


def _entry(leaf: jax.Array, index: jax.Array) -> jax.Array:
    # With a single entry, slicing would only make a copy.
    return leaf[0] if len(leaf) == 1 else jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def choose(tree: Any, index: jax.Array, axis: int) -> Any:
    """Returns each stage's entry `index` (P,) of dim `axis` of a tree that is replicated over stages: (P, ...)."""

    def region(tree, index):
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index[0], axis, keepdims=False)[None],
            tree,
        )

    P = jax.P(AXIS)
    return jax.shard_map(region, in_specs=(jax.P(), P), out_specs=P, axis_names={AXIS})(tree, index)


def send(x: Any, by: int) -> Any:
    """Sends each stage's shard of `x` (P, ...) to the stage `by` positions later on the ring."""
    size = jax.sharding.get_abstract_mesh().shape[AXIS]
    ring = [(stage, (stage + by) % size) for stage in range(size)]
    return _each_stage(lambda x: jax.lax.ppermute(x, AXIS, ring))(x)


def share(x: Any, stage: int) -> Any:
    """Broadcasts one stage's shard of `x` (P, ...) to all stages; -1 is the last stage."""

    # Not `jax.lax.psum`: in bfloat16, in a region that is manual over some axes only, it makes XLA
    # abort on CPU (jax 0.10.2). Not `sum`: it would send float32. The audit finds this by the
    # scope's name.
    def share_leaf(leaf):
        is_source = (np.arange(len(leaf)) == stage % len(leaf)).reshape(-1, *[1] * (leaf.ndim - 1))
        zero = jnp.zeros((), leaf.dtype)
        return jax.lax.reduce(jnp.where(is_source, leaf, zero), zero, jax.lax.add, (0,))

    with jax.named_scope("share"):
        return jax.tree.map(share_leaf, x)


def on_all_stages(x: Any) -> Any:
    """Adds a leading dim of size 1, which broadcasts over the stages."""
    return jax.tree.map(lambda leaf: leaf[None], x)


def either(stages: jax.Array, if_true: Any, if_false: Any) -> Any:
    """Returns leaf by leaf (P, ...) the first value on the `stages` (P,) that are True, the second on others."""

    def choose(a, b):
        return jnp.where(stages.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, if_true, if_false)


def to_stages(layers: Any, num_chunks: int) -> Any:
    """Moves stacked layers (L, ...) to their stages: (P, V, K, ...); chunk v of stage i is the (v P + i)-th."""
    return _move(layers, num_chunks, inward=True)


def from_stages(chunks: Any) -> Any:
    """Moves chunks (P, V, K, ...) back to stacked layers (L, ...) in the model's order."""
    return _move(chunks, jax.tree.leaves(chunks)[0].shape[1], inward=False)


def gradients(chunks: Any) -> dict[str, Any]:
    """Returns gradients (P, V, N, K, ...) as those of the parameter `layers`, (N, L, ...); {} if there are none."""
    return {"layers": jax.vmap(from_stages, in_axes=2)(chunks)} if chunks else {}


def constants_of_stages(layers: Any, num_chunks: int) -> Any:
    """Returns what `to_stages` returns, for arrays that every stage has: nothing is sent."""
    size = jax.sharding.get_abstract_mesh().shape[AXIS]

    def split(leaf):
        return np.reshape(leaf, (num_chunks, size, -1, *leaf.shape[1:])).swapaxes(0, 1)

    return jax.tree.map(split, dict(layers))


def _move(tree: Any, V: int, *, inward: bool) -> Any:
    size = jax.sharding.get_abstract_mesh().shape[AXIS]
    exchanges = list(rounds(size, V, inward=inward))

    def region(leaf, *slots):
        chunks = leaf.reshape(V, -1, *leaf.shape[1:]) if inward else leaf[0]
        if V > 1:
            moved = jnp.zeros_like(chunks)
            for (pairs, _, _), (outgoing, incoming) in zip(exchanges, slots, strict=True):
                piece = jax.lax.dynamic_index_in_dim(chunks, outgoing[0], keepdims=False)
                piece = jax.lax.ppermute(piece, AXIS, pairs)
                moved = jax.lax.dynamic_update_index_in_dim(moved, piece, incoming[0], 0)
            chunks = moved
        return chunks[None] if inward else chunks.reshape(-1, *chunks.shape[2:])

    P = jax.P(AXIS)
    run = jax.shard_map(region, in_specs=P, out_specs=P, axis_names={AXIS})
    slots = [(jnp.asarray(outgoing), jnp.asarray(incoming)) for _, outgoing, incoming in exchanges]
    return jax.tree.map(lambda leaf: run(leaf, *slots), tree)


def rounds(P: int, V: int, *, inward: bool):
    """Yields the V exchanges that move chunks from the model's order to the stages' order, or back.

    The state holds chunks i V ... i V + V - 1 on stage i; the schedule needs chunk c on stage c %
    P. In round k stage i sends its chunk j = (k + i gcd(P, V) // P) % V, so each stage sends and
    receives exactly one. An exchange is (pairs of stages, (P,) index of the chunk sent, (P,) index
    to store the received chunk at).
    """
    i = np.arange(P)
    for k in range(V):
        j = (k + i * math.gcd(P, V) // P) % V
        chunk = i * V + j
        to, slot = chunk % P, np.empty(P, int)
        slot[to] = chunk // P
        if inward:
            yield list(zip(i.tolist(), to.tolist(), strict=True)), j, slot
        else:
            yield list(zip(to.tolist(), i.tolist(), strict=True)), slot, j
