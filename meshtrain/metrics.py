"""The result of a loss function: sums over examples, so that micro-batches add up exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Sums over a batch. The train step divides once, by the weight of the global batch.

    `loss` is differentiated; every entry of `extra` is logged too, per unit of weight.
    """

    loss: jax.Array  # ()
    weight: jax.Array  # (), sum of the weights of tokens or examples
    extra: dict[str, jax.Array] = field(default_factory=dict)

    def mean(self) -> dict[str, jax.Array]:
        """Returns `loss` and the extras per unit of weight; NaN if there is no weight."""
        is_empty = self.weight == 0
        weight = jnp.where(is_empty, 1, self.weight)
        sums = {"loss": self.loss, **self.extra}
        return {name: jnp.where(is_empty, jnp.nan, value / weight) for name, value in sums.items()}


def weighted(loss: jax.Array, weight: jax.Array | None = None, **extra: jax.Array) -> Metrics:
    """Sums per-example (or per-token) values into Metrics; the default `weight` is 1 for each.

    Sums are float32 or float64: float16 would overflow, bfloat16 would lose small terms.
    """
    if weight is None:
        weight = jnp.ones_like(loss)
    dtype = jnp.promote_types(loss.dtype, jnp.float32)

    def total(values):
        return jnp.sum(jnp.where(weight == 0, 0, values * weight), dtype=dtype)  # 0 * nan is nan

    return Metrics(
        loss=total(loss),
        weight=jnp.sum(weight, dtype=dtype),
        extra={name: total(value) for name, value in extra.items()},
    )


# The gradients that a train step asks for, with or without a pipeline:
#   (params, batch, key, scale=1.0, residual=None) -> (gradients, Metrics, residual)
# The gradients are those of `scale` times the summed loss, in float32 or float64; the Metrics are
# not scaled; the residual is that of `grad_sync.Sync`, for the next step.
GradFn = Callable[..., tuple[Any, Metrics, Any]]
