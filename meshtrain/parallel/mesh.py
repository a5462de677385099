"""The device mesh: always the same six axes, so that no code checks whether an axis exists."""

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
) -> jax.sharding.Mesh:
    """Returns the `jax.sharding.Mesh` for a config, or for sizes: `make_mesh(fsdp=2, tensor=4)`.

    The product of the sizes must equal the number of `devices` (by default all); see
    `MeshConfig.resolve`. Each slice holds a contiguous part of `data`. Raises ConfigError for
    slices that the devices cannot form.
    """
    devices = jax.devices() if devices is None else devices
    config = config or MeshConfig(**sizes)
    config = config.resolve(len(devices))
    shape = tuple(getattr(config, axis) for axis in AXES)
    # Auto on purpose: with jax's default, Explicit, users' models would need sharding annotations
    # in their contractions.
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    num_slices = _check_slices(config, devices)
    if num_slices > 1:
        grid = _grid_of_slices(shape, devices, num_slices)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)
    if len({*map(host_of, devices)}) > 1:
        # Several hosts, which jax.make_mesh rejects: neighbours in the mesh share one.
        grid = np.array(sorted(devices, key=host_of)).reshape(shape)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # On a TPU torus whose physical axes do not match the sizes: split a physical axis.
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
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
    count = config.slices
    hosts = [host_of(device) for device in devices]
    num_hosts = len({*hosts})
    if devices[0].platform == "tpu":
        if count not in (1, num_hosts):
            raise ConfigError(
                f"mesh.slices={count}: the TPUs form {num_hosts} slice{'s' * (num_hosts > 1)}; "
                f"use mesh.slices={num_hosts}"
            )
        return num_hosts
    parts = np.sort(hosts).reshape(count, -1)
    # A slice is within a host, or consists of hosts: no host is in two slices.
    within_hosts = all(len({*part}) == 1 for part in parts.tolist())
    splits_a_host = any(a[-1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    if not within_hosts and splits_a_host:
        fits = [n for n in range(1, config.data + 1) if config.data % n == num_hosts % n == 0]
        raise ConfigError(
            f"mesh.slices={count} splits a host: there are {num_hosts}, "
            f"with {len(devices)} devices; "
            f"use mesh.slices={' or '.join(map(str, fits))}"
        )
    return count


def _grid_of_slices(
    sizes: Sequence[int], devices: Sequence[jax.Device], num_slices: int
) -> np.ndarray:
    """Returns the devices in the shape of the mesh: slices split `data`, each in contiguous blocks.

    TPU slices that do not divide `data` split the other axes as well, the ones with the least
    traffic first.
    """
    # An axis of size s is `between[axis]` slices times s / between[axis] devices within a slice.
    between = dict.fromkeys(AXES, 1)
    slices_left = num_slices
    for axis in ("data", *AXES):
        part = math.gcd(slices_left, sizes[AXES.index(axis)] // between[axis])
        between[axis] *= part
        slices_left //= part
    within = [size // between[axis] for axis, size in zip(AXES, sizes, strict=True)]
    if devices[0].platform == "tpu":
        try:
            return mesh_utils.create_hybrid_device_mesh(within, [*between.values()], devices)
        except NotImplementedError:
            # As in make_mesh.
            return mesh_utils.create_hybrid_device_mesh(
                within, [*between.values()], devices, allow_split_physical_axes=True
            )
    parts = np.array(sorted(devices, key=host_of)).reshape(num_slices, *within)
    return np.concatenate(parts, axis=AXES.index("data"))


@dataclass(frozen=True, eq=False)
class Network:
    """The host and the slice of each device: arrays of numbers in the shape of the mesh."""

    hosts: np.ndarray
    slices: np.ndarray

    @property
    def num_slices(self) -> int:
        """Number of slices, each of which holds a contiguous part of `data`."""
        along_data = np.moveaxis(self.slices, AXES.index("data"), 0)
        first_devices = along_data.reshape(len(along_data), -1)[:, 0]
        return len({*first_devices.tolist()})

    def link(self, numbers: Iterable[int]) -> str:
        """Returns the slowest of LINKS between devices, numbered in the order of the mesh."""
        numbers = [*numbers]
        if len({*self.slices.ravel()[numbers].tolist()}) > 1:
            return "slices"
        if len({*self.hosts.ravel()[numbers].tolist()}) > 1:
            return "hosts"
        return "host"

    def link_along(self, *axes: str) -> str:
        """Returns the slowest of LINKS within the groups of devices along these axes."""
        links = [self.link(group) for group in self._groups(axes)]
        return max(links, key=LINKS.index)

    def num_islands(self, *axes: str) -> int:
        """Returns how many slices (or hosts, within one slice) a group along these axes spans.

        1 if the devices of an island are not neighbours along the axes, or if islands differ in
        size.
        """
        island_of_device = self.slices if self.link_along(*axes) == "slices" else self.hosts
        islands = island_of_device.ravel()[self._groups(axes)]  # (groups, devices of a group)
        num_islands = len({*islands[0].tolist()})
        if islands.shape[1] % num_islands:
            return 1
        blocks = islands.reshape(len(islands), num_islands, -1)
        is_one_island_per_block = (blocks == blocks[..., :1]).all()
        is_one_block_per_island = all(len({*row}) == num_islands for row in blocks[..., 0].tolist())
        return num_islands if is_one_island_per_block and is_one_block_per_island else 1

    def _groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the numbers of the devices of each group along these axes."""
        numbers = np.arange(self.hosts.size).reshape(self.hosts.shape)
        group_dims = [AXES.index(axis) for axis in axes]
        other_dims = [dim for dim in range(len(AXES)) if dim not in group_dims]
        group_size = math.prod(self.hosts.shape[dim] for dim in group_dims)
        return numbers.transpose(other_dims + group_dims).reshape(-1, group_size)


def network_of(mesh: jax.sharding.Mesh, num_slices: int = 1) -> Network:
    """Returns the hosts and slices of a mesh.

    `num_slices` (mesh.slices) is the number of slices along `data`; TPUs know their own.
    """
    hosts = np.vectorize(host_of, otypes=[int])(mesh.devices)
    if mesh.devices.flat[0].platform == "tpu":
        return Network(hosts, hosts)
    data_dim = AXES.index("data")
    data_size = hosts.shape[data_dim]
    slices_along_data = np.arange(data_size) * num_slices // data_size
    shape = [-1 if dim == data_dim else 1 for dim in range(len(AXES))]
    slices = np.broadcast_to(slices_along_data.reshape(shape), hosts.shape)
    return Network(hosts, slices)
