"""Learning-rate schedules and optimizers, all from optax, and moments stored in another dtype."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshtrain.config.schema import OptimConfig
from meshtrain.errors import ConfigError

Schedule = Callable[[jax.Array | int], jax.Array | float]  # step -> learning rate


def make_schedule(c: OptimConfig, *, steps: int) -> Schedule:
    """Returns a schedule: linear warm-up to `learning_rate`, then decay to `final_fraction` of it.

    "constant" does not decay; "cosine" and "linear" decay from the end of the warm-up until
    `steps`; "wsd" (warm-up, stable, decay; arXiv 2404.06395) is constant until the last
    `decay_fraction` of the steps, then decays linearly. The first step has learning_rate /
    (warmup_steps + 1).
    """
    peak = c.learning_rate
    final = c.learning_rate * c.final_fraction
    steps_after_warmup = max(1, steps - c.warmup_steps)
    if c.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif c.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, steps_after_warmup, alpha=c.final_fraction)
    elif c.schedule == "linear":
        main = optax.linear_schedule(peak, final, steps_after_warmup)
    else:
        # "wsd"
        decay_steps = min(steps_after_warmup, max(1, round(steps * c.decay_fraction)))
        stable_steps = steps_after_warmup - decay_steps
        main = optax.linear_schedule(peak, final, decay_steps, transition_begin=stable_steps)
    if not c.warmup_steps:
        return main
    warmup = optax.linear_schedule(peak / (c.warmup_steps + 1), peak, c.warmup_steps)
    return optax.join_schedules([warmup, main], [c.warmup_steps])


def updates_done(opt_state: Any, *, otherwise: jax.Array | None) -> jax.Array | None:
    """Returns the count that optax passes to the learning-rate schedule, or else `otherwise`."""

    def has_count(node):
        return isinstance(node, optax.ScaleByScheduleState)

    for node in jax.tree.leaves(opt_state, is_leaf=has_count):
        if has_count(node):
            return node.count
    return otherwise


def adamw(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
) -> optax.GradientTransformation:
    """AdamW with decoupled weight decay (arXiv 1711.05101).

    Parameters named in `no_decay` do not decay. Raises ConfigError if a number is out of range.
    """
    faults = []
    for name, rate in (("b1", b1), ("b2", b2)):
        if not 0 <= rate < 1:
            faults.append(f"optim.{name}={rate}: must be at least 0 and below 1")
    if epsilon <= 0:
        faults.append(f"optim.epsilon={epsilon}: must be above 0")
    if weight_decay < 0:
        faults.append(f"optim.weight_decay={weight_decay}: must be at least 0")
    if faults:
        raise ConfigError(*faults)
    return optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=epsilon,
        weight_decay=weight_decay,
        mask=decay_mask(no_decay),
    )


def decay_mask(no_decay: tuple) -> Callable[[Any], Any]:
    """Returns the function parameters -> tree of bools: whether each one's weights decay.

    A parameter's name is the last key of its path, such as "kernel", "bias" or "scale".
    """

    def mask(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key not in no_decay, params)

    return mask


# ---- moments in another dtype ----


AT_ROUNDING = 2**32 - 1  # the number by which the key of seed 0 is folded


class MomentState(NamedTuple):
    """The state of an optimizer whose moments are stored in another dtype."""

    count: jax.Array  # () int32, updates done
    state: Any  # of the optimizer, with its moments in `moment_dtype`


def store_moments(
    optimizer: optax.GradientTransformation, *, moment_dtype: str, param_dtype: str
) -> optax.GradientTransformation:
    """Returns the optimizer with its moments stored in `moment_dtype`.

    It computes in float32 or float64. Moments are the floating-point arrays of its state with the
    shape of their parameter; smaller arrays, such as Adafactor's rows and columns, stay as they
    are. bfloat16 uses stochastic rounding: with b2 = 0.999 a second moment changes by 0.1 % per
    step, less than half of bfloat16's spacing (0.4 to 0.8 %), so rounding to nearest would never
    change it. The random bits depend only on the number of the update and the array: they are the
    same on every mesh and after a restart.
    """
    if moment_dtype == param_dtype != "bfloat16":
        return optimizer
    compute_dtype = jnp.promote_types(moment_dtype, jnp.float32)

    def to_compute_dtype(tree):
        def cast(leaf):
            if not _is_float(leaf):
                return leaf
            return leaf.astype(jnp.promote_types(leaf.dtype, compute_dtype))

        return jax.tree.map(cast, tree)

    def to_moment_dtype(leaf, parameter):
        is_moment = _is_float(leaf) and leaf.shape == parameter.shape
        return leaf.astype(moment_dtype) if is_moment else leaf

    def init(params):
        state = optimizer.init(to_compute_dtype(params))
        stored = optax.tree.map_params(
            optimizer,
            to_moment_dtype,
            state,
            params,
            # a leaf: optax's placeholder for a parameter that a masked optimizer does not update
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
        return MomentState(jnp.int32(0), stored)

    def update(grads, stored, params):
        updates, state = optimizer.update(
            to_compute_dtype(grads), to_compute_dtype(stored.state), to_compute_dtype(params)
        )
        old_leaves, tree = jax.tree.flatten(stored.state)
        new_leaves = jax.tree.leaves(state)
        # Each array has random bits of its own, or the errors of two arrays would be correlated.
        # Their key is that of no step: steps are fewer than its number.
        key = jax.random.fold_in(jax.random.key(0), AT_ROUNDING)
        key = jax.random.fold_in(key, stored.count)
        seeds = jax.random.bits(key, len(old_leaves), jnp.uint32)
        rounded_leaves = []
        for number, (new, old) in enumerate(zip(new_leaves, old_leaves, strict=True)):
            rounded_leaves.append(round_to(new, old.dtype, seeds[number]))
        rounded = jax.tree.unflatten(tree, rounded_leaves)
        return updates, MomentState(stored.count + 1, rounded)

    return optax.GradientTransformation(init, update)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike, seed: jax.Array) -> jax.Array:
    """Returns `x` in `dtype`; bfloat16 with stochastic rounding, whose expected value is `x`."""
    if dtype != jnp.bfloat16 or x.dtype == jnp.bfloat16:
        return x.astype(dtype)
    # bfloat16 is the upper half of float32: random lower bits carry into it with the right
    # probability.
    x = x.astype(jnp.float32)
    noise = _hash(_positions(x.shape) ^ seed) >> 16
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Returns 0, 1, 2, ... modulo 2^32 in this shape; each device computes its own shard."""
    positions = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        positions = positions * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return positions


def _hash(x: jax.Array) -> jax.Array:
    """Hashes 32 bits (lowbias32 by Chris Wellons), which is random enough for rounding.

    With `jax.random.bits` a step on CPU took 1.5 times as long, and compiling it 3 times as long.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
