"""Find out the rank of this process and the address of process 0, from flags or environment variables.

The first complete description is used, in this order: flags, JAX_* variables (Kubeflow sets these too),
torchrun, SLURM, Open MPI, an Indexed Job of Kubernetes.
"""

import argparse
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOOPBACK = "127.0.0.1"
LOOPBACK_IPV6 = "::1"
LOCALHOST = (LOOPBACK, "localhost", LOOPBACK_IPV6)
JOIN_SECONDS = 120.0  # timeout for all processes to connect
FIRST_PORT, NUM_PORTS = 61440, 4096  # for launchers that give a job id but no port


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that `cluster.runtime.start` reads."""
    flags.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
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


@dataclass(frozen=True)
class ProcessInfo:
    """The rank of one process of a run, and where process 0 listens."""

    host: str  # of process 0
    port: int  # of process 0
    num_processes: int
    process_id: int
    local_id: int = 0  # rank among the processes on this host
    num_local: int = 1  # number of processes on this host
    source: str = "flags"  # where this information comes from, for error messages

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def on_one_host(self) -> bool:
        return self.host in LOCALHOST


def process_info(
    environ: Mapping[str, str], flags: Sequence[Any] = (None, None, None)
) -> ProcessInfo | None:
    """Returns the rank and address of this process; None if it is the only one of its run.

    `flags` override the variables in JAX_VARIABLES unless they are None. Raises ConfigError if the
    description is incomplete.
    """
    given = dict(zip(JAX_VARIABLES, flags, strict=True))
    given = {name: environ.get(name) if flag is None else flag for name, flag in given.items()}
    given = {name: str(value) for name, value in given.items() if value not in (None, "")}
    address, count, number = (given.get(name) for name in JAX_VARIABLES)
    if count and number:
        source, fields = "JAX_*", {"count_and_id": (count, number)}
        fields |= _local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    else:
        source, fields = _from_launcher(environ)
    if not fields:
        if missing := [name for name in JAX_VARIABLES if given and name not in given]:
            raise ConfigError(
                f"{', '.join(given)} set and {', '.join(missing)} not; set all three, or none"
            )
        return None
    num_processes, process_id = _parse_count_and_id(*fields.pop("count_and_id"), source)
    if num_processes == 1:
        return None
    host, port = fields.pop("host", ""), fields.pop("port", "")
    if address:
        host, port = _split_address(address)
    elif fields.get("num_local") == num_processes:
        host = LOOPBACK  # all on one host: no other host needs to reach process 0
    if not host or not port:
        raise ConfigError(
            f"{source} describes {num_processes} processes but not where process 0 listens; "
            f"set {JAX_VARIABLES[0]}=HOST:PORT"
        )
    port = _parse_port(port, f"{host}:{port}")
    return ProcessInfo(host, port, num_processes, process_id, source=source, **fields)


def _from_launcher(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    for source, read in LAUNCHERS.items():
        if fields := read(environ):
            return source, fields
    return "", {}


def _torchrun(environ: Mapping[str, str]) -> dict[str, Any]:
    if not (environ.get("WORLD_SIZE") and environ.get("RANK")):
        return {}
    port = environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdigit():
        port = int(port) + 1  # torchrun's own store listens on MASTER_PORT
    return {
        "count_and_id": (environ["WORLD_SIZE"], environ["RANK"]),
        "host": environ.get("MASTER_ADDR", ""),
        "port": port,
        **_local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }


def _slurm(environ: Mapping[str, str]) -> dict[str, Any]:
    """Only within `srun`: the batch script itself is one process, however many tasks the job has."""
    if not (environ.get("SLURM_STEP_NODELIST") and environ.get("SLURM_PROCID")):
        return {}
    count = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environ.get("SLURM_NODEID", 0))
    return {
        "count_and_id": (count, environ["SLURM_PROCID"]),
        "host": _first_host(environ["SLURM_STEP_NODELIST"]),
        "port": _derived_port(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        "local_id": int(environ.get("SLURM_LOCALID", 0)),
        "num_local": tasks[node] if node < len(tasks) else 1,
    }


def _open_mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = "OMPI_COMM_WORLD_"
    if not (environ.get(prefix + "SIZE") and environ.get(prefix + "RANK")):
        return {}
    # Open MPI 4 gives the job and the host of mpirun, "JOB.0;tcp://FIRST,SECOND:PORT"; Open MPI 5 does not.
    job, _, rest = environ.get("OMPI_MCA_orte_hnp_uri", "").partition(".")
    found = re.search(r"tcp://\[?([^],:]+)", rest)
    return {
        "count_and_id": (environ[prefix + "SIZE"], environ[prefix + "RANK"]),
        "host": found[1] if found else "",
        "port": _derived_port(job or environ.get("PMIX_NAMESPACE", "")),
        **_local(environ, prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE"),
    }


def _indexed_job(environ: Mapping[str, str]) -> dict[str, Any]:
    """Kubernetes sets the index of a pod; the manifest of the Job has to set the number of processes."""
    count, number = environ.get(JAX_VARIABLES[1]), environ.get("JOB_COMPLETION_INDEX")
    return {"count_and_id": (count, number)} if count and number else {}


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "torchrun": _torchrun,
    "SLURM": _slurm,
    "Open MPI": _open_mpi,
    "Indexed Job": _indexed_job,
}


def _local(environ: Mapping[str, str], number: str, count: str) -> dict[str, int]:
    """Returns the rank among the processes of this host and their number, if both variables are set."""
    if not (environ.get(number, "").isdigit() and environ.get(count, "").isdigit()):
        return {}
    return {"local_id": int(environ[number]), "num_local": int(environ[count])}


def _parse_count_and_id(count: str, number: str, source: str) -> tuple[int, int]:
    if str(count).isdigit() and str(number).isdigit() and int(number) < int(count):
        return int(count), int(number)
    raise ConfigError(
        f"{source}: {JAX_VARIABLES[1]}={count} {JAX_VARIABLES[2]}={number}: "
        f"use a number of processes, and an id from 0 to that number - 1"
    )


def _split_address(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    if not host:
        raise ConfigError(f"{JAX_VARIABLES[0]}={address}: use HOST:PORT")
    return host.strip("[]"), port


def _parse_port(port: Any, address: str) -> int:
    if not (str(port).isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"{JAX_VARIABLES[0]}={address}: use HOST:PORT, with a port from 1 to 65535"
        )
    return int(port)


def _derived_port(*names: str) -> int:
    """Returns a port computed from the job's id: all its processes get the same, other jobs rarely do."""
    return FIRST_PORT + zlib.crc32("/".join(names).encode()) % NUM_PORTS


def _first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: node[07-09,12],login -> node07."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in first.groups())


def _tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node: 2(x3),1 -> [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


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


def _num_gpus(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of GPUs visible to this process, and the number SLURM allots to its node."""
    allotted = environ.get("SLURM_GPUS_ON_NODE", "")
    allotted = int(allotted) if allotted.isdigit() else 0
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]), allotted
    return allotted or len(list(Path("/dev").glob("nvidia[0-9]*"))), allotted
