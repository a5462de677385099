"""Context parallelism: the order of sequences that are sharded over devices, and the methods for their attention.

Of the 2 c chunks of a sequence device i of c holds chunks i and 2 c - 1 - i, so that causal
attention is equal work on all devices ("zigzag"). The loader puts each sequence in this order;
attention sees positions, not the order.

  ring     keys and values travel from device to device: each holds those of one other device at a time
           (arXiv 2310.01889)
  gather   keys and values are gathered once per layer (Llama 3, arXiv 2407.21783)
  ulysses  an all-to-all exchanges the shards of the sequence for shards of the heads, and back (arXiv 2309.14509)

ops/between_chunks.py has the first two.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import ConfigError, nearest_multiples
from meshtrain.parallel import sharding

# B batch, S sequence, H heads, G key/value heads, K head dim

# A part of the key of jax's caches of traces, as the rules are.
active_method = jax.make_user_context(default_value="gather")


def order(length: int, num_devices: int) -> np.ndarray:
    """Returns the positions of a sequence in the order in which the devices hold them, (length,) int32.

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
    pairs = np.stack([chunks[:num_devices], chunks[: num_devices - 1 : -1]], axis=1)
    return pairs.reshape(-1)


def positions(length: int) -> jax.Array:
    """Returns the position of each token of a row (length,) int32, in the order of the active mesh and rules."""
    return jnp.asarray(order(length, sharding.num_shards("seq", length)))


def choose(num_heads: int, num_kv_heads: int, num_devices: int, *, fused: bool) -> str:
    """Returns the method for these heads, which the active rules shard, and sequences over `num_devices`.

    `fused`: there is a fused kernel for whole sequences, which only "ulysses" can use. "auto"
    selects "ulysses" if the heads divide and there is such a kernel or it sends fewer bytes, and
    otherwise "gather", or "ring" where devices of a sequence are in different hosts. Raises
    ConfigError if "ulysses" is asked for, and they do not.
    """
    method, _, fallback = active_method.value.partition(":")
    shards = num_devices * sharding.num_shards("heads", num_heads)
    divides = num_heads % shards == 0
    if method == "ulysses" and not divides:
        raise ConfigError(
            f"context.method='ulysses': it shards heads, and {shards} devices do not divide model.num_heads="
            f"{num_heads}; use 'gather' or 'ring'"
        )
    if method != "auto":
        return method
    # Per token: ulysses sends q, k, v and the output, a share (c - 1) / c of each; the others send
    # k and v c - 1 times.
    repeats = kv_repeats(num_heads, num_kv_heads, shards)
    sends_less = num_heads + num_kv_heads * repeats < num_kv_heads * num_devices
    return "ulysses" if divides and (fused or sends_less) else fallback


def kv_repeats(num_heads: int, num_kv_heads: int, shards: int) -> int:
    """Returns how often "ulysses" repeats keys and values so that their heads divide as well."""
    group = num_heads // num_kv_heads
    fits = (n for n in range(1, group + 1) if group % n == 0 and num_kv_heads * n % shards == 0)
    return next(fits, group)


def ulysses(
    attend: Callable[..., jax.Array], q_BSHK: jax.Array, k: jax.Array, v: jax.Array, segments_BS
) -> jax.Array:
    """Returns `attend(q, k, v, segments)`, computed on whole sequences, by each device for some of the heads."""
    (S, H), G = q_BSHK.shape[1:3], k.shape[2]
    num_devices = sharding.num_shards("seq", S)
    shards = num_devices * sharding.num_shards("heads", H)
    k, v = (jnp.repeat(x, kv_repeats(H, G, shards), axis=2) for x in (k, v))
    names = "batch", "seq", "heads", "head_dim"

    def exchange(x):  # a constraint on both sides, for the forward and the backward pass
        x = sharding.constrain(x, *names)
        with sharding.heads_for_sequence():
            return _natural(sharding.constrain(x, *names), num_devices)

    q, k, v = map(exchange, (q_BSHK, k, v))
    with sharding.heads_for_sequence():
        if segments_BS is not None:
            segments_BS = sharding.constrain(segments_BS, "batch", "seq")
            segments_BS = _natural(segments_BS, num_devices)
        out_BSHK = sharding.constrain(attend(q, k, v, segments_BS), *names)
        out_BSHK = sharding.constrain(_zigzag(out_BSHK, num_devices), *names)
    return sharding.constrain(out_BSHK, *names)


def _natural(x: jax.Array, num_devices: int) -> jax.Array:
    """Returns x (B, S, ...) in the order of positions; slices, where indices would become a gather."""
    chunks = x.reshape(x.shape[0], num_devices, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def _zigzag(x: jax.Array, num_devices: int) -> jax.Array:
    """Returns x (B, S, ...), which is in the order of positions, in the order of the devices."""
    chunks = x.reshape(x.shape[0], 2 * num_devices, -1, *x.shape[2:])
    early, late = chunks[:, :num_devices], chunks[:, : num_devices - 1 : -1]
    return jnp.stack([early, late], axis=2).reshape(x.shape)
