"""The environment variables that give a process its rank: those of jax, torchrun, SLURM, Open MPI and others.

A half-set launcher is a fault: a process that ignored it would train alone, next to the others.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

FLAGS = ("--coordinator", "--num_processes", "--process_id")  # they override JAX_VARIABLES

MAX_PROCESSES = 100_000

LOOPBACK = "127.0.0.1"

LOOPBACK_IPV6 = "::1"

LOCALHOST = (LOOPBACK, "localhost", LOOPBACK_IPV6)

FIRST_PORT, NUM_PORTS = 61440, 4096  # for launchers that give a job id but no port

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

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def on_one_host(self) -> bool:
        return self.host in LOCALHOST


class Launcher(NamedTuple):
    """The names of a launcher's variables; `read` returns the other fields of `ProcessInfo`."""

    name: str
    count: Sequence[str]  # number of processes; the first one that is set is used
    number: str  # rank
    address: Sequence[str]  # where process 0 listens
    read: Callable[[Environ], dict[str, Any]]
    required: Sequence[str] = ()  # without these, count and rank mean something else

    def count_name(self, environ: Environ) -> str:
        return next((name for name in self.count if environ.get(name)), self.count[0])

    def is_complete(self, environ: Environ) -> bool:
        needed = (self.count_name(environ), self.number, *self.required)
        return all(environ.get(name) for name in needed)

    def is_half_set(self, environ: Environ) -> bool:
        """Whether only some of count and rank are set; a count of 1 describes a process alone."""
        count = environ.get(self.count_name(environ))
        if self.is_complete(environ) or is_one(count):
            return False
        return bool(count or environ.get(self.number))


def _jax(environ: Environ) -> dict[str, Any]:
    return local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _torchrun(environ: Environ) -> dict[str, Any]:
    port = environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and is_number(port):
        port = str(int(port) + 1)  # torchrun's own store listens on MASTER_PORT
    return {
        "host": environ.get("MASTER_ADDR", ""),
        "port": port,
        **local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }


