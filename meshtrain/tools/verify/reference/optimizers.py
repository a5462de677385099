"""Optimizers and learning rates in plain numpy, one array at a time, written from their papers.

Each optimizer is a function (leaf, param, grad, state, c, rate) -> (new parameter, new state). It
computes one update with the learning rate `rate`. `c` has the keys of section `optim`; the state is
{} before the first update, and then has the names of the paper. Weight decay is decoupled, as in
AdamW: a parameter loses rate x weight_decay of itself, whatever its gradient is.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Section = Mapping[str, Any]  # of a config
State = dict[str, Any]

# T number of the update, from 1; M rows and N columns of a matrix

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # Keller Jordan's coefficients
NS_EPSILON = 1e-8  # added to the norm by which a matrix is divided; 1e-7 in Jordan's code
ADAFACTOR_EPSILON_1 = 1e-30  # added to squared gradients
ADAFACTOR_EPSILON_2 = 1e-3  # smallest size of a parameter, for the size of its update
ADAFACTOR_CLIP = 1.0  # largest RMS of an update, relative to the parameter


class Leaf(NamedTuple):
    """A parameter, and how the optimizers that work on matrices see it."""

    names: tuple[str | None, ...]  # of its dims
    shape: tuple[int, ...]
    num_stacked: int = 0  # leading dims that number arrays: layers, experts
    # of the dims after them, those that are the rows of a matrix; (): this is no matrix
    rows: tuple[int, ...] = ()

    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the dims of an array that are rows, and those that are columns."""
        dims = range(len(self.shape) - self.num_stacked)
        return self.rows, tuple(dim for dim in dims if dim not in self.rows)

    def matrix_shape(self) -> tuple[int, int]:
        shape = self.shape[self.num_stacked :]
        rows, columns = self.sides()
        return math.prod(shape[dim] for dim in rows), math.prod(shape[dim] for dim in columns)


def decay_of(path: str, c: Section) -> float:
    """Returns the weight decay of the parameter with this path, whose last name decides."""
    return 0.0 if path.split("/")[-1] in c["no_decay"] else c["weight_decay"]


def adamw(leaf: Leaf, param, grad, state: State, c: Section, *, rate: float, decay: float):
    """Computes AdamW (arXiv 1711.05101, Algorithm 2)."""
    t = state.get("t", 0) + 1
    m = c["b1"] * state.get("m", 0.0) + (1 - c["b1"]) * grad
    v = c["b2"] * state.get("v", 0.0) + (1 - c["b2"]) * grad**2
    m_hat = m / (1 - c["b1"] ** t)
    v_hat = v / (1 - c["b2"] ** t)
    step = m_hat / (np.sqrt(v_hat) + c["epsilon"]) + decay * param
    return param - rate * step, {"t": t, "m": m, "v": v}


def lion(leaf: Leaf, param, grad, state: State, c: Section, *, rate: float, decay: float):
    """Computes Lion (arXiv 2302.06675, Algorithm 2): b1 interpolates, b2 is of the moment."""
    m = state.get("m", 0.0)
    step = np.sign(c["b1"] * m + (1 - c["b1"]) * grad) + decay * param
    m = c["b2"] * m + (1 - c["b2"]) * grad
    return param - rate * step, {"m": m}


def muon(leaf: Leaf, param, grad, state: State, c: Section, *, rate: float, decay: float):
    """Computes Muon (arXiv 2502.16982, Algorithm 1 and section 2.2) for matrices, AdamW for others.

    The momentum has the look-ahead of Nesterov, as in Keller Jordan's code (2024).
    """
    if not leaf.rows:
        return adamw(leaf, param, grad, state, c, rate=rate, decay=decay)
    momentum = c.get("momentum", 0.95)
    m = momentum * state.get("m", 0.0) + grad
    look_ahead = momentum * m + grad

    def orthogonal(matrix_MN):
        size = math.sqrt(max(matrix_MN.shape))
        return c.get("rms", 0.2) * size * _newton_schulz(matrix_MN, c.get("ns_steps", 5))

    step = _of_each_matrix(leaf, orthogonal, look_ahead) + decay * param
    return param - rate * step, {"m": m}


def _newton_schulz(x_MN: np.ndarray, num_steps: int) -> np.ndarray:
    """Returns about U V^T of the SVD of a matrix, by quintic iterations."""
    a, b, c = NEWTON_SCHULZ
    x_MN = x_MN / (np.linalg.norm(x_MN) + NS_EPSILON)
    for _ in range(num_steps):
        square_MM = x_MN @ x_MN.T
        x_MN = a * x_MN + (b * square_MM + c * square_MM @ square_MM) @ x_MN
    return x_MN


def _of_each_matrix(leaf: Leaf, function: Callable, array: np.ndarray) -> np.ndarray:
    """Returns what `function` returns for each matrix in an array of the parameter's shape."""
    rows, columns = leaf.sides()
    result = np.empty_like(array)
    for index in np.ndindex(*leaf.shape[: leaf.num_stacked]):
        rows_first = array[index].transpose(rows + columns)
        of_matrix = function(rows_first.reshape(leaf.matrix_shape())).reshape(rows_first.shape)
        result[index] = of_matrix.transpose(np.argsort(rows + columns))
    return result


