"""Joining the processes of a run that spans several hosts."""

import itertools
import json
import os
from typing import Any

import jax
from jax._src import distributed as runtime  # its store of keys and values has no public name

from meshtrain.errors import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LONGEST = 3600  # seconds to wait for the first process, which may have a large checkpoint to check
KEPT = 1000  # answers that others may not have read yet; older ones are dropped

_questions = itertools.count()


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


def agree(value: Any) -> Any:
    """Returns on every process what the first one gave, as JSON has it; all must call it as often.

    Not a collective: the devices go on meanwhile.
    """
    value = json.loads(json.dumps(value))
    if jax.process_count() == 1:
        return value
    client, number = runtime.global_state.client, next(_questions)
    if jax.process_index() > 0:
        return json.loads(client.blocking_key_value_get(f"meshtrain/{number}", LONGEST * 1000))
    client.key_value_set(f"meshtrain/{number}", json.dumps(value))
    if number >= KEPT:
        client.key_value_delete(f"meshtrain/{number - KEPT}")
    return value
