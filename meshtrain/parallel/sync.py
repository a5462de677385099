"""Reduces the partial sums of the batch shards to the gradients of the global batch."""

from typing import Any

import jax


def synchronise(sums: tuple[Any, Any], grad_shardings: Any) -> tuple[Any, Any]:
    """Sums gradients and Metrics over their leading dim of batch shards: the only collective over `data`."""
    grads, metrics = jax.tree.map(lambda leaf: leaf.sum(0), sums)
    return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics
