"""Which chunks of queries and keys meet in each round of attention between chunks; see between_chunks.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# c devices, each with an early and a late chunk of a sequence


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys on each device."""

    queries_early: jax.Array  # (c,) bool, whether the queries are those of the early chunk
    keys_early: jax.Array  # (c,) bool
    distance: jax.Array  # (c,) int32, chunks between the starts of queries and keys
    # (), of all devices; computed from the distances, each would be an all-reduce.
    smallest: jax.Array
    largest: jax.Array


def loop(
    num_devices: int, number: jax.Array | int, add: Callable[[Any, Pair], Any], carry: Any
) -> Any:
    """Returns `carry` after `add(carry, pair)` for each pair of round `number`.

    In round r each device has the keys of the r-th device before it. All devices compute two pairs, in round 0 three.
    """
    rows = zip(*_pairs(num_devices, number), strict=True)
    columns = [jnp.stack([jnp.asarray(value) for value in column]) for column in rows]

    def add_one(at, carry):
        return add(carry, Pair(*(column[at] for column in columns)))

    return jax.lax.fori_loop(0, 2 + (number == 0), add_one, carry)


def _pairs(num_devices: int, number: jax.Array | int) -> list[Pair]:
    """Returns the two pairs of a round, and the third of round 0.

    The late chunk sees the early chunk of any device. Of the other pairs, early sees early if the keys are of a device
    before, else late sees late; at home, in round 0, both do. So no chunk meets keys that none of its tokens sees.
    """
    c, r, device = num_devices, number, jnp.arange(num_devices)
    no, yes = jnp.zeros(c, bool), jnp.ones(c, bool)
    is_after, nearest = device >= r, jnp.minimum(r, c - r)
    crossed = 2 * c - 1 - device - (device - r) % c
    crossed_range = jnp.minimum(1 + r, c + 1 - r), jnp.maximum(2 * c - 1 - r, c - 1 + r)
    straight = jnp.where(is_after, r, c - r)
    return [
        Pair(no, yes, crossed, *crossed_range),
        Pair(is_after, is_after, straight, nearest, jnp.where(r == 0, 0, c - nearest)),
        Pair(no, no, 0 * device, jnp.int32(0), jnp.int32(0)),
    ]
