"""Sharding rules: models give each dim a logical name, one table maps these names to mesh axes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.errors import ConfigError, did_you_mean

# (logical name, mesh axis or axes or None), in order of preference; a name may have several rules.
Rules = Sequence[tuple[str, str | Sequence[str] | None]]

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Parameters, gradients and optimizer state are sharded over these axes as far as the ZeRO stage
# says.
ZERO_AXES = ("fsdp", "context")
Names = Sequence[str | None]  # one logical name per dim, None for a dim that is never sharded


# ---- from names to shardings ----


def spec_for(
    names: Names, shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """Returns the PartitionSpec of an array: each dim gets the first rule that fits.

    Rules are tried from top to bottom. A rule fits a dim of its name if none of its mesh axes
    already shards another dim of this array, and the product of their sizes divides the dim. A dim
    that no rule fits is unsharded. Raises ConfigError for a name without a rule, or an axis that
    `sizes` lacks.
    """
    known = {name for name, _ in rules}
    for name in names:
        if name is not None and name not in known:
            raise ConfigError(
                f"logical axis {name!r} has no rule{did_you_mean(name, known)}; "
                f'add ("{name}", None) to config.rules'
            )
    assigned: list[tuple[str, ...] | None] = [None] * len(names)
    used: set[str] = set()
    for name, axes in rules:
        axes = axes_of(axes)
        for axis in axes:
            if axis not in sizes:
                raise ConfigError(
                    f"config.rules maps {name!r} to {axis!r}, which is not a mesh axis"
                    f"{did_you_mean(axis, sizes)}"
                )
        for dim in range(len(names)):
            if names[dim] != name or assigned[dim] is not None or used & set(axes):
                continue
            if shape[dim] % math.prod(sizes[axis] for axis in axes) == 0:
                assigned[dim] = axes
                used |= set(axes)
    return PartitionSpec(*(axes or None for axes in assigned))


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a rule or a PartitionSpec, as a tuple."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shardings(axes: Any, shapes: Any, rules: Rules, mesh: AnyMesh) -> Any:
    """Returns the tree of NamedShardings; `axes` has the names of the dims of each leaf."""
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, spec_for(names, leaf.shape, rules, mesh.shape)),
        shapes,
        axes,
    )


def not_divisible(
    names: Names, shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]
) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Returns the mesh axes over which this array is replicated because they do not divide it.

    Each with the number of the dim and the axes of the rule. Not among them are axes that shard
    another dim, and axes of rules that are not tried, because an earlier rule fits or another dim
    uses an axis of theirs.
    """
    axes_of_dim = [axes_of(entry) for entry in spec_for(names, shape, rules, sizes)]
    dim_and_rule_of_axis = {}
    for dim, name in enumerate(names):
        other_dims = axes_of_dim[:dim] + axes_of_dim[dim + 1 :]
        used_by_others = {axis for axes in other_dims for axis in axes}
        for rule_name, rule_axes in rules:
            if rule_name != name:
                continue
            rule_axes = axes_of(rule_axes)
            if rule_axes == axes_of_dim[dim]:
                break  # this rule fits, so no later one is tried
            if used_by_others & {*rule_axes}:
                continue
            for axis in rule_axes:
                if sizes[axis] > 1 and axis not in axes_of_dim[dim]:
                    dim_and_rule_of_axis[axis] = (dim, rule_axes)
    return dim_and_rule_of_axis


def rules_without(rules: Rules, *removed: str) -> Rules:
    """Returns the rules with these mesh axes removed from each."""
    return tuple(
        (name, tuple(axis for axis in axes_of(axes) if axis not in removed)) for name, axes in rules
    )


def without_axes(sharding: NamedSharding, axes: Sequence[str]) -> NamedSharding:
    """Returns the sharding with these mesh axes removed from its spec."""
    entries = []
    for entry in sharding.spec:
        kept = tuple(axis for axis in axes_of(entry) if axis not in axes)
        entries.append(kept or None)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


# ---- the active rules ----

# jax keys its caches of traces by this context; with a context variable, functions that jax traces
# once (jit, checkpoint, custom_vjp) would keep the constraints of the first rules.
_active_rules = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_rules(rules: Rules | None) -> Iterator[None]:
    """Sets the rules that `constrain` applies; set once, together with `jax.set_mesh`."""
    hashable = rules and tuple((name, axes_of(axes)) for name, axes in rules)
    with _active_rules(hashable):
        yield


