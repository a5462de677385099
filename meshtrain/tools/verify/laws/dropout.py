"""Laws of dropout: its rate, and independence of masks that should differ.

That it is off in evaluation, and on in the same elements on every layout, is compared in `verify.check_layout`; that
its masks are those of an independent implementation, in `laws.decoder`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.ops import dropout

RATE, SIGMAS = 0.25, 5

STEPS, ROWS, LAYERS, SITES, SHAPE = 2, 4, 3, 2, (32, 64)


def independent() -> str | None:
    """Law: an element is dropped with the probability `rate`, in each mask independently of all others.

    Masks differ by step, row, layer, call and position. Two of them agree in as many elements as independent ones.
    """
    names, masks = _masks()
    of_one = np.sqrt(RATE * (1 - RATE) / masks[0].size)
    agreeing = RATE**2 + (1 - RATE) ** 2
    of_two = np.sqrt(agreeing * (1 - agreeing) / masks[0].size)
    for name, mask in zip(names, masks, strict=True):
        if not abs(mask.mean() - (1 - RATE)) <= SIGMAS * of_one:
            return f"{name}: keeps {mask.mean():.4f} of the elements, not {1 - RATE}"
    for (a, one), (b, other) in itertools.combinations(zip(names, masks, strict=True), 2):
        if not abs((one == other).mean() - agreeing) <= SIGMAS * of_two:
            return (
                f"{a} and {b}: agree in {(one == other).mean():.4f} of the elements, not {agreeing}"
            )
    return None


def _masks() -> tuple[list[str], list[np.ndarray]]:
    """Returns the names of all masks, and which elements (32, 64) each keeps; some start one position or dim later."""
    names, masks = [], []
    for step, layer, site in itertools.product(range(STEPS), range(LAYERS), range(SITES)):
        key = jax.random.fold_in(jax.random.key(0), step)
        x = jnp.ones((ROWS, *(size + 1 for size in SHAPE)))
        batch = dropout.at_layer(dropout.with_row_keys({"x": x}, key), layer)
        kept = np.asarray(dropout.dropout(x, batch, rate=RATE, site=site)) > 0
        for row in range(ROWS):
            for shift in itertools.product((0, 1), repeat=2) if step == row == 0 else [(0, 0)]:
                names.append(f"step {step}, row {row}, layer {layer}, call {site}, from {shift}")
                part = tuple(slice(s, s + size) for s, size in zip(shift, SHAPE, strict=True))
                masks.append(kept[row][part])
    return names, masks
