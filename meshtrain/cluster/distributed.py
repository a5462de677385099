"""Joins the processes of a run, and exchanges small values between them.

Nothing here uses the devices: they keep running, and the supervisor can name a stuck process.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed as jax_distributed  # its key-value store has no public name

import meshtrain
from meshtrain.cluster import environment, launchers, rendezvous
from meshtrain.errors import EXIT_PREEMPTED, ConfigError, TransientError, install_command

TIMEOUT = 3600  # seconds to wait for another process, which may have a large program to compile


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    join_seconds: float = environment.JOIN_SECONDS,
    num_devices: int | None = None,
) -> None:
    """Joins the run that arguments, variables or a launcher describe; see `environment.py`.

    Without any of them, this process is the only one. Of its GPUs it uses its part of
    `num_devices`, by default all. Raises ConfigError if the description is
    wrong, if a process is missing after `join_seconds`, or if jax does not find the GPUs that the
    launcher allotted.
    """
    process = environment.process_info(os.environ, (coordinator, num_processes, process_id))
    if process is None:
        return
    token = os.environ.get(rendezvous.TOKEN_VARIABLE, "")
    rendezvous.wait_for_all(process, seconds=join_seconds, token=token)

    # On one host, no other host shall reach the coordinator.
    bind_address = None
    if process.on_one_host:
        bind_address = process.address.replace("localhost", launchers.LOOPBACK)
    on_cpu = "cpu" in (jax.config.jax_platforms or "")
    most = num_devices // process.num_processes if num_devices else None
    local_device_ids = None if on_cpu else environment.local_gpus(process, os.environ, most)
    # jax's own SIGTERM handler would replace ours; see `any_asked_to_stop`.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        process.address,
        process.num_processes,
        process.process_id,
        local_device_ids=local_device_ids,
        # Under SLURM, detection uses only one GPU of a node (jax-ml/jax#16788).
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
    )
    with raise_on_all_processes():
        if not on_cpu:
            start_backend()
            _check_gpus(process, most)


def start_backend() -> None:
    """Starts jax's backend; raises ConfigError without devices of the kind a variable names."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that there is one
        name = "JAX_PLATFORMS" if jax.config.jax_platforms else "JAX_PLATFORM_NAME"
        if not os.environ.get(name):
            raise
        reason = str(error).partition("\n")[0] or "jax finds no such devices"
        remedy = "set JAX_PLATFORMS=cpu, or unset it and omit --platform, to use what there is"
        if os.environ[name] == "cuda":
            remedy += f"; for GPUs install the extra cuda12 or cuda13, {install_command('cuda12')}"
        raise ConfigError(f"{name}={os.environ[name]}: {reason}; {remedy}") from error


def _check_gpus(process: launchers.ProcessInfo, most: int | None) -> None:
    """Raises ConfigError if jax has not found the GPUs that the launcher allots to this process.

    Of them it uses `most` at most.
    """
    num_allotted = environment.num_allotted_gpus(process, os.environ)
    if most is not None:
        num_allotted = min(num_allotted, most)
    if not num_allotted:
        return
    num_devices = jax.local_device_count()
    kind = jax.default_backend()
    if kind == "cpu" or num_devices != num_allotted:
        raise ConfigError(
            f"{process.source} gives this process {num_allotted} GPUs, and jax found {num_devices} "
            f"devices of kind {kind}; set JAX_PLATFORMS=cpu, or install the extra cuda12 or "
            f"cuda13, {install_command('cuda12')}"
        )


def is_joined() -> bool:
    """Returns whether jax.distributed is initialized, by this package or by others."""
    return jax_distributed.global_state.client is not None


def num_processes() -> int:
    """Returns the number of joined processes, without starting a backend."""
    return jax_distributed.global_state.num_processes


def process_id() -> int:
    """Returns the rank of this process, without starting a backend."""
    return jax_distributed.global_state.process_id


# ---- values that all processes exchange, as JSON in the key-value store of jax.distributed ----

