"""One of two functions, chosen on the device, without losing the sharding of what they keep for the backward pass."""

from collections.abc import Callable
from functools import partial

import jax


def either(
    predicate: jax.Array,
    if_true: Callable[..., jax.Array],
    if_false: Callable[..., jax.Array],
    *operands: jax.Array,
    constrain: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns `if_true(*operands)` or `if_false(*operands)`; their residuals have the same shapes.

    `constrain` shards an operand, result or residual. With `lax.cond` alone, XLA replicates the residuals: it does
    not propagate shardings out of and into the branches.
    """
    vjp_trees = {}

    def cond(predicate, branch, *args):
        return jax.lax.cond(predicate, partial(branch, if_true), partial(branch, if_false), *args)

    def forward(predicate, *operands):
        def branch(compute, *operands):
            out, vjp = jax.vjp(compute, *map(constrain, operands))
            residuals, vjp_trees[compute] = jax.tree.flatten(vjp)
            return constrain(out), [*map(constrain, residuals)]

        out, residuals = cond(predicate, branch, *operands)
        return out, (predicate, residuals)

    def backward(kept, grad):
        def branch(compute, residuals, grad):
            vjp = jax.tree.unflatten(vjp_trees[compute], [*map(constrain, residuals)])
            return [*map(constrain, vjp(constrain(grad)))]

        predicate, residuals = kept
        return None, *cond(predicate, branch, residuals, grad)

    chosen = jax.custom_vjp(lambda *args: forward(*args)[0])
    chosen.defvjp(forward, backward)
    return chosen(predicate, *operands)
