"""Reference implementation of a training step in plain maths on one device.

It computes the expected values without the trainer: no mesh, no rules, no micro-batches, no remat,
no masks between documents. Every document is a separate row.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from meshtrain.data.source import Batch
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params, is_measured
from meshtrain.ops import dropout
from meshtrain.tools.verify.reference.adapter import Adapter, trained_part

# B batch, S sequence, N rows of documents


class Step(NamedTuple):
    """The expected values of one optimizer step."""

    sums: dict[str, jax.Array]  # loss, weight and the extras of Metrics, before the update
    means: dict[str, jax.Array]  # loss and the extras, divided by the weight
    learning_rate: jax.Array | float
    norm: jax.Array  # (), global norm of the gradients before clipping
    grads: Params  # of the mean loss, clipped
    params: Params
    opt_state: Any


def run_compiled(function: Callable, *args: Any) -> Any:
    """Compiles and calls a function; returns its result as numpy arrays."""
    return jax.device_get(jax.jit(function)(*args))


def with_row_keys(seed: int, step: int, batch: Any) -> Any:
    """Returns the batch of a step with the key of each of its rows, by seed, step and row."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    rows = range(len(jax.tree.leaves(batch)[0]))
    keys = [np.asarray(jax.random.key_data(jax.random.fold_in(key, row))) for row in rows]
    return dropout.with_keys(batch, np.stack(keys))


def apply_blocks(model: Model, params: Params, batch: Any) -> jax.Array:
    """Returns the output of the last block, (B, S, D) for the transformer."""
    x, stack = model.embed(params, batch), {**params["layers"], **model.constants}
    return jax.lax.scan(lambda x, layer: (model.block(layer, x, batch), None), x, stack)[0]


def loss(model: Model, params: Params, batch: Any) -> Metrics:
    """Returns the model's Metrics of the batch."""
    if model.block is None:
        return model.loss(params, batch, None)
    return model.head(params, apply_blocks(model, params, batch), batch)


def make_gradients(model: Model) -> Callable[[Params, Any], tuple[dict[str, jax.Array], Params]]:
    """Returns the function (params, batch) -> sums, gradients of the mean loss."""

    def mean(params, batch):
        sums = loss(model, params, batch)
        return sums.loss / sums.weight, {"loss": sums.loss, "weight": sums.weight, **sums.extra}

    def gradients(params, batch):
        grads, sums = jax.grad(mean, has_aux=True)(params, batch)
        return sums, grads

    return gradients


def make_update(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: Callable,
    adapter: Adapter,
) -> Callable[..., Step]:
    """Returns the function (number, params, opt_state, sums, grads, clip_norm) -> Step.

    `grads` has the gradients of the parameters that `adapter` trains; all others stay as they are.
    """

    def update(number, params, opt_state, sums, grads, clip_norm):
        means = {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}
        measured = params
        if model.measure is not None:
            measured, _ = model.measure(params, grads)
            grads = jax.tree.map_with_path(
                lambda path, leaf: 0 * leaf if is_measured(path) else leaf, grads
            )
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, clip_norm / norm), grads)
        trained = trained_part(params, adapter)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        updates = {jax.tree_util.keystr(path): u for path, u in jax.tree.leaves_with_path(updates)}

        def after(path, old, of_measure):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if not adapter.trains(name):
                return old
            return of_measure if is_measured(path) else old + updates[jax.tree_util.keystr(path)]

        params = jax.tree.map_with_path(after, params, measured)
        return Step(sums, means, schedule(number), norm, grads, params, opt_state)

    return update


def unpack_documents(
    rows: np.ndarray, weights: np.ndarray, separator: int | None, num_rows: int
) -> Batch:
    """Returns (num_rows, S): every document of `rows` (B, S + 1) in a separate row.

    A document ends with `separator`, and the target after it has weight 0. If `separator` is None,
    each row is one document. `weights` (B, S) are the weights of the targets. Padding has weight 0.
    """
    S = rows.shape[1] - 1
    tokens, targets = np.zeros((2, num_rows, S), np.int32)
    target_weights = np.zeros((num_rows, S), np.float32)
    number = 0
    for row, weight in zip(rows, weights, strict=True):
        start = 0
        for end in sorted({*(np.flatnonzero(row[:S] == separator) + 1), S}):
            tokens[number, : end - start] = row[start:end]
            targets[number, : end - start] = row[start + 1 : end + 1]
            target_weights[number, : end - start] = weight[start:end] * (
                row[start:end] != separator
            )
            number, start = number + 1, end
    return Batch(tokens, targets, target_weights)


