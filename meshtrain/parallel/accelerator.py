"""The devices that are compiled for; the host may lack them."""

import jax


def platform() -> str:
    """Returns the platform of the active mesh, such as "gpu"; without a mesh that of the local devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
