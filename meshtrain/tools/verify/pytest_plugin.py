"""pytest's fixture `verify_loss`: a test of a plain jax loss on simulated devices.

An entry point in pyproject.toml loads it wherever meshtrain is installed; nothing here imports jax
before a test needs the fixture.
"""

import os
from typing import Any

import pytest

import meshtrain

NUM_DEVICES = 8
FIXTURE = "verify_loss"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Simulates devices if a collected test uses the fixture: afterwards jax cannot change them."""
    if any(FIXTURE in getattr(item, "fixturenames", ()) for item in session.items):
        simulate_devices()


def simulate_devices() -> None:
    """Gives jax NUM_DEVICES CPU devices, unless the user has chosen a number or jax has started."""
    import jax

    is_chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if is_chosen or jax.config.jax_num_cpu_devices != -1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    except RuntimeError:
        pass  # jax has started: with one device, verify_loss says what to do


@pytest.fixture
def verify_loss() -> Any:
    """The function `meshtrain.verify_loss`, with simulated CPU devices if there are no others."""
    return meshtrain.verify_loss
