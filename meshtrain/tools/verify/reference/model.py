"""Reference implementation of the package's transformer.

A comparison of layouts runs the package's model on both sides, so it cannot find an error that also
occurs on one device; a comparison with this file does. It was written from the papers and does not
call the code under test: it reads only the sizes of the model in TransformerConfig.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models.base import Params
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.tools.verify.reference import adapter as reference_adapter
from meshtrain.tools.verify.reference import latent_attention as reference_latent_attention
from meshtrain.tools.verify.reference import mixture as reference_mixture
from meshtrain.tools.verify.reference.adapter import Adapter
from meshtrain.tools.verify.reference.dropout import dropped, of_layer
from meshtrain.tools.verify.reference.mixture import mixture

# B batch, S sequence, D model, H heads, G key/value heads, K head dim, k = K/2, V vocabulary


def loss(
    params: Params, batch: Batch, c: TransformerConfig, adapter: Adapter | None = None
) -> jax.Array:
    """Returns the training loss of a decoder, with its adapter: a weighted sum over tokens."""
    adapted = reference_adapter.adapted_layers(params)
    x_BSD = params["tokens"]["embedding"][batch.tokens] * c.embed_scale
    if c.positions == "learned":
        x_BSD = x_BSD + params["positions"]["embedding"][: batch.tokens.shape[1]][None]
    x_BSD = dropped(x_BSD, batch.row_keys, c.dropout, 0)
    layer_losses = 0.0
    first = c.first_dense_layers
    for number in range(c.num_layers):
        is_sparse = c.num_experts and number >= first
        if number < first:
            path = f"first_layers/{number}"
            layer = params["first_layers"][str(number)]
        else:
            path, index = "layers", number - first
            layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        keys = of_layer(batch.row_keys, number)
        if adapter is not None:
            layer = reference_adapter.attached(layer, path, adapted, adapter, keys)
        local = c.attention[number % len(c.attention)] == "l"
        has_rope = c.rope_layers[number % len(c.rope_layers)] == "r"
        normed_BSD = _norm(x_BSD, layer["attention_norm"], c) if c.pre_norm else x_BSD
        update = attention(normed_BSD, layer["attention"], c, local, keys, has_rope=has_rope)
        update = _norm(update, layer["attention_post_norm"], c) if c.post_norm else update
        x_BSD += c.branch_scale * dropped(update, keys, c.dropout, 1)
        normed_BSD = _norm(x_BSD, layer["mlp_norm"], c) if c.pre_norm else x_BSD
        if is_sparse:
            update, more = mixture(normed_BSD, layer["mlp"], c, batch, _mlp)
            layer_losses += more
        else:
            update = _mlp(normed_BSD, layer["mlp"], c)
        update = _norm(update, layer["mlp_post_norm"], c) if c.post_norm else update
        x_BSD += c.branch_scale * dropped(update, keys, c.dropout, 2)
    x_BSD = _norm(x_BSD, params["final_norm"], c)
    tied = c.tie_embeddings
    head_DV = params["tokens"]["embedding"].T if tied else params["output"]["kernel"]
    logits_BSV = c.logit_scale * (x_BSD @ head_DV[:, : c.vocab_size])
    logits_BSV = _capped(logits_BSV, c.logit_softcap)
    log_z_BS = jnp.log(jnp.exp(logits_BSV).sum(-1))
    at_target_BS = jnp.take_along_axis(logits_BSV, batch.targets[..., None], axis=-1)[..., 0]
    token_losses_BS = log_z_BS - at_target_BS + c.z_loss * log_z_BS**2
    return (token_losses_BS * batch.weights).sum() + layer_losses


def attention(
    x_BSD: jax.Array,
    p: Params,
    c: TransformerConfig,
    local: bool,
    keys=None,
    *,
    has_rope: bool = True,
) -> jax.Array:
    """Returns softmax(q k^T * scale) v of a causal attention layer, with its projections.

    In a `local` layer a position attends only to the last `window` positions. `keys` are those of
    dropout. Without `has_rope` nothing says where a position is.
    """

    def rope(x_BSHK):
        return _rope(x_BSHK, c, local) if has_rope and c.positions == "rope" else x_BSHK

    if c.kv_lora_rank:
        q_BSHK, k_BSHK, v_BSHV = reference_latent_attention.heads(x_BSD, p, c, rope)
    else:
        q_BSHK, k_BSHK, v_BSHV = _heads(x_BSD, p, c, rope)
    position_S = jnp.arange(x_BSD.shape[1])
    if c.query_growth:
        growth_S = [
            1 + c.query_growth * math.log(1 + position // c.query_growth_length)
            for position in range(x_BSD.shape[1])
        ]
        q_BSHK = q_BSHK * np.array(growth_S)[None, :, None, None]
    mask_SS = position_S[None, :] <= position_S[:, None]
    if local:
        mask_SS &= position_S[:, None] < position_S[None, :] + c.window
    scale = c.query_scale or 1 / math.sqrt(q_BSHK.shape[-1])
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) * scale
    scores_BHST = jnp.exp(_capped(scores_BHST, c.attention_softcap)) * mask_SS[None, None]
    sums_BHS1 = scores_BHST.sum(-1, keepdims=True)
    if c.attention_sinks:
        sums_BHS1 = sums_BHS1 + jnp.exp(p["sinks"]["bias"])[None, :, None, None]
    probs_BHST = scores_BHST / sums_BHS1
    probs_BHST = dropped(probs_BHST, keys, c.dropout, 0)
    return _linear(jnp.einsum("bhst,bthv->bshv", probs_BHST, v_BSHV), p["out"], 2)


def _heads(
    x_BSD: jax.Array, p: Params, c: TransformerConfig, rope: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values, the latter repeated for grouped-query attention."""
    q_BSHK, k_BSGK, v_BSGK = (_linear(x_BSD, p[name], 1) for name in ("query", "key", "value"))
    if c.qk_norm:
        norm = _norm_of_all_heads if c.qk_norm_heads == "all" else _norm
        q_BSHK, k_BSGK = norm(q_BSHK, p["query_norm"], c), norm(k_BSGK, p["key_norm"], c)
    q_BSHK, k_BSGK = rope(q_BSHK), rope(k_BSGK)
    # Query heads are grouped in order: the first `group` heads use the first key/value head.
    group = c.num_heads // c.num_kv_heads
    k_BSHK, v_BSHV = (jnp.repeat(x, group, axis=2) for x in (k_BSGK, v_BSGK))
    return q_BSHK, k_BSHK, v_BSHV


