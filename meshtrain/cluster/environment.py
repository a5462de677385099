"""Finds the rank of this process and the address of process 0, from flags or environment variables.

The first complete description is used, in this order: flags, JAX_* variables (Kubeflow sets these
too), torchrun, SLURM, Open MPI, an Indexed Job of Kubernetes, TPU slices on GKE. If there is only a
part of one, that is a fault. The last section finds the GPUs of this process.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.cluster import launchers, limits
from meshtrain.cluster.launchers import (
    FLAGS,
    JAX_VARIABLES,
    LOOPBACK,
    Launcher,
    Placement,
    ProcessInfo,
)
from meshtrain.errors import ConfigError, minimum_faults, nearest_multiples

PLATFORMS = ("cpu", "cuda", "tpu")  # by their names in jax
JOIN_SECONDS = 120.0  # timeout for all processes to connect
MAX_SECONDS = 1e8  # of any timeout


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that `cluster.runtime.start` reads."""
    flags.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    flags.add_argument(
        "--num_devices",
        type=int,
        metavar="N",
        help="use N of the devices, in all: equally many of each process (default: all there are)",
    )
    flags.add_argument(
        "--platform",
        type=lambda name: {"gpu": "cuda"}.get(name, name),
        choices=PLATFORMS,
        help="kind of devices to use (default: the fastest that jax finds, or JAX_PLATFORMS)",
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
    """Raises ConfigError if a flag of `add_flags`, or its variable, is wrong. Does not load jax."""
    faults = seconds_faults({"join_seconds": args.join_seconds})
    if faults:
        raise ConfigError(*faults)
    if args.platform not in (None, "cpu") and args.simulate_devices is not None:
        raise ConfigError(
            f"--platform={args.platform} and --simulate_devices={args.simulate_devices}: simulated "
            f"devices are CPUs; give one of the flags"
        )
    limits.check_devices(args.simulate_devices, environ, force=args.force)
    process = process_info(environ, (args.coordinator, args.num_processes, args.process_id))
    if args.num_devices is None:
        return
    num_processes = process.num_processes if process else 1
    faults = num_devices_faults(args.num_devices, num_processes)
    if not faults and args.simulate_devices is not None:
        there = args.simulate_devices * num_processes
        if args.num_devices > there:
            faults.append(
                f"--num_devices={args.num_devices}: --simulate_devices={args.simulate_devices} "
                f"makes {there} in all; use {there} or fewer"
            )
    if faults:
        raise ConfigError(*faults)


def num_devices_faults(num_devices: int, num_processes: int) -> list[str]:
    """Returns a fault unless each process can take an equal number of `num_devices`."""
    faults = minimum_faults(1, {"--num_devices": num_devices})
    if not faults and num_devices % num_processes:
        faults.append(
            f"--num_devices={num_devices}: is not divisible by the {num_processes} processes; use "
            f"{nearest_multiples(num_devices, num_processes)}"
        )
    return faults


def seconds_faults(flags: Mapping[str, float]) -> list[str]:
    """Returns a fault for each number of seconds that is not positive, or too large."""
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
    address_variable, count_variable, rank_variable = JAX_VARIABLES
    given: dict[str, str] = {}
    for name, value in zip(JAX_VARIABLES, flags, strict=True):
        if value is not None:
            given[name] = str(value)
    environ = {**environ, **given}
    labels = dict(zip(JAX_VARIABLES, flag_names, strict=True))

    def label(name: str) -> str:
        """Returns the name of a variable, or of the flag that gives it or should give it."""
        missing_flag = name in labels and given and not environ.get(name)
        return labels[name] if name in given or missing_flag else name

    if not any(map(environ.get, JAX_VARIABLES)) and not launchers.find(environ):
        values = launchers.tpu_slice_process(environ)
        if values:
            environ |= dict(zip(JAX_VARIABLES, values, strict=True))
    empty = [name for name in given if not environ[name]]
    if empty:
        raise ConfigError(*(f"{label(name)}=: is empty" for name in empty))

    # A given address is checked first, even if the process turns out to be alone.
    host, port = "", 0
    address = environ.get(address_variable)
    if address:
        host, port = _split_address(address, label(address_variable))
    if launchers.is_one(environ.get(count_variable)) and not environ.get(rank_variable):
        return None

    launcher = launchers.find(environ)
    if launcher is None:
        fault = launchers.half_set_fault(environ, label)
        if fault:
            raise ConfigError(fault)
        return None
    num_processes, process_id = launchers.count_and_rank(launcher, environ, label)
    for name, number in ((count_variable, num_processes), (rank_variable, process_id)):
        if environ.get(name, "") not in ("", str(number)):
            # Half of jax's variables: the launcher would silently win.
            raise ConfigError(
                f"{label(name)}={environ[name]}: differs from {number} of {launcher.name}; "
                f"set {label(count_variable)} and {label(rank_variable)}, or neither"
            )
    if num_processes == 1:
        return None

    placement = launcher.read(environ)
    variables = ""
    if address:
        address_name = label(address_variable)
    else:
        names = dict.fromkeys([launcher.count_name(environ), launcher.rank, *launcher.address])
        values = " ".join(f"{label(name)}={environ[name]}" for name in names if environ.get(name))
        variables = f"{values} ({launcher.name})"
        address_name = ":".join(launcher.address)
        host, port = _launcher_address(
            environ, launcher, placement, label, num_processes=num_processes
        )
    return ProcessInfo(
        host=host,
        port=port,
        num_processes=num_processes,
        process_id=process_id,
        local_id=placement.local_id,
        num_local=placement.num_local,
        source=launcher.name,
        names=(address_name, label(launcher.count_name(environ)), label(launcher.rank)),
        variables=variables,
    )


def _launcher_address(
    environ: Mapping[str, str],
    launcher: Launcher,
    placement: Placement,
    label: Callable[[str], str],
    *,
    num_processes: int,
) -> tuple[str, int]:
    """Returns host and port of process 0. Raises ConfigError if the launcher does not give them."""
    host_variable, port_variable = launcher.address[0], launcher.address[-1]
    host = LOOPBACK if placement.num_local == num_processes else placement.host
    if not host or not placement.port:
        names = (launcher.count_name(environ), launcher.rank)
        given = " ".join(f"{label(name)}={environ[name]}" for name in names)
        needed = [port_variable] if host else launcher.address
        missing = [name for name in needed if not environ.get(name)]
        raise ConfigError(
            f"{given}: {launcher.name} describes several processes but not where process 0 "
            f"listens: "
            f"{', '.join(missing)} not set; set {JAX_VARIABLES[0]}=HOST:PORT"
        )
    _check_host(host, f"{host_variable}={environ.get(host_variable, host)}")
    given = f"{port_variable}={environ.get(port_variable)}"
    port = _parse_port(placement.port, given, "use a port")
    return host, port


def _split_address(address: str, label: str) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT or [IPV6]:PORT."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise ConfigError(f"{label}={address}: use HOST:PORT")
    _check_host(host, f"{label}={address}")
    return host, _parse_port(port, f"{label}={address}", "use HOST:PORT, with a port")


def _check_host(host: str, given: str) -> None:
    name = r"[\w-]{1,63}(\.[\w-]{1,63})*\.?"
    ipv6 = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?"
    is_name = re.fullmatch(name, host, re.ASCII) and len(host) < 254
    if not is_name and not re.fullmatch(ipv6, host, re.ASCII):
        raise ConfigError(f"{given}: use a host name or an IP address")


def _parse_port(port: str, given: str, remedy: str) -> int:
    if not (launchers.is_number(port) and 0 < int(port) < 65536):
        raise ConfigError(f"{given}: {remedy} from 1 to 65535")
    return int(port)


def jax_variable_fault(error: Exception, environ: Mapping[str, str]) -> str:
    """Returns a fault if one of jax's variables keeps it from being imported, or ""."""
    # An import that fails is removed from sys.modules.
    if not isinstance(error, ValueError) or "jax" in sys.modules:
        return ""
    for name, value in environ.items():
        if not name.startswith("JAX_") or not value:
            continue
        if re.search(f"['\"]{re.escape(value)}['\"]", str(error)):
            return f"{name}={value}: {error}; unset it, or correct it"
    return ""


# ---- the GPUs of this process ----


def local_gpus(
    process: ProcessInfo, environ: Mapping[str, str], most: int | None = None
) -> list[int] | None:
    """Returns the indices of this process's GPUs among the visible ones; None means all of these.

    A process alone on its host uses all GPUs. Several processes get equal consecutive ranges (jax
    would give each one only the GPU with its rank, jax-ml/jax#16788). Of its range, a process uses
    the first `most`. Raises ConfigError if the number of GPUs is not divisible by the number of
    processes.
    """
    indices = _range_of_gpus(process, environ)
    num_visible = _num_gpus(environ)[0]
    if most is None or not num_visible:
        return indices
    if indices is None:
        indices = list(range(num_visible))
    return indices[:most]


def _range_of_gpus(process: ProcessInfo, environ: Mapping[str, str]) -> list[int] | None:
    visible, allotted = _num_gpus(environ)
    if process.num_local == 1 or not visible or visible < allotted:
        return None  # the launcher has already divided the node's GPUs among the processes
    if visible % process.num_local:
        raise ConfigError(
            f"{visible} GPUs on this host and {process.num_local} processes: use a number of "
            f"processes that divides the GPUs, such as one for all GPUs, or one for each"
        )
    num_gpus_each = visible // process.num_local
    first = num_gpus_each * process.local_id
    return list(range(first, first + num_gpus_each))


def num_allotted_gpus(process: ProcessInfo, environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that the launcher allots to this process; 0 if it does not say."""
    visible, allotted = _num_gpus(environ)
    if not allotted and not environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    indices = local_gpus(process, environ)
    return visible if indices is None else len(indices)


DRIVER_FILES = "nvidia[0-9]*"  # in /dev, one for each GPU


def num_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that this process may use."""
    # Variables may name GPUs that this machine does not have.
    has_driver = any(Path("/dev").glob(DRIVER_FILES))
    return _num_gpus(environ)[0] if has_driver else 0


def _num_gpus(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of GPUs that this process sees, and that SLURM allots to its node."""
    allotted = environ.get("SLURM_GPUS_ON_NODE", "")
    num_allotted = int(allotted) if allotted.isdigit() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
        return len(gpus), num_allotted
    num_files = len(list(Path("/dev").glob(DRIVER_FILES)))
    return num_allotted or num_files, num_allotted
