"""Laws of the optimizers and of the learning-rate schedule: they compute what plain formulas do."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.config.schema import LEARNING_RATE_SCHEDULES, OptimConfig
from meshtrain.optim import base as optim
from meshtrain.optim import muon, others
from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.reference import optimizers as reference
from meshtrain.tools.verify.reference.optimizers import Leaf

# ---- learning rates ----

NUM_STEPS = 23  # of which a fifth, to decay, is no integer
FAR_BEYOND = (NUM_STEPS, NUM_STEPS + 1, 10 * NUM_STEPS, 10**6, 2**31 - 1)


def schedule(c: Mapping[str, Any]) -> str | None:
    """Law: each kind of learning-rate schedule follows its formula, also beyond the last step."""
    keys = [field.name for field in fields(OptimConfig)]
    steps = np.array([*range(NUM_STEPS), *FAR_BEYOND], np.int32)
    for kind in LEARNING_RATE_SCHEDULES:
        for warmup in (0, 5, NUM_STEPS + 3):
            section = {**c, "schedule": kind, "warmup_steps": warmup}
            cfg = OptimConfig(**{key: section[key] for key in keys})
            rates = optim.make_schedule(cfg, steps=NUM_STEPS)(steps)
            rates = np.broadcast_to(rates, steps.shape)
            for step, actual in zip(steps.tolist(), rates, strict=True):
                expected = reference.learning_rate(step, section, NUM_STEPS)
                if not abs(actual - expected) <= 1e-6 * c["learning_rate"]:
                    where = f"{kind}, {warmup} steps of warm-up, step {step} of {NUM_STEPS}"
                    return f"{where}: {actual:.9g} is not {expected:.9g}"
    return None


# ---- updates ----

BUILDERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "meshtrain.optim.base:adamw": optim.adamw,
    "meshtrain.optim.muon:muon": muon.muon,
    "meshtrain.optim.others:lion": others.lion,
    "meshtrain.optim.others:adafactor": others.adafactor,
    "meshtrain.optim.others:schedule_free_adamw": others.schedule_free_adamw,
}
# Relative to the largest value of a parameter. Adafactor's decay rate is in float32.
TOLERANCES = dict.fromkeys(BUILDERS, 1e-10) | {"meshtrain.optim.others:adafactor": 1e-6}

# Every kind of parameter: its path in the package's models, the names of its dims, a shape, the
# number of stacked dims, and those of the other dims that are the rows of a matrix.
LEAVES = {
    "tokens/embedding": Leaf(("vocab", "embed"), (12, 6)),
    "positions/embedding": Leaf((None, "embed"), (7, 6)),
    "output/kernel": Leaf(("embed", "vocab"), (6, 12)),
    "final_norm/scale": Leaf(("embed",), (6,)),
    "factor": Leaf((), ()),
    "patches/kernel": Leaf((None, None), (5, 6)),
    "layers/norm/scale": Leaf(("layers", "embed"), (3, 6), 1),
    "layers/query/kernel": Leaf(("layers", "embed", "heads", "head_dim"), (3, 6, 4, 3), 1, (0,)),
    "layers/query/bias": Leaf(("layers", "heads", "head_dim"), (3, 4, 3), 1),
    "layers/key/kernel": Leaf(("layers", "embed", "kv_heads", "head_dim"), (3, 6, 2, 3), 1, (0,)),
    "layers/key/lora_a": Leaf(("layers", "embed", None), (3, 6, 2), 1, (0,)),
    "layers/key/lora_b": Leaf(("layers", None, "kv_heads", "head_dim"), (3, 2, 2, 3), 1, (0,)),
    "layers/out/kernel": Leaf(("layers", "heads", "head_dim", "embed"), (3, 4, 3, 6), 1, (0, 1)),
    "layers/out/lora_a": Leaf(("layers", "heads", "head_dim", None), (3, 4, 3, 2), 1, (0, 1)),
    "layers/mixed/kernel": Leaf(("layers", "heads", "embed", "head_dim"), (3, 4, 6, 2), 1, (0, 2)),
    "layers/down/kernel": Leaf(("layers", "mlp", "embed"), (3, 10, 6), 1, (0,)),
    "layers/mlp/bias": Leaf(("layers", "mlp"), (3, 10), 1),
    "layers/router/kernel": Leaf(("layers", "embed", None), (3, 6, 2), 1, (0,)),
    "layers/gate/kernel": Leaf(("layers", "expert", "embed", None), (3, 2, 6, 5), 2, (0,)),
    "layers/gate/bias": Leaf(("layers", "expert"), (3, 2), 1),
    "experts/kernel": Leaf(("expert", None, "embed"), (2, 5, 6), 1, (0,)),
}
RATES = (1e-2, 3e-2, 5e-2, 4e-2, 4e-2, 1e-2, 2e-2)  # of the updates, as in warm-up and decay

# Values of all options that differ from the defaults and from each other.
OTHER_KEYS = {
    "b1": 0.7,
    "b2": 0.85,
    "epsilon": 1e-2,
    "weight_decay": 0.4,
    "no_decay": ("kernel", "layers"),  # "layers" is the name of no parameter, only of their parent
    "momentum": 0.8,
    "ns_steps": 3,
    "rms": 0.5,
    "decay_rate": 0.6,
    "min_dim_size_to_factor": 5,
}


def updates(c: Mapping[str, Any]) -> str | None:
    """Law: the optimizer of a section `optim` computes what its paper's formula does.

    Of every kind of parameter, in every update; with the keys of the section, and with others.
    """
    options = inspect.signature(BUILDERS[c["build"]]).parameters
    own = {key: c[key] for key in options if key in c and key != "learning_rate"}
    other = {key: OTHER_KEYS[key] for key in options if key in OTHER_KEYS}
    for keys in (own, other):
        fault = updates_with(c["build"], keys)
        if fault:
            return f"{fault}, with {keys}"
    return None


def updates_with(build: str, keys: Mapping[str, Any]) -> str | None:
    """Returns the first parameter that differs from the formula, or None."""
    params, grads = examples()
    actual = params_after_each_update(optimizer_of(build, keys), params, grads)
    state: dict[str, Any] = {path: {} for path in params}
    for number, rate in enumerate(RATES):
        for path, leaf in LEAVES.items():
            params[path], state[path] = reference.OPTIMIZERS[build](
                leaf,
                params[path],
                grads[path][number],
                state[path],
                keys,
                rate=rate,
                decay=reference.decay_of(path, keys),
            )
        _, fault = certificate.compare(
            {"parameters": {path: history[number] for path, history in actual.items()}},
            {"parameters": params},
            tolerance=TOLERANCES[build],
            where="in the reference",
        )
        if fault:
            return f"update {number + 1}: {fault}"
    return None


def optimizer_of(build: str, keys: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the optimizer of LEAVES with the learning rates RATES."""
    builder = BUILDERS[build]
    given = dict(keys)
    if "axes" in inspect.signature(builder).parameters:
        given["axes"] = nested({path: leaf.names for path, leaf in LEAVES.items()})
    return builder(lambda number: jnp.array(RATES)[number], **given)


