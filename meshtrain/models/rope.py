"""Rotary position embeddings (RoFormer, arXiv 2104.09864), scaled for longer sequences."""

import math

import jax
import jax.numpy as jnp
import numpy as np

# B batch, S sequence, H heads, K head dim, k = K / 2 pairs of dims

# What follows each kind of model.rope_scaling. An ATTENTION_FACTOR of 0 is 0.1 ln(FACTOR) + 1.
SCALINGS = {
    "linear": ("FACTOR",),
    "llama3": ("FACTOR", "LOW_FREQ_FACTOR", "HIGH_FREQ_FACTOR", "ORIGINAL_LENGTH"),
    "yarn": (
        "FACTOR",
        "BETA_FAST",
        "BETA_SLOW",
        "ORIGINAL_LENGTH",
        "ATTENTION_FACTOR",
        "TRUNCATE",
    ),
    "dynamic": ("FACTOR", "ORIGINAL_LENGTH"),
    # Then K / 2 divisors of the frequencies in rows of up to ORIGINAL_LENGTH, and K / 2 in others.
    "longrope": ("ORIGINAL_LENGTH", "ATTENTION_FACTOR", "SHORT...", "LONG..."),
}


def frequencies(
    head_dim: int, theta: float, scaling: tuple = (), row_length: int | jax.Array = 0
) -> np.ndarray | jax.Array:
    """Returns the frequencies (K / 2,), in radians per position: theta^(-2k/K), K = `head_dim`.

    `scaling` is model.rope_scaling. Only "dynamic" and "longrope" depend on `row_length`: the
    number of tokens in a row, packed or padded or not; with a key/value cache, of those so far.
    Cached keys keep the frequencies of their own call, so generation beyond the original length
    differs from one pass over the whole row. With "dynamic", transformers does the same.
    """
    frequency_k = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if not scaling:
        return frequency_k
    kind, *numbers = scaling
    if kind == "linear":  # arXiv 2306.15595
        return frequency_k / numbers[0]
    if kind == "llama3":
        return _llama3(frequency_k, *numbers)
    if kind == "yarn":
        return _yarn(frequency_k, theta, numbers)
    if kind == "longrope":
        return _longrope(frequency_k, row_length, numbers)
    return _dynamic(frequency_k, row_length, *numbers)


def _llama3(frequency_k, factor, low, high, length):
    """Divides frequencies with fewer than `low` rotations in `length` positions by `factor`.

    Those with more than `high` rotations are kept.

    In between it interpolates linearly in the number of rotations (Llama 3.1, arXiv 2407.21783).
    """
    rotations_k = length * frequency_k / (2 * np.pi)
    unscaled_k = np.clip((rotations_k - low) / (high - low), 0, 1)
    return frequency_k * (unscaled_k + (1 - unscaled_k) / factor)