def active_rules() -> Rules | None:
    """Returns the rules that `use_rules` has set, or None."""
    return _active_rules.value


def with_active_rules(function: Callable) -> Callable:
    """Returns `function`, which runs with the rules that are active now.

    A pipeline traces the backward pass where other rules are active than in the forward pass.
    """
    rules = _active_rules.value

    @functools.wraps(function)
    def run(*args):
        with use_rules(rules):
            return function(*args)

    return run


@contextlib.contextmanager
def partial_axes(axes: Sequence[str]) -> Iterator[None]:
    """Makes `constrain` ignore these mesh axes, so that each shard along them has partial sums."""
    rules = _active_rules.value
    with use_rules(rules and rules_without(rules, *axes)):
        yield


@contextlib.contextmanager
def heads_for_sequence() -> Iterator[None]:
    """Shards heads over the mesh axes of the sequence as well, and the sequence not at all."""
    rules = _active_rules.value
    # Of several rules for a name the first counts, so it is entered last.
    first_axes = {name: axes_of(axes) for name, axes in reversed(rules)}
    changed = []
    for name in ("heads", "kv_heads"):
        changed.append((name, (*first_axes.get(name, ()), *first_axes["seq"])))
    changed.append(("seq", None))
    unchanged = [rule for rule in rules if rule[0] not in ("heads", "kv_heads", "seq")]
    with use_rules([*changed, *unchanged]):
        yield


# ---- constraints by the active rules; no effect without a mesh or rules ----


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Shards `x` by the active rules for these names."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec_for(names, x.shape, rules, mesh.shape))


def pin(x: jax.Array, dim: int, name: str | None) -> jax.Array:
    """Shards one dim of `x` by the active rules for this name, and leaves all others to XLA.

    None: the dim is not sharded.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return x
    (axes,) = spec_for((name,), (x.shape[dim],), rules, mesh.shape)
    spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[dim] = axes
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def shard_over(x: jax.Array, *dims: Sequence[str]) -> jax.Array:
    """Shards each leading dim of `x` over these mesh axes, and the others not at all."""
    if jax.sharding.get_abstract_mesh().empty or _active_rules.value is None:
        return x
    spec = PartitionSpec(*(tuple(axes) or None for axes in dims))
    return jax.lax.with_sharding_constraint(x, spec)


def gathered(x: jax.Array, stored: Names, used: Names) -> jax.Array:
    """Returns the parameter `x`, stored sharded by the names `stored`, sharded by `used`.

    Its gradient is sharded by `stored`; with `constrain` alone XLA would all-reduce it on GPU, not
    reduce-scatter.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return x
    spec = spec_for(stored, x.shape, rules, mesh.shape)

    @jax.custom_vjp
    def gather(x):
        return constrain(x, *used)

    def forward(x):
        return constrain(x, *used), None

    def backward(_, grad):
        return (jax.lax.with_sharding_constraint(grad, spec),)

    gather.defvjp(forward, backward)
    return gather(x)


def gather_sequence(x_BSD: jax.Array) -> jax.Array:
    """Returns activations whose sequence is sharded as inside a layer, not as between blocks.

    Where the rules shard it further between blocks, all matrices of a layer read one gathered
    array, and its gradient is summed before it is scattered; XLA would do both for each matrix.
    """
    length = x_BSD.shape[1]
    if num_shards("residual_seq", length) == num_shards("seq", length):
        return x_BSD
    return constrain(x_BSD, "batch", "seq", "residual")


def active_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Returns the PartitionSpec of an array by the active rules for these names."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return PartitionSpec(*(None for _ in names))
    return spec_for(names, shape, rules, mesh.shape)


def per_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `function`, which each device runs on its parts of the arguments.

    XLA does not partition kernels that are written by hand. The specs are those of `jax.shard_map`.
    The result must not be differentiated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    free = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if not free:
        return function
    # `check_vma` may be off, because nothing differentiates it: the callers are derivatives.
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False
    )