def violations(model: Model, params: Params, batch: Batch, vocab_size: int | None) -> list[str]:
    """Returns a line for each law of language models that `model` violates.

    Weights: the loss is additive in the token weights. Causality (only for models with `logits`):
    later tokens do not change earlier losses. Cross-entropy (also needs a `vocab_size`): the loss
    is the negative log softmax(logits)[target] over the vocabulary without padding. In a mixture of
    experts the loss is its cross-entropy.
    """
    position_S = np.arange(batch.tokens.shape[1])
    is_early_S = position_S < position_S.size // 2
    third = batch.weights * (position_S % 3 == 0)
    early = batch.weights * is_early_S
    changed = np.where(is_early_S, batch.tokens, np.roll(batch.tokens, 1, axis=0))
    variants = {
        "all": batch,
        "third": batch._replace(weights=third),
        "rest": batch._replace(weights=batch.weights - third),
        "early": batch._replace(weights=early),
        "changed": batch._replace(weights=early, tokens=changed),
    }
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *variants.values())

    def metrics_of_each(params, batches):
        return jax.lax.map(lambda one: loss(model, params, one), batches)

    sums = run_compiled(metrics_of_each, params, stacked)
    # The loss by which experts are balanced depends on what other tokens do.
    totals = sums.loss if model.measure is None else sums.extra["cross_entropy"]
    losses = dict(zip(variants, totals, strict=True))
    pairs = {
        "weights: the loss is additive": (losses["third"] + losses["rest"], losses["all"]),
        "weights: their sum is the weight of Metrics": (sums.weight[0], batch.weights.sum()),
    }
    if model.logits is not None:
        pairs["causality: later tokens do not change earlier losses"] = (
            losses["changed"],
            losses["early"],
        )
        if vocab_size:
            actual = sums.extra.get("cross_entropy", sums.loss)[0]
            expected = cross_entropy(model, params, batch, vocab_size)
            pairs["cross-entropy: equals numpy's, from the logits"] = (actual, expected)
    return [
        f"{law}: {float(actual):.16g} is not {float(expected):.16g}"
        for law, (actual, expected) in pairs.items()
        if not abs(actual - expected) <= 1e-10 * abs(expected)
    ]


def cross_entropy(model: Model, params: Params, batch: Batch, vocab_size: int) -> float:
    """Returns the weighted sum of -log softmax(logits)[target] over `vocab_size` logits."""
    logits = run_compiled(
        lambda params: model.logits(params, apply_blocks(model, params, batch)), params
    )
    logits_BSV = logits[..., :vocab_size]
    log_z_BS = np.log(np.exp(logits_BSV).sum(-1))
    at_target_BS = np.take_along_axis(logits_BSV, batch.targets[..., None], axis=-1)[..., 0]
    return float(((log_z_BS - at_target_BS) * batch.weights).sum())


def rounded(block: np.ndarray, wire: str) -> np.ndarray:
    """Returns a block of numbers as the other side reads it."""
    if wire == "bfloat16":
        return block.astype(ml_dtypes.bfloat16).astype(np.float64)
    if not np.isfinite(block).all():
        return np.full_like(block, np.nan)
    largest = {"int8": 127, "int4": 7}[wire]
    wide = np.abs(block).max() / largest
    scale = np.float32(wide)
    if scale < wide:
        scale = np.nextafter(scale, np.float32(np.inf))
    scale = np.float64(scale or 1)
    return np.clip(np.rint(block / scale), -largest, largest) * scale


def summed(
    parts: np.ndarray, wire: str, block: int, num_networks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum (L,) of the parts (N, L) of N members, and what it lacks of each (N, L).

    With `num_networks` networks of neighbours, numbers are added exactly within them, and sent
    between them.
    """
    num, length = parts.shape
    inside = num // num_networks if num_networks > 1 else 1
    senders = num // inside
    size = math.ceil(length / (num * block)) * block  # elements that a member adds up
    padded = np.pad(parts, ((0, 0), (0, num * size - length)))
    total, lost = np.zeros(num * size), np.zeros_like(padded)
    for start in range(0, num * size, block):
        piece, section = slice(start, start + block), start // size
        # A member of each network holds the section; they share it out among themselves in turn.
        place, owner = divmod(section, senders)
        values = padded[:, piece].reshape(senders, inside, block).sum(1)
        read = np.stack([rounded(one, wire) for one in values])
        read[owner] = values[owner]  # not sent
        whole = read.sum(0)
        total[piece] = rounded(whole, wire)
        for sender in range(senders):
            lost[sender * inside + place, piece] = values[sender] - read[sender]
        lost[owner * inside + place, piece] += whole - total[piece]
    return total[:length], lost[:, :length]
