"""Detects replica divergence (silent data corruption) and stragglers.

A faulty device can compute wrong values without an error; its replica of the parameters then
differs from the others. Every `health.every` steps, and before each save, digests of all replicas
are compared: one changed bit changes the digest. Every `health.every` steps, and a few times before
that, the speeds of all processes are compared, too.
"""

import collections
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import state as states
from meshtrain.cluster import distributed
from meshtrain.cluster.progress import ProgressPage
from meshtrain.config.schema import AXES, HealthConfig

# A process below this fraction of the median speed is slow (as in NVIDIA's resiliency extension).
SLOW_SPEED = 0.75
MIN_SLOW_CHECKS = 3  # in a row before a process is logged; a single slow check may be noise

# Steps of a run after which speeds are compared too: a slow process is logged at the last one, not
# only after several times `health.every` steps.
EARLY_STEPS = (10, 20, 40, 80)


class CorruptState(RuntimeError):
    """Replicas of the state differ between devices."""


class ReplicaCheck:
    """Compares replicas and speeds; writes to `event(name, **fields)` and `log(text)`."""

    def __init__(
        self,
        settings: HealthConfig,
        mesh: jax.sharding.Mesh,
        progress: ProgressPage,
        *,
        event: Callable[..., None],
        log: Callable[[str], None],
    ):
        self._every = settings.every
        self._mesh = mesh
        self._progress = progress
        self._event = event
        self._log = log
        self._digest: Callable[[Any], jax.Array] | None = None
        self._slow_checks: collections.Counter[int] = collections.Counter()  # in a row, by process
        # At the last check: step, total seconds of waiting for data, total seconds in the phase
        # "step".
        self._previous: np.ndarray | None = None

    def due(self, step: int, *, saving: bool) -> bool:
        """Returns whether to call `run` before this step; `saving`: whether it will be saved."""
        return self._every > 0 and step > 0 and (saving or self._speeds_due(step))

    def _speeds_due(self, step: int) -> bool:
        if step % self._every == 0:
            return True
        if distributed.num_processes() == 1:
            return False
        num_steps = step - self._progress["first_step"]
        return num_steps < self._every and num_steps in EARLY_STEPS

    def run(self, step: int, state: Any) -> None:
        """Raises CorruptState, on all processes, if replicas differ; logs slow processes."""
        if self._digest is None:
            self._digest = make_digest(state, self._mesh)
        own_digests = local_digests(self._digest(state))
        faults = replica_faults(state, distributed.gather(own_digests))
        for fault in faults:
            self._event("corrupt", step=step, fault=fault)
        if faults:
            raise CorruptState(
                f"step {step}: {faults[0]}. Results since the last checkpoint may be wrong; "
                f"if the same device is named again, remove it"
            )
        if distributed.num_processes() > 1 and self._speeds_due(step):
            self._compare_speeds(step)

    def _compare_speeds(self, step: int) -> None:
        current = np.array([step, self._progress["data"], self._progress["step"]])
        previous = self._previous
        self._previous = current
        if previous is None or previous[0] >= step:
            return
        # Per step since the last check: seconds of waiting for data, seconds of the rest.
        _, data, rest = (current - previous) / (step - previous[0])
        processes = distributed.gather([data, rest, time_product(), socket.gethostname()])
        speeds = relative_speeds([(data, rest, product) for data, rest, product, _ in processes])
        for number, speed in enumerate(speeds):
            if speed >= SLOW_SPEED:
                self._slow_checks[number] = 0
                continue
            self._slow_checks[number] += 1
            if self._slow_checks[number] < MIN_SLOW_CHECKS:
                continue
            data, _, product, host = processes[number]
            self._event(
                "straggler",
                step=step,
                process=number,
                host=host,
                score=speed,
                data_seconds=data,
                probe_seconds=product,
            )
            self._log(
                f"process {number} on {host} is slow: {speed:.2f} of the median speed; it waits "
                f"{data:.3f} s per step for data, a test matrix product takes {product * 1e3:.1f} "
                f"ms"
            )


