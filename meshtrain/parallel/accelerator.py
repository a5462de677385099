"""The devices that are compiled for; this host may lack them."""

import jax


def platform() -> str:
    """Returns the platform of the active mesh, such as "gpu"; without a mesh the local one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def device_kind() -> str:
    """Returns jax's kind of the devices of the active mesh; without a mesh of the local ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else jax.local_devices()[0].device_kind
