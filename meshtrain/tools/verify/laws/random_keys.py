"""Law: the random keys of a step are distinct, across steps, micro-batches and batch shards."""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.config.build import RunParts
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.metrics import weighted
from meshtrain.models.base import Model
from meshtrain.program import assemble

NUM_BUCKETS = 2**20  # a key selects one; two of 48 keys select the same with a probability of 0.1 %
NUM_MICROBATCHES, STEPS = 3, 2


def repeated(raw: Mapping[str, Any]) -> str | None:
    """Law: no two calls of a loss get the same key, in two steps of the train step."""
    raw = copy.deepcopy(dict(raw))
    num_devices = jax.device_count()
    global_batch = num_devices * NUM_MICROBATCHES
    raw["mesh"] = {**dict.fromkeys(AXES, 1), "data": num_devices}
    raw["train"].update(
        global_batch=global_batch,
        num_microbatches=NUM_MICROBATCHES,
        zero_stage=3,
        remat="none",
    )
    raw["optim"].update(clip_norm=np.inf)
    cfg = parse(raw, num_devices=num_devices)
    program = assemble(cfg, RunParts(_probe(), lambda _: optax.sgd(global_batch)))
    batch = {"x": np.ones(global_batch)}
    with program.active():
        state = program.initial_state(cfg.train.seed)
        step = program.compile(batch)
        for _ in range(STEPS):
            state, _ = step(state, batch)
    counts = -np.asarray(state.params["buckets"])  # gradients of a mean, times the learning rate
    most = int(round(counts.max()))
    if counts.max() > 1.5:
        return f"{most} calls of the loss in {STEPS} steps got the same random key"
    expected = STEPS * NUM_MICROBATCHES * num_devices
    num_keys = round(counts.sum())
    return None if num_keys == expected else f"{num_keys} keys in {STEPS} steps, not {expected}"


def _probe() -> Model:
    """Returns a model whose gradient counts the keys.

    Its loss is one parameter, chosen by the key.
    """

    def loss(params, batch, key):
        bucket = 0 if key is None else jax.random.bits(key, (), jnp.uint32) % NUM_BUCKETS
        # Each call has one row: the sum over its rows adds the parameter once.
        return weighted(params["buckets"][bucket] * batch["x"])

    return Model(
        init=lambda key: {"buckets": jnp.zeros(NUM_BUCKETS)},
        axes={"buckets": (None,)},
        loss=loss,
    )
