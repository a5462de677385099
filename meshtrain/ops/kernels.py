"""Which formulas the layers use: plain ones, or the fused ones, with derivatives of their own.

`jax.grad` of a plain formula reads some arrays more often than a GPU needs to: its backward pass
computes statistics again, and writes products in float32. The fused formulas keep the statistics
and read each array once. What they keep has names: KEPT in parallel/remat.py. With "pallas" two
kernels that are written by hand replace the fused formulas where they fit: norm_kernel.py and
loss_kernel.py.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from meshtrain import hardware
from meshtrain.errors import ConfigError
from meshtrain.parallel import accelerator, sharding

AMPERE = 8.0  # compute capability
MAX_WIDTH = 8192  # numbers of a row; more would not fit the registers

# Part of the key of jax's caches of traces, as the rules of `sharding` are.
_chosen = jax.make_user_context(default_value="plain")


@contextlib.contextmanager
def use(kernels: str) -> Iterator[None]:
    """Traces with these formulas: a value of config key `train.kernels`."""
    with _chosen(kernels):
        yield


def are_fused() -> bool:
    """Returns whether the layers use the fused formulas."""
    return resolved(_chosen.value, accelerator.platform()) != "plain"


def uses_norm_kernel(x: jax.Array) -> bool:
    """Returns whether the backward pass of a norm of `x` is the kernel of norm_kernel.py.

    It takes rows (B, S, D) that fit the registers of a program, with D not sharded.
    """
    if _chosen.value != "pallas" or x.ndim != 3:
        return False
    return x.shape[-1] <= MAX_WIDTH and sharding.num_shards("residual", x.shape[-1]) == 1


def uses_loss_kernel(logits: jax.Array) -> bool:
    """Returns whether the loss of logits (B, S, V) is the kernel of loss_kernel.py.

    The vocabulary must not be sharded. In float16 the loss must be scaled before its gradient is
    computed, and the kernel computes both at once.
    """
    if _chosen.value != "pallas" or logits.dtype == jnp.float16:
        return False
    return sharding.num_shards("vocab", logits.shape[-1]) == 1


def resolved(kernels: str, platform: str) -> str:
    """Returns a value of `train.kernels` without "auto", which is "fused" on GPUs."""
    if kernels == "auto":
        return "fused" if platform == "gpu" else "plain"
    return kernels


def check(kernels: str, device: jax.Device) -> None:
    """Raises ConfigError if a value of `train.kernels` needs another device."""
    if reason := why_not(kernels, device):
        raise ConfigError(f"train.kernels={kernels!r}: {reason}; use 'auto'")


def why_not(kernels: str, device: jax.Device) -> str:
    """Returns why a value of `train.kernels` needs another device; "" if it does not."""
    if kernels != "pallas":
        return ""
    # "gfx..." on AMD. A device that is compiled for and is not there has none.
    row = hardware.device_of(device.device_kind)
    known = row.chip.capability if row and row.chip else str(AMPERE)
    capability = getattr(device, "compute_capability", None) or known
    is_old = capability.startswith("gfx") or float(capability) < AMPERE
    if device.platform in ("gpu", "cuda", "cpu") and not is_old:
        return ""
    return (
        f"its kernels run on NVIDIA GPUs from compute capability {AMPERE} on, and interpreted on "
        f"CPUs; this is {device.platform} {device.device_kind}"
    )
