"""Where arrays live: models give each dim a logical name, one table of rules maps names to mesh axes."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.errors import ConfigError, did_you_mean

# (logical name, mesh axis or axes or None), in order of preference; a name may appear several times.
Rules = Sequence[tuple[str, str | Sequence[str] | None]]
Names = Sequence[str | None]  # one logical name per dim, None for a dim that is never sharded

_active_rules: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("rules", default=None)


@contextlib.contextmanager
def use_rules(rules: Rules | None) -> Iterator[None]:
    """Makes `rules` those that `constrain` follows; set once, beside `jax.set_mesh`."""
    token = _active_rules.set(rules)
    try:
        yield
    finally:
        _active_rules.reset(token)


def spec_for(
    names: Names, shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these dims: the first rule that fits each name wins.

    Rules are tried from top to bottom. One fits a dim that it names if none of its mesh axes already
    shards another dim of this array and their sizes in `sizes` divide the dim. A dim that no rule
    fits stays whole. Raises ConfigError for a name that no rule knows, or an axis that `sizes` lacks.
    """
    known = {name for name, _ in rules}
    for name in names:
        if name is not None and name not in known:
            raise ConfigError(
                f'logical axis {name!r} has no rule{did_you_mean(name, known)}; add ("{name}", None) to config.rules'
            )
    assigned: list[tuple[str, ...] | None] = [None] * len(names)
    taken: set[str] = set()
    for name, axes in rules:
        axes = axes_of(axes)
        for axis in axes:
            if axis not in sizes:
                raise ConfigError(
                    f"config.rules maps {name!r} to {axis!r}, which is no mesh axis{did_you_mean(axis, sizes)}"
                )
        for dim in range(len(names)):
            if names[dim] != name or assigned[dim] is not None or taken & set(axes):
                continue
            if shape[dim] % math.prod(sizes[axis] for axis in axes) == 0:
                assigned[dim] = axes
                taken |= set(axes)
    return PartitionSpec(*(axes or None for axes in assigned))


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a rule or a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def shardings(axes, shapes, rules: Rules, mesh: jax.sharding.Mesh):
    """Returns a tree of NamedSharding for a tree of shaped leaves and the same tree of their names."""
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, spec_for(names, leaf.shape, rules, mesh.shape)),
        shapes,
        axes,
    )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins `x` to where the active rules put these names; without active rules or mesh it does nothing."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.get()
    if mesh.empty or rules is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec_for(names, x.shape, rules, mesh.shape))


def without(rules: Rules, *gone: str) -> Rules:
    """Returns the rules with these mesh axes taken out of every line."""
    return tuple(
        (name, tuple(axis for axis in axes_of(axes) if axis not in gone)) for name, axes in rules
    )


def batch_slices(axes: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Returns those of these mesh axes that shard the batch by the active rules, and their product."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.get() or ()
    if mesh.empty or all(name != "batch" for name, _ in rules):
        return (), 1
    (sharded,) = spec_for(("batch",), (mesh.size,), rules, mesh.shape)  # a size that all divide
    axes = tuple(axis for axis in axes if axis in axes_of(sharded))
    return axes, math.prod(mesh.shape[axis] for axis in axes)


def num_shards(name: str, size: int) -> int:
    """Returns among how many devices the active rules share a dim of this name and size."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.get()
    if mesh.empty or rules is None:
        return 1
    (axes,) = spec_for((name,), (size,), rules, mesh.shape)
    return math.prod(mesh.shape[axis] for axis in axes_of(axes))


@contextlib.contextmanager
def partial_axes(axes: Sequence[str]) -> Iterator[None]:
    """Within it `constrain` says nothing of these mesh axes: each of their slices works by itself."""
    rules = _active_rules.get()
    with use_rules(rules and without(rules, *axes)):
        yield


def without_axes(place: NamedSharding, axes: Sequence[str]) -> NamedSharding:
    """Returns a sharding without these mesh axes."""
    kept = (tuple(axis for axis in axes_of(dim) if axis not in axes) for dim in place.spec)
    return NamedSharding(place.mesh, PartitionSpec(*(dim or None for dim in kept)))
