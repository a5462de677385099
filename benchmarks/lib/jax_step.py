"""The baseline in bare jax: a training step written for a single device, without a trainer.

For GPT-2 and Llama models, with the same maths, initial parameters and optimizer as meshtrain's
transformer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# B batch, S sequence, D model, H heads, G key/value heads, K head dim, F feed-forward, V vocabulary


def make_step(
    section: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    *,
    dtype: str,
    unroll: bool,
    flat: bool,
) -> Callable:
    """Returns a step, not compiled.

    Its type is ((params, opt_state), tokens_BS, targets_BS) -> ((params, opt_state), loss).

    `unroll`: a Python loop over the layers instead of a scan. `flat`: matrix products get inputs (B
    S, D).
    """
    c = section
    K = c["head_dim"] or c["d_model"] // c["num_heads"]

    def norm(x, p):
        x32 = x.astype(jnp.float32)
        if c["norm"] == "layer":
            x32 -= x32.mean(-1, keepdims=True)
        x32 *= jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + c["norm_epsilon"])
        out = x32 * p["scale"].astype(jnp.float32)
        return (out + p["bias"].astype(jnp.float32) if "bias" in p else out).astype(x.dtype)

    def linear(x, p, dims=1):
        kernel = p["kernel"]
        lead, x = x.shape[:-dims], x.reshape(-1, *x.shape[-dims:]) if flat else x
        out = jnp.tensordot(x, kernel, dims).reshape(*lead, *kernel.shape[dims:])
        return out + p["bias"] if "bias" in p else out

    def rotate(x, angle):
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attend(q, k, v):
        if jax.default_backend() == "gpu":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        B, S, H, _ = q.shape
        q = q.reshape(B, S, k.shape[2], -1, K)
        scores = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(np.tri(S, dtype=bool), scores * K**-0.5, -1e30)
        probs = jax.nn.softmax(scores, -1).astype(v.dtype)
        return jnp.einsum("bgrst,btgk->bsgrk", probs, v).reshape(B, S, H, K)

    def layer(x, p):
        h, heads = norm(x, p["attention_norm"]), p["attention"]
        q, k, v = (linear(h, heads[name]) for name in ("query", "key", "value"))
        if c["positions"] == "rope":
            frequency = c["rope_theta"] ** (-np.arange(0, K, 2) / K)
            angle = jnp.float32(np.arange(x.shape[1])[:, None] * frequency)[None, :, None]
            q, k = rotate(q, angle), rotate(k, angle)
        x = x + linear(attend(q, k, v), heads["out"], 2)
        h, mlp = norm(x, p["mlp_norm"]), p["mlp"]
        up = linear(h, mlp["up"])
        hidden = jax.nn.silu(linear(h, mlp["gate"])) * up if "gate" in mlp else jax.nn.gelu(up)
        return x + linear(hidden, mlp["down"])

    def loss(params, tokens, targets):
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        x = p["tokens"]["embedding"][tokens]
        if "positions" in p:
            x = x + p["positions"]["embedding"][: x.shape[1]]
        if unroll:
            for i in range(c["num_layers"]):
                x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]))
        else:
            x, _ = jax.lax.scan(lambda x, params: (layer(x, params), None), x, p["layers"])
        x = norm(x, p["final_norm"])
        table = p["output"]["kernel"] if "output" in p else p["tokens"]["embedding"].T
        logits = linear(x, {"kernel": table}).astype(jnp.float32)
        logits = jnp.where(np.arange(logits.shape[-1]) < c["vocab_size"], logits, -1e30)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def train_step(carry, tokens, targets):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return train_step


def make_optimizer(optim: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns gradient clipping and AdamW with the settings of the `optim` section of a config."""

    def decayed(tree):
        return jax.tree.map_with_path(lambda path, _: path[-1].key not in optim["no_decay"], tree)

    adamw = optax.adamw(
        optim["learning_rate"],
        optim["b1"],
        optim["b2"],
        optim["epsilon"],
        weight_decay=optim["weight_decay"],
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(optim["clip_norm"]), adamw)
