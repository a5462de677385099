"""Epochs of 19 rows: their batches, and a linear model that logs which rows it has seen."""

import jax.numpy as jnp
import numpy as np

import meshtrain
from meshtrain.models.base import Model
from meshtrain.train import train
from tests.lib.configs import tiny_config

NUM_ROWS = 19  # an epoch: batches of 8, 8 and 3 rows


def linear():
    """Returns a linear model whose loss is weighed by `weights`; the mean of `row` is logged."""

    def loss(params, batch, key):
        losses = jnp.square(batch["x"] @ params["w"] - batch["y"])
        return meshtrain.weighted(losses, batch["weights"], row=batch["row"])

    return Model(lambda key: {"w": jnp.zeros(4)}, {"w": ("embed",)}, loss=loss)


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 4)).astype(np.float32)
    return {
        "x": x,
        "y": x.sum(1),
        "row": np.arange(NUM_ROWS, dtype=np.float32),
        "weights": np.ones(NUM_ROWS, np.float32),
    }


def batches(size=8, *, process=0, num_processes=1):
    """Returns an epoch; a process has every `num_processes`-th part of each batch of 8."""
    parts = [{k: v[at : at + 8] for k, v in rows().items()} for at in range(0, NUM_ROWS, 8)]
    return [
        {k: np.array_split(v, num_processes)[process] for k, v in part.items()} for part in parts
    ]


def settings(**changes):
    c = tiny_config()
    c.train.update({"global_batch": 8, **changes})
    c.optim.update(schedule="constant", learning_rate=0.1)
    c.eval.batches = 0
    return c


def logged(c, data, **options):
    found = []
    result = train(c, model=linear(), data=data, on_metrics=found.append, **options)
    return result, found
