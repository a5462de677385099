"""Starts the processes of a run, supervises them, and restarts all of them if one dies or hangs.

  meshtrain launch --nproc=2 --max_restarts=3 -- --config=configs/quickstart.py --workdir=runs/two

  meshtrain launch --nproc=2 -- python my_train.py --my_flag=1

After -- come the arguments of `meshtrain train`, or another verb and its arguments, or a script of
your own, whose processes find each other in `meshtrain.initialize()` or `meshtrain.train()`. On
several hosts, run the same command on each one; the rank of a host is read from SLURM, Open MPI,
torchrun or JAX_* variables, or from --nnodes, --node_rank and --coordinator. With --hosts=a,b,c the
command starts itself on these hosts with ssh. Several hosts need the same MESHTRAIN_SECRET in their
environment, such as one output of `openssl rand -hex 32`; --hosts and launch/slurm.sbatch make one.
After a restart the run resumes from its newest valid checkpoint. The exit code is the run's; 18 if
it hung too often.
"""

import argparse
from collections.abc import Sequence

from meshtrain.cli.verbs import NAMES, Verb
from meshtrain.errors import ConfigError, did_you_mean
from meshtrain.supervise import launch, ssh
from meshtrain.supervise.launch import CLUSTER
from meshtrain.supervise.restart_policy import Settings


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting."""
    defaults = Settings()

    def add(name: str, kind: type, text: str, metavar: str) -> None:
        default = getattr(defaults, name)
        if default is not None:
            text += f" (default: {default})"
        flags.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)

    def add_optional(name: str, kind: type, text: str, metavar: str) -> None:
        # Without a default: `supervise.launch` reads these from the launcher unless they are given.
        flags.add_argument(
            f"--{name}",
            type=kind,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=text,
        )

    add("nproc", int, "processes on this host", "N")
    add("simulate_devices", int, "CPU devices of each process", "N")
    add("max_restarts", int, "restarts after a crash or a stall, within --window", "N")
    add("window", float, "time over which --max_restarts limits the restarts", "SECONDS")
    add(
        "min_nproc",
        int,
        "smallest number of processes, over all hosts, to continue with if some are lost",
        "N",
    )
    add(
        "stall_seconds",
        float,
        "seconds without a step after which a process is considered stuck",
        "SECONDS",
    )
    add("grace", float, "seconds that processes have to save when asked to stop", "SECONDS")
    add_optional(
        "nnodes", int, "number of hosts, by default from the launcher's variables, or 1", "N"
    )
    add_optional(
        "node_rank", int, "rank of this host, by default from the launcher's variables, or 0", "N"
    )
    add_optional(
        "coordinator",
        str,
        "address where node 0 listens, by default from the launcher's variables",
        "HOST:PORT",
    )
    add("join_seconds", float, "seconds to wait for all hosts", "SECONDS")
    add("ports", str, "ports of which node 0 uses a free one for the processes", "LOW-HIGH")
    flags.add_argument(
        "--hosts", metavar="A,B,...", help="start the run on these hosts with ssh, from this one"
    )
    flags.add_argument(
        "--insecure",
        action="store_true",
        help="let supervisors of several hosts meet without MESHTRAIN_SECRET: anybody who reaches "
        "the port of node 0 can join the run or end it",
    )
    flags.add_argument(
        "--quiet",
        action="store_true",
        help="print only warnings, faults, restarts and the last line of the run",
    )
    flags.add_argument(
        "--force",
        action="store_true",
        help="start more processes and devices than this machine is likely to have the cores and "
        "memory for",
    )


def run(args: argparse.Namespace) -> int:
    """Launches the run and returns its exit code."""
    settings = dict(vars(args))
    arguments = settings.pop("rest")
    hosts = settings.pop("hosts")
    _check_command(arguments)
    if hosts is None:
        return launch.launch(arguments, **settings)

    address = settings.pop("coordinator", None)
    ignored = [f"--{name}" for name in CLUSTER if name in settings]
    if ignored:
        raise ConfigError(
            f"--hosts={hosts}: sets {' and '.join(ignored)} for each host; omit these"
        )
    Settings(**settings)  # its faults are the same on all hosts
    defaults = vars(Settings())
    flags = []
    for name, value in settings.items():
        if value != defaults[name]:
            flags.append(f"--{name}" if value is True else f"--{name}={value}")
    return ssh.launch(ssh.parse_hosts(hosts), flags, arguments, address)


def _check_command(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a first argument that each process would reject."""
    if not arguments or launch.program_of(arguments):
        return
    first = arguments[0]
    if not first.startswith("-") and first not in NAMES:
        near = did_you_mean(first, NAMES)
        raise ConfigError(
            f"{first}: neither a verb nor a script{near}; use a verb of `meshtrain help`, "
            f"python SCRIPT.py, or the path of a program"
        )


VERB = Verb(
    summary="start the processes of a run, and restart them",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    forwards=True,
)
