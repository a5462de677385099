"""Splash attention on TPUs: the inputs that it supports, and its place in a sharded program.

It is flash attention that skips the blocks of scores that no query sees. XLA does not partition
hand-written kernels, so each device calls them on its rows and heads, by splash_kernel.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshtrain.parallel import accelerator, context, sharding
from meshtrain.parallel.remat import ATTENTION

# B batch, S sequence, H query heads, G key/value heads, K head dim, V of values

LANES = 128  # of a vector register: the tokens of a block are a multiple of it


def why_not(dtype: jax.typing.DTypeLike, dropout: bool, sinks: bool = False) -> str:
    """Returns why splash attention does not support these inputs; "" if it does.

    It supports every head dim, soft cap, window and packed row. On CPUs it is interpreted, and its
    plain twin computes float64.
    """
    platform = accelerator.platform()
    if platform not in ("tpu", "cpu"):
        return f"it runs on TPUs only, and this is {platform}"
    dtypes = [jnp.bfloat16, jnp.float32]
    if platform == "cpu":
        dtypes.append(jnp.float64)
    if jnp.dtype(dtype) not in dtypes:
        return f"it computes in bfloat16 or float32, and train.dtype is {jnp.dtype(dtype)}"
    if dropout:
        return "it has no dropout, and model.dropout is more than 0"
    if sinks:
        return "it does not support model.attention_sinks"
    return ""


class Options(NamedTuple):
    """What is static in a call, with the specs of (B, H, S, K) and (B, G, S, K)."""

    softcap: float
    window: int  # positions, of local layers; 0: no window
    of_queries: PartitionSpec
    of_keys: PartitionSpec


def attention(
    q_BSHK, k_BSGK, v_BSGV, segments_BS, *, start, scale, softcap, window, is_local
) -> jax.Array:
    """Returns the attention (B, S, H, V) of `ops.attention.attention`.

    `window` is static; `is_local` is an array if layers differ. The result has the name ATTENTION,
    and so have the statistics that the backward pass needs.
    """
    # Only generation sets another start, and choose_for_generation never returns "splash".
    assert isinstance(start, int) and start == 0
    B, S, H, _ = q_BSHK.shape
    G = k_BSGK.shape[2]
    # Specs of this place: other rules may be active where the backward pass is traced.
    of_queries = sharding.active_spec((B, H, S, 1), "batch", "heads", None, None)
    of_keys = sharding.active_spec((B, G, S, 1), "batch", "kv_heads", None, None)
    if of_queries != of_keys:
        # A device needs the key/value heads of its query heads.
        repeats = context.kv_repeats(H, G, sharding.num_shards("heads", H))
        k_BSGK = jnp.repeat(k_BSGK, repeats, axis=2)
        v_BSGV = jnp.repeat(v_BSGV, repeats, axis=2)
        of_keys = of_queries
    # Attention is causal, so no query sees the padding after it.
    padding = -S % LANES

    def heads_first(x):
        x = jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])
        return jnp.einsum("bshk->bhsk", x)

    segments_BP = None
    if segments_BS is not None:
        segments_BP = jnp.pad(jnp.broadcast_to(segments_BS, (B, S)), [(0, 0), (0, padding)])
    inputs = heads_first(q_BSHK * scale), heads_first(k_BSGK), heads_first(v_BSGV)

    has_window = window is not None and window < S
    options = Options(softcap, window if has_window else 0, of_queries, of_keys)
    if isinstance(is_local, bool) or not has_window:
        is_local = None
    out_BHSV = _attention(options, is_local, *inputs, segments_BP)
    return jnp.einsum("bhsv->bshv", out_BHSV)[:, :S]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, is_local, q_BHSK, k_BGSK, v_BGSV, segments_BS) -> jax.Array:
    return _forward(options, is_local, q_BHSK, k_BGSK, v_BGSV, segments_BS)[0]


def _forward(options: Options, is_local, q_BHSK, k_BGSK, v_BGSV, segments_BS):
    from meshtrain.ops import splash_kernel  # Pallas takes 0.2 s to import

    inputs = is_local, q_BHSK, k_BGSK, v_BGSV, segments_BS
    on_each_device = sharding.per_device(
        partial(_with_window, splash_kernel.forward, options),
        in_specs=_input_specs(options, is_local, segments_BS),
        out_specs=(options.of_queries, PartitionSpec(*options.of_queries[:3])),
    )
    # Otherwise jax splits the call where layers are a loop: what depends on the segments alone
    # would leave the loop, with a sharding that cannot be mapped over stages. Nothing is computed
    # twice.
    in_one_piece = jax.checkpoint(
        on_each_device,
        policy=jax.checkpoint_policies.nothing_saveable,
        prevent_cse=False,
    )
    out_BHSV, log_z_BHS = in_one_piece(*inputs)
    out_BHSV = checkpoint_name(out_BHSV, ATTENTION)
    log_z_BHS = checkpoint_name(log_z_BHS, ATTENTION)
    return out_BHSV, (*inputs, out_BHSV, log_z_BHS)


def _backward(options: Options, residuals, grad_BHSV):
    from meshtrain.ops import splash_kernel

    is_local, _, _, _, segments_BS, _, _ = residuals
    on_each_device = sharding.per_device(
        partial(_with_window, splash_kernel.backward, options),
        in_specs=(
            *_input_specs(options, is_local, segments_BS),
            options.of_queries,
            PartitionSpec(*options.of_queries[:3]),
            options.of_queries,
        ),
        out_specs=(options.of_queries, options.of_keys, options.of_keys),
    )
    grad_q, grad_k, grad_v = on_each_device(*residuals, grad_BHSV)
    return None, grad_q, grad_k, grad_v, None


_attention.defvjp(_forward, _backward)


def _input_specs(options: Options, is_local, segments_BS) -> tuple[Any, ...]:
    return (
        None if is_local is None else PartitionSpec(),
        options.of_queries,
        options.of_keys,
        options.of_keys,
        None if segments_BS is None else PartitionSpec(options.of_queries[0], None),
    )


def _with_window(compute: Callable, options: Options, is_local, *arrays: jax.Array | None) -> Any:
    """Returns `compute(*arrays)` of one device, within the window if the layer is local."""
    local = partial(compute, softcap=options.softcap, window=options.window)
    if is_local is None:
        return local(*arrays)
    # The kernels have static windows.
    everywhere = partial(compute, softcap=options.softcap, window=0)
    return jax.lax.cond(is_local, local, everywhere, *arrays)
