"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are projections of one latent vector per token, which is what
generation caches. Positions enter by dims of their own: each query head has R more, and one key of
R dims is shared by all heads.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.models.layers import (
    Attend,
    AttentionMetadata,
    CachedAttention,
    dense,
    norm,
    with_scores,
)
from meshtrain.models.lora_layer import with_update
from meshtrain.models.rope import rope
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.parallel.remat import recomputed
from meshtrain.parallel.sharding import constrain, gather_sequence, gathered

# B batch, S sequence, D model, H heads, N head dim without rope, R with rope, K = N + R, V of a
# value, Q latent of queries, C latent of keys and values, E = C + R what a token has for all heads

EPSILON = 1e-6  # of the norms of latents, as in transformers, where no key sets it


class LatentAttention(nnx.Module):
    """Causal self-attention with low-rank queries, keys and values, and a shared rope key."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.c = c
        H, D, Q, C, E = c.num_heads, c.d_model, c.q_lora_rank, c.kv_lora_rank, c.latent_size
        into_heads, out_of_heads = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
        down = ("embed", None)
        queries, values = (H, c.query_size), (H, c.value_size)
        keys_and_values = (H, c.head_size + c.value_size)
        if Q:
            self.query_down = dense(rngs, D, Q, axes=down, bias=c.bias)
            self.query_down_norm = norm(rngs, "rms", Q, epsilon=EPSILON)
            self.query_up = dense(rngs, Q, queries, axes=into_heads, bias=False)
        else:
            self.query = dense(rngs, D, queries, axes=into_heads, bias=False)
        self.kv_down = dense(rngs, D, E, axes=down, bias=c.bias)
        self.kv_down_norm = norm(rngs, "rms", C, epsilon=EPSILON)
        self.kv_up = dense(rngs, C, keys_and_values, axes=into_heads, bias=False)
        self.out = dense(rngs, values, D, axes=out_of_heads, bias=c.bias, scale=c.residual_scale)

    def __call__(
        self,
        norm: Callable[[jax.Array], jax.Array],
        x_BSD: jax.Array,
        metadata: AttentionMetadata,
        attend: Attend,
    ) -> jax.Array:
        """Returns the attention of `norm(x)`."""
        scored = with_scores(attend, self.c, metadata.is_local)
        down = recomputed(lambda x_BSD: self._down(norm(x_BSD)), x_BSD)
        up = partial(self._up, metadata)
        if isinstance(attend, CachedAttention):
            q_BSHK, kv_BSE = up(*down)
            out_BSHV = self._attend_to_latents(q_BSHK, kv_BSE, scored)
        else:
            q_BSHK, k_BSHK, v_BSHV = recomputed(lambda *down: self._expand(*up(*down)), *down)
            out_BSHV = scored(q_BSHK, k_BSHK, v_BSHV)
        return recomputed(self._combine, out_BSHV)

    def _down(self, x_BSD):
        """Returns the queries or their latents, and the latents of keys and values (B, S, E)."""
        x_BSD = gather_sequence(x_BSD)
        if self.c.q_lora_rank:
            query = constrain(self.query_down(x_BSD), "batch", "seq", None)
        else:
            query = constrain(self.query(x_BSD), "batch", "seq", "heads", "head_dim")
        return query, constrain(self.kv_down(x_BSD), "batch", "seq", None)

    def _up(self, metadata, query, kv_BSE):
        """Returns the queries (B, S, H, K), and the normalized latents and shared key (B, S, E).

        Queries and the shared key have rope.
        """
        c = self.c
        N, C = c.head_size, c.kv_lora_rank
        if c.q_lora_rank:
            query = self.query_up(self.query_down_norm(query))
        q_BSHK = constrain(query, "batch", "seq", "heads", "head_dim")
        frequency_r, factor = c.rotation(metadata.row_length, metadata.is_local, metadata.has_rope)

        def rotate(x_BSHR):
            return rope(x_BSHR, metadata.positions_BS, frequency_r, factor, interleaved=True)

        q_BSHK = jnp.concatenate([q_BSHK[..., :N], rotate(q_BSHK[..., N:])], axis=-1)
        latent_BSC, key_BSR = self.kv_down_norm(kv_BSE[..., :C]), kv_BSE[..., C:]
        key_BSR = rotate(key_BSR[:, :, None])[:, :, 0]
        return q_BSHK, jnp.concatenate([latent_BSC, key_BSR], axis=-1)

    def _expand(self, q_BSHK, kv_BSE):
        """Returns the queries, and the keys (B, S, H, K) and values (B, S, H, V) of each head."""
        N, C = self.c.head_size, self.c.kv_lora_rank
        names = "batch", "seq", "kv_heads", "head_dim"
        up_BSHM = constrain(self.kv_up(kv_BSE[..., :C]), *names)
        # In float32, because the gradient of the shared key is a sum over heads.
        wide_BSR = kv_BSE[..., C:].astype(jnp.promote_types(kv_BSE.dtype, jnp.float32))
        key_BSHR = jnp.broadcast_to(
            wide_BSR[:, :, None], (*up_BSHM.shape[:3], self.c.rope_head_dim)
        ).astype(kv_BSE.dtype)
        k_BSHK = jnp.concatenate([up_BSHM[..., :N], key_BSHR], axis=-1)
        return q_BSHK, constrain(k_BSHK, *names), up_BSHM[..., N:]

    def _attend_to_latents(self, q_BSHK, kv_BSE, attend):
        """Attends without the keys and values of each head: queries and results are projected.

        All heads share the E entries of a token as one key, of which the first C are the value:
        nothing else is cached. (q W_key) latent = q (W_key latent), as in the paper's section
        2.1.2.
        """
        N, C = self.c.head_size, self.c.kv_lora_rank
        stored, used = ("embed", "heads", "head_dim"), (None, "heads", "head_dim")
        kernel_CHM = gathered(self.kv_up.kernel[...], stored, used).astype(q_BSHK.dtype)
        kernel_CHM = with_update(self.kv_up, kernel_CHM)
        q_BSHC = jnp.einsum("bshn,chn->bshc", q_BSHK[..., :N], kernel_CHM[..., :N])
        q_BSHE = jnp.concatenate([q_BSHC, q_BSHK[..., N:]], axis=-1)
        q_BSHE = constrain(q_BSHE, "batch", "seq", "heads", "head_dim")
        out_BSHC = attend(q_BSHE, kv_BSE[:, :, None])[..., :C]
        return jnp.einsum("bshc,chv->bshv", out_BSHC, kernel_CHM[..., N:])

    def _combine(self, out_BSHV):
        return self.out(constrain(out_BSHV, "batch", "seq", "heads", "head_dim"))
