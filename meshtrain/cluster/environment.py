"""Which process of which run this is: from flags, or from what launchers leave in the environment.

Several processes may be told in several ways; the first that is complete counts, in this order: flags,
JAX_* variables (Kubeflow's too), torchrun's, SLURM's, Open MPI's, an Indexed Job's of Kubernetes.
"""

import argparse
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError

JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOOPBACK = "127.0.0.1"
LOOPBACK_6 = "::1"
LOCALHOST = (LOOPBACK, "localhost", LOOPBACK_6)
JOIN_SECONDS = 120.0  # until all processes must have arrived
FIRST_PORT, NUM_PORTS = 61440, 4096  # for launchers that name a job and no port


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that `cluster.runtime.start` reads."""
    flags.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    group = flags.add_argument_group(
        "several processes", "by default read from the launcher's environment variables"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num_processes", type=int, metavar="N")
    group.add_argument("--process_id", type=int, metavar="I")
    group.add_argument(
        "--join_seconds",
        type=float,
        metavar="S",
        default=JOIN_SECONDS,
        help="how long to wait for all processes (default: %(default)s)",
    )


@dataclass(frozen=True)
class Place:
    """One process among those of a run."""

    host: str  # of process 0
    port: int  # where it listens
    num_processes: int
    process_id: int
    local_id: int = 0  # among those of its host
    num_local: int = 1
    source: str = "flags"  # who says so, for messages

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def on_one_host(self) -> bool:
        return self.host in LOCALHOST


def find(environ: Mapping[str, str], flags: Sequence[Any] = (None, None, None)) -> Place | None:
    """Returns the place of this process, None where it is the whole run.

    `flags` take the place of the variables in JAX where they are not None. Raises ConfigError where the
    description has a gap.
    """
    told = dict(zip(JAX, flags, strict=True))
    told = {name: environ.get(name) if flag is None else flag for name, flag in told.items()}
    told = {name: str(value) for name, value in told.items() if value not in (None, "")}
    if JAX[1] in told and JAX[2] in told:
        source, fields = "JAX_*", {"numbers": (told[JAX[1]], told[JAX[2]])}
        fields |= _local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    else:
        source, fields = _launcher(environ)
    if not fields:
        if missing := [name for name in JAX if told and name not in told]:
            raise ConfigError(
                f"{', '.join(told)} set and {', '.join(missing)} not; set all three, or none"
            )
        return None
    count, number = _numbers(*fields.pop("numbers"), source)
    if count == 1:
        return None
    host, port = fields.pop("host", ""), fields.pop("port", "")
    if address := told.get(JAX[0]):
        host, port = _split(address)
    elif fields.get("num_local") == count:
        host = LOOPBACK  # all on one host: nobody else needs to reach it
    if not host or not port:
        raise ConfigError(
            f"{source} describes {count} processes and not where the first one listens; "
            f"set {JAX[0]}=HOST:PORT"
        )
    return Place(host, _port(port, f"{host}:{port}"), count, number, source=source, **fields)


def _launcher(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    for source, read in LAUNCHERS.items():
        if fields := read(environ):
            return source, fields
    return "", {}


def _torchrun(environ: Mapping[str, str]) -> dict[str, Any]:
    if not (environ.get("WORLD_SIZE") and environ.get("RANK")):
        return {}
    port = environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdigit():
        port = int(port) + 1  # its own store listens on the other
    return {
        "numbers": (environ["WORLD_SIZE"], environ["RANK"]),
        "host": environ.get("MASTER_ADDR", ""),
        "port": port,
        **_local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }


def _slurm(environ: Mapping[str, str]) -> dict[str, Any]:
    """Within `srun` alone: the batch script itself is one process, whatever the job has tasks."""
    if not (environ.get("SLURM_STEP_NODELIST") and environ.get("SLURM_PROCID")):
        return {}
    count = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environ.get("SLURM_NODEID", 0))
    return {
        "numbers": (count, environ["SLURM_PROCID"]),
        "host": _first_host(environ["SLURM_STEP_NODELIST"]),
        "port": _port_of(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        "local_id": int(environ.get("SLURM_LOCALID", 0)),
        "num_local": tasks[node] if node < len(tasks) else 1,
    }


def _open_mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = "OMPI_COMM_WORLD_"
    if not (environ.get(prefix + "SIZE") and environ.get(prefix + "RANK")):
        return {}
    # Open MPI 4 names the host of mpirun, and the job: "JOB.0;tcp://FIRST,SECOND:PORT"; 5 does not.
    job, _, rest = environ.get("OMPI_MCA_orte_hnp_uri", "").partition(".")
    found = re.search(r"tcp://\[?([^],:]+)", rest)
    return {
        "numbers": (environ[prefix + "SIZE"], environ[prefix + "RANK"]),
        "host": found[1] if found else "",
        "port": _port_of(job or environ.get("PMIX_NAMESPACE", "")),
        **_local(environ, prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE"),
    }


def _indexed_job(environ: Mapping[str, str]) -> dict[str, Any]:
    """Kubernetes numbers the pods; how many there are, the manifest says."""
    count, number = environ.get(JAX[1]), environ.get("JOB_COMPLETION_INDEX")
    return {"numbers": (count, number)} if count and number else {}


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "torchrun": _torchrun,
    "SLURM": _slurm,
    "Open MPI": _open_mpi,
    "Indexed Job": _indexed_job,
}


def _local(environ: Mapping[str, str], number: str, count: str) -> dict[str, int]:
    """Returns the place among the processes of this host, where the variables tell it."""
    if not (environ.get(number, "").isdigit() and environ.get(count, "").isdigit()):
        return {}
    return {"local_id": int(environ[number]), "num_local": int(environ[count])}


def _numbers(count: str, number: str, source: str) -> tuple[int, int]:
    if str(count).isdigit() and str(number).isdigit() and int(number) < int(count):
        return int(count), int(number)
    raise ConfigError(
        f"{source}: {JAX[1]}={count} {JAX[2]}={number}: use a count of processes, and an id from 0 to below it"
    )


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    if not host:
        raise ConfigError(f"{JAX[0]}={address}: use HOST:PORT")
    return host.strip("[]"), port


def _port(port: Any, address: str) -> int:
    if not (str(port).isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{JAX[0]}={address}: use HOST:PORT, with a port from 1 to 65535")
    return int(port)


def _port_of(*names: str) -> int:
    """A port that all processes of a job come to, and those of its neighbour rarely."""
    return FIRST_PORT + zlib.crc32("/".join(names).encode()) % NUM_PORTS


def _first_host(nodes: str) -> str:
    """The first of a SLURM list of hosts: node[07-09,12],login -> node07."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in first.groups())


