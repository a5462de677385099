"""How gradients are written for a slow network: as bfloat16, or as small integers with a scale for each block.

The arrays hold rows; each row is sent to another device. A block of integers is decoded as integer x scale, its scale
being max |x| / the largest integer, so that |x - decoded| is at most half a scale (a whole one if rounded
stochastically). Values that are not finite make their whole block NaN, so that a step with them is skipped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


class Wire(NamedTuple):
    """A format: `bits` per element, and one float32 scale per `block` elements (bfloat16 has none)."""

    bits: int
    block: int
    stochastic: bool = (
        False  # rounds up or down at random, so that the mean of many roundings is the value
    )

    @property
    def bytes_per_element(self) -> float:
        """Returns what an element takes on the wire, with its share of the scale."""
        return self.bits / 8 + (4 / self.block if self.bits < 16 else 0)

    def encode(self, rows_RC: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns rows (R, C), C a multiple of `block`, as they are sent: (R, bytes) or, of bfloat16, (R, C).

        Raises ValueError without a `key` if the rounding is stochastic.
        """
        if self.bits == 16:
            # As integers, because XLA on CPU would send bfloat16 as float32.
            return jax.lax.bitcast_convert_type(rows_RC.astype(jnp.bfloat16), jnp.uint16)
        if self.stochastic and key is None:
            raise ValueError("stochastic rounding needs a key")
        largest = 2 ** (self.bits - 1) - 1
        blocks = rows_RC.reshape(len(rows_RC), -1, self.block)
        scale = _scale(blocks, largest)
        values = blocks / scale[..., None].astype(blocks.dtype)
        if self.stochastic:
            values = jnp.floor(values + jax.random.uniform(key, values.shape, jnp.float32))
        else:
            values = jnp.round(values)
        values = jnp.clip(values, -largest, largest).astype(jnp.int8).reshape(rows_RC.shape)
        if self.bits == 4:
            nibbles = (values + 8).astype(jnp.uint8)
            payload = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        else:
            payload = jax.lax.bitcast_convert_type(values, jnp.uint8)
        # One message: payload and scales travel together.
        scales = jax.lax.bitcast_convert_type(scale, jnp.uint8).reshape(len(rows_RC), -1)
        return jnp.concatenate([payload, scales], axis=1)

    def decode(self, sent: jax.Array, length: int, dtype: jnp.dtype) -> jax.Array:
        """Returns the rows (R, C = `length`) that `encode` has written."""
        if self.bits == 16:
            return jax.lax.bitcast_convert_type(sent, jnp.bfloat16).astype(dtype)
        payload, scales = jnp.split(sent, [length * self.bits // 8], axis=1)
        if self.bits == 4:
            nibbles = jnp.stack([payload & 15, payload >> 4], axis=-1)
            values = nibbles.astype(jnp.int8) - 8
        else:
            values = jax.lax.bitcast_convert_type(payload, jnp.int8)
        scale = jax.lax.bitcast_convert_type(scales.reshape(len(sent), -1, 4), jnp.float32)
        blocks = values.reshape(*scale.shape, self.block).astype(dtype)
        return (blocks * scale[..., None].astype(dtype)).reshape(len(sent), length)


def _scale(blocks: jax.Array, largest: int) -> jax.Array:
    """Returns the float32 scale of each block (..., b), rounded up so that no value is clipped; 1 of zeros."""
    wide = jnp.abs(blocks).max(-1) / largest
    scale = wide.astype(jnp.float32)
    too_small = scale.astype(blocks.dtype) < wide
    scale = jnp.where(too_small, jnp.nextafter(scale, jnp.float32(jnp.inf)), scale)
    scale = jnp.where(scale == 0, 1, scale)
    # Not left to the maximum: on CPU XLA loses a NaN in a large array.
    return jnp.where(jnp.isfinite(blocks).all(-1), scale, jnp.nan)
