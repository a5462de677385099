"""Attention over the key/value cache of generation."""

from collections.abc import Callable
from typing import Any

import jax

from meshtrain.data.source import Batch
from meshtrain.models.base import Past
from meshtrain.parallel.sharding import constrain

# B batch, S sequence, T positions of the cache, H heads, G key/value heads, K head dim


class CachedAttention:
    """Attention over a cache: keys and values, each (B, T, G, K), to which a call adds those of its tokens.

    A cache of one array holds latent keys, which are the values as well. `attend` is as `ops.attention.attention`.
    """

    def __init__(self, attend: Callable[..., jax.Array], cache: Any, batch: Batch, past: Past):
        self.attend, self.cache, self.batch, self.past = attend, cache, batch, past

    def __call__(self, q_BSHK: jax.Array, *new: jax.Array, **options: Any) -> jax.Array:
        start, names = self.past.start, ("batch", None, "kv_heads", "head_dim")
        self.cache = tuple(
            constrain(
                jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), start, 1), *names
            )
            for old, x in zip(self.cache, new, strict=True)
        )
        keys, values = self.cache[0], self.cache[-1]
        segments = self.batch.segments, self.past.segments_BT
        return self.attend(q_BSHK, keys, values, *segments, start=start, **options)
