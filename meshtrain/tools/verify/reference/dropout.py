"""Reference implementation of dropout in numpy, written apart from `ops/dropout.py`."""

import jax
import jax.numpy as jnp
import numpy as np

# B batch, W words of a key


def dropped(x: jax.Array, keys_BW: np.ndarray | None, rate: float, site: int) -> jax.Array:
    """Returns x (B, ...) with 0 where the hash of key, site and indices is below `rate`."""
    if not rate or keys_BW is None:
        return x
    row, *indices = np.indices(x.shape).reshape(x.ndim, -1)
    words = np.stack([*keys_BW[row].T, np.full(row.size, site), *indices], axis=1)
    kept = (murmur3(words) / 2**32 >= rate).reshape(x.shape)
    return x * jnp.asarray(kept / (1 - rate))


def of_layer(keys_BW: np.ndarray | None, number: int) -> np.ndarray | None:
    """Returns the keys of the rows in layer `number`."""
    if keys_BW is None:
        return None
    words = [[[*key, 0xFFFFFFFF, number, word] for word in range(len(key))] for key in keys_BW]
    return murmur3(np.array(words, np.uint64).reshape(keys_BW.size, -1)).reshape(keys_BW.shape)


def murmur3(words: np.ndarray) -> np.ndarray:
    """Returns MurmurHash3_x86_32, seed 0, of each row of 32-bit words, low byte first."""
    mask, state = np.uint64(0xFFFFFFFF), np.zeros(len(words), np.uint64)
    words = words.astype(np.uint64)

    def times(a, b):
        return (a * np.uint64(b)) & mask

    def rotated(a, by):
        return ((a << np.uint64(by)) | (a >> np.uint64(32 - by))) & mask

    for column in words.T:
        state = state ^ times(rotated(times(column, 0xCC9E2D51), 15), 0x1B873593)
        state = (times(rotated(state, 13), 5) + np.uint64(0xE6546B64)) & mask
    state = state ^ np.uint64(4 * words.shape[1])
    state = times(state ^ (state >> np.uint64(16)), 0x85EBCA6B)
    state = times(state ^ (state >> np.uint64(13)), 0xC2B2AE35)
    return state ^ (state >> np.uint64(16))