def adafactor(leaf: Leaf, param, grad, state: State, c: Section, *, rate: float, decay: float):
    """Computes Adafactor (arXiv 1804.04235, Algorithm 4) for each layer and expert by itself.

    The second moment is the product of those of rows and columns, divided by their mean. Means
    take the place of the paper's sums, which changes nothing.
    """
    t = state.get("t", 0) + 1
    beta = 1 - t ** -c.get("decay_rate", 0.8)
    min_size = c.get("min_dim_size_to_factor", 128)
    shape = _factored_shape(leaf, min_size)
    dims = _factored_dims(shape, min_size)

    new_param = np.empty_like(param)
    new_state: State = {"t": t} if dims else {"t": t, "v": np.empty_like(param)}
    for index in np.ndindex(*leaf.shape[: leaf.num_stacked]):
        own_shape = param[index].shape
        x, g = param[index].reshape(shape), grad[index].reshape(shape)
        squares = g**2 + ADAFACTOR_EPSILON_1
        if dims:
            rows, columns = state.get(index, (0.0, 0.0))
            rows = beta * rows + (1 - beta) * squares.mean(dims[0], keepdims=True)
            columns = beta * columns + (1 - beta) * squares.mean(dims[1], keepdims=True)
            v = rows * columns / rows.mean(dims[1], keepdims=True)
            new_state[index] = rows, columns
        else:
            before = state["v"][index].reshape(shape) if state else 0.0
            v = beta * before + (1 - beta) * squares
            new_state["v"][index] = v.reshape(own_shape)
        update = g / np.sqrt(v)
        update = update / max(1.0, _rms(update) / ADAFACTOR_CLIP)
        update = update * max(ADAFACTOR_EPSILON_2, _rms(x))
        new_param[index] = (x - rate * (update + decay * x)).reshape(own_shape)
    return new_param, new_state


def _rms(x: np.ndarray) -> float:
    return np.sqrt(np.mean(x**2))


def _factored_shape(leaf: Leaf, min_size: int) -> tuple[int, ...]:
    """Returns the shape of one array: as a matrix, if only this makes both dims large enough.

    Elements keep their order, so the dims of the rows must be the first.
    """
    shape = leaf.shape[leaf.num_stacked :]
    is_matrix = leaf.rows and leaf.rows == tuple(range(len(leaf.rows)))
    if not is_matrix or _factored_dims(shape, min_size):
        return shape
    matrix = leaf.matrix_shape()
    return matrix if min(matrix) >= min_size else shape


def _factored_dims(shape: tuple[int, ...], min_size: int) -> tuple[int, ...]:
    """Returns the two largest dims if both are large enough, else ()."""
    largest = sorted(range(len(shape)), key=lambda dim: shape[dim])[-2:]
    is_factored = len(largest) == 2 and shape[largest[0]] >= min_size
    return tuple(largest) if is_factored else ()


def schedule_free_adamw(
    leaf: Leaf, param, grad, state: State, c: Section, *, rate: float, decay: float
):
    """Computes schedule-free AdamW (arXiv 2405.15682, Algorithm 1); the parameters are y.

    As in the authors' code since version 1.3, the second moment has the bias correction, and not
    the learning rate, and the weight of an iterate is the square of the largest learning rate.
    """
    b1 = c["b1"]
    t = state.get("t", 0) + 1
    z = state.get("z", param)
    x = (param - (1 - b1) * z) / b1
    v = c["b2"] * state.get("v", 0.0) + (1 - c["b2"]) * grad**2
    v_hat = v / (1 - c["b2"] ** t)
    z = z - rate * (grad / (np.sqrt(v_hat) + c["epsilon"]) + decay * param)
    largest_rate = max(state.get("largest_rate", 0.0), rate)
    sum_of_weights = state.get("sum_of_weights", 0.0) + largest_rate**2
    share = largest_rate**2 / sum_of_weights if sum_of_weights else 0.0
    x = (1 - share) * x + share * z
    new_state = {"t": t, "v": v, "z": z}
    new_state |= {"largest_rate": largest_rate, "sum_of_weights": sum_of_weights}
    return (1 - b1) * z + b1 * x, new_state


# By `optim.build`.
OPTIMIZERS: dict[str, Callable[..., tuple[np.ndarray, State]]] = {
    "meshtrain.optim.base:adamw": adamw,
    "meshtrain.optim.muon:muon": muon,
    "meshtrain.optim.others:lion": lion,
    "meshtrain.optim.others:adafactor": adafactor,
    "meshtrain.optim.others:schedule_free_adamw": schedule_free_adamw,
}


def clipped(grads: dict[str, np.ndarray], clip_norm: float) -> dict[str, np.ndarray]:
    """Returns the gradients scaled to a global norm of at most `clip_norm` (arXiv 1211.5063)."""
    norm = math.sqrt(sum(float(np.sum(grad**2)) for grad in grads.values()))
    factor = 1.0 if norm <= clip_norm else clip_norm / norm
    return {path: grad * factor for path, grad in grads.items()}


def learning_rate(step: int, c: Section, steps: int) -> float:
    """Returns the learning rate at `step` of a run of `steps` steps, by an `optim` section.

    Warm-up is linear. "cosine" is that of arXiv 1608.03983 without restarts, "wsd" that of arXiv
    2404.06395.
    """
    peak, end, warmup = c["learning_rate"], c["final_fraction"], c["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    length = max(1, steps - warmup)
    progress = min(1.0, (step - warmup) / length)
    if c["schedule"] == "cosine":
        return peak * (end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)
    if c["schedule"] == "linear":
        return peak * (1 + (end - 1) * progress)
    if c["schedule"] == "wsd":
        decay = min(length, max(1, round(steps * c["decay_fraction"])))
        decayed = min(1.0, max(0.0, (step - warmup - (length - decay)) / decay))
        return peak * (1 + (end - 1) * decayed)
    return peak
