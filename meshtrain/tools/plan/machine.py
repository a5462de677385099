"""The devices as the planner sees them: sustained speeds, and the links along each mesh axis."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain import foreign
from meshtrain.cluster import limits
from meshtrain.errors import ConfigError
from meshtrain.hardware import Device

# What is sustained, as a part of the data sheet's figure; all are others' measurements of kernels,
# not of steps. Large matrix products by cuBLAS: 779 of 989 TFLOP/s on H200, 250 of 312 on A100. A
# product whose middle dim (of M, N and K) is D reaches D / (D + PRODUCT_DIM) of that, as fewer
# blocks share what they read: 685 TFLOP/s on H200 at 768 (profile in hardware.toml).
PRODUCTS = {"gpu": 0.80, "tpu": 0.85, "measured": 1.0}
PRODUCT_DIM = {"gpu": 120, "tpu": 0, "measured": 0}

# Of the speed of one device, what each of several sustains for hours: kernels of collectives take
# cores, and the power is limited. On Hopper that of NeMo's steps (half of the published steps of
# GPUs with its kernels are of other trainers, and not used); on v6e that of MaxText's.
SUSTAINED = {"hopper": 0.82, "ampere": 1.0, "v6e": 0.79}

# Fused attention, forward and backward, of long rows with a head dim from 128 on: by cuDNN on
# Hopper (arXiv 2407.08608, figures 5 and 6), by FlashAttention-2 on Ampere (arXiv 2307.08691,
# figures 5 and 6). Rows of S tokens reach S / (S + ATTENTION_ROW) of it: the diagonal blocks are
# computed in full, and few blocks share what they read. Half the head dim halves the products of an
# exponential, not the exponentials.
ATTENTION = {"hopper": (0.60, 0.50), "ampere": (0.70, 0.58), "tpu": (0.45, 0.40)}
ATTENTION["measured"] = (0.5, 0.5)
ATTENTION_ROW = {"gpu": 512, "tpu": 0, "measured": 0}
# Of Hopper's peak with the instructions of Ampere, which older kernels have (arXiv 2402.13499).
AMPERE_INSTRUCTIONS = 0.62

# Of the bandwidth, what norms, elementwise operations, the loss and the optimizer reach together
# (profile in hardware.toml).
MEMORY = {"gpu": 0.70, "tpu": 0.80, "measured": 0.80}
LINK = 0.80
NETWORK = 0.65

# Seconds of an operation that does nothing.
LAUNCH = {"gpu": 4e-6, "tpu": 1e-6, "measured": 10e-6}

LATENCY = {"link": 10e-6, "network": 30e-6}  # seconds of a collective of no bytes


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, `per_host` on each host; of TPUs, `per_host` is a slice.

    The fast links of a slice are the torus.
    """

    device: Device
    num_devices: int
    per_host: int

    @property
    def kind(self) -> str:
        if self.device.latency:
            return "measured"
        return "gpu" if self.device.chip else "tpu"

    @property
    def generation(self) -> str:
        """What the tables above name: of GPUs, those with the instructions of Hopper, or older."""
        chip = self.device.chip
        if self.kind == "gpu" and chip:
            return "hopper" if float(chip.capability) >= 9 else "ampere"
        return self.device.name

    @property
    def peak(self) -> float:
        """The FLOP/s of 16-bit products, less what several devices do not sustain."""
        share = SUSTAINED.get(self.generation, 1.0) if self.num_devices > 1 else 1.0
        return share * self.device.flops_16

    def product(self, m: float, n: float, k: float, itemsize: int) -> float:
        """Returns the seconds of a 16-bit matrix product (m, k) x (k, n)."""
        middle = sorted((m, n, k))[1]
        share = PRODUCTS[self.kind] * middle / (middle + PRODUCT_DIM[self.kind])
        return self._kernel(2 * m * n * k, share, itemsize * (m * k + k * n + m * n))

    def batched_products(self, flops: float, num_bytes: float) -> float:
        """Returns the seconds of small products, one after the other with what they move."""
        return flops / (self.peak * PRODUCTS[self.kind]) + self.memory(num_bytes)

    def _kernel(self, flops: float, share: float, num_bytes: float) -> float:
        """Returns the seconds of a kernel that moves bytes while it computes."""
        return max(flops / (self.peak * share), self.memory(num_bytes))

    def attention(
        self,
        flops: float,
        seq_len: float,
        head_dim: float,
        *,
        backward: bool,
        shares: tuple[float, float] | None = None,
    ) -> float:
        """Returns the seconds of fused attention.

        `shares` are those of a kernel with Ampere's instructions; None: of the best one.
        """
        peak = self.peak
        if shares and self.generation == "hopper":
            peak *= AMPERE_INSTRUCTIONS
        kind = self.generation if self.kind == "gpu" else self.kind
        share = (shares or ATTENTION[kind])[backward]
        if self.kind == "gpu":
            share *= min(1.0, math.sqrt(head_dim / 128))
        return flops / (peak * share * seq_len / (seq_len + ATTENTION_ROW[self.kind]))

    def memory(self, num_bytes: float) -> float:
        """Returns the seconds in which a device reads or writes these bytes."""
        return num_bytes / (self.device.bandwidth * MEMORY[self.kind])

    def link_of(self, size: int, stride: int) -> str:
        """Returns the slowest link along an axis of `size` devices that are `stride` apart.

        It is "link", "network" or "none".
        """
        if size == 1:
            return "none"
        return "link" if size * stride <= self.per_host else "network"

    def collective(self, num_bytes: float, size: int, stride: int) -> float:
        """Returns the seconds in which `size` devices gather, or reduce and scatter, `num_bytes`.

        Each sends the (size - 1) / size of the bytes. Of an axis that leaves the host, the members
        inside one share its network cards, one card for each device.
        """
        if size == 1 or not num_bytes:
            return 0.0
        rate = self.device.link * LINK
        where = self.link_of(size, stride)
        if where == "network":
            members = max(1, self.per_host // stride)
            rate = min(rate, members * (self.device.network or self.device.link) * NETWORK)
        return num_bytes * (size - 1) / size / rate + self._latency(where)

    def parts_inside(self, size: int, stride: int) -> int:
        """Returns how many of `size` devices share a host; 1 if not all hosts hold equally many."""
        inside = min(size, self.per_host // stride)
        return inside if inside and self.per_host % stride == 0 and size % inside == 0 else 1

    def exchange(self, num_bytes: float, size: int, stride: int, *, is_ring: bool) -> float:
        """Returns the seconds in which each of `size` devices sends a part to each other one.

        A part is 1 / `size` of `num_bytes`. In a ring everything goes to the next device, in
        `size` - 1 steps; so one of a host sends all that leaves it.
        """
        where = self.link_of(size, stride)
        if where == "none":
            return 0.0
        link, network = self.device.link * LINK, self.device.network * NETWORK
        if where == "link":
            sent = num_bytes * (size - 1) / size
            rate = link
        else:
            inside = 1 if is_ring else self.parts_inside(size, stride)
            sent = num_bytes * (size - inside) / size
            rate = min(link, network or link)
        num_steps = size - 1 if is_ring else 1
        return sent / rate + self._latency(where) * num_steps

    def send(self, num_bytes: float, stride: int) -> float:
        """Returns the seconds in which a device sends to the one `stride` further."""
        where = self.link_of(2, stride)
        rate = self.device.link * LINK if where == "link" else self.device.network * NETWORK
        return num_bytes / (rate or self.device.link * LINK) + self._latency(where)

    def _latency(self, where: str) -> float:
        return self.device.latency or LATENCY[where]


# ---- devices that are not in the table: measured ----

MATRIX_SIZE = 384  # of the matrices
COPIED_ELEMENTS = 1 << 20  # elements of the arrays that are copied and summed
REPEATS = 3


def measure_host() -> Device:
    """Returns all devices of this job as a row of the table of hardware.

    All processes must call it. Every device works at the same time, so what they share is shared in
    the figures too. The link is that of the slowest pair.
    """
    devices = jax.devices()
    num = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    over_all = PartitionSpec("all")
    sharding = jax.NamedSharding(mesh, over_all)

    def ones(*shape: int) -> jax.Array:
        """Returns an array of this shape on each device."""
        return jax.jit(lambda: jnp.ones((num, *shape)), out_shardings=sharding)()

    add = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=over_all, out_specs=PartitionSpec()
    )
    matrices = ones(MATRIX_SIZE, MATRIX_SIZE)
    product_seconds = _seconds(lambda x: jnp.einsum("bij,bjk->bik", x, x), matrices)
    large = ones(COPIED_ELEMENTS)
    copy_seconds = _seconds(lambda x: x + 1, large)
    sum_seconds = _seconds(add, large)
    latency = _seconds(add, ones(1))

    # Of an all-reduce, from each device.
    sent = 2 * (num - 1) / num * 4 * COPIED_ELEMENTS
    link = sent / max(sum_seconds - latency, 1e-6) if num > 1 else float("inf")
    flops = 2 * MATRIX_SIZE**3 / product_seconds
    return Device(
        jax.devices()[0].platform,
        (),
        flops_16=flops,
        flops_32=flops,
        memory=_memory(),
        bandwidth=2 * 4 * COPIED_ELEMENTS / copy_seconds,  # read and written
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
    """Returns the bytes of a device; of simulated ones, their share of the host's free memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return limits.available_memory() / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit", float("inf"))


# ---- a run on devices of the table: the factor of --measured ----

MAX_METRICS_BYTES = 1 << 30
SKIPPED_ROWS = 5  # rows that are left out: the first steps compile, read caches and fill queues


def measured_factor(workdir: Path) -> float:
    """Returns measured / predicted step time, the median over rows of a run's metrics.jsonl.

    Raises ConfigError if no row has both.
    """
    file = workdir / "metrics.jsonl"
    try:
        content = foreign.read_bytes(file, max_bytes=MAX_METRICS_BYTES)
        rows = [foreign.parse_json(line) for line in content.splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--measured={workdir}: metrics.jsonl cannot be read ({error})"
        ) from error
    ratios = []
    for row in rows:
        match row:
            case {"step_time": float(measured), "predicted_step_time": float(predicted)}:
                ratios.append(measured / predicted)
    ratios = ratios[SKIPPED_ROWS:] or ratios
    if not ratios:
        raise ConfigError(
            f"--measured={workdir}: no row of metrics.jsonl has predicted_step_time, which runs on "
            f"devices of meshtrain/hardware.toml write; use such a run"
        )
    return statistics.median(ratios)
