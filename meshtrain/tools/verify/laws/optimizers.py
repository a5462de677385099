"""Laws of the optimizers and of the learning-rate schedule: they compute what plain formulas do."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config.schema import LEARNING_RATE_SCHEDULES, OptimConfig
from meshtrain.optim import base as optim
from meshtrain.optim import muon as optim_muon
from meshtrain.optim import others
from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.reference import model as reference_model

TOLERANCE = 1e-10
RATES = (1e-2, 3e-2, 2e-2)

ADAMW = "meshtrain.optim.base:adamw"


def schedule(c: Mapping[str, Any]) -> str | None:
    """Law: each kind of learning-rate schedule follows its formula in the reference."""
    keys, num_steps = [field.name for field in fields(OptimConfig)], 20
    for kind in LEARNING_RATE_SCHEDULES:
        for warmup in (0, 5):
            section = {**c, "schedule": kind, "warmup_steps": warmup}
            cfg = OptimConfig(**{key: section[key] for key in keys})
            rates = optim.make_schedule(cfg, steps=num_steps)
            values = rates(jnp.arange(num_steps + 2))
            for step, actual in enumerate(np.broadcast_to(values, num_steps + 2)):
                expected = reference_model.learning_rate(step, section, num_steps)
                if not abs(actual - expected) <= 1e-6 * c["learning_rate"]:
                    where = f"{kind}, {warmup} steps of warm-up, step {step} of {num_steps}"
                    return f"{where}: {actual:.9g} is not {expected:.9g}"
    return None


def adamw(c: Mapping[str, Any]) -> str | None:
    """Law: AdamW computes the same parameters as the reference."""
    random = np.random.default_rng(0)
    # Whether a parameter decays depends on the last key of its path, not on the others.
    names = ("kernel", *c["no_decay"])
    params = {f"{outer}/{name}": random.normal(size=64) for outer in names for name in names}
    grads = [
        {path: random.normal(size=64) * 10 ** random.uniform(-9, 1, 64) for path in params}
        for _ in RATES
    ]
    optimizer = optim.adamw(
        lambda number: jnp.array(RATES)[number],
        b1=c["b1"],
        b2=c["b2"],
        epsilon=c["epsilon"],
        weight_decay=c["weight_decay"],
        no_decay=c["no_decay"],
    )
    expected = reference_model.adamw(params, grads, list(RATES), c)
    actual = _nested(params)
    state = optimizer.init(actual)
    for grad in grads:
        updates, state = optimizer.update(_nested(grad), state, actual)
        actual = jax.tree.map(lambda leaf, update: leaf + np.asarray(update), actual, updates)
    return _difference(actual, _nested(expected))


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a dict of dicts from paths of two names."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        outer, name = path.split("/")
        nested.setdefault(outer, {})[name] = value
    return nested


def _difference(actual: Any, expected: Any) -> str | None:
    """Returns the first parameter that differs."""
    _, fault = certificate.compare(
        {"parameters": actual},
        {"parameters": expected},
        tolerance=TOLERANCE,
        where="in the reference",
    )
    return fault


# ---- optimizers that work on matrices: a plain implementation in numpy, matrix by matrix ----

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


def muon(c: Mapping[str, Any]) -> str | None:
    """Law: Muon orthogonalizes each layer and expert by itself; other arrays have AdamW."""
    keys = {"momentum": 0.95, "ns_steps": optim_muon.NS_STEPS, "rms": 0.2, **_keys_of(c)}
    axes = {name: names for name, (names, _) in PARAMS.items()}
    optimizer = optim_muon.muon(_rates, axes=axes, **keys)
    return _three_updates_differ(optimizer, keys, _numpy_muon)


def lion(c: Mapping[str, Any]) -> str | None:
    """Law: Lion adds the sign of the interpolated gradient, and decays like AdamW."""
    keys = _keys_of(c)
    return _three_updates_differ(others.lion(_rates, **keys), keys, _numpy_lion)


# By `optim.build`; each with the section `optim`.
LAWS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "meshtrain.optim.muon:muon": muon,
    "meshtrain.optim.others:lion": lion,
}


def _keys_of(c: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the optimizer itself."""
    names = ("b1", "b2", "epsilon", "weight_decay", "no_decay", "momentum", "ns_steps", "rms")
    return {name: c[name] for name in names if name in c}


def _rates(number: jax.Array) -> jax.Array:
    return jnp.array(RATES)[number]


def _three_updates_differ(
    optimizer: Any, keys: Mapping[str, Any], reference: Callable[..., np.ndarray]
) -> str | None:
    """Returns the first parameter that differs from `reference` after three updates, or None."""
    random = np.random.default_rng(0)
    initial = {name: random.normal(size=shape) for name, (_, shape) in PARAMS.items()}
    grads = [
        {name: random.normal(size=leaf.shape) for name, leaf in initial.items()} for _ in RATES
    ]
    params, state = initial, optimizer.init(initial)
    for grad in grads:
        updates, state = jax.jit(optimizer.update)(grad, state, params)
        params = {name: leaf + np.asarray(updates[name]) for name, leaf in params.items()}
    expected = {
        name: reference(name, leaf, [grad[name] for grad in grads], **keys)
        for name, leaf in initial.items()
    }
    return _difference(params, expected)


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
