"""The plain maths of training, on one device: what every layout, schedule and micro-batch must equal.

Nothing here goes through the trainer: no mesh, no rules, no scan, no micro-batches, no remat, no
masks between documents. Every document is a row of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.data.source import Batch
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params

# B batch, S sequence, N rows of documents


class Step(NamedTuple):
    """One optimizer step, as it should be."""

    means: dict[str, jax.Array]  # loss and what is reported beside it
    learning_rate: jax.Array | float
    norm: jax.Array  # () of the gradients, before clipping
    grads: Params  # as the optimizer gets them: means, clipped
    params: Params
    opt_state: Any


def run(function: Callable, *args: Any) -> Any:
    """Returns what the compiled function makes of these arguments, as numpy arrays."""
    return jax.device_get(jax.jit(function)(*args))


def blocks(model: Model, params: Params, batch: Any) -> jax.Array:
    """Returns what the layers make of the embedded batch, one after the other."""
    x = model.embed(params, batch)
    for number in range(len(jax.tree.leaves(params["layers"])[0])):
        stack = {**params["layers"], **model.constants}
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], stack)
        x = model.block(layer, x, batch)
    return x


def loss(model: Model, params: Params, batch: Any) -> Metrics:
    """Returns the model's own sums over the batch."""
    if model.block is None:
        return model.loss(params, batch, None)
    return model.head(params, blocks(model, params, batch), batch)


def make_step(
    model: Model, optimizer: optax.GradientTransformation, schedule: Callable
) -> Callable[..., Step]:
    """Returns the function (number, params, opt_state, batch, clip_norm) -> Step."""

    def step(number, params, opt_state, batch, clip_norm):
        def mean(params):
            sums = loss(model, params, batch)
            means = {"loss": sums.loss / sums.weight}
            return means["loss"], means | {k: v / sums.weight for k, v in sums.extra.items()}

        grads, means = jax.grad(mean, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, clip_norm / norm), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        return Step(means, schedule(number), norm, grads, params, opt_state)

    return step


def alone(rows: np.ndarray, weights: np.ndarray, separator: int | None, num_rows: int) -> Batch:
    """Returns every document of (B, S + 1) tokens as a row of its own, filled up with weightless ones.

    A document ends with `separator`, whose target counts nothing; None: each row is one document.
    `weights` (B, S) are those of the targets.
    """
    S = rows.shape[1] - 1
    tokens, targets = np.zeros((2, num_rows, S), np.int32)
    counted = np.zeros((num_rows, S), np.float32)
    number = 0
    for row, weight in zip(rows, weights, strict=True):
        start = 0
        for end in sorted({*(np.flatnonzero(row[:S] == separator) + 1), S}):
            tokens[number, : end - start] = row[start:end]
            targets[number, : end - start] = row[start + 1 : end + 1]
            counted[number, : end - start] = weight[start:end] * (row[start:end] != separator)
            number, start = number + 1, end
    return Batch(tokens, targets, counted)


def broken_laws(model: Model, params: Params, batch: Batch, vocab_size: int | None) -> list[str]:
    """Returns what a language model has to obey whatever the layout, and does not, a line for each.

    Weights: losses of parts of the weights add up to that of all. Causality (of models with logits):
    what comes later changes no earlier loss. Cross-entropy (where `vocab_size` is known): it is
    -log softmax(logits)[target] over the vocabulary, without what pads it.
    """
    place_S = np.arange(batch.tokens.shape[1])
    third = batch.weights * (place_S % 3 == 0)
    early = batch.weights * (place_S < place_S.size // 2)
    changed = np.where(place_S < place_S.size // 2, batch.tokens, np.roll(batch.tokens, 1, axis=0))
    variants = {
        "all": batch,
        "third": batch._replace(weights=third),
        "rest": batch._replace(weights=batch.weights - third),
        "early": batch._replace(weights=early),
        "changed": batch._replace(weights=early, tokens=changed),
    }
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *variants.values())

    def each(params, many):
        return jax.lax.map(lambda one: loss(model, params, one), many)

    sums = run(each, params, stacked)
    of = dict(zip(variants, sums.loss, strict=True))
    pairs = {
        "weights: parts of the loss add up to it": (of["third"] + of["rest"], of["all"]),
        "weights: their sum is the weight": (sums.weight[0], batch.weights.sum()),
    }
    if model.logits is not None:
        pairs["causality: later tokens change no earlier loss"] = (of["changed"], of["early"])
        if vocab_size:
            seen = sums.extra.get("cross_entropy", sums.loss)[0]
            due = cross_entropy(model, params, batch, vocab_size)
            pairs["cross-entropy: that of the logits in numpy"] = (seen, due)
    return [
        f"{law}: {float(seen):.16g} is not {float(due):.16g}"
        for law, (seen, due) in pairs.items()
        if not abs(seen - due) <= 1e-10 * abs(due)
    ]


def cross_entropy(model: Model, params: Params, batch: Batch, vocab_size: int) -> float:
    """Returns the weighted sum of -log softmax(logits)[target] over the first `vocab_size` logits."""
    logits = run(lambda params: model.logits(params, blocks(model, params, batch)), params)
    logits_BSV = logits[..., :vocab_size]
    log_z_BS = np.log(np.exp(logits_BSV).sum(-1))
    at_target_BS = np.take_along_axis(logits_BSV, batch.targets[..., None], axis=-1)[..., 0]
    return float(((log_z_BS - at_target_BS) * batch.weights).sum())