MAX_STORED_VALUES = 1000  # broadcasts that others may not have read yet; older ones are deleted

# The number of the next exchange: the same on all processes, which make the same calls.
_sequence = itertools.count()


def broadcast(value: Any) -> Any:
    """Returns process 0's value on every process, after a round trip through JSON.

    All processes must call `broadcast`, `gather` and `barrier` in the same order.
    """
    value = json.loads(json.dumps(value))
    if num_processes() == 1:
        return value
    client = jax_distributed.global_state.client
    number = next(_sequence)
    if process_id() > 0:
        return json.loads(client.blocking_key_value_get(f"meshtrain/{number}", TIMEOUT * 1000))
    client.key_value_set(f"meshtrain/{number}", json.dumps(value))
    if number >= MAX_STORED_VALUES:
        client.key_value_delete(f"meshtrain/{number - MAX_STORED_VALUES}")
    return value


def gather(value: Any) -> list[Any]:
    """Returns on every process the values of all, by rank (an all-gather through JSON)."""
    if num_processes() == 1:
        return [json.loads(json.dumps(value))]
    client = jax_distributed.global_state.client
    number = next(_sequence)
    if process_id() > 0:
        client.key_value_set(f"meshtrain/{number}/{process_id()}", json.dumps(value))
        return broadcast(None)
    values = [value]
    keys = [f"meshtrain/{number}/{rank}" for rank in range(1, num_processes())]
    for key in keys:
        values.append(json.loads(client.blocking_key_value_get(key, TIMEOUT * 1000)))
    for key in keys:
        client.key_value_delete(key)
    return broadcast(values)


def barrier(name: str) -> None:
    """Returns when all processes have called it."""
    if num_processes() > 1:
        client = jax_distributed.global_state.client
        number = next(_sequence)
        client.wait_at_barrier(f"meshtrain/{number}/{name}", TIMEOUT * 1000)


class Barriers:
    """Barriers of one task, which the failure of any process ends for all.

    At jax's own barriers the others would wait until the timeout. All processes must create it
    together; then any thread may call the methods.
    """

    def __init__(self, count: int):
        self._place = f"meshtrain/{next(_sequence)}"
        self._count = count
        self._next = 0

    def wait(self, seconds: float) -> None:
        """Returns when all processes have called it; raises RuntimeError if one has failed."""
        client = jax_distributed.global_state.client
        place = f"{self._place}/{self._next}"
        self._next += 1
        if process_id() > 0:
            self._set(f"{place}/{process_id()}", "")
            fault = client.blocking_key_value_get(f"{place}/all", int(seconds * 1000))
        else:
            fault = ""
            for rank in range(1, num_processes()):
                key = f"{place}/{rank}"
                fault = fault or client.blocking_key_value_get(key, int(seconds * 1000))
            self._set(f"{place}/all", fault)
        if fault:
            raise RuntimeError(fault)

    def fail(self, reason: str) -> None:
        """Ends the barriers at which the others wait, or will wait."""
        if num_processes() == 1:
            return
        own = process_id() or "all"
        for number in range(self._count):
            self._set(f"{self._place}/{number}/{own}", f"process {process_id()}: {reason}")

    def _set(self, key: str, value: str) -> None:
        # One that was set before stays: the others may have read it.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax_distributed.global_state.client.key_value_set(key, value)

    def forget(self) -> None:
        """Deletes what the processes have exchanged. They must have passed all barriers."""
        if num_processes() > 1 and process_id() == 0:
            jax_distributed.global_state.client.key_value_delete(f"{self._place}/")


# ---- requests to stop ----

STOP_KEYS = "meshtrain/stop"
_run = 0  # number of the run in these processes
_stop_sent = False  # whether this process has sent its request


def reset_stop_requests() -> None:
    """Forgets the stop requests of an earlier run in these processes. All must call it."""
    global _run, _stop_sent
    _run += 1
    _stop_sent = False


