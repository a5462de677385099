"""Dropout whose masks follow from global indices: they are the same on every mesh and schedule.

From the key of a step to a mask:

  1. The train step gives each row of the global batch a key, by seed, step and row:
     `with_row_keys`. The keys are part of the batch: micro-batches, pipeline stages and
     recomputation move them as they move tokens. In evaluation and generation a batch has none, and
     dropout is off.
  2. A layer of a stack mixes its number into the keys: `at_layer`.
  3. `dropout`, and attention for its probabilities, hash the key, a number of the call (`site`) and
     the indices of each element: its position in the row, its dim. No index is that of a shard, a
     micro-batch or a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.parallel import context, sharding

# B batch, S sequence, W words of a key, G key/value heads, R query heads of each, s queries and t
# keys of a block; ... dims that queries and keys share

NAME = "row_keys"  # of the keys in a batch: a field of Batch, or an entry of a dict
AT_LAYER = 2**32 - 1  # the number by which `at_layer` calls the hash; sites of masks are small


def with_row_keys(batch: Any, key: jax.Array) -> Any:
    """Returns the batch, a Batch or a dict, with a key for each of its rows: (B, W) uint32."""
    num_rows = len(jax.tree.leaves(batch)[0])
    fold = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(key, row)))
    return with_keys(batch, sharding.constrain(fold(jnp.arange(num_rows)), "batch", None))


def at_layer(batch: Any, number: jax.Array | int) -> Any:
    """Returns the batch with the keys of layer `number`; a batch without keys is unchanged."""
    if (keys_BW := row_keys(batch)) is None:
        return batch
    word_W = jnp.arange(keys_BW.shape[1], dtype=jnp.uint32)
    words = jnp.uint32(AT_LAYER), _words(number), word_W[None]
    return with_keys(batch, _hash(keys_BW[:, None], *words))


def row_keys(batch: Any) -> jax.Array | None:
    """Returns the keys of the rows (B, W); None if the batch has none, as in evaluation."""
    return batch.get(NAME) if isinstance(batch, dict) else getattr(batch, NAME, None)


def with_keys(batch: Any, keys_BW: jax.Array) -> Any:
    """Returns the batch, a Batch or a dict, with these keys of its rows."""
    if isinstance(batch, dict):
        return {**batch, NAME: keys_BW}
    if hasattr(batch, NAME):  # a data.source.Batch
        return batch._replace(row_keys=keys_BW)
    raise ConfigError(
        f"data: a batch is a {type(batch).__name__}, which cannot hold the keys of its rows for "
        "dropout (Model.row_keys); yield a dict or a meshtrain.Batch"
    )


def dropout(x: jax.Array, batch: Any, *, rate: float, site: int) -> jax.Array:
    """Returns x (B, ...) after dropout: elements are 0 with probability `rate`, or / (1 - rate).

    In evaluation, where the batch has no keys, it returns x. `site` is a number of your choice that
    differs between the calls in the same part of a model (embed, block or head), so that their
    masks are independent. Of an x with three dims or more, the second one is the sequence. The
    backward pass computes the mask again.
    """
    keys_BW = row_keys(batch)
    if keys_BW is None or not rate:
        return x
    indices = [np.arange(size) for size in x.shape[1:]]
    if x.ndim > 2:
        indices[0] = context.positions(x.shape[1])
    return _dropout(rate, site, x, keys_BW, indices)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dropout(rate, site, x, keys_BW, indices):
    spread = [
        jnp.expand_dims(_words(index), [d for d in range(x.ndim) if d != dim])
        for dim, index in enumerate(indices, 1)
    ]
    keys = keys_BW.reshape(len(keys_BW), *[1] * len(indices), -1)
    return _where_kept(rate, _hash(keys, jnp.uint32(site), *spread), x)


_dropout.defvjp(
    lambda rate, site, x, *rest: (_dropout(rate, site, x, *rest), rest),
    lambda rate, site, rest, grad: (_dropout(rate, site, grad, *rest), None, None),
)


@partial(
    jax.tree_util.register_dataclass, data_fields=["row_keys_BW"], meta_fields=["rate", "site"]
)
@dataclass(frozen=True)
class OfAttention:
    """Dropout of attention probabilities: the keys of this layer, and the rate."""

    row_keys_BW: jax.Array
    rate: float
    site: int

    def __call__(self, probs: jax.Array, query_s: jax.Array, key_t: jax.Array) -> jax.Array:
        """Returns probabilities (B, ..., G, R, s, t) after dropout.

        The positions (..., s) and (..., t) are those in the row.
        """
        G, R = probs.shape[-4:-2]
        rows = self.row_keys_BW.reshape(probs.shape[0], *[1] * (probs.ndim - 1), -1)
        head = jnp.arange(G * R, dtype=jnp.uint32).reshape(*[1] * (probs.ndim - 4), G, R, 1, 1)
        query = jnp.expand_dims(_words(query_s), (0, -4, -3, -1))
        key = jnp.expand_dims(_words(key_t), (0, -4, -3, -2))
        return _where_kept(self.rate, _hash(rows, jnp.uint32(self.site), head, query, key), probs)


def _where_kept(rate: float, bits: jax.Array, x: jax.Array) -> jax.Array:
    kept = bits >= jnp.uint32(round(rate * 2**32))
    # In bfloat16 the factor is off by up to 0.4 %.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(kept, wide / (1 - rate), 0).astype(x.dtype)


def _words(numbers: jax.Array | int) -> jax.Array:
    return jnp.asarray(numbers).astype(jnp.uint32)


@jax.jit  # traced once for all of its calls
def _hash(keys: jax.Array, *words: jax.Array) -> jax.Array:
    """Returns MurmurHash3_x86_32, seed 0, of the words of `keys` (..., W) and of `words`.

    All are uint32, and broadcast. By Austin Appleby, public domain (github.com/aappleby/smhasher);
    its last lines, the finalizer, let each bit of the words change each bit of the result with a
    probability of about 1/2.
    """
    all_words: Sequence[jax.Array] = [*jnp.moveaxis(keys, -1, 0), *words]
    state = jnp.uint32(0)
    for word in all_words:
        word = _rotated(word * jnp.uint32(0xCC9E2D51), 15) * jnp.uint32(0x1B873593)
        state = _rotated(state ^ word, 13) * jnp.uint32(5) + jnp.uint32(0xE6546B64)
    state ^= jnp.uint32(4 * len(all_words))  # the length in bytes
    state = (state ^ (state >> 16)) * jnp.uint32(0x85EBCA6B)
    state = (state ^ (state >> 13)) * jnp.uint32(0xC2B2AE35)
    return state ^ (state >> 16)


def _rotated(word: jax.Array, by: int) -> jax.Array:
    return (word << by) | (word >> (32 - by))
