"""One optimizer step: gradients, clipping, update. It is skipped if it would not be finite."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.metrics import GradFn
from meshtrain.models import trees
from meshtrain.models.base import Params, is_measured
from meshtrain.optim.base import Schedule, updates_done
from meshtrain.state import TrainState, to_device

Scalars = dict[str, jax.Array]  # of one step, to be logged


def make_train_step(
    grad_fn: GradFn,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    clip_norm: float,
    seed: int,
    with_row_keys: Callable[[Any, jax.Array], Any] | None = None,
    measure: Callable[[Params, Params], tuple[Params, Scalars]] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Scalars]]:
    """Returns the train step: (state, batch) -> (new state, scalars to log).

    The scalars are `loss` before the update, `grad_norm` before clipping, and `learning_rate` of
    this update. A batch without weight has no loss (NaN), and is not skipped. The learning rate
    follows the number of updates, not of steps: skipped steps do not count. `with_row_keys` (batch,
    key of the step) adds a key for each row, for a model with dropout. `measure` is that of the
    model, see `Model.measure`.
    """
    clip = optax.clip_by_global_norm(clip_norm)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Scalars]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        # Keys belong to rows of the global batch, so they are added before anything splits it.
        if with_row_keys is not None:
            batch = with_row_keys(batch, key)

        # Gradients of the summed loss. A residual is kept without the loss scale, which may change
        # from step to step.
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
        residual = jax.tree.map(lambda leaf: leaf * scale, state.residual)
        grads, metrics, residual = grad_fn(state.params, batch, key, scale, residual)
        residual = jax.tree.map(lambda leaf: leaf / scale, residual)

        # The only division: sums become means over the weight of the global batch.
        means = metrics.mean()
        is_empty = metrics.weight == 0
        weight = jnp.where(is_empty, 1, metrics.weight) * scale
        grads = jax.tree.map(lambda grad: (grad / weight).astype(grad.dtype), grads)

        # What a model measures arrives as the gradient of its statistics: no optimizer sees it.
        measured, measured_scalars = None, {}
        if measure is not None:
            measured, measured_scalars = measure(state.params, grads)
            measured = jax.tree.map(partial(jnp.where, is_empty), state.params, measured)
            measured_scalars = jax.tree.map(
                lambda scalar: jnp.where(is_empty, jnp.nan, scalar), measured_scalars
            )
            grads = _where_measured(jax.tree.map(jnp.zeros_like, grads), grads)

        # Clip, update.
        norm = optax.tree.norm(grads)
        # Moments in the host's memory arrive when the activations are gone.
        state = state._replace(opt_state=to_device(state.opt_state, after=norm))
        grads, _ = clip.update(grads, clip.init(None))
        count = updates_done(state.opt_state, otherwise=state.step)
        trained = trees.intersect(state.params, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        params = trees.merge(state.params, optax.apply_updates(trained, updates))

        # An overflow in the forward pass shows in the loss, one in the backward pass in the norm.
        # The mean of an empty batch is NaN, its sum is not.
        loss = jnp.where(is_empty, metrics.loss, means["loss"])
        finite = jnp.isfinite(loss + norm)
        scalars = {
            **means,
            "grad_norm": norm,
            "learning_rate": schedule(count),
            "skipped": ~finite,
        }
        if measured is not None:
            params = _where_measured(measured, params)
            scalars |= measured_scalars
        if state.loss_scale is not None:
            scalars["loss_scale"] = scale
        new = state._replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            residual=residual,
        )
        return _unless_skipped(finite, new, state), scalars

    return train_step


def _where_measured(if_measured: Params, otherwise: Params) -> Params:
    """Returns the measured leaves of the first tree, and all other leaves of the second."""
    return jax.tree.map_with_path(
        lambda path, a, b: a if is_measured(path) else b, if_measured, otherwise
    )


def _unless_skipped(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """Returns the new state, or the old one with the new step number if not `finite`.

    The loss scale is updated in both cases.
    """
    # A mask, not a branch: `lax.cond` around sharded code can deadlock XLA's collectives.
    params, opt_state, residual = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before),
        (new.params, new.opt_state, new.residual),
        (old.params, old.opt_state, old.residual),
    )
    loss_scale = None if old.loss_scale is None else old.loss_scale.after(finite)
    return TrainState(
        step=new.step,
        params=params,
        opt_state=opt_state,
        loss_scale=loss_scale,
        residual=residual,
    )
