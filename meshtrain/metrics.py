"""What a loss function returns: sums over examples, so that micro-batches and masks add up exactly."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Sums over a batch. The step divides by the weight of the whole global batch, once.

    `loss` is what is differentiated; every entry of `extra` is reported beside it, per unit of weight.
    """

    loss: jax.Array  # ()
    weight: jax.Array  # (), number of tokens or examples that count
    extra: dict[str, jax.Array] = field(default_factory=dict)

    def mean(self) -> dict[str, jax.Array]:
        """Returns `loss` and the extras per unit of weight."""
        weight = jnp.where(self.weight == 0, 1, self.weight)
        return {name: value / weight for name, value in {"loss": self.loss, **self.extra}.items()}


def weighted(loss: jax.Array, weight: jax.Array | None = None, **extra: jax.Array) -> Metrics:
    """Sums per-example (or per-token) values into Metrics; `weight` defaults to one for each.

    Sums are float32 or wider: in float16 they would overflow, in bfloat16 lose what is small.
    """
    weight = jnp.ones_like(loss) if weight is None else weight
    wide = jnp.promote_types(loss.dtype, jnp.float32)

    def total(values):
        return jnp.sum(jnp.where(weight == 0, 0, values * weight), dtype=wide)  # 0 * nan is nan

    return Metrics(
        total(loss),
        jnp.sum(weight, dtype=wide),
        {name: total(value) for name, value in extra.items()},
    )
