"""The device mesh: six named axes, always all of them, so that nothing asks whether one exists."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
from jax.experimental import mesh_utils

from meshtrain.errors import ConfigError

# Slowest link outermost: neighbours along `tensor` exchange the most and sit closest together.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis; at most one may be -1, which takes all that are left."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    def resolve(self, num_devices: int) -> "MeshConfig":
        """Fills in the -1 and returns sizes whose product is `num_devices`, or raises ConfigError."""
        sizes = asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(
                    f"mesh.{axis}={size} is no axis size; use 1 or more, or -1 for all that are left"
                )
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ConfigError(
                f"{' and '.join(f'mesh.{axis}' for axis in free)} are -1; only one axis may be"
            )
        fixed = math.prod(size for size in sizes.values() if size != -1)
        product = " x ".join(
            f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)
        )
        if free and num_devices % fixed:
            raise ConfigError(
                f"{product} needs a multiple of {fixed} devices for mesh.{free[0]}=-1 and there are {num_devices}; "
                f"use sizes whose product divides {num_devices}, or --simulate_devices={fixed}"
            )
        if free:
            sizes[free[0]] = num_devices // fixed
        elif fixed != num_devices:
            raise ConfigError(
                f"{product or 'a mesh without axes above 1'} makes {fixed} devices and there are {num_devices}; "
                f"use --simulate_devices={fixed}, or set one axis to -1"
            )
        return MeshConfig(**sizes)


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
