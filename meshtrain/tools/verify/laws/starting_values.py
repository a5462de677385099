"""Laws of the starting values of parameters: their distribution, and their independence.

`normal_initializer` draws the sum of four uniform numbers, so mean, variance, skewness, kurtosis
and bounds are known, and with them the standard error of each statistic of n values. Right values
exceed MAX_Z standard errors once in 1.7 million statistics.
"""

import math
from collections.abc import Mapping

import numpy as np

# n values of a leaf, K slices along a dim, U units: leaves, or layers of a stacked leaf

MAX_Z = 5.0  # standard errors
MAX_Z_OF_MANY = 7.0  # where the largest of thousands of statistics counts
BOUND = math.sqrt(12)  # standard deviations: four uniform numbers are at most 2 sqrt(3)
MIN_VALUES = 64  # statistics of fewer values are not nearly normal
PREFIX = 512  # values of a unit that are compared with those of others
STACK = "layers/"  # start of the paths of leaves with a dim of layers


def _moments(count: int = 4, num_points: int = 400) -> list[float]:
    """Returns E x^0 to E x^8 of the standardised sum of `count` uniform numbers."""
    density = np.ones(1)
    for _ in range(count):
        density = np.convolve(density, np.full(num_points, 1 / num_points))
    x = np.arange(len(density)) - (len(density) - 1) / 2
    x /= math.sqrt((density * x**2).sum())
    return [float((density * x**power).sum()) for power in range(9)]


MOMENTS = _moments()


def fault_of(
    leaves: Mapping[str, np.ndarray], stddevs: Mapping[str, float], constants: Mapping[str, float]
) -> str | None:
    """Returns the first fault of starting values, by path: their name, and what is wrong.

    Leaves in `constants` have that value everywhere, all others the deviation in `stddevs`.
    """
    units = {}
    for name, leaf in leaves.items():
        values = np.asarray(leaf, np.float64)
        if name in constants:
            # Rounded to the dtype of the parameter.
            if not np.allclose(values, constants[name], rtol=1e-2, atol=0):
                return f"{name}: starts with {values.ravel()[0]:.6g}, not {constants[name]:.6g}"
            continue
        z = values / stddevs[name]
        fault = _fault_of_distribution(z, stddevs[name]) or _fault_of_slices(z)
        if not fault and np.abs(z).max() > BOUND * 1.01:
            fault = f"an initial value is {np.abs(z).max():.2f} standard deviations, not below 3.46"
        if fault:
            return f"{name}: {fault}"
        layers = enumerate(z) if name.startswith(STACK) else [(None, z)]
        for number, layer in layers:
            units[name if number is None else f"{name} of layer {number}"] = layer.ravel()
    return _fault_of_pairs(units)


def _fault_of_distribution(z: np.ndarray, stddev: float) -> str | None:
    """Returns the fault of the moments of values divided by their standard deviation."""
    n = z.size
    for power, name in ((1, "mean"), (2, "variance"), (3, "skewness"), (4, "kurtosis")):
        expected = MOMENTS[power]
        error = math.sqrt((MOMENTS[2 * power] - expected**2) / n)
        found = float((z**power).mean())
        if n >= MIN_VALUES and abs(found - expected) > MAX_Z * error:
            if power <= 2:
                return (
                    f"initial standard deviation {z.std() * stddev:.3g} and mean "
                    f"{z.mean() * stddev:.3g}, not {stddev:.3g} and 0"
                )
            return f"initial values have a {name} of {found:.3g}, not {expected:.3g}"
    return None


def _fault_of_slices(z: np.ndarray) -> str | None:
    """Returns the fault of slices along a dim: other means or variances, or correlated values."""
    for dim, K in enumerate(z.shape):
        m = z.size // K
        if K < 2 or m < 2 or z.size < MIN_VALUES:
            continue
        slices = np.moveaxis(z, dim, 0).reshape(K, m)
        for power, name in ((1, "mean"), (2, "variance")):
            error = math.sqrt((MOMENTS[2 * power] - MOMENTS[power] ** 2) / m)
            squares = (((slices**power).mean(1) - MOMENTS[power]) / error) ** 2
            # The sum of K squares, each with mean 1; the variance of one is 2 + excess / m.
            excess = (squares.mean() - 1) * math.sqrt(K / (2 + 20 / m))
            # A sum of few squares has a longer tail than a normal distribution.
            if excess > MAX_Z_OF_MANY + 16 / K:
                return f"initial values of slices along dim {dim} differ in their {name}"
        neighbours = slices[1:] * slices[:-1]
        if abs(neighbours.sum()) > MAX_Z * math.sqrt(neighbours.size):
            return f"initial values are repeated: neighbours along dim {dim} are correlated"
        correlated = _correlated(slices)
        if correlated is not None:
            return (
                f"initial values are repeated: slices {correlated[0]} and {correlated[1]} along "
                f"dim {dim} are correlated"
            )
    return None


def _fault_of_pairs(units: Mapping[str, np.ndarray]) -> str | None:
    """Returns a pair of leaves, or layers, whose first values are correlated."""
    names = [name for name, values in units.items() if values.size >= MIN_VALUES]
    rows = np.zeros((len(names), PREFIX))
    for row, name in zip(rows, names, strict=True):
        first = units[name][:PREFIX]
        row[: first.size] = first
    correlated = _correlated(rows) if len(names) > 1 else None
    if correlated is None:
        return None
    a, b = (names[number] for number in correlated)
    return f"{a}: initial values are repeated: they are correlated with those of {b}"


def _correlated(rows: np.ndarray) -> tuple[int, int] | None:
    """Returns two rows whose correlation is not that of independent values, or None.

    A row may be padded with zeros. Only the first rows are compared with each other.
    """
    rows = rows[:PREFIX]
    sizes = (rows != 0).sum(1)
    # The products of few values have longer tails than a normal distribution.
    allowed = MAX_Z_OF_MANY + 20 / math.sqrt(max(1, int(sizes.min())))
    z = rows @ rows.T / np.sqrt(np.maximum(1, np.minimum(sizes[:, None], sizes[None])))
    np.fill_diagonal(z, 0)
    if np.abs(z).max() <= allowed:
        return None
    a, b = np.unravel_index(np.abs(z).argmax(), z.shape)
    return int(min(a, b)), int(max(a, b))