def _yarn(frequency_k, theta, numbers):
    """Divides frequencies with fewer than `slow` rotations in `length` positions by `factor`.

    Those with more than `fast` rotations are kept.

    In between it interpolates linearly in k (YaRN, arXiv 2309.00071). `truncate` rounds both ends
    of that range outwards to integers, as the authors' code does, and transformers by default.
    """
    factor, fast, slow, length, _, truncate = numbers
    half = len(frequency_k)
    first, last = (
        half * math.log(length / (2 * math.pi * rotations)) / math.log(theta)
        for rotations in (fast, slow)
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    divided_k = np.clip((np.arange(half) - first) / ((last - first) or 0.001), 0, 1)
    return frequency_k * (1 - divided_k + divided_k / factor)


def _dynamic(frequency_k, row_length, factor, length):
    """Divides frequencies by powers of n, the lowest by n itself.

    n = factor * row_length / length - (factor - 1).

    This replaces theta by theta * n^(K/(K-2)) (dynamic NTK, arXiv 2309.00071); rows of up to
    `length` are unchanged.
    """
    maximum = max if isinstance(row_length, int) else jnp.maximum
    divisor = factor * maximum(row_length / length, 1) - (factor - 1)
    return frequency_k * divisor ** -np.linspace(0, 1, len(frequency_k))


def _longrope(frequency_k, row_length, numbers):
    """Divides each frequency by a factor of its own (LongRoPE, arXiv 2402.13753)."""
    length, _, *factors = numbers
    short_k, long_k = np.split(np.asarray(factors, np.float64), 2)
    return select(row_length > length, frequency_k / long_k, frequency_k / short_k)


def attention_factor(scaling: tuple) -> float:
    """Returns the factor of cos and sin: 1 except with YaRN (arXiv 2309.00071) and LongRoPE."""
    if scaling and scaling[0] == "longrope":
        return scaling[2]
    if not scaling or scaling[0] != "yarn":
        return 1.0
    _, factor, _, _, _, given, _ = scaling
    return given or 0.1 * math.log(factor) + 1


def rope(
    x_BSHK: jax.Array,
    positions_BS: jax.Array,
    frequency_k: jax.Array,
    factor: float | jax.Array,
    *,
    interleaved: bool = False,
) -> jax.Array:
    """Rotates each pair of dims (k, k + R/2) by position * frequency, and scales it by `factor`.

    R is twice the number of frequencies; dims from R on stay as they are. `interleaved` pairs are
    (2 k, 2 k + 1): they are returned at k and k + R/2. Queries and keys are reordered alike, so
    their products do not change.
    """
    half = frequency_k.shape[-1]
    if 2 * half < x_BSHK.shape[-1]:
        x_BSHR, rest = x_BSHK[..., : 2 * half], x_BSHK[..., 2 * half :]
        rotated = rope(x_BSHR, positions_BS, frequency_k, factor, interleaved=interleaved)
        return jnp.concatenate([rotated, rest], axis=-1)
    if interleaved:
        x_BSHK = jnp.concatenate([x_BSHK[..., ::2], x_BSHK[..., 1::2]], axis=-1)
    dtype = jnp.promote_types(x_BSHK.dtype, jnp.float32)
    frequency_k = jnp.asarray(frequency_k, dtype)
    angle_BS1k = positions_BS[:, :, None, None].astype(dtype) * frequency_k[None, None, None, :]
    sin_BS1k, cos_BS1k = factor * jnp.sin(angle_BS1k), factor * jnp.cos(angle_BS1k)
    a_BSHk, b_BSHk = x_BSHK[..., :half], x_BSHK[..., half:]
    rotated = jnp.concatenate(
        [a_BSHk * cos_BS1k - b_BSHk * sin_BS1k, b_BSHk * cos_BS1k + a_BSHk * sin_BS1k], axis=-1
    )
    return rotated.astype(x_BSHK.dtype)


def scaling_faults(scaling: tuple) -> list[str]:
    """Returns the fault of an invalid model.rope_scaling, or []."""
    kind, *numbers = scaling or ("linear", 1.0)
    name = f"model.rope_scaling={tuple(scaling)}"
    has_factors = kind == "longrope" and len(numbers) >= 4 and len(numbers) % 2 == 0
    has_values = has_factors or len(SCALINGS.get(kind, ())) == len(numbers)
    if not has_values or not _are_positive(kind, numbers):
        forms = [f"({', '.join([repr(key), *names])})" for key, names in SCALINGS.items()]
        return [
            f"{name}: use (), {', '.join(forms[:-1])}, or {forms[-1]}, with numbers above 0 "
            f"(ATTENTION_FACTOR 0: 0.1 ln(FACTOR) + 1; TRUNCATE: True or False)"
        ]
    if kind in ("yarn", "dynamic") and numbers[0] < 1:
        return [f"{name}: the factor is below 1, but {kind} extends the length; use 1 or more"]
    if kind == "llama3" and not numbers[1] < numbers[2]:
        return [f"{name}: the low factor is not below the high factor; swap them"]
    if kind == "yarn" and not numbers[2] < numbers[1]:
        return [f"{name}: BETA_SLOW is not below BETA_FAST; swap them"]
    return []


def with_num_factors(scaling: tuple, num_rotated: int) -> tuple:
    """Returns model.rope_scaling for heads of another size: longrope with fewer or more factors.

    The factors are interpolated; those of all other kinds do not depend on the size.
    """
    if not scaling or scaling[0] != "longrope" or len(scaling) - 3 == num_rotated // 2 * 2:
        return scaling
    kind, length, factor, *factors = scaling
    resized = []
    for given in np.split(np.asarray(factors), 2):
        at = np.linspace(0, len(given) - 1, num_rotated // 2)
        resized += np.interp(at, np.arange(len(given)), given).tolist()
    return kind, length, factor, *resized


def _are_positive(kind: str, numbers: list) -> bool:
    """Returns whether all numbers are positive.

    Of YaRN, the last two are a number of 0 or more, and a bool.
    """
    if kind == "yarn":
        *numbers, factor, truncate = numbers
        if factor != 0:
            numbers.append(factor)
        if not isinstance(truncate, bool):
            return False
    return all(isinstance(number, int | float) and number > 0 for number in numbers)


def select(condition: jax.Array | bool, if_true, if_false):
    """Returns one of two values, by a condition that may be traced."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return jnp.where(condition, if_true, if_false)
