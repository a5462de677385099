"""Reads the environment variables of jax, torchrun, SLURM, Open MPI and others for a rank.

LAUNCHERS has a row for each; `find` returns the first one that is complete. A half-set launcher is
a fault: a process that ignored it would train alone, next to the others. TPU slices on GKE are read
into jax's variables.
"""

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FLAGS = ("--coordinator", "--num_processes", "--process_id")  # they override JAX_VARIABLES
MAX_PROCESSES = 100_000
LOOPBACK = "127.0.0.1"
LOOPBACK_IPV6 = "::1"
LOCALHOST = (LOOPBACK, "localhost", LOOPBACK_IPV6)
ALONE = f"to run alone, set {JAX_VARIABLES[1]}=1"
Environ = Mapping[str, str]


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
    names: tuple[str, str, str] = JAX_VARIABLES  # of address, number of processes and rank there
    # The launcher's variables with their values, "" if the address is given by a flag or to jax.
    variables: str = ""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def on_one_host(self) -> bool:
        return self.host in LOCALHOST


class Placement(NamedTuple):
    """Where process 0 listens ("" if the launcher does not say), and the rank on this host."""

    host: str = ""
    port: str = ""
    local_id: int = 0
    num_local: int = 1


class Launcher(NamedTuple):
    """The names of a launcher's variables; `read` reads the others."""

    name: str
    count: Sequence[str]  # number of processes; the first one that is set is used
    rank: str
    address: Sequence[str]  # where process 0 listens
    read: Callable[[Environ], Placement]
    required: Sequence[str] = ()  # without these, count and rank mean something else

    def count_name(self, environ: Environ) -> str:
        return next((name for name in self.count if environ.get(name)), self.count[0])

    def is_complete(self, environ: Environ) -> bool:
        needed = (self.count_name(environ), self.rank, *self.required)
        return all(environ.get(name) for name in needed)

    def is_half_set(self, environ: Environ) -> bool:
        """Returns whether only one of count and rank is set; a count of 1 is a process alone."""
        count = environ.get(self.count_name(environ))
        if self.is_complete(environ) or is_one(count):
            return False
        return bool(count or environ.get(self.rank))


# ---- one function for each launcher, then their table ----


