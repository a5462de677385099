"""Rematerialisation: the backward pass computes whole layers, or cheap regions, again."""

from collections.abc import Callable
from typing import Any

import jax

from meshtrain.parallel import accelerator

# Part of the key of jax's caches of traces, as the rules of `sharding` are.
_in_rematerialised = jax.make_user_context(default_value=False)


def rematerialised(function: Callable, remat: str) -> Callable:
    """Returns `function`, whose backward pass keeps what config key `train.remat` selects.

    It decides for all that the function calls: `recomputed` has no effect inside.
    """
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        names = remat.removeprefix("names:").split(",")
        policy = policies.save_only_these_names(*names)

    def inside(*args):
        with _in_rematerialised(True):
            return function(*args)

    return jax.checkpoint(inside, policy=policy)


def recomputed(function: Callable, *args: jax.Array) -> Any:
    """Returns `function(*args)`; its backward pass keeps only `args` and runs it again.

    For cheap operations followed by a matrix product: the product's result is kept by its consumer,
    so no product is computed twice.
    """
    if _in_rematerialised.value:
        return function(*args)
    # Without a barrier XLA merges the recomputation with the forward pass if both are in one
    # computation, that is if all layers are unrolled. On CPU that is welcome: time is scarce there,
    # not memory.
    barrier = accelerator.platform() != "cpu"
    return jax.checkpoint(function, prevent_cse=barrier)(*args)
