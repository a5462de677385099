"""Describes the attention of sequences that a mesh axis shards: its method and its sizes."""

from typing import Any

import jax.numpy as jnp

from meshtrain.analysis.audit.placement import Placement, ShardedAttention
from meshtrain.config.schema import Config
from meshtrain.data.source import Batch
from meshtrain.models.base import Model
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import between_chunks
from meshtrain.ops.attention import choose_for_context
from meshtrain.parallel import context, sharding

TRANSFORMER = "meshtrain.models.transformer:build"


def sharded_attention(
    cfg: Config, model: Model, batch: Any, placement: Placement
) -> ShardedAttention | None:
    """Returns the attention of a layer by the active mesh and rules; None if sequences are not sharded.

    None as well for a model of the user's own, whose heads are unknown.
    """
    is_known = model.attention is not None and cfg.model.build == TRANSFORMER
    if not is_known or not isinstance(batch, Batch):
        return None
    seq_len = batch.tokens.shape[1]
    num_devices = sharding.num_shards("seq", seq_len)
    if num_devices == 1:
        return None
    c = TransformerConfig(**cfg.model.options)
    num_tokens = placement.num_tokens
    H, G, dtype = c.num_heads, c.num_kv_heads, cfg.train.dtype
    shapes = dict(seq_len=seq_len, head_dim=max(c.query_size, c.value_size), dtype=dtype)
    shapes |= dict(num_heads=H, num_kv_heads=G, packed=batch.segments is not None)
    shapes |= dict(softcap=c.attention_softcap, dropout=c.dropout > 0)
    method, _ = choose_for_context(c.attention_impl, **shapes)
    num_shards = sharding.num_shards("heads", H)
    if method == "ulysses":
        G *= context.kv_repeats(H, G, num_devices * num_shards)
    of_queries = num_tokens * H // num_shards
    of_keys = num_tokens * G // sharding.num_shards("kv_heads", G)
    return ShardedAttention(
        method=method,
        num_devices=num_devices,
        query_size=of_queries * c.query_size,
        output_size=of_queries * c.value_size,
        key_size=of_keys * c.query_size,
        value_size=of_keys * c.value_size,
        padding=_padding(c.attention_impl, seq_len // (2 * num_devices)),
        itemsize=jnp.dtype(dtype).itemsize,
    )


def _padding(implementation: str, length: int) -> float:
    """Returns the tokens of a chunk of `length` in whole blocks, over `length`."""
    block = between_chunks.block_size(implementation, length)
    return -(-length // block) * block / length
