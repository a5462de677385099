"""The device mesh: always the same six named axes, so that no code checks whether an axis exists."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils

from meshtrain.config.schema import AXES, MeshConfig
from meshtrain.errors import ConfigError

# What two devices communicate over, from the fastest to the slowest: the fast network of a host of
# GPUs, a TPU slice or a CPU process; the network between hosts; the network between slices.
LINKS = ("host", "hosts", "slices")


def make_mesh(
    config: MeshConfig | None = None, *, devices: Sequence[jax.Device] | None = None, **sizes: int
):
    """Returns the `jax.sharding.Mesh` for a config, or for sizes: `make_mesh(fsdp=2, tensor=4)`.

    The product of the sizes must equal the number of `devices` (by default all); see
    `MeshConfig.resolve`. Each slice holds a contiguous part of `data`. Raises ConfigError for
    slices that the devices cannot form.
    """
    devices = jax.devices() if devices is None else devices
    config = (config or MeshConfig(**sizes)).resolve(len(devices))
    sizes = tuple(getattr(config, axis) for axis in AXES)
    # Auto on purpose: with jax's default, Explicit, users' models would need sharding annotations
    # in their contractions.
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    num_slices = _check_slices(config, devices)
    if num_slices > 1:
        grid = _grid_of_slices(sizes, devices, num_slices)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)
    if len({*map(host_of, devices)}) > 1:
        # Several hosts, which jax.make_mesh rejects: neighbours in the mesh share one.
        grid = np.array(sorted(devices, key=host_of)).reshape(sizes)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)
    try:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # On a TPU torus whose physical axes do not match the sizes: split a physical axis.
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)


def host_of(device: jax.Device) -> int:
    """Returns the number of the device's fast network.

    jax numbers these networks by `slice_index`: of TPUs a slice, of GPUs a host, or several hosts
    that NVLink connects. CPU devices share the memory of their process. In a description of a GPU
    cluster that is not there, hosts are processes.
    """
    is_gpu_of_nobody = device.platform == "gpu" and not device.client.local_device_count()
    is_process = device.platform == "cpu" or is_gpu_of_nobody
    # A device outside a cluster has no slice_index.
    return device.process_index if is_process else getattr(device, "slice_index", 0)


def _check_slices(config: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Returns the number of slices; raises ConfigError if the devices cannot form them."""
    count, hosts = config.slices, [host_of(device) for device in devices]
    num_hosts = len({*hosts})
    if devices[0].platform == "tpu":
        if count not in (1, num_hosts):
            raise ConfigError(
                f"mesh.slices={count}: the TPUs form {num_hosts} slice{'s' * (num_hosts > 1)}; "
                f"use mesh.slices={num_hosts}"
            )
        return num_hosts
    parts = np.sort(hosts).reshape(count, -1)
    within_hosts = all(len({*part}) == 1 for part in parts.tolist())
    if not within_hosts and any(a[-1] == b[0] for a, b in zip(parts, parts[1:], strict=False)):
        fits = [n for n in range(1, config.data + 1) if config.data % n == num_hosts % n == 0]
        raise ConfigError(
            f"mesh.slices={count} splits a host: there are {num_hosts}, with {len(devices)} devices; "
            f"use mesh.slices={' or '.join(map(str, fits))}"
        )
    return count


def _grid_of_slices(sizes: Sequence[int], devices: Sequence[jax.Device], num_slices: int):
    """Returns the devices in the shape of the mesh: slices split `data`, each in contiguous blocks.

    TPU slices that do not divide `data` split the other axes as well, the ones with the least
    traffic first.
    """
    outer, left = dict.fromkeys(AXES, 1), num_slices
    for axis in ("data", *AXES):
        part = math.gcd(left, sizes[AXES.index(axis)] // outer[axis])
        outer[axis], left = outer[axis] * part, left // part
    inner = [size // outer[axis] for axis, size in zip(AXES, sizes, strict=True)]
    if devices[0].platform == "tpu":
        shapes = inner, [*outer.values()], devices
        try:
            return mesh_utils.create_hybrid_device_mesh(*shapes)
        except NotImplementedError:  # as in make_mesh
            return mesh_utils.create_hybrid_device_mesh(*shapes, allow_split_physical_axes=True)
    parts = np.array(sorted(devices, key=host_of)).reshape(num_slices, *inner)
    return np.concatenate(parts, axis=AXES.index("data"))


@dataclass(frozen=True, eq=False)
class Network:
    """The host and the slice of each device: arrays of numbers in the shape of the mesh."""

    hosts: np.ndarray
    slices: np.ndarray

    @property
    def num_slices(self) -> int:
        """Number of slices along `data`: this many contiguous parts of it are in slices of their own."""
        along_data = np.moveaxis(self.slices, AXES.index("data"), 0)
        return len({*along_data.reshape(len(along_data), -1)[:, 0].tolist()})

    def link(self, numbers: Iterable[int]) -> str:
        """Returns the slowest of LINKS between devices, numbered in the order of the mesh."""
        numbers = [*numbers]
        if len({*self.slices.ravel()[numbers].tolist()}) > 1:
            return "slices"
        return "hosts" if len({*self.hosts.ravel()[numbers].tolist()}) > 1 else "host"

    def link_along(self, *axes: str) -> str:
        """Returns the slowest of LINKS within the groups of devices along these axes."""
        return max((self.link(group) for group in self._groups(axes)), key=LINKS.index)

    def num_parts(self, *axes: str) -> int:
        """Returns over how many slices, or hosts if they are in one slice, the groups along these axes are spread.

        1 if the members of a part are not neighbours along the axes, or if parts differ in size.
        """
        groups = self._groups(axes)
        of_device = self.slices if self.link_along(*axes) == "slices" else self.hosts
        parts = of_device.ravel()[groups]
        number = len({*parts[0].tolist()})
        if parts.shape[1] % number:
            return 1
        blocks = parts.reshape(len(parts), number, -1)
        are_whole = (blocks == blocks[..., :1]).all()
        are_apart = all(len({*row}) == number for row in blocks[..., 0].tolist())
        return number if are_whole and are_apart else 1

    def _groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the numbers of the devices of each group along these axes."""
        numbers = np.arange(self.hosts.size).reshape(self.hosts.shape)
        last = [AXES.index(axis) for axis in axes]
        rest = [dim for dim in range(len(AXES)) if dim not in last]
        size = math.prod(self.hosts.shape[dim] for dim in last)
        return numbers.transpose(rest + last).reshape(-1, size)


def network_of(mesh: jax.sharding.Mesh, num_slices: int = 1) -> Network:
    """Returns the hosts and slices of a mesh. `num_slices` (mesh.slices): parts of `data`; TPUs know their own."""
    hosts = np.vectorize(host_of, otypes=[int])(mesh.devices)
    if mesh.devices.flat[0].platform == "tpu":
        return Network(hosts, hosts)
    axis = AXES.index("data")
    numbers = np.arange(hosts.shape[axis]) * num_slices // hosts.shape[axis]
    shape = [-1 if dim == axis else 1 for dim in range(len(AXES))]
    return Network(hosts, np.broadcast_to(numbers.reshape(shape), hosts.shape))