def any_asked_to_stop(asked: bool) -> bool:
    """Returns on process 0 whether any process has passed True so far in this run; on others False.

    Process 0 has to `broadcast` its decision, so that all processes stop in the same step.
    """
    global _stop_sent
    if num_processes() == 1:
        return asked
    client = jax_distributed.global_state.client
    if process_id() == 0:
        return asked or bool(client.key_value_dir_get(f"{STOP_KEYS}/{_run}/"))
    if asked and not _stop_sent:
        client.key_value_set(f"{STOP_KEYS}/{_run}/{process_id()}", "")
        _stop_sent = True
    return False


# ---- errors of one process that all of them raise ----


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raises the ConfigErrors of any process in this block on all processes. All must enter it."""
    faults: tuple[str, ...] = ()
    try:
        yield
    except ConfigError as error:
        faults = error.faults
    by_process = gather(faults)
    if not any(by_process):
        return
    if all(faults == by_process[0] for faults in by_process):
        raise ConfigError(*by_process[0])
    raise ConfigError(
        *(f"process {rank}: {fault}" for rank, faults in enumerate(by_process) for fault in faults)
    )


def on_first_process(action: Callable[[], Any]) -> Any:
    """Returns what `action` returns on process 0, through JSON; all raise its ConfigErrors."""
    result = None
    faults: Sequence[str] = ()
    may_pass = False
    if process_id() == 0:
        try:
            result = action()
        except ConfigError as error:
            faults = error.faults
            may_pass = isinstance(error, TransientError)
    result, faults, may_pass = broadcast((result, faults, may_pass))
    if faults:
        error_type = TransientError if may_pass else ConfigError
        raise error_type(*faults)
    return result


def raise_first(error: Exception | None, kinds: Sequence[type[Exception]]) -> None:
    """Raises on all processes an error of one: the kind listed first, then the lowest rank."""
    own = error and (kinds.index(type(error)), str(error))
    errors = [other for other in gather(own) if other]
    if errors:
        number, text = min(errors, key=lambda numbered: numbered[0])
        raise kinds[number](text)


# ---- a comparison of what the processes run ----

# A result depends on the versions of these.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_same(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the config or the package versions differ between processes."""
    if num_processes() == 1:
        return
    by_process = gather({**dict(_flatten(config, "config.")), **versions()})
    names: dict[str, None] = {}  # a dict keeps the order
    for values in by_process:
        names |= dict.fromkeys(values)
    faults = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(by_process):
            value = values.get(name, "nothing")
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            places = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            faults.append(f"{name} differs between processes: {', '.join(places)}; use the same")
    if faults:
        raise ConfigError(*faults)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    # The code that runs, whatever distribution of this name is installed.
    by_name = {"python": platform.python_version(), "meshtrain": meshtrain.__version__}
    for name in PACKAGES:
        by_name[name] = importlib.metadata.version(name)
    return by_name


def _flatten(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, repr(value)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        shown += ", ..."
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


# ---- the end of a process that has failed ----

EXIT_TIMEOUT = 3.0  # seconds that a failed process waits for the others to print their errors
EXIT_DELAY = 0.5  # seconds that process 0 waits longer than the others


def exit_failed_process(code: int, *, wait_for_others: bool) -> None:
    """Ends this process at once if it is one of several and has failed; otherwise does nothing.

    At a normal exit jax waits for all other processes, and they may be waiting for this one. With
    `wait_for_others`, waits up to EXIT_TIMEOUT for them to fail too: otherwise jax may abort them
    before they print their errors.
    """
    if num_processes() == 1 or code in (0, EXIT_PREEMPTED):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        if wait_for_others:
            client = jax_distributed.global_state.client
            client.wait_at_barrier("meshtrain/exit", int(EXIT_TIMEOUT * 1000))
            if process_id() == 0:
                time.sleep(EXIT_DELAY)  # jax aborts the others, with a C++ stack, once it is gone
    os._exit(code)
