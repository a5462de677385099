"""Reference implementation of a mixture of experts: every expert computes every token."""

import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models.base import Params
from meshtrain.models.transformer_config import TransformerConfig

# B batch, S sequence, D model, E experts, k experts per token, F feed-forward, N = S k assignments
# of a row

Mlp = Callable[[jax.Array, Params, TransformerConfig], jax.Array]


def mixture(
    x_BSD: jax.Array, p: Params, c: TransformerConfig, batch: Batch, mlp: Mlp
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of a layer, and its part of the loss, a weighted sum over tokens.

    `mlp(x, p, c)` is an ordinary feed-forward layer. Each row of the batch is one document.
    """
    E, k, measured = c.num_experts, c.experts_per_token, p["measured"]
    logits_BSE = jnp.einsum("bsd,de->bse", x_BSD, p["router"]["kernel"])
    if "update" in p["router"]:
        logits_BSE = logits_BSE + p["router"]["update"](x_BSD, 1)
    if c.expert_bias:
        logits_BSE = logits_BSE + p["router"]["bias"][None, None]
    scores_BSE = 1 / (1 + jnp.exp(-logits_BSE))
    if c.router != "sigmoid":
        scores_BSE = jnp.exp(logits_BSE)
        scores_BSE = scores_BSE / scores_BSE.sum(-1, keepdims=True)
    share_BSE = scores_BSE / scores_BSE.sum(-1, keepdims=True)
    # The order of all experts for each token: the first k are chosen.
    preference_BSE = _in_groups(scores_BSE + measured["bias"][None, None], c)
    place_BSE = jnp.argsort(jnp.argsort(-preference_BSE, axis=-1), axis=-1)
    chosen_BSE = (place_BSE < k).astype(x_BSD.dtype)
    weights_BSE = scores_BSE * chosen_BSE
    if c.router != "softmax":
        weights_BSE = weights_BSE / weights_BSE.sum(-1, keepdims=True)
    accepted_BSE = _accepted(place_BSE, c) * chosen_BSE
    kernels = {name: p[name] for name in ("gate", "up", "down") if name in p}
    y_EBSD = jax.vmap(lambda expert: mlp(x_BSD, expert, c))(kernels)
    combined_BSE = c.router_scale * weights_BSE * accepted_BSE
    y_BSD = jnp.einsum("bse,ebsd->bsd", combined_BSE, y_EBSD)
    if c.num_shared_experts:
        shared_BSD = mlp(x_BSD, p["shared"], c)
        if c.shared_gate:
            gate_BS1 = x_BSD @ p["shared_gate"]["kernel"]
            if "update" in p["shared_gate"]:
                gate_BS1 = gate_BS1 + p["shared_gate"]["update"](x_BSD, 1)
            shared_BSD = shared_BSD / (1 + jnp.exp(-gate_BS1))
        y_BSD = y_BSD + shared_BSD
    load_BSE, w_BS1 = chosen_BSE / k, batch.weights[..., None]
    log_z_BS = jnp.log(jnp.exp(logits_BSE).sum(-1))
    loss = c.router_z_loss * (log_z_BS**2 * batch.weights).sum()
    if c.balance == "batch":
        load = _fixed(measured["load"])[None, None]
        loss += c.balance_weight * E * (load * share_BSE * w_BS1).sum()
    if c.balance == "sequence":
        mean_BE = (load_BSE * w_BS1).sum(1) / jnp.maximum(w_BS1.sum(1), 1e-30)
        loss += c.balance_weight * E * (mean_BE[:, None] * share_BSE * w_BS1).sum()
    sums = {
        "load": (load_BSE * w_BS1).sum((0, 1)),
        "score": (share_BSE * w_BS1).sum((0, 1)),
        "log_z": (log_z_BS * batch.weights).sum(),
        "dropped": ((1 - accepted_BSE.sum(-1) / k) * batch.weights).sum(),
    }
    # What is measured is defined as a gradient: it adds nothing to the loss.
    for name, total in sums.items():
        loss += ((measured[name] - _fixed(measured[name])) * _fixed(total)).sum()
    return y_BSD, loss


def _fixed(x: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(x)


def _in_groups(preference_BSE: jax.Array, c: TransformerConfig) -> jax.Array:
    """Returns the preferences with -inf for experts outside of each token's best groups."""
    if not c.expert_groups:
        return preference_BSE
    num_groups, groups_per_token = c.expert_groups
    size = c.num_experts // num_groups
    num_best = min(size, 2 if c.router == "sigmoid" else 1)
    by_group = jnp.stack(jnp.split(preference_BSE, num_groups, axis=-1), axis=-2)
    value = jnp.sort(by_group, axis=-1)[..., size - num_best :].sum(-1)
    place = jnp.argsort(jnp.argsort(-value, axis=-1), axis=-1)
    allowed = jnp.repeat(place < groups_per_token, size, axis=-1)
    return jnp.where(allowed, preference_BSE, -jnp.inf)


def _accepted(place_BSE: jax.Array, c: TransformerConfig) -> jax.Array:
    """Returns 1 where an expert accepts a token that chooses it: by position."""
    if not c.capacity_factor:
        return jnp.ones(place_BSE.shape)
    (S, E), k = place_BSE.shape[1:], c.experts_per_token
    # As written in decimals: 1.1 * 100 is 110, and not a bit more, which would be rounded up.
    capacity = math.ceil(Fraction(c.capacity_factor).limit_denominator(10**9) * S * k / E)
    is_chosen_BSE = (place_BSE < k).astype(float)
    is_earlier_SS = np.arange(S)[None, :] < np.arange(S)[:, None]
    before_BSE = jnp.einsum("st,bte->bse", is_earlier_SS.astype(float), is_chosen_BSE)
    return (before_BSE < capacity).astype(float)


def initial_stddevs(c: TransformerConfig) -> dict[str, float]:
    """Returns the standard deviation of the initial values of a layer's parameters, by path."""
    from_residual, to_residual = c.d_model**-0.5, (2 * c.num_layers) ** -0.5
    up_names = ("up", "gate") if c.gated else ("up",)
    stddevs = {"router/kernel": from_residual}
    stddevs |= {f"{name}/kernel": from_residual for name in up_names}
    stddevs["down/kernel"] = c.expert_size**-0.5 * to_residual
    if c.expert_bias:
        stddevs |= {f"{name}/bias": 0.0 for name in ("router", *up_names, "down")}
    if c.num_shared_experts:
        stddevs |= {f"shared/{name}/kernel": from_residual for name in up_names}
        stddevs["shared/down/kernel"] = c.shared_size**-0.5 * to_residual
        if c.shared_gate:
            stddevs["shared_gate/kernel"] = from_residual
        if c.bias:
            stddevs |= {f"shared/{name}/bias": 0.0 for name in (*up_names, "down")}
    for name in ("load", "score", "log_z", "dropped", "bias"):
        stddevs[f"measured/{name}"] = 0.0
    return stddevs
