"""Which formulas the layers use: plain ones, or the fused ones, with derivatives of their own.

`jax.grad` of a plain formula reads some arrays more often than a GPU needs to: its backward pass
computes statistics again, and writes products in float32. The fused formulas keep the statistics
and read each array once. They round as the plain ones do, or less often.
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
    """Returns whether the layers use the fused formulas: with "auto" on GPUs."""
    if _chosen.value == "auto":
        return accelerator.platform() == "gpu"
    return _chosen.value == "fused"
