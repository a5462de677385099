"""The device mesh: six named axes, always all of them, so that nothing asks whether one exists."""

from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils

from meshtrain.config.schema import AXES, MeshConfig


def make_mesh(
    config: MeshConfig | None = None, *, devices: Sequence[jax.Device] | None = None, **sizes: int
):
    """Returns the `jax.sharding.Mesh` of a config, or of sizes: `make_mesh(fsdp=2, tensor=4)`.

    Without `devices` the sizes must use up all of them; see `MeshConfig.resolve`.
    """
    devices = jax.devices() if devices is None else devices
    config = (config or MeshConfig(**sizes)).resolve(len(devices))
    sizes = tuple(getattr(config, axis) for axis in AXES)
    # Auto, on purpose: jax makes Explicit axes by default, which would force sharding annotations
    # into the contractions of users' models.
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # A torus of TPUs: no product of its sides is the size of each axis. So cut a side among axes.
        places = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(places, AXES, axis_types=types)
