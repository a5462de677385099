"""Messages between pipeline stages, and each stage's own index into its arrays.

Arrays have a leading dim of stages, sharded over the mesh axis `pipeline`. The maths of a stage
runs under `jax.vmap` over that dim. Only the functions here differ from stage to stage or send
something, so they are `jax.shard_map` regions, manual over `pipeline` alone. Stage indices are
passed as data, because XLA cannot always compute `jax.lax.axis_index` in such a region (PartitionId
is not supported).
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "pipeline"

# P stages, V chunks per stage, K layers per chunk


def _each_stage(function: Callable) -> Callable:
    """Returns a function that runs `function` on each stage's shard, without the dim of stages."""

    def on_leaves(*args):
        own = jax.tree.map(lambda leaf: leaf[0], args)
        return jax.tree.map(lambda leaf: leaf[None], function(*own))

    @functools.wraps(function)
    def region(*args):
        spec = jax.P(AXIS)
        run = jax.shard_map(on_leaves, in_specs=spec, out_specs=spec, axis_names={AXIS})
        return run(*args)

    return region


@_each_stage
def pick(tree: Any, index: jax.Array) -> Any:
    """Returns each stage's entry `index` (P,) of dim 1 of every leaf (P, n, ...): (P, ...)."""
    return jax.tree.map(lambda leaf: _entry(leaf, index), tree)


@_each_stage
def put(tree: Any, index: jax.Array, value: Any) -> Any:
    """Returns `tree` with entry `index` (P,) of each stage replaced by `value` (P, ...)."""

    def put_leaf(leaf, new):
        return jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0)

    # `tools.hlo.activations` finds the buffers by this name.
    with jax.named_scope("kept"):
        return jax.tree.map(put_leaf, tree, value)


@_each_stage
def add(tree: Any, index: jax.Array, value: Any, active: jax.Array) -> Any:
    """Returns `tree` with `value` (P, ...) added to entry `index` (P,) of each `active` stage."""

    def add_leaf(leaf, new):
        # Not multiplied by the mask: 0 * nan is nan.
        new = _entry(leaf, index) + jnp.where(active, new.astype(leaf.dtype), 0)
        return jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0)

    return jax.tree.map(add_leaf, tree, value)


def _entry(leaf: jax.Array, index: jax.Array) -> jax.Array:
    if len(leaf) == 1:
        # Slicing would only make a copy.
        return leaf[0]
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def choose(tree: Any, index: jax.Array, axis: int) -> Any:
    """Returns each stage's entry `index` (P,) of dim `axis` of every leaf: (P, ...).

    The tree is replicated over the stages.
    """

    def region(tree, index):
        def choose_leaf(leaf):
            entry = jax.lax.dynamic_index_in_dim(leaf, index[0], axis, keepdims=False)
            return entry[None]

        return jax.tree.map(choose_leaf, tree)

    by_stage = jax.P(AXIS)
    run = jax.shard_map(region, in_specs=(jax.P(), by_stage), out_specs=by_stage, axis_names={AXIS})
    return run(tree, index)


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
        num_stages = len(leaf)
        is_source = np.arange(num_stages) == stage % num_stages
        is_source = is_source.reshape(-1, *[1] * (leaf.ndim - 1))
        zero = jnp.zeros((), leaf.dtype)
        add = jax.lax.bitwise_or if leaf.dtype == jnp.bool_ else jax.lax.add
        return jax.lax.reduce(jnp.where(is_source, leaf, zero), zero, add, (0,))

    with jax.named_scope("share"):
        return jax.tree.map(share_leaf, x)


def on_all_stages(x: Any) -> Any:
    """Adds a leading dim of size 1, which broadcasts over the stages."""
    return jax.tree.map(lambda leaf: leaf[None], x)


def either(stages: jax.Array, if_true: Any, if_false: Any) -> Any:
    """Returns `if_true` (P, ...) on the `stages` (P,) that are True, `if_false` on the others."""

    def choose_leaf(a, b):
        return jnp.where(stages.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose_leaf, if_true, if_false)


# ---- between the order of the model and that of the stages ----


