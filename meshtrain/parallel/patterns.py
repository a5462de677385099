"""All-reduce as a sequence of exchanges in groups, inside a `shard_map`: who meets whom, and how.

Each level reduces and scatters among the members of its groups, from the fastest links to the slowest; then the same
levels, in reverse, gather. With N members on H hosts, what leaves a host, as a multiple of the array:

  xla           one level that XLA does: on GPUs NCCL chooses the pattern
  ring          one level in N - 1 steps to the next member, and N - 1 back            2 (N - 1) / N
  tree          a level for each prime factor of N, those inside a host first;         2 (H - 1) / H
                halving and doubling (Rabenseifner) where N is a power of two
  hierarchical  a level inside the hosts, one between them, both by XLA                2 (H - 1) / H
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.parallel.wire import Wire

# N members, L elements, C of a member's part


class Level(NamedTuple):
    """Groups of `size` members whose numbers are `stride` apart."""

    size: int
    stride: int
    is_ring: bool = False  # in steps to the next member, else one collective of XLA

    def groups(self, num_members: int) -> list[list[int]]:
        """Returns the numbers of the members of each group."""
        numbers = np.arange(num_members).reshape(-1, self.size, self.stride)
        return numbers.swapaxes(1, 2).reshape(-1, self.size).tolist()

    def place(self, axes: Sequence[str]) -> jax.Array:
        """Returns this member's place in its group."""
        return lax.axis_index(axes) // self.stride % self.size


def levels_of(pattern: str, num_members: int, num_networks: int) -> tuple[Level, ...]:
    """Returns the levels of a pattern; neighbouring members share one of `num_networks` fast networks of equal size."""
    inside = num_members // num_networks
    if pattern == "ring":
        return (Level(num_members, 1, is_ring=True),)
    if pattern == "tree":
        sizes = [*_prime_factors(inside), *_prime_factors(num_networks)]
        strides = np.cumprod([1, *sizes]).tolist()
        return tuple(Level(n, s, is_ring=True) for n, s in zip(sizes, strides, strict=False))
    if pattern == "hierarchical" and 1 < num_networks < num_members:
        return Level(inside, 1), Level(num_networks, inside)
    return (Level(num_members, 1),)


def bytes_sent(levels: Sequence[Level], wire: Wire | None, itemsize: int) -> float:
    """Returns the bytes that a member sends for each element: of each level 2 (N - 1) / N of the part it works on."""
    total, part = 0.0, 1.0
    for level in levels:
        size = wire.bytes_per_element if wire and level is levels[-1] else itemsize
        total += 2 * (level.size - 1) / level.size * part * size
        part /= level.size
    return total


def all_reduce(
    x_L: jax.Array,
    axes: Sequence[str],
    levels: Sequence[Level],
    wire: Wire | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sum of `x` over the members along the mesh axes, and what the sum lacks of this member's `x`.

    With a `wire` the last level, that of the slowest links, sends its format, and adds in the dtype of `x`. Summed
    over all members the second array (L,) is sum of x minus the result; without a wire it is None. All members return
    the same bits. `key` is the same on all members.
    """
    num_members = int(np.prod([level.size for level in levels]))
    if wire is None and levels == (Level(num_members, 1),):
        return lax.psum(x_L, axes), None
    multiple = num_members * (wire.block if wire else 1)
    x = jnp.pad(x_L, (0, -len(x_L) % multiple))
    exact = levels[:-1] if wire else levels
    for level in exact:
        x = _scatter(x, axes, level, level.groups(num_members))
    error = None
    if wire:
        keys = (
            None if key is None else jax.random.split(jax.random.fold_in(key, lax.axis_index(axes)))
        )
        x, error = _compressed(x, axes, levels[-1], levels[-1].groups(num_members), wire, keys)
    for level in reversed(exact):
        x = _gather(x, axes, level, level.groups(num_members))
        if wire:  # this member alone has compressed its part
            error = _at(error, level.place(axes), level.size)
    return x[: len(x_L)], None if error is None else error[: len(x_L)]


def _compressed(x_L, axes, level: Level, groups, wire: Wire, keys):
    """Returns the sum over the groups of one level, sent in the format of `wire`, and this member's error."""
    rows_NC = x_L.reshape(level.size, -1)
    length = rows_NC.shape[1]
    place = level.place(axes)
    first, second = (None, None) if keys is None else keys
    sent = wire.encode(rows_NC, first)
    error_NC = rows_NC - wire.decode(sent, length, x_L.dtype)
    received = lax.all_to_all(sent, axes, 0, 0, axis_index_groups=groups, tiled=True)
    # What this member adds up of its own is not sent, so it stays exact: what the sum lacked at the last step is in it.
    part_NC = wire.decode(received, length, x_L.dtype).at[place].set(rows_NC[place])
    part_C = part_NC.sum(0)
    sent = wire.encode(part_C[None], second)
    # Its own part decoded too, or replicas would differ.
    error_C = part_C - wire.decode(sent, length, x_L.dtype)[0]
    rows = lax.all_gather(sent[0], axes, axis_index_groups=groups)
    error = error_NC.at[place].set(error_C).reshape(-1)
    return wire.decode(rows, length, x_L.dtype).reshape(-1), error


def _scatter(x_L, axes, level: Level, groups) -> jax.Array:
    """Returns this member's part of the sum over its group: (L / size,)."""
    if not level.is_ring:
        return lax.psum_scatter(x_L, axes, axis_index_groups=groups, tiled=True)
    rows_NC, place = x_L.reshape(level.size, -1), level.place(axes)

    def row(number):
        return lax.dynamic_index_in_dim(rows_NC, number % level.size, keepdims=False)

    def step(part_C, number):
        return lax.ppermute(part_C, axes, _to_next(groups)) + row(place - 2 - number), None

    return lax.scan(step, row(place - 1), jnp.arange(level.size - 1))[0]


def _gather(x_C, axes, level: Level, groups) -> jax.Array:
    """Returns the parts of all members of the group: (size x C,)."""
    if not level.is_ring:
        return lax.all_gather(x_C, axes, axis_index_groups=groups, tiled=True)
    place = level.place(axes)

    def step(carry, number):
        part_C, rows_NC = carry
        part_C = lax.ppermute(part_C, axes, _to_next(groups))
        whose = (place - 1 - number) % level.size
        return (part_C, lax.dynamic_update_index_in_dim(rows_NC, part_C, whose, 0)), None

    rows_NC = _at(x_C, place, level.size).reshape(level.size, -1)
    return lax.scan(step, (x_C, rows_NC), jnp.arange(level.size - 1))[0][1].reshape(-1)


def _at(x_C, place, size: int) -> jax.Array:
    """Returns (size x C,) with `x` at its place, and zeros elsewhere."""
    rows_NC = jnp.zeros((size, len(x_C)), x_C.dtype)
    return lax.dynamic_update_index_in_dim(rows_NC, x_C, place, 0).reshape(-1)


def _to_next(groups: list[list[int]]) -> list[tuple[int, int]]:
    return [(a, b) for group in groups for a, b in zip(group, [*group[1:], group[0]], strict=True)]


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
