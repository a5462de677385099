"""The residual of compressed gradients (`parallel.sync.Sync`) in a checkpoint: it fits any number of batch shards.

What counts is its sum over the shards. Restored on as many shards, each gets its own again; on another number, the sum
is shared equally.
"""

import ast
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

PREFIX = "residual/"
Residual = Mapping[str, jax.Array]  # by the path of the parameter: (N, ...)


def saved_like(
    saved: Mapping[str, str], wanted: Residual | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays to read: those in `wanted` that were saved, with the saved number of shards.

    `saved` is the manifest's `arrays`. An array of a parameter of another shape is read as it is wanted.
    """
    found = {}
    for name, leaf in (wanted or {}).items():
        if PREFIX + name not in saved:
            continue
        num, *shape = ast.literal_eval(saved[PREFIX + name].rpartition(" ")[0])
        spec = leaf.sharding.spec
        if num % leaf.shape[0]:
            spec = jax.P(None, *spec[1:])  # the devices along its axes cannot share the rows
        sharding = jax.NamedSharding(leaf.sharding.mesh, spec)
        same = tuple(shape) == leaf.shape[1:]
        found[name] = leaf.update(shape=(num, *shape), sharding=sharding) if same else leaf
    return found


def shared(read: Residual, wanted: Residual | None) -> dict[str, jax.Array] | None:
    """Returns the residual that was read for as many shards as `wanted`; zeros for what was not saved."""
    if wanted is None:
        return None

    def of(name: str, leaf: jax.Array) -> jax.Array:
        if name in read and read[name].shape == leaf.shape:
            return read[name]
        run = partial(jax.jit, out_shardings=leaf.sharding)
        if name not in read:
            return run(lambda: jnp.zeros(leaf.shape, leaf.dtype))()
        return run(lambda rows: jnp.broadcast_to(rows.sum(0) / leaf.shape[0], leaf.shape))(
            read[name]
        )

    return {name: of(name, leaf) for name, leaf in wanted.items()}
