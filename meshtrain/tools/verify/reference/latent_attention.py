"""Reference implementation of multi-head latent attention, head by head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtrain.models.base import Params
from meshtrain.models.transformer_config import TransformerConfig

# B batch, S sequence, D model, H heads, K head dim, V of values, R dims with rope


def heads(
    x_BSD: jax.Array, p: Params, c: TransformerConfig, rope: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys (B, S, H, K), and values (B, S, H, V).

    After DeepSeek-V2, equations 9 to 19.

    `rope` rotates the pairs (r, r + R/2) of (B, S, 1, R); here a pair is (2 r, 2 r + 1).
    """
    no_rope, width, rank = c.head_size, c.value_size, c.kv_lora_rank
    pairs = sorted(range(c.rope_head_dim), key=lambda dim: dim % 2)
    source, query_layer = x_BSD, "query"
    if c.q_lora_rank:
        source = _norm(_linear(x_BSD, p["query_down"]), p["query_down_norm"])
        query_layer = "query_up"
    down = _linear(x_BSD, p["kv_down"])
    latent = _norm(down[..., :rank], p["kv_down_norm"])
    shared_BSR = rope(down[..., None, rank:][..., pairs])[:, :, 0]
    update_BSHK = None
    if "update" in p[query_layer]:
        update_BSHK = p[query_layer]["update"](source, 1)
    up_BSHM = None
    if "update" in p["kv_up"]:
        up_BSHM = p["kv_up"]["update"](latent, 1)
    queries, keys, values = [], [], []
    for head in range(c.num_heads):
        query = source @ p[query_layer]["kernel"][:, head]
        if update_BSHK is not None:
            query += update_BSHK[:, :, head]
        rotated = rope(query[..., None, no_rope:][..., pairs])[:, :, 0]
        queries.append(jnp.concatenate([query[..., :no_rope], rotated], -1))
        up = latent @ p["kv_up"]["kernel"][:, head]
        if up_BSHM is not None:
            up += up_BSHM[:, :, head]
        keys.append(jnp.concatenate([up[..., :no_rope], shared_BSR], -1))
        values.append(up[..., -width:])
    return jnp.stack(queries, 2), jnp.stack(keys, 2), jnp.stack(values, 2)


def _linear(x: jax.Array, p: Params) -> jax.Array:
    y = x @ p["kernel"]
    if "update" in p:
        y += p["update"](x, 1)
    return y + jnp.broadcast_to(p["bias"], y.shape) if "bias" in p else y


def _norm(x: jax.Array, p: Params) -> jax.Array:
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * jnp.broadcast_to(p["scale"], x.shape)


def initial_stddevs(c: TransformerConfig) -> dict[str, float]:
    """Returns the standard deviation of the initial values of a layer's attention, by path."""
    from_residual, to_residual = c.d_model**-0.5, (2 * c.num_layers) ** -0.5
    kernels = {
        "kv_down": from_residual,
        "kv_up": c.kv_lora_rank**-0.5,
        "out": (c.num_heads * c.value_size) ** -0.5 * to_residual,
    }
    if c.q_lora_rank:
        kernels |= {"query_down": from_residual, "query_up": c.q_lora_rank**-0.5}
    else:
        kernels["query"] = from_residual
    stddevs = {}
    for name, stddev in kernels.items():
        stddevs[f"attention/{name}/kernel"] = stddev
        if name.endswith("_down"):
            stddevs[f"attention/{name}_norm/scale"] = 0.0
        if c.bias and (name.endswith("_down") or name == "out"):
            stddevs[f"attention/{name}/bias"] = 0.0
    return stddevs
