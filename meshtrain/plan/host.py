"""The speed of devices that the table of hardware lacks, such as simulated ones, measured in half a second."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain.analysis.hardware import Device
from meshtrain.cluster import limits

SIZE = 384  # of the matrices
COPIED = 1 << 20  # elements of the arrays that are copied and summed
REPEATS = 3


def measured() -> Device:
    """Returns all devices of this job as a row of the table of hardware; all processes must call it.

    Every device works at the same time, so what they share is shared in the figures too. The link is that of the
    slowest pair.
    """
    devices = jax.devices()
    num = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    of_all = PartitionSpec("all")

    def ones(*shape: int) -> jax.Array:
        make = jax.jit(
            lambda: jnp.ones((num, *shape)), out_shardings=jax.NamedSharding(mesh, of_all)
        )
        return make()

    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=of_all, out_specs=PartitionSpec()
    )
    of_product = _seconds(lambda x: jnp.einsum("bij,bjk->bik", x, x), ones(SIZE, SIZE))
    large = ones(COPIED)
    of_copy, of_sum = _seconds(lambda x: x + 1, large), _seconds(summed, large)
    latency = _seconds(summed, ones(1))
    sent = 2 * (num - 1) / num * 4 * COPIED  # of an all-reduce, from each device
    link = sent / max(of_sum - latency, 1e-6) if num > 1 else float("inf")
    flops = 2 * SIZE**3 / of_product
    return Device(
        jax.devices()[0].platform,
        (),
        flops_16=flops,
        flops_32=flops,
        memory=_memory(),
        bandwidth=2 * 4 * COPIED / of_copy,  # read and written
        link=link,
        network=link,
        latency=latency,
    )


def _seconds(function: Callable, x: jax.Array) -> float:
    """Returns the shortest time of a call, without compiling."""
    compiled = jax.jit(function).lower(x).compile()
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _memory() -> float:
    """Returns the bytes of a device; of simulated devices, their share of the host's free memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return limits.available_memory() / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit", float("inf"))
