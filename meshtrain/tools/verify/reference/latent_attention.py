"""Reference implementation of multi-head latent attention, head by head."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.models.base import Params

# B batch, S sequence, D model, H heads, K head dim, V of values, R dims with rope

Section = Mapping[str, Any]  # the `model` section of a config


def heads(
    x_BSD: jax.Array, p: Params, c: Section, rope: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys (B, S, H, K), and values (B, S, H, V), after DeepSeek-V2, equations 9 to 19.

    `rope` rotates the pairs (r, r + R/2) of (B, S, 1, R); here a pair is (2 r, 2 r + 1).
    """
    no_rope = c["head_dim"] or c["d_model"] // c["num_heads"]
    width, rank = c["v_head_dim"] or no_rope, c["kv_lora_rank"]
    pairs = sorted(range(c["rope_head_dim"]), key=lambda dim: dim % 2)
    source, kernel_of_queries = x_BSD, "query"
    if c["q_lora_rank"]:
        source = _norm(_linear(x_BSD, p["query_down"]), p["query_down_norm"])
        kernel_of_queries = "query_up"
    down = _linear(x_BSD, p["kv_down"])
    latent = _norm(down[..., :rank], p["kv_down_norm"])
    shared_BSR = rope(down[..., None, rank:][..., pairs])[:, :, 0]
    queries, keys, values = [], [], []
    for head in range(c["num_heads"]):
        query = source @ p[kernel_of_queries]["kernel"][:, head]
        rotated = rope(query[..., None, no_rope:][..., pairs])[:, :, 0]
        queries.append(jnp.concatenate([query[..., :no_rope], rotated], -1))
        up = latent @ p["kv_up"]["kernel"][:, head]
        keys.append(jnp.concatenate([up[..., :no_rope], shared_BSR], -1))
        values.append(up[..., -width:])
    q_BSHK, k_BSHK, v_BSHV = (jnp.stack(found, 2) for found in (queries, keys, values))
    return q_BSHK, k_BSHK, v_BSHV


def _linear(x: jax.Array, p: Params) -> jax.Array:
    y = x @ p["kernel"]
    return y + jnp.broadcast_to(p["bias"], y.shape) if "bias" in p else y


def _norm(x: jax.Array, p: Params) -> jax.Array:
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * jnp.broadcast_to(p["scale"], x.shape)


def initial_stddevs(c: Section) -> dict[str, float]:
    """Returns the standard deviation of the initial values of a layer's attention, by path."""
    H, of_model = c["num_heads"], c["d_model"] ** -0.5
    width = c["v_head_dim"] or c["head_dim"] or c["d_model"] // H
    out = (H * width) ** -0.5 * (2 * c["num_layers"]) ** -0.5
    kernels = {"kv_down": of_model, "kv_up": c["kv_lora_rank"] ** -0.5, "out": out}
    kernels |= (
        {"query_down": of_model, "query_up": c["q_lora_rank"] ** -0.5}
        if c["q_lora_rank"]
        else {"query": of_model}
    )
    found = {f"attention/{name}/kernel": one for name, one in kernels.items()}
    found |= {f"attention/{name}_norm/scale": 0.0 for name in kernels if name.endswith("_down")}
    if c["bias"]:
        biased = [name for name in kernels if name.endswith("_down") or name == "out"]
        found |= {f"attention/{name}/bias": 0.0 for name in biased}
    return found
