"""Joining the processes of a run that spans several hosts."""

import os

import jax

from meshtrain.errors import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Joins the run that the JAX_* variables describe; without them this process is the whole run.

    jax itself reads only the first of the three. Raises ConfigError where they are incomplete.
    """
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given:
        return
    if missing := [name for name in VARIABLES if name not in given]:
        raise ConfigError(
            f"{', '.join(given)} set and {', '.join(missing)} not; set all three, or none"
        )
    address, *numbers = given.values()
    if not all(number.isdigit() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        settings = " ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(f"{settings}: use a count of processes, and an id from 0 to below it")
    jax.distributed.initialize(address, int(numbers[0]), int(numbers[1]))
