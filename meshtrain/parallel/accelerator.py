"""The devices that are compiled for; the host may lack them."""

import jax

from meshtrain.analysis import hardware


def platform() -> str:
    """Returns the platform of the active mesh, such as "gpu"; without a mesh that of the local devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def capability() -> str:
    """Returns the compute capability of the GPU that is compiled for ("9.0"; on AMD "gfx..."), or ""."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    row = device and hardware.device_of(device.device_kind)
    if row and row.chip:
        return row.chip.capability
    return getattr(jax.local_devices()[0], "compute_capability", "")
