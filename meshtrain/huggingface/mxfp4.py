"""Kernels in MXFP4, in which OpenAI publishes gpt-oss: 4 bits a value, and a scale for each block.

A value is an E2M1 number (sign, 2 bits of exponent, 1 of mantissa) times the power of two of its
block (E8M0: 2^(byte - 127)), as in the OCP Microscaling Formats specification 1.0. Files hold a
kernel (E experts, I in, O out) as two tensors of bytes: NAME_blocks (E, O, I / block, block / 2),
whose low half byte is the even value, and NAME_scales (E, O, I / block). bfloat16 represents every
value exactly. transformers: integrations/mxfp4.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.huggingface import files

METHOD = "mxfp4"  # in `quantization_config.quant_method`

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)

BFLOAT16 = files.DTYPES["BF16"]


def _make_table() -> np.ndarray:
    """Returns the two values of each byte with each scale: (scale, byte, 2), in bfloat16."""
    pairs = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=1)
    exponents = np.arange(256) - 127
    # The scales before the last one, which is NaN, make the largest values infinite.
    with np.errstate(over="ignore"):
        table = np.ldexp(pairs, exponents[:, None, None])
    table[255] = np.nan
    return table.astype(BFLOAT16)


# As one number a pair, which NumPy looks up as fast as a single value.
TABLE = _make_table().view(np.uint32)[..., 0]


def is_used(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json says that kernels are in MXFP4."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


@dataclass(frozen=True)
class Kernel:
    """The location of a kernel (E, I, O) in MXFP4."""

    blocks: files.Tensor
    scales: files.Tensor

    code = "BF16"  # the smallest dtype that represents every value

    @property
    def path(self) -> Path:
        """Returns the file of the values."""
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, num_out, num_blocks, num_bytes = self.blocks.shape
        return num_experts, num_blocks * num_bytes * 2, num_out

    def read(self) -> np.ndarray:
        """Returns the values (E, I, O)."""
        return self.read_within((slice(None),) * 3)

    def read_within(self, box: tuple[slice, ...]) -> np.ndarray:
        """Returns an array (E, I, O) in which only the values in `box` are set.

        Only their blocks are read, and only where they lie it takes memory.
        """
        experts, inside, outside = box
        num_experts, num_in, num_out = self.shape
        # In the order of the file. The operating system provides memory for what is written.
        values_EOI = np.empty((num_experts, num_out, num_in), BFLOAT16)
        block_size = 2 * self.blocks.shape[-1]
        start, stop, _ = inside.indices(num_in)
        first, last = start // block_size, -(-stop // block_size)
        blocks = map_bytes(self.blocks)
        scales = map_bytes(self.scales)
        for expert in range(num_experts)[experts]:
            # O, N blocks, B bytes of a block
            scales_ON = scales[expert, outside, first:last]
            pairs_ONB = TABLE[scales_ON[..., None], blocks[expert, outside, first:last]]
            values = pairs_ONB.view(BFLOAT16).reshape(len(pairs_ONB), -1)
            values_EOI[expert, outside, first * block_size : last * block_size] = values
        return values_EOI.swapaxes(1, 2)


def map_bytes(tensor: files.Tensor) -> np.ndarray:
    """Returns the bytes of a tensor, memory-mapped."""
    return np.memmap(tensor.path, np.uint8, "r", tensor.start, tensor.shape)


def join(tensors: Mapping[str, files.Tensor]) -> dict[str, files.Tensor | Kernel]:
    """Returns the tensors of a folder by name, with a kernel for each pair of blocks and scales.

    Tensors that are no such pair stay as they are.
    """
    joined: dict[str, files.Tensor | Kernel] = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        stem = name.removesuffix(BLOCKS)
        scales = tensors.get(stem + SCALES)
        if scales is None or stem in tensors:
            continue
        are_bytes = blocks.code == scales.code == "U8"
        # `weights.check` reports tensors of other shapes under their own names.
        if are_bytes and len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape:
            del joined[name], joined[stem + SCALES]
            joined[stem] = Kernel(blocks, scales)
    return joined