def _capped(scores: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(scores / cap) if cap else scores


def _rope(x_BSHK: jax.Array, c: TransformerConfig, local: bool) -> jax.Array:
    """Rotates each pair of the first dims, as a complex number, by the angle position * frequency.

    Of R rotated dims, a pair is (k, k + R/2), or (2 k, 2 k + 1) if the model interleaves them.
    """
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    if not c.kv_lora_rank:
        K = int(K * c.rope_fraction) // 2 * 2
    local_theta = local and c.rope_theta_local
    theta, scaling = (local_theta, ()) if local_theta else (c.rope_theta, c.rope_scaling)
    frequency_k = [_frequency(k, K, S, theta, *scaling) for k in range(K // 2)]
    angle_Sk = np.arange(S)[:, None] * np.array(frequency_k)
    length = _yarn_factor(*scaling[1:]) if scaling and scaling[0] == "yarn" else 1
    if scaling and scaling[0] == "longrope":
        length = scaling[2]
    real_BSHk, imag_BSHk = x_BSHK[..., : K // 2], x_BSHK[..., K // 2 : K]
    if c.rope_interleaved:
        real_BSHk, imag_BSHk = x_BSHK[..., 0:K:2], x_BSHK[..., 1:K:2]
    z_BSHk = jax.lax.complex(real_BSHk, imag_BSHk)
    z_BSHk = z_BSHk * (length * np.exp(1j * angle_Sk))[None, :, None, :]
    if c.rope_interleaved:
        rotated_BSHR = jnp.stack([z_BSHk.real, z_BSHk.imag], axis=-1).reshape(*x_BSHK.shape[:3], K)
    else:
        rotated_BSHR = jnp.concatenate([z_BSHk.real, z_BSHk.imag], axis=-1)
    return jnp.concatenate([rotated_BSHR, x_BSHK[..., K:]], axis=-1)


def _frequency(
    k: int, K: int, S: int, theta: float, kind: str = "", factor: float = 1, *rest: Any
) -> float:
    """Returns frequency k after `rope_scaling`, in radians per position of a row of S tokens."""
    if kind == "dynamic":
        (length,) = rest
        if S > length:
            theta *= (factor * S / length - (factor - 1)) ** (K / (K - 2))
        return theta ** (-2 * k / K)
    frequency = theta ** (-2 * k / K)
    if kind == "longrope":
        length, (_, *divisors) = factor, rest
        return frequency / divisors[k + K // 2 if S > length else k]
    if kind == "llama3":
        return _llama3_frequency(frequency, factor, *rest)
    if kind == "yarn":
        divided = _yarn_ramp(k, K, theta, rest)
        return divided * frequency / factor + (1 - divided) * frequency
    return frequency / factor


def _llama3_frequency(
    frequency: float, factor: float, low: float, high: float, length: float
) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_ramp(k: int, K: int, theta: float, numbers: tuple) -> float:
    """Returns how much of frequency k YaRN divides by the factor, 0 to 1."""
    fast, slow, length, _, truncate = numbers

    def dim_of(rotations: float) -> float:
        """Solves rotations = length / wavelength, with wavelength = 2 pi theta^(2 dim / K)."""
        wavelength = length / rotations
        return K / 2 * math.log(wavelength / (2 * math.pi), theta)

    start, end = dim_of(fast), dim_of(slow)
    if truncate:
        start, end = float(math.floor(start)), float(math.ceil(end))
    start, end = max(start, 0.0), min(end, K - 1.0)
    if start == end:
        end += 0.001
    return min(1.0, max(0.0, (k - start) / (end - start)))


def _yarn_factor(
    factor: float, fast: float, slow: float, length: float, attention_factor: float, truncate: bool
) -> float:
    """Returns what YaRN multiplies queries and keys by: 0.1 ln(factor) + 1 if it is not given."""
    return attention_factor if attention_factor else 1 + math.log(factor) / 10


def _mlp(x_BSD: jax.Array, p: Params, c: TransformerConfig) -> jax.Array:
    up_BSF = _linear(x_BSD, p["up"], 1)
    if c.mlp == "gelu":
        return _linear(_gelu(up_BSF), p["down"], 1)
    gate_BSF = _linear(x_BSD, p["gate"], 1)
    if c.mlp == "clamped_swiglu":
        gate_BSF = jnp.where(gate_BSF > c.glu_limit, c.glu_limit, gate_BSF)
        up_BSF = jnp.where(up_BSF > c.glu_limit, c.glu_limit, up_BSF)
        up_BSF = jnp.where(up_BSF < -c.glu_limit, -c.glu_limit, up_BSF)
        gate_BSF = gate_BSF / (1 + jnp.exp(-c.glu_slope * gate_BSF))
        return _linear(gate_BSF * up_BSF + gate_BSF, p["down"], 1)
    gate_BSF = gate_BSF / (1 + jnp.exp(-gate_BSF)) if c.mlp == "swiglu" else _gelu(gate_BSF)
    return _linear(gate_BSF * up_BSF, p["down"], 1)


def _gelu(x: jax.Array) -> jax.Array:
    return x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _linear(x: jax.Array, p: Params, num_in: int) -> jax.Array:
    y = jnp.tensordot(x, p["kernel"], axes=num_in)
    if "update" in p:
        y += p["update"](x, num_in)
    return y + jnp.broadcast_to(p["bias"], y.shape) if "bias" in p else y


def _norm(x: jax.Array, p: Params, c: TransformerConfig) -> jax.Array:
    """Normalises the last dim."""
    if c.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon)
    x = x * jnp.broadcast_to(p["scale"] + (c.norm == "rms_1p"), x.shape)
    return x + jnp.broadcast_to(p["bias"], x.shape) if "bias" in p else x


def _norm_of_all_heads(x_BSHK: jax.Array, p: Params, c: TransformerConfig) -> jax.Array:
    """Normalises the last two dims as if they were one."""
    B, S, H, K = x_BSHK.shape
    flat = jax.tree.map(lambda leaf: leaf.reshape(H * K), p)
    return _norm(x_BSHK.reshape(B, S, H * K), flat, c).reshape(B, S, H, K)


def initial_stddevs(c: TransformerConfig) -> dict[str, float]:
    """Returns the standard deviation of each parameter's initial values, by path."""
    layers = {"layers": _stddevs_of_layer(c, bool(c.num_experts))}
    for number in range(c.first_dense_layers):
        layers[f"first_layers/{number}"] = _stddevs_of_layer(c, False)
    stddevs = {
        f"{name}/{path}": one for name, found in layers.items() for path, one in found.items()
    }
    stddevs |= {"tokens/embedding": 0.02, "final_norm/scale": 0.0}
    if (c.bias or c.norm_bias) and c.norm == "layer":
        stddevs["final_norm/bias"] = 0.0
    stddevs |= {"positions/embedding": 0.02} if c.positions == "learned" else {}
    return stddevs if c.tie_embeddings else stddevs | {"output/kernel": c.d_model**-0.5}


def initial_constant(path: str, c: TransformerConfig) -> float:
    """Returns the value at which a parameter starts whose initial values do not vary."""
    layer, _, name = path.rpartition("/")
    if name in ("load", "score"):
        return 1 / c.num_experts
    # Norms of latents are plain, whatever the other norms are.
    from_zero = c.norm == "rms_1p" and not layer.endswith("_down_norm")
    return 1.0 if name == "scale" and not from_zero else 0.0


def _stddevs_of_layer(c: TransformerConfig, is_sparse: bool) -> dict[str, float]:
    from_residual, to_residual = c.d_model**-0.5, (2 * c.num_layers) ** -0.5
    stddevs, attention, latent = {}, {}, {}
    if c.kv_lora_rank:
        latent = reference_latent_attention.initial_stddevs(c)
    else:
        heads = c.num_heads * c.head_size
        for name in ("query", "key", "value"):
            attention[f"{name}/kernel"] = from_residual
            if c.bias or c.qkv_bias:
                attention[f"{name}/bias"] = 0.0
        attention["out/kernel"] = heads**-0.5 * to_residual
        if c.bias or c.out_bias:
            attention["out/bias"] = 0.0
        if c.attention_sinks:
            attention["sinks/bias"] = 0.0
    if not is_sparse:
        stddevs["mlp/up/kernel"] = from_residual
        stddevs |= {"mlp/gate/kernel": from_residual} if c.gated else {}
        stddevs["mlp/down/kernel"] = c.d_ff**-0.5 * to_residual
    if c.bias:
        stddevs |= {name.replace("kernel", "bias"): 0.0 for name in stddevs}
    stddevs |= {f"attention/{name}": stddev for name, stddev in attention.items()}
    norms = ("attention_norm", "mlp_norm") if c.pre_norm else ()
    if c.post_norm:
        norms += ("attention_post_norm", "mlp_post_norm")
    if is_sparse:
        of_mixture = reference_mixture.initial_stddevs(c)
        stddevs |= {f"mlp/{name}": one for name, one in of_mixture.items()}
    if (c.bias or c.norm_bias) and c.norm == "layer":
        stddevs |= {f"{name}/bias": 0.0 for name in norms}
    if c.qk_norm:
        norms += ("attention/query_norm", "attention/key_norm")
    return stddevs | latent | {f"{name}/scale": 0.0 for name in norms}