def mapped_over(function: Callable, size: int, axes: Sequence[str], *, in_axes: tuple) -> Callable:
    """Returns `function` mapped over a leading dim of this size, which these mesh axes shard."""
    if size > 1:
        return jax.vmap(function, in_axes, spmd_axis_name=tuple(axes) or None)

    def once(*args):
        only = []
        for arg, axis in zip(args, in_axes, strict=True):
            if axis is not None:
                arg = jax.tree.map(lambda leaf: leaf[0], arg)
            only.append(arg)
        return jax.tree.map(lambda leaf: leaf[None], function(*only))

    return once


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def copied(size: int, outer: tuple[str, ...], axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Returns copies of x (e, ...), sharded over `outer`, along a dim over `axes`: (e, size, ...).

    Its gradient is summed over that dim in its own dtype, as those of other parameters are. What
    `jax.vmap` sums for an argument that it does not map would be sent in float32.
    """
    copies = jnp.broadcast_to(x[:, None], (len(x), size, *x.shape[1:]))
    return shard_over(copies, outer, axes)


copied.defvjp(
    lambda size, outer, axes, x: (copied(size, outer, axes, x), None),
    lambda size, outer, axes, _, grad: (
        jax.lax.reduce(grad, jnp.zeros((), grad.dtype), jax.lax.add, (1,)),
    ),
)


@jax.custom_batching.custom_vmap
def largest_of_mapped(count: jax.Array) -> jax.Array:
    """Returns the largest `count` of all that are mapped: devices run equally many iterations.

    With a condition that differs between them, `jax.vmap` would copy what the loop carries in every
    iteration.
    """
    return count


@largest_of_mapped.def_vmap
def _(axis_size, in_batched, count):
    return largest_of_mapped(count.max(0)), False


def repeat_on_all(
    add: Callable[..., tuple], carry: tuple, *, first: int, end: jax.Array, scope: str
) -> tuple:
    """Returns `carry` after `carry = add(number, *carry)` for the numbers from `first` below `end`.

    Of functions that are mapped, all run as many iterations as the one with the largest `end`.
    `scope` is the name of the loop in compiled programs.
    """
    largest = largest_of_mapped(end)

    def body(state):
        return state[0] + 1, *add(*state)

    start = (jnp.full((), first, jnp.int32), *carry)
    with jax.named_scope(scope):
        return jax.lax.while_loop(lambda state: state[0] < largest, body, start)[1:]


def sum_on_all(
    compute: Callable[[jax.Array], tuple], first: tuple, *, end: jax.Array, scope: str
) -> tuple:
    """Returns `first` plus `compute(number)` for each number from 1 below `end`.

    As `repeat_on_all`, in float32 or wider: in bfloat16, sums of many terms would lose small ones.
    """

    def add(number, *sums):
        return tuple(map(jnp.add, sums, compute(number)))

    wide = tuple(one.astype(jnp.promote_types(one.dtype, jnp.float32)) for one in first)
    sums = repeat_on_all(add, wide, first=1, end=end, scope=scope)
    return tuple(total.astype(one.dtype) for total, one in zip(sums, first, strict=True))


# ---- numbers of shards, by the active mesh and rules; without them everything is one shard ----


def axes_for(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dim of this name and size."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return ()
    return axes_of(spec_for((name,), (size,), rules, mesh.shape)[0])


def num_shards(name: str, size: int) -> int:
    """Returns the number of shards of a dim of this name and size."""
    return num_devices(axes_for(name, size))


def num_devices(axes: Sequence[str]) -> int:
    """Returns the product of the sizes of these mesh axes."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def batch_slices(axes: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Returns those of the mesh axes `axes` that shard the batch, and the number of slices."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value or ()
    if mesh.empty or all(name != "batch" for name, _ in rules):
        return (), 1
    # The size of the batch is not known here: with mesh.size rows, which every product of axis
    # sizes divides.
    (entry,) = spec_for(("batch",), (mesh.size,), rules, mesh.shape)
    batch_axes = tuple(axis for axis in axes if axis in axes_of(entry))
    return batch_axes, math.prod(mesh.shape[axis] for axis in batch_axes)


def token_slices(axes: Sequence[str], length: int) -> tuple[tuple[str, ...], int, int]:
    """Returns those of the mesh axes `axes` that shard a batch (B, S = `length`).

    And the number of slices of B, and that of S.
    """
    batch_axes, num_batch_slices = batch_slices(axes)
    mesh, rules = jax.sharding.get_abstract_mesh(), _active_rules.value
    if mesh.empty or rules is None:
        return batch_axes, num_batch_slices, 1
    (entry,) = spec_for(("seq",), (length,), rules, mesh.shape)
    seq_axes = tuple(axis for axis in axes_of(entry) if axis in axes and axis not in batch_axes)
    num_seq_slices = math.prod(mesh.shape[axis] for axis in seq_axes)
    return (*batch_axes, *seq_axes), num_batch_slices, num_seq_slices
