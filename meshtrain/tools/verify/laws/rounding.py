"""Laws of stochastic rounding: it is unbiased, and its errors are independent of each other.

An error is +(1 - p) or -p, where p is the share at which a value lies between its two neighbours in
bfloat16; divided by sqrt(p (1 - p)) it has mean 0 and variance 1. Every limit is MAX_Z standard
errors of a statistic of many such errors. The random numbers are those of fixed updates, so that a
law that holds once holds always.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.optim import base as optim

MAX_Z = 5.0  # a correct law exceeds it once in 1.7 million statistics
NUM_UPDATES = 1024
FAR = NUM_UPDATES // 2  # the second half has numbers that are larger by 2^16
NUM_SEEDS = 4096

# U updates, M rows, N columns, V values
NUM_ROWS, NUM_COLUMNS = 16, 24


def laws() -> dict[str, Callable[[], str | None]]:
    """Returns the laws by name; each returns a fault or None."""
    return {
        "stochastic rounding": stochastic_rounding,
        "rounded values": rounded_values,
        "rounding of large arrays": large_arrays,
    }


def stochastic_rounding() -> str | None:
    """Law: the errors of stored moments are unbiased, have their variance, and are independent.

    Between all pairs of elements of an array, which include those of two devices, between arrays,
    between the moments of an array, and between updates.
    """
    values_MN = between_neighbours((NUM_ROWS, NUM_COLUMNS))
    grads = {"a": values_MN, "b": values_MN}
    # Each of the two moments is the gradient itself.
    moments = optax.chain(optax.trace(0.0), optax.trace(0.0))
    stored = optim.store_moments(moments, moment_dtype="bfloat16", param_dtype="float32")

    def moments_of(count, grads):
        start = stored.init(grads)
        _, after = stored.update(grads, start._replace(count=count), grads)
        return [one.trace for one in after.state]

    with jax.enable_x64(False):
        sharded = jax.device_put(grads, _rows_over_devices())
        run = jax.jit(jax.vmap(moments_of, in_axes=(0, None)))
        counts = jnp.concatenate([jnp.arange(FAR), 2**16 + jnp.arange(FAR)])
        drawn = jax.device_get(run(counts, sharded))
    errors = {}
    for number, moment in enumerate(drawn):
        for name, drawn_UMN in moment.items():
            fault, errors[number, name] = errors_of(values_MN, drawn_UMN)
            if fault:
                return fault
    # The last one assumes that errors are independent.
    return _bias(errors) or _variance(errors) or _correlation(errors) or _bias_of_all(errors)


def _rows_over_devices() -> jax.sharding.Sharding:
    """Returns the sharding of the rows over as many devices as divide them."""
    num_devices = max(n for n in range(1, jax.device_count() + 1) if NUM_ROWS % n == 0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("rows",))
    return jax.NamedSharding(mesh, jax.P("rows"))


def between_neighbours(shape: tuple[int, ...]) -> np.ndarray:
    """Returns float32 values of several magnitudes, a quarter to three quarters between two."""
    random = np.random.default_rng(0)
    bits = np.asarray(random.normal(size=shape) * 10 ** random.uniform(-8, 3, shape), np.float32)
    upper = bits.view(np.uint32) & np.uint32(0xFFFF0000)
    return (upper + random.integers(2**14, 3 * 2**14, shape).astype(np.uint32)).view(np.float32)


def errors_of(values: np.ndarray, drawn_U: np.ndarray) -> tuple[str | None, np.ndarray]:
    """Returns a fault if a value is not rounded to a neighbour, and the errors with variance 1."""
    bits = values.view(np.uint32)
    lower = bits & np.uint32(0xFFFF0000)
    upper = (lower + np.uint32(0x10000)).view(np.float32)
    lower = lower.view(np.float32)
    drawn_U = np.asarray(drawn_U, np.float32)
    if not ((drawn_U == lower) | (drawn_U == upper)).all():
        return "not rounded to a neighbour", drawn_U
    share = (bits & 0xFFFF) / 2**16
    return None, ((drawn_U == upper) - share) / np.sqrt(share * (1 - share))


Errors = dict[tuple[int, str], np.ndarray]  # (U, M, N), by moment and array


def _bias(errors: Errors) -> str | None:
    """Returns a fault if the mean of an element over the updates is not 0."""
    for errors_UMN in errors.values():
        z = np.abs(errors_UMN.mean(0)).max() * NUM_UPDATES**0.5
        if not z <= MAX_Z:
            return f"the mean over {NUM_UPDATES} updates is {z:.1f} standard errors off"
    return None


def _bias_of_all(errors: Errors) -> str | None:
    """Returns a fault if the mean of all errors of an array is not 0."""
    for errors_UMN in errors.values():
        z = abs(errors_UMN.mean()) * errors_UMN.size**0.5
        if not z <= MAX_Z:
            return f"the mean over {errors_UMN.size} elements is {z:.1f} standard errors off"
    return None


def _variance(errors: Errors) -> str | None:
    """Returns a fault if sums of n errors along a line of an array do not have the variance n."""
    lines: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "rows": lambda x_UMN: x_UMN.sum(2),
        "columns": lambda x_UMN: x_UMN.sum(1),
        "diagonals": lambda x_UMN: np.trace(x_UMN[:, :, :NUM_ROWS], axis1=1, axis2=2)[:, None],
        "whole arrays": lambda x_UMN: x_UMN.sum((1, 2))[:, None],
    }
    for errors_UMN in errors.values():
        for kind, total in lines.items():
            num_errors = total(np.ones_like(errors_UMN[:1]))
            squares = total(errors_UMN) ** 2 / num_errors
            # A sum of many independent errors is normal: its square has the variance 2.
            z = abs(squares.mean() - 1) * (squares.size / 2) ** 0.5
            if not z <= MAX_Z:
                return f"the variance of the sums of {kind} is {z:.1f} standard errors off"
    return None


def _correlation(errors: Errors) -> str | None:
    """Returns a fault if the errors of two elements are correlated, at any distance."""
    padded = (2 * NUM_ROWS, 2 * NUM_COLUMNS)  # so that distances do not wrap around
    spectra = {one: np.fft.rfft2(errors_UMN, padded) for one, errors_UMN in errors.items()}
    ones = np.fft.rfft2(np.ones((NUM_ROWS, NUM_COLUMNS)), padded)
    num_pairs_MN = np.fft.irfft2(np.abs(ones) ** 2, padded)
    for first, second, apart in itertools.product(spectra, spectra, (0, 1, 2, FAR)):
        a, b = spectra[first][apart:], spectra[second][: NUM_UPDATES - apart]
        products_MN = np.fft.irfft2((a * b.conj()).sum(0), padded)
        # Where no pair of elements has a distance, there are no products.
        num_products_MN = np.maximum(num_pairs_MN, 1) * (NUM_UPDATES - apart)
        z_MN = np.abs(products_MN) / num_products_MN**0.5
        if first == second and apart == 0:
            z_MN[0, 0] = 0  # of an element with itself
        if not z_MN.max() <= MAX_Z:
            at = np.unravel_index(z_MN.argmax(), z_MN.shape)
            # The second half of the distances are negative.
            sizes = np.array([NUM_ROWS, NUM_COLUMNS])
            distance = ((at + sizes) % (2 * sizes) - sizes).tolist()
            return (
                f"the errors of two {_kind(first, second, apart)} are correlated, at the distance "
                f"{distance} by {z_MN.max():.1f} standard errors"
            )
    return None


def _kind(first: tuple[int, str], second: tuple[int, str], apart: int) -> str:
    """Returns what two sets of errors are: elements of one array, or of several."""
    if apart:
        return "updates"
    if first == second:
        return "elements of an array"
    return "moments of an array" if first[1] == second[1] else "arrays"


def large_arrays() -> str | None:
    """Law: elements that are a multiple of 2^16 apart are rounded independently."""
    values = np.full((8, 2**16), 1 + 2.0**-8, np.float32)  # in the middle of 1 and the next number
    with jax.enable_x64(False):
        drawn = jax.jit(lambda x: optim.round_to(x, jnp.bfloat16, jnp.uint32(0)))(values)
    fault, errors = errors_of(values, np.asarray(drawn))
    if fault:
        return fault
    z = errors @ errors.T / 2**8
    np.fill_diagonal(z, 0)
    if not np.abs(z).max() <= MAX_Z:
        return f"elements 2^16 apart are correlated, by {np.abs(z).max():.1f} standard errors"
    return None


# ---- single values ----

# bits of float32: exact ones, those next to exact ones, next to a power of two, of all exponents
# from the smallest subnormal number to the largest
EXACT_BITS = (0x0000, 0x3F80, 0x4049, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80)
EXPONENT_BITS = (0x0000, 0x0001, 0x007F, 0x0080, 0x2000, 0x3F7F, 0x3F80, 0x3FFF, 0x4049, 0x7F7E)
SHARES = (0x0001, 0x0100, 0x2000, 0x8000, 0xC000, 0xFF00, 0xFFFF)  # of 2^16
NAN_BITS = (0x7FC00000, 0x7FFFFFFF, 0x7F800001)  # no rounding may carry out of their mantissa


def rounded_values() -> str | None:
    """Law: a value of any magnitude and sign is rounded up at its share; exact values stay."""
    exact = [upper << 16 for upper in EXACT_BITS]
    inexact = [(upper << 16) + share for upper in EXPONENT_BITS for share in SHARES]
    bits_V = np.array([*exact, *inexact], np.uint32)
    bits_V = np.concatenate([bits_V, bits_V | np.uint32(0x80000000), np.uint32(NAN_BITS)])
    values_V = bits_V.view(np.float32)
    with jax.enable_x64(False):
        seeds = jax.random.bits(jax.random.key(0), NUM_SEEDS, jnp.uint32)
        round_all = jax.vmap(lambda seed: optim.round_to(values_V, jnp.bfloat16, seed))
        drawn_SV = np.asarray(jax.jit(round_all)(seeds))
        again_SV = np.asarray(jax.jit(round_all)(seeds))
    # As bits: comparisons of subnormal numbers may call them equal to zero.
    drawn_SV, again_SV = drawn_SV.view(np.uint16), again_SV.view(np.uint16)
    if (drawn_SV != again_SV).any():
        return "one seed gives different numbers"
    is_nan_V = np.isnan(values_V)
    if not np.isnan(drawn_SV[:, is_nan_V].view(jnp.bfloat16).astype(np.float32)).all():
        return "NaN is rounded to a number"
    bits_V, values_V, drawn_SV = bits_V[~is_nan_V], values_V[~is_nan_V], drawn_SV[:, ~is_nan_V]
    lower_V, share_V = bits_V >> 16, (bits_V & 0xFFFF) / 2**16
    is_up_SV = drawn_SV != lower_V
    for value, lower, share, drawn_S, is_up_S in zip(
        values_V, lower_V, share_V, drawn_SV.T, is_up_SV.T, strict=True
    ):
        if is_up_S.any() and (share == 0 or (drawn_S[is_up_S] != lower + 1).any()):
            return f"{value:.9g} is not rounded to a neighbour"
        expected = NUM_SEEDS * share
        deviation = (expected * (1 - share)) ** 0.5
        # Rare events are not normal: at least this many are allowed.
        if not abs(is_up_S.sum() - expected) <= MAX_Z * max(deviation, 1):
            return (
                f"{value:.9g} is rounded up {is_up_S.sum()} times of {NUM_SEEDS}, "
                f"not {expected:.6g}"
            )
    return None
