"""One optimizer step: gradients, clipping, update, report."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from meshtrain.grads import GradFn
from meshtrain.optim import Schedule
from meshtrain.state import TrainState

Report = dict[str, jax.Array]  # scalars of one step, to be logged


def make_train_step(
    grad_fn: GradFn,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    clip_norm: float,
    seed: int,
) -> Callable[[TrainState, Any], tuple[TrainState, Report]]:
    """Returns the step. Its report holds the loss before the update, and the norm before clipping."""
    clip = optax.clip_by_global_norm(clip_norm)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        grads, metrics = grad_fn(state.params, batch, key)
        # Sums became means here, once, by the weight of the whole global batch.
        means = metrics.mean()
        weight = jax.numpy.where(metrics.weight == 0, 1, metrics.weight)
        grads = jax.tree.map(lambda grad: (grad / weight).astype(grad.dtype), grads)
        norm = optax.tree.norm(grads)
        grads, _ = clip.update(grads, clip.init(None))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        report = {**means, "grad_norm": norm, "learning_rate": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state), report

    return train_step