def to_stages(layers: Any, num_chunks: int) -> Any:
    """Moves stacked layers (L, ...) to their stages: (P, V, K, ...).

    Chunk v of stage i is number v P + i of the stack.
    """
    return _move(layers, num_chunks, inward=True)


def from_stages(chunks: Any) -> Any:
    """Moves chunks (P, V, K, ...) back to stacked layers (L, ...) in the model's order."""
    num_chunks = jax.tree.leaves(chunks)[0].shape[1]
    return _move(chunks, num_chunks, inward=False)


def gradients(chunks: Any) -> dict[str, Any]:
    """Returns gradients (P, V, N, K, ...) as those of the parameter `layers`, (N, L, ...).

    Without gradients of layers it returns {}.
    """
    if not chunks:
        return {}
    return {"layers": jax.vmap(from_stages, in_axes=2)(chunks)}


def constants_of_stages(layers: Any, num_chunks: int) -> Any:
    """Returns what `to_stages` returns, for arrays that every stage has: nothing is sent."""
    num_stages = jax.sharding.get_abstract_mesh().shape[AXIS]

    def split(leaf):
        # (L, ...) -> (V, P, K, ...) -> (P, V, K, ...)
        chunks = np.reshape(leaf, (num_chunks, num_stages, -1, *leaf.shape[1:]))
        return chunks.swapaxes(0, 1)

    return jax.tree.map(split, dict(layers))


class Exchange(NamedTuple):
    """A message from each stage to one stage: each sends one chunk, and receives one."""

    pairs: list[tuple[int, int]]  # (source, target)
    outgoing: np.ndarray  # (P,) index of the chunk that a stage sends
    incoming: np.ndarray  # (P,) index at which a stage stores the received chunk


def _move(tree: Any, num_chunks: int, *, inward: bool) -> Any:
    """Moves the chunks of each leaf to the stages' order if `inward`, else to the model's."""
    num_stages = jax.sharding.get_abstract_mesh().shape[AXIS]
    exchanges = list(rounds(num_stages, num_chunks, inward=inward))

    def region(leaf, *indices):
        chunks = leaf.reshape(num_chunks, -1, *leaf.shape[1:]) if inward else leaf[0]
        # With one chunk per stage both orders are the same.
        if num_chunks > 1:
            moved = jnp.zeros_like(chunks)
            for exchange, (outgoing, incoming) in zip(exchanges, indices, strict=True):
                chunk = jax.lax.dynamic_index_in_dim(chunks, outgoing[0], keepdims=False)
                chunk = jax.lax.ppermute(chunk, AXIS, exchange.pairs)
                moved = jax.lax.dynamic_update_index_in_dim(moved, chunk, incoming[0], 0)
            chunks = moved
        return chunks[None] if inward else chunks.reshape(-1, *chunks.shape[2:])

    spec = jax.P(AXIS)
    run = jax.shard_map(region, in_specs=spec, out_specs=spec, axis_names={AXIS})
    # Each stage's indices are passed as data, as everywhere in this file.
    indices = [
        (jnp.asarray(exchange.outgoing), jnp.asarray(exchange.incoming)) for exchange in exchanges
    ]
    return jax.tree.map(lambda leaf: run(leaf, *indices), tree)


def rounds(P: int, V: int, *, inward: bool) -> Iterator[Exchange]:
    """Yields the V exchanges that move chunks from the model's order to the stages', or back.

    The state holds chunks i V ... i V + V - 1 on stage i; the schedule needs chunk c on stage c %
    P. In round k stage i sends its chunk j = (k + i gcd(P, V) // P) % V, so each stage sends and
    receives exactly one.
    """
    i = np.arange(P)
    for k in range(V):
        j = (k + i * math.gcd(P, V) // P) % V
        chunk = i * V + j
        target = chunk % P
        slot = np.empty(P, int)
        slot[target] = chunk // P
        if inward:
            yield Exchange(list(zip(i.tolist(), target.tolist(), strict=True)), j, slot)
        else:
            yield Exchange(list(zip(target.tolist(), i.tolist(), strict=True)), slot, j)
