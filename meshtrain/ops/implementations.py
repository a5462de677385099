"""The names of attention's implementations, such as "blockwise", or "blockwise:256" with a size."""

from meshtrain.errors import choice_faults

NAMES = ("auto", "xla", "cudnn", "splash", "blockwise", "emulated")
FUSED = ("cudnn", "splash")  # kernels that name their results for `train.remat`
WITH_BLOCKS = ("xla", "blockwise")


def split(name: str) -> tuple[str, int]:
    """Returns the name without its block size, and the block size; 0: the default one."""
    kind, _, block = name.partition(":")
    return kind, int(block or 0)


def faults(key: str, value: str) -> list[str]:
    """Returns a fault if a config value does not name an implementation."""
    kind, colon, block = value.partition(":")
    if not colon:
        return choice_faults(key, value, NAMES)
    if kind in WITH_BLOCKS and block.isdecimal() and int(block) > 0:
        return []
    return [f"{key}={value!r}: use a name and a block size in tokens, such as 'blockwise:256'"]
