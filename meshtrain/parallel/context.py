"""Context parallelism: the order of sharded sequences, and the methods for their attention.

Of the 2 c chunks of a sequence device i of c holds chunks i and 2 c - 1 - i, so that causal
attention is equal work on all devices ("zigzag"). The loader puts each sequence in this order;
attention sees positions, not the order.

  ring     keys and values travel from device to device: each holds those of one other device at a
           time (arXiv 2310.01889)
  gather   keys and values are gathered once per layer (Llama 3, arXiv 2407.21783)
  ulysses  an all-to-all exchanges the shards of the sequence for shards of the heads, and back
           (arXiv 2309.14509)

ops/context_fused.py has the first two with a fused kernel, ops/context_attention.py in blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import ConfigError, nearest_multiples
from meshtrain.parallel import sharding

# B batch, S sequence, H heads, G key/value heads, K head dim, V head dim of values

# A part of the key of jax's caches of traces, as the rules are.
active_method = jax.make_user_context(default_value="gather")


def order(length: int, num_devices: int) -> np.ndarray:
    """Returns the positions of a sequence in the order of the devices: (length,) int32.

    Raises ConfigError for a length that 2 x `num_devices` does not divide.
    """
    if num_devices == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * num_devices):
        raise ConfigError(
            f"a sequence of {length} tokens is not divisible by 2 x mesh.context={num_devices}; "
            f"use {nearest_multiples(length, 2 * num_devices)}"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * num_devices, -1)
    early = chunks[:num_devices]
    late_from_the_end = chunks[: num_devices - 1 : -1]
    return np.stack([early, late_from_the_end], axis=1).reshape(-1)


def positions(length: int) -> jax.Array:
    """Returns `order` for the active mesh and rules, (length,) int32."""
    return jnp.asarray(order(length, sharding.num_shards("seq", length)))


def choose(
    num_heads: int,
    num_kv_heads: int,
    num_devices: int,
    *,
    fused: bool,
    fused_chunks: bool = False,
) -> str:
    """Returns the method for these heads, and sequences that are sharded over `num_devices`.

    The active rules shard the heads. `fused`: there is a fused kernel for unsharded sequences;
    `fused_chunks`: one for chunks of them. "auto" selects "ulysses" if the heads divide and there
    is a kernel or it sends fewer bytes: with a kernel it has no outputs to merge. Otherwise "ring"
    with a kernel, which hides what the ring sends. Without one it selects "gather", or "ring" where
    devices of a sequence are in different hosts. Raises ConfigError if "ulysses" is asked for, and
    the heads do not divide.
    """
    # "auto:gather" and "auto:ring" name the method without kernels if it is not "ulysses".
    method, _, fallback = active_method.value.partition(":")
    num_head_shards = num_devices * sharding.num_shards("heads", num_heads)
    divides = num_heads % num_head_shards == 0
    if method == "ulysses" and not divides:
        raise ConfigError(
            f"context.method='ulysses': it shards heads, and {num_head_shards} devices do not "
            f"divide model.num_heads={num_heads}; use 'gather' or 'ring'"
        )
    if method != "auto":
        return method
    # Per token, ulysses sends q, k, v and the output, (c - 1) / c of each; the others send k and v
    # c - 1 times. Divided by 2 (c - 1) / c:
    ulysses_heads = num_heads + num_kv_heads * kv_repeats(num_heads, num_kv_heads, num_head_shards)
    other_heads = num_kv_heads * num_devices
    if divides and (fused or ulysses_heads < other_heads):
        return "ulysses"
    return "ring" if fused_chunks else fallback


def kv_repeats(num_heads: int, num_kv_heads: int, num_head_shards: int) -> int:
    """Returns how often "ulysses" repeats keys and values so that their heads divide as well."""
    group = num_heads // num_kv_heads
    for repeats in range(1, group + 1):
        if group % repeats == 0 and num_kv_heads * repeats % num_head_shards == 0:
            return repeats
    return group


def ulysses(
    attend: Callable[..., jax.Array],
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGV: jax.Array,
    segments_BS: jax.Array | None,
) -> jax.Array:
    """Returns `attend(q, k, v, segments)`, by each device for some heads of full sequences."""
    S, H = q_BSHK.shape[1:3]
    G = k_BSGK.shape[2]
    num_devices = sharding.num_shards("seq", S)
    num_head_shards = num_devices * sharding.num_shards("heads", H)
    repeats = kv_repeats(H, G, num_head_shards)
    k = jnp.repeat(k_BSGK, repeats, axis=2)
    v = jnp.repeat(v_BSGV, repeats, axis=2)
    names = ("batch", "seq", "heads", "head_dim")

    # A constraint on both sides of an exchange, for the forward and the backward pass.
    def to_heads(x):
        x = sharding.constrain(x, *names)
        with sharding.heads_for_sequence():
            return _natural(sharding.constrain(x, *names), num_devices)

    q = to_heads(q_BSHK)
    k = to_heads(k)
    v = to_heads(v)
    with sharding.heads_for_sequence():
        if segments_BS is not None:
            segments_BS = sharding.constrain(segments_BS, "batch", "seq")
            segments_BS = _natural(segments_BS, num_devices)
        out_BSHK = sharding.constrain(attend(q, k, v, segments_BS), *names)
        out_BSHK = sharding.constrain(_zigzag(out_BSHK, num_devices), *names)
    return sharding.constrain(out_BSHK, *names)


def _natural(x: jax.Array, num_devices: int) -> jax.Array:
    """Returns x (B, S, ...) in the order of positions, by slices: indices would be a gather."""
    chunks = x.reshape(x.shape[0], num_devices, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def _zigzag(x: jax.Array, num_devices: int) -> jax.Array:
    """Returns x (B, S, ...) in the order of the devices, from the order of positions."""
    chunks = x.reshape(x.shape[0], 2 * num_devices, -1, *x.shape[2:])
    early, late = chunks[:, :num_devices], chunks[:, : num_devices - 1 : -1]
    return jnp.stack([early, late], axis=2).reshape(x.shape)
