"""The device mesh: always the same six named axes, so that no code checks whether an axis exists."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from meshtrain.config.schema import AXES, MeshConfig


def make_mesh(
    config: MeshConfig | None = None, *, devices: Sequence[jax.Device] | None = None, **sizes: int
):
    """Returns the `jax.sharding.Mesh` for a config, or for sizes: `make_mesh(fsdp=2, tensor=4)`.

    The product of the sizes must equal the number of `devices` (by default all); see `MeshConfig.resolve`.
    """
    devices = jax.devices() if devices is None else devices
    config = (config or MeshConfig(**sizes)).resolve(len(devices))
    sizes = tuple(getattr(config, axis) for axis in AXES)
    # Auto on purpose: with jax's default, Explicit, users' models would need sharding annotations in
    # their contractions.
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        # Several hosts, or TPU slices, which jax.make_mesh rejects: neighbours in the mesh share one.
        grid = np.array(sorted(devices, key=lambda device: device.slice_index)).reshape(sizes)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)
    try:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # On a TPU torus whose physical axes do not match the sizes: split a physical axis.
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, AXES, axis_types=types)


def networks_of(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the number of the fast network of each device, in the shape of the mesh.

    jax numbers these networks by `slice_index`: of TPUs a slice, of GPUs a host, or several hosts that NVLink
    connects. CPU devices share the memory of their process.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    attribute = "process_index" if is_cpu else "slice_index"  # only in a cluster
    return np.vectorize(
        lambda device: getattr(device, attribute, device.process_index), otypes=[int]
    )(mesh.devices)


def crosses_networks(mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Returns whether a group of devices along this axis is not within one fast network."""
    networks = networks_of(mesh)
    return bool((networks != networks.take([0], AXES.index(axis))).any())


def num_networks(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    """Returns over how many fast networks the devices along these axes are spread, each with as many neighbours.

    1 if the devices of a network are not neighbours along the axes, or not equally many.
    """
    networks = networks_of(mesh)
    others = [i for i, axis in enumerate(AXES) if axis not in axes]
    groups = networks.transpose(*others, *(AXES.index(axis) for axis in axes))
    groups = groups.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    number = len({*groups[0].tolist()})
    if groups.shape[1] % number:
        return 1
    blocks = groups.reshape(len(groups), number, -1)
    together = (blocks == blocks[..., :1]).all()
    apart = all(len({*row}) == number for row in blocks[..., 0].tolist())
    return number if together and apart else 1