def _slurm(environ: Environ) -> dict[str, Any]:
    """Only within `srun`: the batch script itself is one process, however many tasks the job has."""
    tasks_name = "SLURM_STEP_TASKS_PER_NODE"
    tasks, node = _tasks_per_node(tasks_name, environ.get(tasks_name, "")), 0
    if tasks:
        node = integer(environ, "SLURM_NODEID", 0)
        if node >= len(tasks):
            raise ConfigError(
                f"SLURM_NODEID={node}: {tasks_name}={environ[tasks_name]} has {len(tasks)} nodes"
            )
    num_local = tasks[node] if tasks else 1
    return {
        "host": _first_host(environ["SLURM_STEP_NODELIST"]),
        "port": _derived_port(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        "local_id": integer(environ, "SLURM_LOCALID", 0, below=num_local, of=tasks_name),
        "num_local": num_local,
    }


def _open_mpi(environ: Environ) -> dict[str, Any]:
    # Open MPI 4 gives the job and the host of mpirun, "JOB.0;tcp://FIRST,SECOND:PORT"; Open MPI 5 does not.
    job, _, rest = environ.get("OMPI_MCA_orte_hnp_uri", "").partition(".")
    found = re.search(r"tcp://\[?([^],:]+)", rest)
    return {
        "host": found[1] if found else "",
        "port": _derived_port(job or environ.get("PMIX_NAMESPACE", "")),
        **local(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    }


JAX = Launcher("JAX_*", JAX_VARIABLES[1:2], JAX_VARIABLES[2], JAX_VARIABLES[:1], _jax)

# In the order in which they are asked.
LAUNCHERS = (
    JAX,
    Launcher("torchrun", ("WORLD_SIZE",), "RANK", ("MASTER_ADDR", "MASTER_PORT"), _torchrun),
    Launcher(
        "SLURM",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "SLURM_PROCID",
        ("SLURM_STEP_NODELIST",),
        _slurm,
        required=(
            "SLURM_STEP_NODELIST",
        ),  # not set in a batch script, which `srun` has not started
    ),
    Launcher(
        "Open MPI", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", JAX_VARIABLES[:1], _open_mpi
    ),
    # Kubernetes sets the index of a pod; the manifest of the Job has to set the number of processes.
    Launcher(
        "Indexed Job",
        JAX_VARIABLES[1:2],
        "JOB_COMPLETION_INDEX",
        JAX_VARIABLES[:1],
        lambda environ: {},
    ),
)

# Count and rank of launchers that do not say where process 0 listens; some of them set only the rank.
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


def complete(environ: Environ) -> Launcher | None:
    """Returns the first launcher whose count and rank are set."""
    return next((one for one in LAUNCHERS if one.is_complete(environ)), None)


def half_set_fault(environ: Environ, label: Callable[[str], str]) -> str:
    """Returns the fault of the first launcher of which only some variables are set, or ""."""
    for one in LAUNCHERS:
        if one.name == "Indexed Job" and not environ.get(one.number):
            continue  # the count alone is jax's
        if not one.is_half_set(environ) or one.name == "SLURM" and is_batch_script(environ):
            continue
        count = one.count_name(environ)
        names = dict.fromkeys((count, one.number, *one.required, *one.address))
        if environ.get(JAX_VARIABLES[0]):  # it replaces the launcher's own address
            names = {
                name: None for name in names if name not in one.address or name in one.required
            }
        return _missing(environ, names, label)
    if environ.get(JAX_VARIABLES[0]) and not any(map(environ.get, JAX_VARIABLES[1:])):
        return _missing(environ, JAX_VARIABLES, label)
    pairs = [pair for pair in NOT_READ if environ.get(pair[0]) or environ.get(pair[1])]
    pairs += [
        pair for pair in LOCAL if environ.get(pair[0]) or environ.get(pair[1], "0") not in ("", "0")
    ]
    for count, number in pairs:
        if not is_one(environ.get(count)):
            given = " ".join(f"{n}={environ[n]}" for n in (count, number) if environ.get(n))
            return (
                f"{given}: not enough to join a run; set {', '.join(JAX_VARIABLES)} too, or {ALONE}"
            )
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        return f"TPU_WORKER_HOSTNAMES={hosts}: several hosts; set {', '.join(JAX_VARIABLES)} too, or {ALONE}"
    return ""


def _missing(environ: Environ, names: Sequence[str], label: Callable[[str], str]) -> str:
    given = " ".join(f"{label(name)}={environ[name]}" for name in names if environ.get(name))
    missing = [label(name) for name in names if not environ.get(name)]
    verb = "is" if len(missing) == 1 else "are"
    start = "start it with srun" if "SLURM_PROCID" in names else "set all"
    return f"{given}: {', '.join(missing)} {verb} not set; {start}, or {ALONE}"


def is_batch_script(environ: Environ) -> bool:
    """Whether SLURM has started this process as the batch script of a job or a shell of `salloc`.

    Such a process is one, however many tasks the job has: `srun` starts those.
    """
    in_job = environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST")
    return (
        bool(in_job) and environ.get("SLURM_PROCID", "0") == "0" and "SLURM_STEP_ID" not in environ
    )


def batch_script_line(environ: Environ) -> str:
    """Returns a line to log if this process runs alone in a job of several tasks, or ""."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if not is_batch_script(environ) or is_one(tasks) or environ.get(JAX_VARIABLES[1]):
        return ""
    return f"SLURM_NTASKS={tasks}: this process runs alone, because srun has not started it"


def count_and_number(
    launcher: Launcher, environ: Environ, label: Callable[[str], str]
) -> tuple[int, int]:
    """Returns the number of processes and the rank; raises ConfigError if one is not a number in range."""
    name = launcher.count_name(environ)
    count, number = environ[name], environ[launcher.number]
    if not is_number(count) or not 0 < int(count) <= MAX_PROCESSES:
        raise ConfigError(
            f"{label(name)}={count}: use a number of processes from 1 to {MAX_PROCESSES}"
        )
    if launcher.name == "Indexed Job" and int(count) == 1:
        return 1, 0  # the pods of this Job are runs of their own
    if not is_number(number) or int(number) >= int(count):
        raise ConfigError(
            f"{label(launcher.number)}={number}: use an id from 0 to {int(count) - 1}, "
            f"below {label(name)}={count}"
        )
    return int(count), int(number)


def is_number(text: Any) -> bool:
    """Whether `text` is a number without a sign, of at most 9 digits."""
    return re.fullmatch(r"[0-9]{1,9}", str(text)) is not None


def is_one(text: str | None) -> bool:
    return is_number(text) and int(text) == 1


def integer(environ: Environ, name: str, default: int, *, below: int = 10**9, of: str = "") -> int:
    """Returns the value of a variable; raises ConfigError if it is not a number below `below`."""
    text = environ.get(name) or str(default)
    if is_number(text) and int(text) < below:
        return int(text)
    limit = f", below {of}={environ.get(of, '')}" if of else ""
    raise ConfigError(f"{name}={text}: use a number{limit}")


def local(environ: Environ, number: str, count: str) -> dict[str, int]:
    """Returns the rank among the processes of this host and their number; 0 of 1 if neither is set."""
    if not (environ.get(number) or environ.get(count)):
        return {}
    num_local = integer(environ, count, 1)
    if num_local > 1 and not environ.get(number):
        raise ConfigError(f"{count}={num_local}: {number} is not set; set both")
    if num_local == 0:
        raise ConfigError(f"{count}=0: use a number of processes, 1 or more")
    return {
        "local_id": integer(environ, number, 0, below=num_local, of=count),
        "num_local": num_local,
    }


def _derived_port(*names: str) -> str:
    """Returns a port computed from the job's id: all its processes get the same, other jobs rarely do."""
    return str(FIRST_PORT + zlib.crc32("/".join(names).encode(errors="replace")) % NUM_PORTS)


def _first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: node[07-09,12],login -> node07."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in first.groups())


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Returns the number of tasks of each node: 2(x3),1 -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not found or len(tasks) > MAX_PROCESSES or not 0 < int(found[1]) <= MAX_PROCESSES:
            raise ConfigError(f"{name}={text}: use the tasks of each node, such as 2(x3),1")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


TPU_PORT = 8476  # as of jax before 0.8.1; the firewall of Cloud TPU VMs admits it, jax-ml/jax#35905


def tpu_slice_process(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Returns HOST:PORT of process 0, the number of processes and the rank; None if there are not several hosts.

    The hosts of slice 0 have the lowest ranks. jax reads the same variables (jax/_src/clusters/cloud_tpu_cluster.py).
    Raises ConfigError if a number is out of range. Without one of the variables it is None too.
    """
    given = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    hosts = [name.strip() for name in given.split(",") if name.strip()]
    slices = _number_below(environ, "MEGASCALE_NUM_SLICES", "1", 10**5)
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else ",".join(hosts[:1])
    needed = ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID") if slices > 1 else ("TPU_WORKER_ID",)
    if len(hosts) * slices < 2 or not first or not all(map(environ.get, needed)):
        return None
    rank = _number_below(environ, "TPU_WORKER_ID", "", len(hosts))
    if slices > 1:
        rank += _number_below(environ, "MEGASCALE_SLICE_ID", "", slices) * len(hosts)
    return f"{first.partition(':')[0]}:{TPU_PORT}", str(len(hosts) * slices), str(rank)


def _number_below(environ: Mapping[str, str], name: str, default: str, end: int) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < end):
        raise ConfigError(f"{name}={text}: use a number from 0 to {end - 1}")
    return int(text)
