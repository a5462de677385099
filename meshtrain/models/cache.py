"""Attention over the key/value cache of generation."""

from typing import Any

import jax

from meshtrain.data.source import Batch
from meshtrain.models.base import Past
from meshtrain.ops.attention import attention, choose_for_generation
from meshtrain.parallel.sharding import constrain

# B batch, S sequence, T positions of the cache, H heads, G key/value heads, K head dim


class CachedAttention:
    """Attention over a cache: keys and values, each (B, T, G, K), to which a call adds those of its tokens.

    A cache of one array holds latent keys, which are the values as well.
    """

    def __init__(self, implementation: str, cache: Any, batch: Batch, past: Past):
        self.implementation, self.cache, self.batch, self.past = implementation, cache, batch, past

    def __call__(self, q_BSHK: jax.Array, *new: jax.Array, **options: Any) -> jax.Array:
        start, names = self.past.start, ("batch", None, "kv_heads", "head_dim")
        self.cache = tuple(
            constrain(
                jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), start, 1), *names
            )
            for old, x in zip(self.cache, new, strict=True)
        )
        keys, values = self.cache[0], self.cache[-1]
        name = choose_for_generation(self.implementation, q_BSHK.shape[1], keys.shape[1])
        options |= dict(start=start, implementation=name)
        segments = self.batch.segments, self.past.segments_BT
        return attention(q_BSHK, keys, values, *segments, **options)
