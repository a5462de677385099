"""Which formulas the layers use: plain ones, or the fused ones, with derivatives of their own.

`jax.grad` of a plain formula reads some arrays more often than a GPU needs to: its backward pass
computes statistics again, and writes products in float32. The fused formulas keep the statistics
and read each array once. What they keep has names: KEPT in parallel/remat.py.
"""

import contextlib
from collections.abc import Iterator

import jax

from meshtrain.parallel import accelerator

# Part of the key of jax's caches of traces, as the rules of `sharding` are.
_chosen = jax.make_user_context(default_value="plain")


@contextlib.contextmanager
def use(kernels: str) -> Iterator[None]:
    """Traces with these formulas: a value of config key `train.kernels`."""
    with _chosen(kernels):
        yield


def are_fused() -> bool:
    """Returns whether the layers use the fused formulas."""
    return resolved(_chosen.value, accelerator.platform()) == "fused"


def resolved(kernels: str, platform: str) -> str:
    """Returns "plain" or "fused" for a value of `train.kernels`: "auto" is "fused" on GPUs."""
    if kernels == "auto":
        return "fused" if platform == "gpu" else "plain"
    return kernels
