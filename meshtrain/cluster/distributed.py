"""The processes of a run that spans several: joining them, and what they tell each other.

Nothing here is a collective: the devices go on meanwhile, and a process that is stuck can be named.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed as runtime  # its store of keys and values has no public name

from meshtrain.cluster import environment as places
from meshtrain.cluster import rendezvous
from meshtrain.errors import EXIT_PREEMPTED, ConfigError

LONGEST = 3600  # seconds to wait for another process, which may have a large program to compile
KEPT = 1000  # answers that others may not have read yet; older ones are dropped
FAREWELL = 3.0  # seconds that a process with an error waits for the others to have it too
PACKAGES = ("meshtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
WISHES = "meshtrain/wish"

_questions, _run, _wished = itertools.count(), 0, False


def initialize(
    coordinator: str | None = None,
    count: int | None = None,
    number: int | None = None,
    *,
    join_seconds: float = places.JOIN_SECONDS,
) -> None:
    """Joins the run that arguments, variables or a launcher describe (see `place.find`).

    Without any this process is the whole run. Raises ConfigError where the description is wrong, a
    process is missing after `join_seconds`, or this one has not the GPUs that it was promised.
    """
    place = places.find(os.environ, (coordinator, count, number))
    if place is None:
        return
    rendezvous.meet(place, seconds=join_seconds)
    loopback = place.address.replace("localhost", places.LOOPBACK) if place.on_one_host else None
    on_cpu = "cpu" in (jax.config.jax_platforms or "")
    # Its handler of SIGTERM would take the signal away from ours; see `wished`.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.address,
        place.num_processes,
        place.process_id,
        local_device_ids=None if on_cpu else places.local_gpus(place, os.environ),
        cluster_detection_method="deactivate",  # under SLURM it takes one GPU of a node, jax #16788
        coordinator_bind_address=loopback,
    )
    with together():
        if not on_cpu:
            _check_gpus(place)


def num_processes() -> int:
    """Asks jax's runtime, not a backend, which would be started by that."""
    return runtime.global_state.num_processes


def process_id() -> int:
    return runtime.global_state.process_id


def _check_gpus(place: places.Place) -> None:
    promised = places.promised_gpus(place, os.environ)
    if promised:
        found, kind = jax.local_device_count(), jax.default_backend()
        if kind == "cpu" or found != promised:
            raise ConfigError(
                f"{place.source} gives this process {promised} GPUs, and jax found {found} devices of kind "
                f"{kind}; install meshtrain[cuda12] or [cuda13], or set JAX_PLATFORMS=cpu"
            )


def agree(value: Any) -> Any:
    """Returns on every process what the first one gave, as JSON has it; all must call it as often."""
    value = json.loads(json.dumps(value))
    if num_processes() == 1:
        return value
    client, number = runtime.global_state.client, next(_questions)
    if process_id() > 0:
        return json.loads(client.blocking_key_value_get(f"meshtrain/{number}", LONGEST * 1000))
    client.key_value_set(f"meshtrain/{number}", json.dumps(value))
    if number >= KEPT:
        client.key_value_delete(f"meshtrain/{number - KEPT}")
    return value


def gather(value: Any) -> list[Any]:
    """Returns what each process gave, in their order, as JSON has it; all must call it as often."""
    if num_processes() == 1:
        return [json.loads(json.dumps(value))]
    client, number = runtime.global_state.client, next(_questions)
    if process_id() > 0:
        client.key_value_set(f"meshtrain/{number}/{process_id()}", json.dumps(value))
        return agree(None)
    keys = [f"meshtrain/{number}/{one}" for one in range(1, num_processes())]
    others = [json.loads(client.blocking_key_value_get(key, LONGEST * 1000)) for key in keys]
    for key in keys:
        client.key_value_delete(key)
    return agree([value, *others])


def new_run() -> None:
    """Forgets what was wished in an earlier run of these processes; all must call it as often."""
    global _run, _wished
    _run, _wished = _run + 1, False


def any_asked_to_stop(mine: bool) -> bool:
    """Says, on the first process, whether any process has given True by now; elsewhere nothing.

    What the first one makes of it is for `agree` to tell, so that all act in the same step.
    """
    global _wished
    if num_processes() == 1:
        return mine
    client = runtime.global_state.client
    if process_id() == 0:
        return mine or bool(client.key_value_dir_get(f"{WISHES}/{_run}/"))
    if mine and not _wished:
        client.key_value_set(f"{WISHES}/{_run}/{process_id()}", "")
        _wished = True
    return False


def barrier(name: str) -> None:
    """Returns when all processes are here."""
    if num_processes() > 1:
        number = next(_questions)
        runtime.global_state.client.wait_at_barrier(f"meshtrain/{number}/{name}", LONGEST * 1000)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What the user has to change on one process, found within, is raised on all of them."""
    faults: tuple[str, ...] = ()
    try:
        yield
    except ConfigError as error:
        faults = error.faults
    everyone = gather(faults)
    if not any(everyone):
        return
    if all(one == everyone[0] for one in everyone):
        raise ConfigError(*everyone[0])
    raise ConfigError(
        *(f"process {number}: {fault}" for number, one in enumerate(everyone) for fault in one)
    )


def check_same(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where processes differ in the config or in versions, saying which and how."""
    flat = dict(_flat(config, "config."))
    facts = gather({**flat, **versions()} if num_processes() > 1 else {})
    faults = []
    for name in {name: None for one in facts for name in one}:  # in their order
        by_value: dict[str, list[int]] = {}
        for number, one in enumerate(facts):
            by_value.setdefault(one.get(name, "nothing"), []).append(number)
        if len(by_value) > 1:
            told = [f"{value} on {_ranks(numbers)}" for value, numbers in by_value.items()]
            faults.append(f"{name} differs between processes: {', '.join(told)}; use the same")
    if faults:
        raise ConfigError(*faults)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run without installing
            found[name] = importlib.metadata.version(name)
    return found


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, repr(value)


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def leave(code: int, *, together: bool) -> None:
    """Ends a process of several that has failed, `together` with the others or alone.

    jax would wait at exit for all others, which may wait for this one. One that has not failed, or has
    saved its state, leaves the usual way.
    """
    if num_processes() == 1 or code in (0, EXIT_PREEMPTED):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        if together:  # the first to go cuts off what others have to say
            client = runtime.global_state.client
            client.wait_at_barrier("meshtrain/farewell", int(FAREWELL * 1000))
    os._exit(code)
