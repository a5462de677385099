"""Compressed sums of gradients in numpy, written apart from `parallel/sync.py`: all shards in one array, in a loop.

Float64 throughout: an integer of 8 bits times a float32 scale is exact, so that results can be compared bit for bit.
"""

import math

import ml_dtypes
import numpy as np


def rounded(block: np.ndarray, wire: str) -> np.ndarray:
    """Returns a block of numbers as the other side reads it."""
    if wire == "bfloat16":
        return block.astype(ml_dtypes.bfloat16).astype(np.float64)
    if not np.isfinite(block).all():
        return np.full_like(block, np.nan)
    largest = {"int8": 127, "int4": 7}[wire]
    wide = np.abs(block).max() / largest
    scale = np.float32(wide)
    if scale < wide:
        scale = np.nextafter(scale, np.float32(np.inf))
    scale = np.float64(scale or 1)
    return np.clip(np.rint(block / scale), -largest, largest) * scale


def summed(
    parts: np.ndarray, wire: str, block: int, num_networks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum (L,) of the parts (N, L) of N members, and of each what the sum lacks of its part (N, L).

    With `num_networks` networks of neighbours, numbers are added exactly within them, and sent between them.
    """
    num, length = parts.shape
    inside = num // num_networks if num_networks > 1 else 1
    senders = num // inside
    size = math.ceil(length / (num * block)) * block  # elements that a member adds up
    padded = np.pad(parts, ((0, 0), (0, num * size - length)))
    total, lost = np.zeros(num * size), np.zeros_like(padded)
    for start in range(0, num * size, block):
        piece, section = slice(start, start + block), start // size
        # A member of each network holds the section; they share it out among themselves in turn.
        place, owner = divmod(section, senders)
        values = padded[:, piece].reshape(senders, inside, block).sum(1)
        read = np.stack([rounded(one, wire) for one in values])
        read[owner] = values[owner]  # not sent
        whole = read.sum(0)
        total[piece] = rounded(whole, wire)
        for sender in range(senders):
            lost[sender * inside + place, piece] = values[sender] - read[sender]
        lost[owner * inside + place, piece] += whole - total[piece]
    return total[:length], lost[:, :length]
