"""The package's own model, optimizer and schedules once more, in plain maths: what theirs must equal.

Layouts are compared with the very model that they train, so what it computes wrongly on one device
too shows only here. Written after the papers, and without a call into the code that it judges.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models.base import Params

# B batch, S sequence, D model, H heads, G key/value heads, K head dim, V vocabulary

Section = Mapping[str, Any]  # of a config


def loss(params: Params, batch: Batch, c: Section) -> jax.Array:
    """Returns the weighted sum over tokens that a decoder of this `model` section is trained on."""
    x_BSD = params["tokens"]["embedding"][batch.tokens] * c["embed_scale"]
    if c["positions"] == "learned":
        x_BSD = x_BSD + params["positions"]["embedding"][: batch.tokens.shape[1]][None]
    for number in range(c["num_layers"]):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        local = c["attention"][number % len(c["attention"])] == "l"
        new = attention(_norm(x_BSD, layer["attention_norm"], c), layer["attention"], c, local)
        x_BSD += _norm(new, layer["attention_post_norm"], c) if c["post_norm"] else new
        new = _mlp(_norm(x_BSD, layer["mlp_norm"], c), layer["mlp"], c)
        x_BSD += _norm(new, layer["mlp_post_norm"], c) if c["post_norm"] else new
    x_BSD = _norm(x_BSD, params["final_norm"], c)
    tied = c["tie_embeddings"]
    head_DV = params["tokens"]["embedding"].T if tied else params["output"]["kernel"]
    logits_BSV = _capped(x_BSD @ head_DV[:, : c["vocab_size"]], c["logit_softcap"])
    log_z_BS = jnp.log(jnp.exp(logits_BSV).sum(-1))
    at_target_BS = jnp.take_along_axis(logits_BSV, batch.targets[..., None], axis=-1)[..., 0]
    return ((log_z_BS - at_target_BS + c["z_loss"] * log_z_BS**2) * batch.weights).sum()


def attention(x_BSD: jax.Array, p: Params, c: Section, local: bool) -> jax.Array:
    """Returns softmax(q k scale) v over the positions up to each one, with keys and values repeated.

    A `local` layer sees no more than the last `window` of them.
    """
    q_BSHK, k_BSGK, v_BSGK = (_linear(x_BSD, p[name], 1) for name in ("query", "key", "value"))
    if c["qk_norm"]:
        q_BSHK, k_BSGK = _norm(q_BSHK, p["query_norm"], c), _norm(k_BSGK, p["key_norm"], c)
    if c["positions"] == "rope":
        q_BSHK, k_BSGK = _rope(q_BSHK, c, local), _rope(k_BSGK, c, local)
    shared = c["num_heads"] // c["num_kv_heads"]  # query heads that follow one another
    k_BSHK, v_BSHK = (jnp.repeat(x, shared, axis=2) for x in (k_BSGK, v_BSGK))
    place_S = jnp.arange(x_BSD.shape[1])
    seen_SS = place_S[None, :] <= place_S[:, None]
    if local:
        seen_SS &= place_S[:, None] < place_S[None, :] + c["window"]
    scale = c["query_scale"] or 1 / math.sqrt(q_BSHK.shape[-1])
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) * scale
    scores_BHST = jnp.exp(_capped(scores_BHST, c["attention_softcap"])) * seen_SS[None, None]
    probs_BHST = scores_BHST / scores_BHST.sum(-1, keepdims=True)
    return _linear(jnp.einsum("bhst,bthk->bshk", probs_BHST, v_BSHK), p["out"], 2)


def _capped(scores: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(scores / cap) if cap else scores


def _rope(x_BSHK: jax.Array, c: Section, local: bool) -> jax.Array:
    """Turns each pair (k, k + K/2), as a complex number, by position * frequency."""
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    own = local and c["rope_theta_local"]
    theta, scaling = (own, ()) if own else (c["rope_theta"], c["rope_scaling"])
    angle_Sk = np.arange(S)[:, None] * [
        _turn(theta ** (-2 * k / K), *scaling) for k in range(K // 2)
    ]
    turned = jax.lax.complex(x_BSHK[..., : K // 2], x_BSHK[..., K // 2 :])
    turned = turned * np.exp(1j * angle_Sk)[None, :, None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def _turn(frequency: float, kind: str = "", factor: float = 1, *llama: float) -> float:
    """Returns what scaling makes of one frequency, in radians per position."""
    if kind != "llama3":
        return frequency / factor
    low, high, length = llama
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _mlp(x_BSD: jax.Array, p: Params, c: Section) -> jax.Array:
    up_BSF = _linear(x_BSD, p["up"], 1)
    if c["mlp"] == "gelu":
        return _linear(_gelu(up_BSF), p["down"], 1)
    gate_BSF = _linear(x_BSD, p["gate"], 1)
    gate_BSF = gate_BSF / (1 + jnp.exp(-gate_BSF)) if c["mlp"] == "swiglu" else _gelu(gate_BSF)
    return _linear(gate_BSF * up_BSF, p["down"], 1)


def _gelu(x: jax.Array) -> jax.Array:
    return x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _linear(x: jax.Array, p: Params, num_in: int) -> jax.Array:
    y = jnp.tensordot(x, p["kernel"], axes=num_in)
    return y + jnp.broadcast_to(p["bias"], y.shape) if "bias" in p else y


def _norm(x: jax.Array, p: Params, c: Section) -> jax.Array:
    """Of the last dim."""
    if c["norm"] == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + c["norm_epsilon"])
    x = x * jnp.broadcast_to(p["scale"] + (c["norm"] == "rms_1p"), x.shape)
    return x + jnp.broadcast_to(p["bias"], x.shape) if "bias" in p else x


def initial_stddevs(c: Section) -> dict[str, float]:
    """Returns the standard deviation that each parameter of a `model` section starts with, by its path."""
    inward, outward = c["d_model"] ** -0.5, (2 * c["num_layers"]) ** -0.5
    heads = c["num_heads"] * c["head_dim"] if c["head_dim"] else c["d_model"]
    qkv = {f"layers/attention/{name}/kernel": inward for name in ("query", "key", "value")}
    found = {**qkv, "layers/mlp/up/kernel": inward}
    found |= {"layers/attention/out/kernel": heads**-0.5 * outward}
    found |= {"layers/mlp/gate/kernel": inward} if c["mlp"] != "gelu" else {}
    found |= {"layers/mlp/down/kernel": c["d_ff"] ** -0.5 * outward}
    norms = ("layers/attention_norm", "layers/mlp_norm", "final_norm")
    if c["post_norm"]:
        norms += ("layers/attention_post_norm", "layers/mlp_post_norm")
    biased = found if c["bias"] else qkv if c["qkv_bias"] else {}
    found |= {name.replace("kernel", "bias"): 0.0 for name in biased}
    if c["bias"] and c["norm"] == "layer":
        found |= {f"{name}/bias": 0.0 for name in norms}
    if c["qk_norm"]:
        norms += ("layers/attention/query_norm", "layers/attention/key_norm")
    found |= {f"{name}/scale": 0.0 for name in norms} | {"tokens/embedding": 0.02}
    found |= {"positions/embedding": 0.02} if c["positions"] == "learned" else {}
    return found if c["tie_embeddings"] else found | {"output/kernel": inward}


def adamw(params: dict, grads: list[dict], rates: list[float], c: Section) -> dict:
    """Returns what AdamW (arXiv 1711.05101) of this `optim` section makes of flat dicts, path -> array."""
    b1, b2 = c["b1"], c["b2"]
    first, second = ({path: 0.0 for path in params} for _ in range(2))
    for number, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        for path, g in grad.items():
            first[path] = b1 * first[path] + (1 - b1) * g
            second[path] = b2 * second[path] + (1 - b2) * g**2
            mean, square = first[path] / (1 - b1**number), second[path] / (1 - b2**number)
            decay = 0.0 if path.split("/")[-1] in c["no_decay"] else c["weight_decay"]
            change = mean / (np.sqrt(square) + c["epsilon"]) + decay * params[path]
            params = params | {path: params[path] - rate * change}
    return params


def learning_rate(step: int, c: Section, steps: int) -> float:
    """Returns that of one step of a run of so many, by an `optim` section."""
    peak, end, warmup = c["learning_rate"], c["final_fraction"], c["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    length = max(1, steps - warmup)
    done = min(1.0, (step - warmup) / length)
    if c["schedule"] == "cosine":
        return peak * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)
    if c["schedule"] == "linear":
        return peak * (1 + (end - 1) * done)
    if c["schedule"] == "wsd":
        decay = min(length, max(1, round(steps * c["decay_fraction"])))
        down = min(1.0, max(0.0, (step - warmup - (length - decay)) / decay))
        return peak * (1 + (end - 1) * down)
    return peak
