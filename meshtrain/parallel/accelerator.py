"""The platform of the devices that are compiled for; this host may lack them."""

import jax


def platform() -> str:
    """Returns the platform of the active mesh, such as "gpu"; without a mesh the local one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
