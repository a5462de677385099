"""Law of dropout: masks that should differ are independent, and drop at the given rate.

That it is off in evaluation, and on in the same elements on every layout, is compared in
`verify.check_layout`; that its masks are those of an independent implementation, in
`laws.model.decoder`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.ops import dropout

RATE, SIGMAS = 0.25, 5
STEPS, ROWS, LAYERS, SITES, SHAPE = 2, 4, 3, 2, (32, 64)


def independent() -> str | None:
    """Law: an element is dropped with the probability `rate`, in each mask independently.

    Masks differ by step, row, layer, call and position. Two of them agree in as many elements as
    independent ones.
    """
    names, masks = _masks()
    num_elements = masks[0].size
    deviation = np.sqrt(RATE * (1 - RATE) / num_elements)
    for name, mask in zip(names, masks, strict=True):
        if not abs(mask.mean() - (1 - RATE)) <= SIGMAS * deviation:
            return f"{name}: keeps {mask.mean():.4f} of the elements, not {1 - RATE}"

    agreeing = RATE**2 + (1 - RATE) ** 2
    deviation = np.sqrt(agreeing * (1 - agreeing) / num_elements)
    for a, b in itertools.combinations(range(len(masks)), 2):
        share = (masks[a] == masks[b]).mean()
        if not abs(share - agreeing) <= SIGMAS * deviation:
            return (
                f"{names[a]} and {names[b]}: agree in {share:.4f} of the elements, not {agreeing}"
            )
    return None


def _masks() -> tuple[list[str], list[np.ndarray]]:
    """Returns the names of all masks, and which elements (32, 64) each keeps.

    Some start one position or dim later.
    """
    names, masks = [], []
    for step, layer, site in itertools.product(range(STEPS), range(LAYERS), range(SITES)):
        key = jax.random.fold_in(jax.random.key(0), step)
        x = jnp.ones((ROWS, *(size + 1 for size in SHAPE)))
        batch = dropout.at_layer(dropout.with_row_keys({"x": x}, key), layer)
        kept = np.asarray(dropout.dropout(x, batch, rate=RATE, site=site)) > 0
        for row in range(ROWS):
            starts = itertools.product((0, 1), repeat=2) if step == row == 0 else [(0, 0)]
            for start in starts:
                names.append(f"step {step}, row {row}, layer {layer}, call {site}, from {start}")
                part = tuple(slice(s, s + size) for s, size in zip(start, SHAPE, strict=True))
                masks.append(kept[row][part])
    return names, masks
