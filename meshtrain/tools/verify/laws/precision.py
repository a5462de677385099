"""Laws of low precision that a comparison of layouts with one device cannot find broken."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.optim import base as optim

NUM_SEEDS = 4096
MAX_Z = 5.0  # standard errors; a correct law exceeds it once in 1.7 million numbers


def laws() -> dict[str, Callable[[], str | None]]:
    """Returns the laws by name; each returns a fault or None."""
    return {"stochastic rounding": stochastic_rounding}


def stochastic_rounding() -> str | None:
    """Law: stored moments are unbiased over updates, and their errors independent of each other.

    Each moment is rounded to one of its two neighbours in bfloat16. Over NUM_SEEDS updates the
    share that is rounded up is within MAX_Z standard errors of its distance from the lower one. So
    are the correlations between two arrays of the same values, two updates, and neighbours in an
    array of 0.
    """
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    grads, adam = {"a": values, "b": values}, optax.scale_by_adam()
    stored = optim.store_moments(adam, moment_dtype="bfloat16", param_dtype="float32")
    with jax.enable_x64(False):
        _, exact = adam.update(grads, adam.init(grads), grads)
        start = stored.init(grads)

        def moments(count):
            return stored.update(grads, start._replace(count=count), grads)[1].state

        drawn = jax.device_get(jax.jit(jax.vmap(moments))(jnp.arange(NUM_SEEDS)))
    for name in ("mu", "nu"):
        errors = {}
        for leaf in grads:
            exact_N = np.asarray(getattr(exact, name)[leaf])
            drawn_SN = np.asarray(getattr(drawn, name)[leaf], np.float32)
            bits_N = exact_N.view(np.uint32)
            low_N = bits_N & np.uint32(0xFFFF0000)
            high_N = (low_N + np.uint32(0x10000)).view(np.float32)
            share_N, low_N = (bits_N & 0xFFFF) / 2**16, low_N.view(np.float32)
            if not ((drawn_SN == low_N) | (drawn_SN == high_N)).all():
                return f"{name}: not rounded to a neighbour"
            inner_N = (0.05 < share_N) & (share_N < 0.95)  # where the share is nearly normal
            deviation_N = np.sqrt(share_N * (1 - share_N))[inner_N]
            errors[leaf] = ((drawn_SN == high_N) - share_N)[:, inner_N] / deviation_N
            z = np.abs(errors[leaf].mean(0)).max() * NUM_SEEDS**0.5
            if not z <= MAX_Z:
                return f"{name}: the mean over {NUM_SEEDS} updates is {z:.1f} standard errors off"
        a, b = errors["a"], errors["b"]
        pairs = {"arrays": a * b, "updates": a[1:] * a[:-1], "neighbours": a[:, 1:] * a[:, :-1]}
        for kind, products in pairs.items():
            z = abs(products.mean()) * products.size**0.5
            if not z <= MAX_Z:
                return (
                    f"{name}: the errors of two {kind} are correlated, by {z:.1f} standard errors"
                )
    return None