def _jax(environ: Environ) -> Placement:
    local_id, num_local = _local_rank(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Placement(local_id=local_id, num_local=num_local)


def _torchrun(environ: Environ) -> Placement:
    port = environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and is_number(port):
        port = str(int(port) + 1)  # torchrun's own store listens on MASTER_PORT
    local_id, num_local = _local_rank(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Placement(environ.get("MASTER_ADDR", ""), port, local_id, num_local)


def _slurm(environ: Environ) -> Placement:
    """Only within `srun`: the batch script is one process, however many tasks the job has."""
    tasks_name = "SLURM_STEP_TASKS_PER_NODE"
    tasks = _tasks_per_node(tasks_name, environ.get(tasks_name, ""))
    num_local = 1
    if tasks:
        node = _integer(environ, "SLURM_NODEID", 0)
        if node >= len(tasks):
            raise ConfigError(
                f"SLURM_NODEID={node}: {tasks_name}={environ[tasks_name]} has {len(tasks)} nodes"
            )
        num_local = tasks[node]
    return Placement(
        host=_first_host(environ["SLURM_STEP_NODELIST"]),
        port=_derived_port(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        local_id=_integer(environ, "SLURM_LOCALID", 0, below=num_local, limit_name=tasks_name),
        num_local=num_local,
    )


def _open_mpi(environ: Environ) -> Placement:
    # Open MPI 4 gives the job and the host of mpirun, "JOB.0;tcp://FIRST,SECOND:PORT"; Open MPI 5
    # does not.
    job, _, rest = environ.get("OMPI_MCA_orte_hnp_uri", "").partition(".")
    host = re.search(r"tcp://\[?([^],:]+)", rest)
    local_id, num_local = _local_rank(
        environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    return Placement(
        host=host[1] if host else "",
        port=_derived_port(job or environ.get("PMIX_NAMESPACE", "")),
        local_id=local_id,
        num_local=num_local,
    )


def _indexed_job(environ: Environ) -> Placement:
    return Placement()  # a pod is one process


# The first complete one is used.
LAUNCHERS = (
    Launcher(
        name="JAX_*",
        count=(JAX_VARIABLES[1],),
        rank=JAX_VARIABLES[2],
        address=(JAX_VARIABLES[0],),
        read=_jax,
    ),
    Launcher(
        name="torchrun",
        count=("WORLD_SIZE",),
        rank="RANK",
        address=("MASTER_ADDR", "MASTER_PORT"),
        read=_torchrun,
    ),
    Launcher(
        name="SLURM",
        count=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        rank="SLURM_PROCID",
        address=("SLURM_STEP_NODELIST",),
        read=_slurm,
        # Not set in a batch script, which `srun` has not started.
        required=("SLURM_STEP_NODELIST",),
    ),
    Launcher(
        name="Open MPI",
        count=("OMPI_COMM_WORLD_SIZE",),
        rank="OMPI_COMM_WORLD_RANK",
        address=(JAX_VARIABLES[0],),
        read=_open_mpi,
    ),
    # Kubernetes sets the index of a pod; the manifest of the Job has to set the number of
    # processes.
    Launcher(
        name="Indexed Job",
        count=(JAX_VARIABLES[1],),
        rank="JOB_COMPLETION_INDEX",
        address=(JAX_VARIABLES[0],),
        read=_indexed_job,
    ),
)


def find(environ: Environ) -> Launcher | None:
    """Returns the first launcher whose count and rank are set."""
    for launcher in LAUNCHERS:
        if launcher.is_complete(environ):
            return launcher
    return None


def count_and_rank(
    launcher: Launcher, environ: Environ, label: Callable[[str], str]
) -> tuple[int, int]:
    """Returns the number of processes and the rank; raises ConfigError if one is out of range."""
    name = launcher.count_name(environ)
    count = environ[name]
    rank = environ[launcher.rank]
    if not is_number(count) or not 0 < int(count) <= MAX_PROCESSES:
        raise ConfigError(
            f"{label(name)}={count}: use a number of processes from 1 to {MAX_PROCESSES}"
        )
    if launcher.name == "Indexed Job" and int(count) == 1:
        return 1, 0  # the pods of this Job are runs of their own
    if not is_number(rank) or int(rank) >= int(count):
        raise ConfigError(
            f"{label(launcher.rank)}={rank}: use an id from 0 to {int(count) - 1}, "
            f"below {label(name)}={count}"
        )
    return int(count), int(rank)


# ---- descriptions that are not complete ----

# Count and rank of launchers that do not say where process 0 listens; some of them set only the
# rank.
NOT_READ = (
    ("PMI_SIZE", "PMI_RANK"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PALS_SIZE", "PALS_RANKID"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
)

# Number of processes on this host and rank among them: there are others if one of them says so.
LOCAL = (
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def half_set_fault(environ: Environ, label: Callable[[str], str]) -> str:
    """Returns the fault of the first launcher of which only some variables are set, or ""."""
    has_address = bool(environ.get(JAX_VARIABLES[0]))
    for launcher in LAUNCHERS:
        if launcher.name == "Indexed Job" and not environ.get(launcher.rank):
            continue  # the count alone is jax's
        if launcher.name == "SLURM" and is_batch_script(environ):
            continue
        if launcher.is_half_set(environ):
            names = [launcher.count_name(environ), launcher.rank, *launcher.required]
            if not has_address:  # else it replaces the launcher's own address
                names += launcher.address
            return _missing(environ, dict.fromkeys(names), label)
    if has_address and not any(map(environ.get, JAX_VARIABLES[1:])):
        return _missing(environ, JAX_VARIABLES, label)

    # Launchers that are not read, but say that there are other processes.
    pairs = []
    for count, rank in NOT_READ:
        if environ.get(count) or environ.get(rank):
            pairs.append((count, rank))
    for count, rank in LOCAL:
        if environ.get(count) or environ.get(rank, "0") not in ("", "0"):
            pairs.append((count, rank))
    for pair in pairs:
        count, _ = pair
        if not is_one(environ.get(count)):
            given = " ".join(f"{name}={environ[name]}" for name in pair if environ.get(name))
            return (
                f"{given}: not enough to join a run; set {', '.join(JAX_VARIABLES)} too, or {ALONE}"
            )
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        return (
            f"TPU_WORKER_HOSTNAMES={hosts}: several hosts; "
            f"set {', '.join(JAX_VARIABLES)} too, or {ALONE}"
        )
    return ""


def _missing(environ: Environ, names: Collection[str], label: Callable[[str], str]) -> str:
    given = " ".join(f"{label(name)}={environ[name]}" for name in names if environ.get(name))
    missing = [label(name) for name in names if not environ.get(name)]
    verb = "is" if len(missing) == 1 else "are"
    remedy = "start it with srun" if "SLURM_PROCID" in names else "set all"
    return f"{given}: {', '.join(missing)} {verb} not set; {remedy}, or {ALONE}"


def is_batch_script(environ: Environ) -> bool:
    """Returns whether this process is the batch script of a SLURM job, or a shell of `salloc`.

    Such a process is one, however many tasks the job has: `srun` starts those.
    """
    in_job = environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST")
    is_first = environ.get("SLURM_PROCID", "0") == "0"
    return bool(in_job) and is_first and "SLURM_STEP_ID" not in environ


def batch_script_line(environ: Environ) -> str:
    """Returns a line to log if this process runs alone in a job of several tasks, or ""."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if not is_batch_script(environ) or is_one(tasks) or environ.get(JAX_VARIABLES[1]):
        return ""
    return f"SLURM_NTASKS={tasks}: this process runs alone, because srun has not started it"


# ---- TPU slices on GKE ----

TPU_PORT = 8476  # as of jax before 0.8.1; the firewall of Cloud TPU VMs admits it, jax-ml/jax#35905


def tpu_slice_process(environ: Environ) -> tuple[str, str, str] | None:
    """Returns the values of JAX_VARIABLES in TPU slices; None unless there are several hosts.

    The hosts of slice 0 have the lowest ranks. jax reads the same variables
    (jax/_src/clusters/cloud_tpu_cluster.py); without one of them the result is None too. Raises
    ConfigError if a number is out of range.
    """
    addresses = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    hosts = [name.strip() for name in addresses.split(",") if name.strip()]
    num_slices = _number_below(environ, "MEGASCALE_NUM_SLICES", "1", 10**5)
    if num_slices > 1:
        first = environ.get("MEGASCALE_COORDINATOR_ADDRESS")
        needed = ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID")
    else:
        first = ",".join(hosts[:1])
        needed = ("TPU_WORKER_ID",)
    num_processes = len(hosts) * num_slices
    if num_processes < 2 or not first or not all(map(environ.get, needed)):
        return None
    rank = _number_below(environ, "TPU_WORKER_ID", "", len(hosts))
    if num_slices > 1:
        rank += _number_below(environ, "MEGASCALE_SLICE_ID", "", num_slices) * len(hosts)
    return f"{first.partition(':')[0]}:{TPU_PORT}", str(num_processes), str(rank)


# ---- values of variables ----


def is_number(text: Any) -> bool:
    """Returns whether `text` is a number without a sign, of at most 9 digits."""
    return re.fullmatch(r"[0-9]{1,9}", str(text)) is not None


def is_one(text: str | None) -> bool:
    return is_number(text) and int(text) == 1


def _integer(
    environ: Environ, name: str, default: int, *, below: int = 10**9, limit_name: str = ""
) -> int:
    """Returns the value of a variable; raises ConfigError if it is not a number below `below`."""
    text = environ.get(name) or str(default)
    if is_number(text) and int(text) < below:
        return int(text)
    limit = f", below {limit_name}={environ.get(limit_name, '')}" if limit_name else ""
    raise ConfigError(f"{name}={text}: use a number{limit}")


def _number_below(environ: Environ, name: str, default: str, end: int) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < end):
        raise ConfigError(f"{name}={text}: use a number from 0 to {end - 1}")
    return int(text)


def _local_rank(environ: Environ, rank: str, count: str) -> tuple[int, int]:
    """Returns the rank among the processes of this host, and their number; 0 of 1 by default."""
    if not (environ.get(rank) or environ.get(count)):
        return 0, 1
    if environ.get(rank, "0") != "0" and not environ.get(count):
        raise ConfigError(f"{rank}={environ[rank]}: {count} is not set; set both")
    num_local = _integer(environ, count, 1)
    if num_local > 1 and not environ.get(rank):
        raise ConfigError(f"{count}={num_local}: {rank} is not set; set both")
    if num_local == 0:
        raise ConfigError(f"{count}=0: use a number of processes, 1 or more")
    return _integer(environ, rank, 0, below=num_local, limit_name=count), num_local


FIRST_PORT, NUM_PORTS = 61440, 4096  # for launchers that give a job id but no port


def _derived_port(*names: str) -> str:
    """Returns a port that all processes of a job compute from its id; other jobs rarely get it."""
    return str(FIRST_PORT + zlib.crc32("/".join(names).encode(errors="replace")) % NUM_PORTS)


def _first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: node[07-09,12],login -> node07."""
    pattern = r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)"
    first = re.match(pattern, nodes)
    return "".join(part or "" for part in first.groups()) if first else ""  # it matches any text


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Returns the number of tasks of each node: 2(x3),1 -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(",") if text else ():
        count = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not count or len(tasks) > MAX_PROCESSES or not 0 < int(count[1]) <= MAX_PROCESSES:
            raise ConfigError(f"{name}={text}: use the tasks of each node, such as 2(x3),1")
        tasks += [int(count[1])] * int(count[2] or 1)
    return tasks
