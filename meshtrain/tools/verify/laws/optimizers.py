"""Laws of the optimizers in optimizers.py: the parameters of a plain implementation in numpy, matrix by matrix."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.optim import muon as optim_muon
from meshtrain.optim import others
from meshtrain.tools.verify import certificate

TOLERANCE = 1e-10

RATES = (1e-2, 3e-2, 2e-2)

# (names of the dims, shape); L layers, E experts, H heads
PARAMS = {
    "kernel": (("layers", "embed", "mlp"), (3, 6, 10)),
    "query": (("layers", "embed", "heads", "head_dim"), (3, 6, 4, 5)),
    "out": (("layers", "heads", "head_dim", "embed"), (3, 4, 5, 6)),
    "expert": (("layers", "expert", "embed", None), (3, 2, 6, 4)),
    "router": (("layers", "embed", None), (3, 6, 2)),
    "bias": (("layers", "heads", "head_dim"), (3, 4, 5)),
    "scale": (("embed",), (6,)),
    "tokens": (("vocab", "embed"), (12, 6)),
}

MATRICES = {"kernel": 1, "query": 1, "out": 2, "expert": 1, "router": 1}  # dims that are rows

Arrays = dict[str, np.ndarray]


def muon(c: Mapping[str, Any]) -> str | None:
    """Law: Muon orthogonalizes each layer and expert by itself, and uses AdamW for all that is no matrix."""
    keys = {"momentum": 0.95, "ns_steps": optim_muon.NS_STEPS, "rms": 0.2, **_keys_of(c)}
    return _difference(optim_muon.muon, keys, _numpy_muon)


def lion(c: Mapping[str, Any]) -> str | None:
    """Law: Lion adds the sign of the interpolated gradient, and decays like AdamW."""
    return _difference(others.lion, _keys_of(c), _numpy_lion)


LAWS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "meshtrain.optim.muon:muon": muon,
    "meshtrain.optim.others:lion": lion,
}


def _keys_of(c: Mapping[str, Any]) -> dict[str, Any]:
    names = ("b1", "b2", "epsilon", "weight_decay", "no_decay", "momentum", "ns_steps", "rms")
    return {name: c[name] for name in names if name in c}


def _difference(build: Callable, keys: Mapping[str, Any], reference: Callable) -> str | None:
    """Returns the first parameter that differs after three updates, or None."""
    random = np.random.default_rng(0)
    params = {name: random.normal(size=shape) for name, (_, shape) in PARAMS.items()}
    grads = [{name: random.normal(size=leaf.shape) for name, leaf in params.items()} for _ in RATES]
    axes = {name: names for name, (names, _) in PARAMS.items()}
    of_model = {"axes": axes} if build is optim_muon.muon else {}
    optimizer = build(lambda number: jnp.array(RATES)[number], **keys, **of_model)
    found, state = params, optimizer.init(params)
    for grad in grads:
        updates, state = jax.jit(optimizer.update)(grad, state, found)
        found = {name: leaf + np.asarray(updates[name]) for name, leaf in found.items()}
    expected = {
        name: reference(name, leaf, [grad[name] for grad in grads], **keys)
        for name, leaf in params.items()
    }
    _, fault = certificate.compare(
        {"parameters": found}, {"parameters": expected}, tolerance=TOLERANCE
    )
    return fault and fault.removesuffix("on one device") + "in the reference"


def _numpy_muon(name, params, grads, *, momentum, ns_steps, rms, **adamw):
    if name not in MATRICES:
        return _numpy_adamw(name, params, grads, **adamw)
    decay = 0 if name in adamw["no_decay"] else adamw["weight_decay"]
    num_stacked = 2 if name == "expert" else 1
    m = np.zeros_like(params)
    for grad, rate in zip(grads, RATES, strict=True):
        m = momentum * m + grad
        look_ahead, step = grad + momentum * m, np.empty_like(params)
        for index in np.ndindex(*params.shape[:num_stacked]):
            shape = look_ahead[index].shape
            rows = int(np.prod(shape[: MATRICES[name]]))
            x = look_ahead[index].reshape(rows, -1)
            size = max(x.shape) ** 0.5
            x = x / np.linalg.norm(x)
            for _ in range(ns_steps):  # Keller Jordan's coefficients
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            step[index] = (rms * size * x).reshape(shape)
        params = params - rate * (step + decay * params)
    return params


def _numpy_adamw(name, params, grads, *, b1, b2, epsilon, weight_decay, no_decay):
    decay = 0 if name in no_decay else weight_decay
    m = v = np.zeros_like(params)
    for t, (grad, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        params = params - rate * (step + decay * params)
    return params


def _numpy_lion(name, params, grads, *, b1, b2, weight_decay, no_decay, **_):
    decay = 0 if name in no_decay else weight_decay
    m = np.zeros_like(params)
    for grad, rate in zip(grads, RATES, strict=True):
        step = np.sign(b1 * m + (1 - b1) * grad)
        m = b2 * m + (1 - b2) * grad
        params = params - rate * (step + decay * params)
    return params
