"""Describes the experts of a mixture: how the active mesh and rules shard them, and which tokens they compute."""

from typing import Any

import jax.numpy as jnp

from meshtrain.analysis.audit.placement import Axes, Placement, ShardedExperts
from meshtrain.analysis.audit.sequences import TRANSFORMER
from meshtrain.config.schema import Config
from meshtrain.data.source import Batch
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.parallel import expert


def sharded_experts(cfg: Config, batch: Any, placement: Placement) -> ShardedExperts | None:
    """Returns the experts of a layer by the active mesh and rules; None for a model without, or of the user's own."""
    if cfg.model.build != TRANSFORMER or not isinstance(batch, Batch):
        return None
    c = TransformerConfig(**cfg.model.options)
    if not c.num_experts:
        return None
    rows = cfg.train.global_batch // cfg.train.num_microbatches
    where = expert.layout(rows, batch.tokens.shape[1], c.num_experts)

    def larger(axes: Axes) -> Axes:
        return tuple(axis for axis in placement.mesh if axis in axes and placement.mesh[axis] > 1)

    num_rows = placement.num_tokens * where.sizes[2] * c.experts_per_token
    return ShardedExperts(
        gathered=larger(where.gathered),
        others=larger(where.others),
        per_token=c.experts_per_token,
        num_experts=c.num_experts,
        num_devices=where.sizes[2],
        num_shards=where.num_shards,
        itemsize=jnp.dtype(cfg.train.dtype).itemsize,
        has_first_pass=num_rows >= c.num_experts,
    )