def _tasks_per_node(text: str) -> list[int]:
    """2(x3),1 -> [2, 2, 2, 1]"""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def local_gpus(place: Place, environ: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs that belong to this process among those it can see; None: all of them.

    A process alone on its host has all; several share them in order (jax by itself would give each
    the one with its number, jax-ml/jax#16788). Raises ConfigError where they cannot be shared evenly.
    """
    visible, allotted = _num_gpus(environ)
    if place.num_local == 1 or not visible or visible < allotted:
        return None  # fewer than the node's: the launcher has cut them up itself
    if visible % place.num_local:
        raise ConfigError(
            f"{visible} GPUs on this host and {place.num_local} processes: use a divisor, such as "
            f"one process for all, or one for each"
        )
    each = visible // place.num_local
    return list(range(each * place.local_id, each * (place.local_id + 1)))


def promised_gpus(place: Place, environ: Mapping[str, str]) -> int:
    """Returns how many GPUs the launcher has set aside for this process; 0 where it does not say."""
    visible, allotted = _num_gpus(environ)
    if not allotted and not environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    ours = local_gpus(place, environ)
    return visible if ours is None else len(ours)


def _num_gpus(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns how many this process can see, and how many SLURM gives to its node."""
    allotted = environ.get("SLURM_GPUS_ON_NODE", "")
    allotted = int(allotted) if allotted.isdigit() else 0
    if (shown := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([one for one in shown.split(",") if one.strip() not in ("", "-1")]), allotted
    return allotted or len(list(Path("/dev").glob("nvidia[0-9]*"))), allotted
