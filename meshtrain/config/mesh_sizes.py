"""The sizes of the mesh axes for a number of devices."""

import math
from collections.abc import Mapping


def fill(sizes: Mapping[str, int], num_devices: int) -> tuple[dict[str, int], str]:
    """Returns the sizes with the -1 replaced, and the fault if their product is not `num_devices`, else ""."""
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            return {}, (
                f"mesh.{axis}={size} is not an axis size; use 1 or more, or -1 for all remaining devices"
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        return {}, f"{' and '.join(f'mesh.{axis}' for axis in free)} are -1; only one axis may be"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(
        f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)
    )
    if free and num_devices % fixed:
        return {}, (
            f"{product} needs a multiple of {fixed} devices for mesh.{free[0]}=-1 and there are {num_devices}; "
            f"use sizes whose product divides {num_devices}, or --simulate_devices={fixed}"
        )
    if not free and fixed != num_devices:
        return {}, (
            f"{product or 'a mesh with all axes 1'} needs {fixed} devices and there are {num_devices}; "
            f"use --simulate_devices={fixed}, or set one axis to -1"
        )
    return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}, ""