# ---- speeds ----


def relative_speeds(timings: Sequence[Sequence[float]]) -> list[float]:
    """Returns the speed of each process as a fraction of the median speed.

    `timings` holds three times in seconds per process: the wait for data in a step, the rest of the
    step, and a matrix product. The rest of a step includes waiting for slower processes, so it is
    replaced by the minimum over all processes, scaled by the time of the product.
    """
    median_product = statistics.median_low(product for _, _, product in timings)
    shortest_rest = min(rest for _, rest, _ in timings)
    step_times = [data + shortest_rest * product / median_product for data, _, product in timings]
    median_step = statistics.median_low(step_times)
    return [median_step / seconds for seconds in step_times]


NUM_TIMINGS = 5  # of the test matrix product; the fastest is used

# Rows of the square matrices: their product takes milliseconds.
PRODUCT_SIZE = collections.defaultdict(lambda: 4096, cpu=1024)


def time_product() -> float:
    """Returns the seconds that the slowest device of this process takes for a matrix product."""
    return max(_time_product(device) for device in jax.local_devices())


def _time_product(device: jax.Device) -> float:
    size = PRODUCT_SIZE[device.platform]
    seconds = []
    with jax.set_mesh(jax.sharding.Mesh([device], "device")):
        x = jnp.ones((size, size), jnp.float32)
        for _ in range(NUM_TIMINGS + 1):  # the first call compiles
            began = time.perf_counter()
            _product(x).block_until_ready()
            seconds.append(time.perf_counter() - began)
    return min(seconds)


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return x @ x


# ---- replicas ----


def make_digest(state: Any, mesh: jax.sharding.Mesh) -> Callable[[Any], jax.Array]:
    """Returns a function from a state to its digests, (devices, arrays) uint32.

    Each device digests its own shards; there is no communication.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)

    def digest_shards(local: Any) -> jax.Array:
        return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(local)])[None]

    digests_of = jax.shard_map(
        digest_shards,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=jax.P(AXES),
    )
    return jax.jit(lambda state: digests_of(states.to_device(state)))


def _digest(x: jax.Array) -> jax.Array:
    """Returns the sum of all words, each times another odd number: one changed word changes it."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    width = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32).ravel()
    odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * odd, dtype=jnp.uint32)


def local_digests(rows: jax.Array) -> dict[int, list[int]]:
    """Returns the digests of this process's devices by id, from the result of `make_digest`."""
    return {
        shard.device.id: np.asarray(shard.data)[0].tolist() for shard in rows.addressable_shards
    }


def replica_faults(state: Any, digests: list[dict[str, list[int]]]) -> list[str]:
    """Returns a line for each array whose replicas differ, naming the devices in the minority.

    `digests` holds the `local_digests` of each process; JSON has made their keys strings.
    """
    digests_of_device: dict[int, list[int]] = {}
    for local in digests:
        for device_id, row in local.items():
            digests_of_device[int(device_id)] = row
    faults = []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        # shard index -> digest -> devices with this digest
        replicas: dict[str, dict[int, list[jax.Device]]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            devices_by_digest = replicas.setdefault(str(index), {})
            digest = digests_of_device[device.id][number]
            devices_by_digest.setdefault(digest, []).append(device)
        name = jax.tree_util.keystr(path)
        for devices_by_digest in replicas.values():
            if len(devices_by_digest) > 1:
                faults.append(f"{name} differs {_minority(list(devices_by_digest.values()))}")
    return faults


def _minority(groups: list[list[jax.Device]]) -> str:
    """Returns which devices differ, from the groups of devices with equal digests."""
    groups = sorted(groups, key=len)
    names = [" and ".join(_name(device) for device in group) for group in groups]
    if len(groups[-1]) > len(groups[-2]):
        return f"on {', '.join(names[:-1])} from {len(groups[-1])} other replicas"
    return f"between {' / '.join(names)}, without a majority"


def _name(device: jax.Device) -> str:
    return f"device {device.id} of process {device.process_index}"
