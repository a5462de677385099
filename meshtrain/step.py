"""One optimizer step: gradients, clipping, update, report; without effect if they are not finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    """Returns the step. Its report holds the loss before the update, and the norm before clipping.

    The reported learning rate is the schedule's at `step`; the optimizer counts its updates itself,
    and so lags behind by as many steps as were skipped.
    """
    clip = optax.clip_by_global_norm(clip_norm)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
        grads, metrics = grad_fn(state.params, batch, key, scale)
        # Sums became means here, once, by the weight of the whole global batch.
        means = metrics.mean()
        weight = jnp.where(metrics.weight == 0, 1, metrics.weight) * scale
        grads = jax.tree.map(lambda grad: (grad / weight).astype(grad.dtype), grads)
        norm = optax.tree.norm(grads)
        grads, _ = clip.update(grads, clip.init(None))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # What overflows on the way forward shows in the loss, on the way back in the norm.
        finite = jnp.isfinite(means["loss"] + norm)
        report = {**means, "grad_norm": norm, "learning_rate": schedule(state.step)}
        report |= {"skipped": ~finite}
        if state.loss_scale is not None:
            report |= {"loss_scale": scale}
        new = TrainState(state.step + 1, params, opt_state)
        return _unless_skipped(finite, new, state), report

    return train_step


def _unless_skipped(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """Returns the new state, or the old one at the next step, and in both cases the next loss scale."""
    # Masked, not branched: `lax.cond` around sharded code can deadlock XLA's own collectives.
    params, opt_state = jax.tree.map(
        lambda ours, theirs: jnp.where(finite, ours, theirs),
        (new.params, new.opt_state),
        (old.params, old.opt_state),
    )
    loss_scale = None if old.loss_scale is None else old.loss_scale.after(finite)
    return TrainState(new.step, params, opt_state, loss_scale)
