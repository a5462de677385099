"""Find out the rank of this process and the address of process 0, from flags or environment variables.

The first complete description is used, in this order: flags, JAX_* variables (Kubeflow sets these too),
torchrun, SLURM, Open MPI, an Indexed Job of Kubernetes, TPU slices on GKE. If there is only a part of one, that
is a fault.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.cluster import launchers, limits
from meshtrain.cluster.launchers import FLAGS, JAX_VARIABLES, LOOPBACK, ProcessInfo
from meshtrain.errors import ConfigError

MAX_SECONDS = 1e8

JOIN_SECONDS = 120.0  # timeout for all processes to connect


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that `cluster.runtime.start` reads."""
    flags.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    flags.add_argument(
        "--force",
        action="store_true",
        help="simulate more devices than this machine is likely to have the cores and memory for",
    )
    group = flags.add_argument_group(
        "multiple processes", "by default read from the launcher's environment variables"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num_processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process_id", type=int, metavar="I", help="rank of this process")
    group.add_argument(
        "--join_seconds",
        type=float,
        metavar="S",
        default=JOIN_SECONDS,
        help="how long to wait for all processes (default: %(default)s)",
    )


def check_flags(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a flag of `add_flags`, or a variable in its place, is wrong; without loading jax."""
    if faults := seconds_faults({"join_seconds": args.join_seconds}):
        raise ConfigError(*faults)
    limits.check_devices(args.simulate_devices, environ, force=args.force)
    process_info(environ, (args.coordinator, args.num_processes, args.process_id))


def seconds_faults(flags: Mapping[str, float]) -> list[str]:
    """Returns a fault for each number of seconds that is not positive, or too large for a timeout."""
    return [
        f"--{name}={value}: use a positive number of seconds, up to {MAX_SECONDS:.0f}"
        for name, value in flags.items()
        if not 0 < value <= MAX_SECONDS
    ]


def process_info(
    environ: Mapping[str, str],
    flags: Sequence[Any] = (None, None, None),
    flag_names: Sequence[str] = FLAGS,
) -> ProcessInfo | None:
    """Returns the rank and address of this process; None if it is the only one of its run.

    `flags` override the variables in JAX_VARIABLES unless they are None. Raises ConfigError if the
    description is incomplete or a value is out of range; it names the launcher's own variable.
    """
    given = {name: str(v) for name, v in zip(JAX_VARIABLES, flags, strict=True) if v is not None}
    environ, labels = {**environ, **given}, dict(zip(JAX_VARIABLES, flag_names, strict=True))

    def label(name: str) -> str:
        # A missing one is named as the flag if there are flags.
        is_flag = name in given or name in labels and given and not environ.get(name)
        return labels[name] if is_flag else name

    if not any(map(environ.get, JAX_VARIABLES)) and not launchers.complete(environ):
        if found := launchers.tpu_slice_process(environ):
            environ |= dict(zip(JAX_VARIABLES, found, strict=True))
    if any(not environ[name] for name in given):
        raise ConfigError(*(f"{label(name)}=: is empty" for name in given if not environ[name]))
    address = environ.get(JAX_VARIABLES[0])
    host, port = _split_address(address, label(JAX_VARIABLES[0])) if address else ("", "")
    if launchers.is_one(environ.get(JAX_VARIABLES[1])) and not environ.get(JAX_VARIABLES[2]):
        return None
    launcher = launchers.complete(environ)
    if launcher is None:
        if fault := launchers.half_set_fault(environ, label):
            raise ConfigError(fault)
        return None
    num_processes, process_id = launchers.count_and_number(launcher, environ, label)
    count_name = launcher.count_name(environ)
    for name, own in ((JAX_VARIABLES[1], num_processes), (JAX_VARIABLES[2], process_id)):
        if environ.get(name, str(own)) not in ("", str(own)):
            # Half of jax's variables: the launcher would silently win.
            raise ConfigError(
                f"{label(name)}={environ[name]}: differs from {own} of {launcher.name}; "
                f"set {label(JAX_VARIABLES[1])} and {label(JAX_VARIABLES[2])}, or neither"
            )
    if num_processes == 1:
        return None
    fields = launcher.read(environ)
    own_host, own_port = fields.pop("host", ""), fields.pop("port", "")
    address_name = label(JAX_VARIABLES[0])
    if not address:
        address_name = ":".join(launcher.address)
        host = LOOPBACK if fields.get("num_local") == num_processes else own_host
        port = own_port
        if not host or not port:
            raise ConfigError(_address_fault(environ, launcher, label, needs_host=not host))
        _check_host(host, f"{launcher.address[0]}={environ.get(launcher.address[0], host)}")
        port = _parse_port(port, f"{launcher.address[-1]}={environ.get(launcher.address[-1])}")
    names = (address_name, label(count_name), label(launcher.number))
    return ProcessInfo(
        host, int(port), num_processes, process_id, source=launcher.name, names=names, **fields
    )


def _address_fault(
    environ: Mapping[str, str],
    launcher: launchers.Launcher,
    label: Callable[[str], str],
    *,
    needs_host: bool,
) -> str:
    names = (launcher.count_name(environ), launcher.number)
    given = " ".join(f"{label(name)}={environ[name]}" for name in names)
    missing = [name for name in launcher.address if not environ.get(name)]
    if not needs_host:
        missing = [name for name in missing if name == launcher.address[-1]]
    return (
        f"{given}: {launcher.name} describes several processes but not where process 0 listens: "
        f"{', '.join(missing)} not set; set {JAX_VARIABLES[0]}=HOST:PORT"
    )


def _split_address(address: str, label: str) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT or [IPV6]:PORT."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host:
        raise ConfigError(f"{label}={address}: use HOST:PORT")
    _check_host(host, f"{label}={address}")
    return host, _parse_port(port, f"{label}={address}")


def _check_host(host: str, given: str) -> None:
    is_name = re.fullmatch(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", host, re.ASCII) and len(host) < 254
    if not is_name and not re.fullmatch(
        r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?", host, re.ASCII
    ):
        raise ConfigError(f"{given}: use a host name or an IP address")


def _parse_port(port: str, given: str) -> int:
    if not (launchers.is_number(port) and 0 < int(port) < 65536):
        raise ConfigError(f"{given}: use HOST:PORT, with a port from 1 to 65535")
    return int(port)


def local_gpus(process: ProcessInfo, environ: Mapping[str, str]) -> list[int] | None:
    """Returns the indices of this process's GPUs among the visible ones; None means all visible GPUs.

    A process alone on its host uses all GPUs. Several processes get equal consecutive ranges (jax would
    give each one only the GPU with its rank, jax-ml/jax#16788). Raises ConfigError if the number of GPUs
    is not divisible by the number of processes.
    """
    visible, allotted = _num_gpus(environ)
    if process.num_local == 1 or not visible or visible < allotted:
        return None  # the launcher has already divided the node's GPUs among the processes
    if visible % process.num_local:
        raise ConfigError(
            f"{visible} GPUs on this host and {process.num_local} processes: use a number of "
            f"processes that divides the GPUs, such as one for all GPUs, or one for each"
        )
    num_each = visible // process.num_local
    return list(range(num_each * process.local_id, num_each * (process.local_id + 1)))


def num_allotted_gpus(process: ProcessInfo, environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that the launcher allots to this process; 0 if it does not say."""
    visible, allotted = _num_gpus(environ)
    if not allotted and not environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    indices = local_gpus(process, environ)
    return visible if indices is None else len(indices)


def num_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that this process may use."""
    return _num_gpus(environ)[0]


def jax_variable_fault(error: Exception, environ: Mapping[str, str]) -> str:
    """Returns a fault if jax cannot be imported because of one of its environment variables, or ""."""
    if (
        not isinstance(error, ValueError) or "jax" in sys.modules
    ):  # an import that fails is removed there
        return ""
    found = (
        f"{name}={value}: {error}; unset it, or correct it"
        for name, value in environ.items()
        if name.startswith("JAX_")
        and value
        and re.search(f"['\"]{re.escape(value)}['\"]", str(error))
    )
    return next(found, "")


def _num_gpus(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of GPUs visible to this process, and the number SLURM allots to its node."""
    allotted = environ.get("SLURM_GPUS_ON_NODE", "")
    allotted = int(allotted) if allotted.isdigit() else 0
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]), allotted
    return allotted or len(list(Path("/dev").glob("nvidia[0-9]*"))), allotted