def examples() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns parameters of LEAVES, and their gradients of all updates.

    Gradients are of all sizes. Some are zero, as of frozen parts, or of experts and words that a
    batch does not contain.
    """
    random = np.random.default_rng(0)
    params = {path: random.normal(size=leaf.shape) for path, leaf in LEAVES.items()}
    grads = {}
    for path, leaf in LEAVES.items():
        shape = (len(RATES), *leaf.shape)
        grads[path] = random.normal(size=shape) * 10 ** random.uniform(-6, 1, shape)
    grads["tokens/embedding"][:, :4] = 0
    grads["layers/gate/kernel"][:3, :, 1] = 0
    grads["layers/down/kernel"][:, 2] = 0
    grads["layers/mlp/bias"][2] = 0
    return params, grads


def params_after_each_update(
    optimizer: optax.GradientTransformation, params: Mapping[str, Any], grads: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the parameters by path, with a leading dim for the updates."""

    def update(carry, grads):
        params, state = carry
        changes, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, changes)
        return (params, state), params

    def run(params, grads):
        return jax.lax.scan(update, (params, optimizer.init(params)), grads)[1]

    history = jax.device_get(jax.jit(run)(nested(params), nested(grads)))
    leaves = jax.tree.leaves_with_path(history)
    return {certificate.name_of(path): leaf for path, leaf in leaves}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of dicts from paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree
