"""What a run does not notice by itself: copies of the state that differ, and processes that hold it up.

Where a device computes wrongly without a word, its copy of replicated parameters goes astray. Every few
steps, and before each save, all copies are compared bit for bit by a digest, and the speeds of all processes.
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

from meshtrain.cluster import distributed
from meshtrain.cluster.progress import ProgressPage
from meshtrain.config.schema import AXES, HealthConfig

SLOW = 0.75  # of the median speed: slower ones are told (as in NVIDIA's resiliency extension)
IN_A_ROW = 3  # checks; once is a hiccup
PROBES = 5  # the fastest counts
PROBE_SIZE = collections.defaultdict(lambda: 4096, cpu=1024)  # rows of a matrix: milliseconds


class CorruptState(RuntimeError):
    """A device's copy of the state is not what the others have."""


class Check:
    """Compares copies and speeds; `event(name, **fields)` records, `line(text)` tells."""

    def __init__(
        self,
        settings: HealthConfig,
        mesh: jax.sharding.Mesh,
        page: ProgressPage,
        *,
        event: Callable[..., None],
        line: Callable[[str], None],
    ):
        self._every, self._mesh, self._page = settings.every, mesh, page
        self._event, self._line = event, line
        self._digest: Callable | None = None
        self._slow = collections.Counter()  # checks in a row, of each process
        self._before: np.ndarray | None = None  # step, seconds of data and of steps

    def due(self, step: int, *, saving: bool) -> bool:
        return self._every > 0 and step > 0 and (saving or step % self._every == 0)

    def run(self, step: int, state: Any) -> None:
        """Raises CorruptState, on all processes, where copies differ; tells who is slow."""
        if self._digest is None:
            self._digest = make_digest(state, self._mesh)
        faults = differing(state, distributed.gather(local_digests(self._digest(state))))
        for fault in faults:
            self._event("corrupt", step=step, fault=fault)
        if faults:
            raise CorruptState(
                f"step {step}: {faults[0]}. Nothing since the last checkpoint can be trusted; "
                f"if it is the same device again, take it out"
            )
        if step % self._every == 0 and distributed.num_processes() > 1:
            self._compare_speeds(step)

    def _compare_speeds(self, step: int) -> None:
        spent = np.array([step, self._page["data"], self._page["step"]])
        before, self._before = self._before, spent
        if before is None or before[0] >= step:
            return
        _, data, work = (spent - before) / (step - before[0])
        everyone = distributed.gather([data, work, probe(), socket.gethostname()])
        for number, score in enumerate(scores([one[:3] for one in everyone])):
            self._slow[number] = self._slow[number] + 1 if score < SLOW else 0
            if self._slow[number] < IN_A_ROW:
                continue
            data, _, took, host = everyone[number]
            fields = {"process": number, "host": host, "score": score}
            self._event("straggler", step=step, **fields, data_seconds=data, probe_seconds=took)
            self._line(
                f"process {number} on {host} is slow: {score:.2f} of the median speed, in a step it waits "
                f"{data:.3f} s for data, a test product takes it {took * 1e3:.1f} ms"
            )


def scores(everyone: Sequence[Sequence[float]]) -> list[float]:
    """Returns each process's speed, as a part of the median's.

    Of each are given, in seconds: a step's wait for data, the rest of a step, and a probe. That rest
    is the same for all who are quick: they wait for the slowest, which waits least.
    """
    typical = statistics.median_low(probe for _, _, probe in everyone)
    least = min(work for _, work, _ in everyone)
    own = [data + least * probe / typical for data, _, probe in everyone]
    middle = statistics.median_low(own)
    return [middle / one for one in own]


def probe() -> float:
    """Returns how long the slowest device of this process takes for a product of matrices, in seconds."""
    return max(_probe(device) for device in jax.local_devices())


def _probe(device: jax.Device) -> float:
    size, took = PROBE_SIZE[device.platform], []
    with jax.set_mesh(jax.sharding.Mesh([device], "alone")):
        x = jnp.ones((size, size), jnp.float32)
        for _ in range(PROBES + 1):  # the first one compiles
            began = time.perf_counter()
            _product(x).block_until_ready()
            took.append(time.perf_counter() - began)
    return min(took)


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return x @ x


def make_digest(state: Any, mesh: jax.sharding.Mesh) -> Callable[[Any], jax.Array]:
    """Returns a function of such states: for each device a row, for each array a 32-bit digest.

    Each device works on the bytes that it holds itself; nothing is exchanged.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)

    def body(local: Any) -> jax.Array:
        return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(local)])[None]

    rows = jax.P(AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=rows))


def _digest(x: jax.Array) -> jax.Array:
    """The sum of all words, each times another odd number: any one that changes, shows."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    width = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32).ravel()
    odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * odd, dtype=jnp.uint32)


def local_digests(rows: jax.Array) -> dict[int, list[int]]:
    """Returns the rows of this process's devices, by their ids."""
    return {
        shard.device.id: np.asarray(shard.data)[0].tolist() for shard in rows.addressable_shards
    }


def differing(state: Any, everyone: list[dict[str, list[int]]]) -> list[str]:
    """Returns a line for each array whose copies are not the same, with the devices that stand alone."""
    rows = {int(device): row for one in everyone for device, row in one.items()}
    faults = []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        copies: dict[str, dict[int, list[jax.Device]]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            by_digest = copies.setdefault(str(index), {})
            by_digest.setdefault(rows[device.id][number], []).append(device)
        faults += [
            f"{jax.tree_util.keystr(path)} differs {_odd_ones(list(by_digest.values()))}"
            for by_digest in copies.values()
            if len(by_digest) > 1
        ]
    return faults


def _odd_ones(groups: list[list[jax.Device]]) -> str:
    groups = sorted(groups, key=len)
    names = [" and ".join(_name(device) for device in group) for group in groups]
    if len(groups[-1]) > len(groups[-2]):
        return f"on {', '.join(names[:-1])} from {len(groups[-1])} other copies"
    return f"between {' / '.join(names)}, and none is in the majority"


def _name(device: jax.Device) -> str:
    return f"device {device.id} of process {device.process_index}"
