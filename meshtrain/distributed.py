"""Joining the processes of a run that spans several hosts."""

import os

import jax

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Joins the run that the JAX_* variables describe; without them this process is the whole run.

    jax itself reads only the first of the three.
    """
    if all(os.environ.get(name) for name in VARIABLES):
        address, num_processes, process_id = (os.environ[name] for name in VARIABLES)
        jax.distributed.initialize(address, int(num_processes), int(process_id))
