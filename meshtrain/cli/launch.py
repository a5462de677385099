"""Starts the processes of a run, supervises them, and restarts all of them if one dies or hangs.

  meshtrain launch --nproc=2 --max_restarts=3 -- --config=configs/quickstart.py --workdir=runs/two

After -- come the arguments of `meshtrain train`, or another verb and its arguments. On several hosts,
run the same command on each one; the rank of a host is read from SLURM, Open MPI, torchrun or JAX_*
variables, or from --nnodes, --node_rank and --coordinator. With --hosts=a,b,c the command starts itself on
these hosts with ssh. After a restart the run resumes from its
newest valid checkpoint. The exit code is the run's; 18 if it hung too often.
"""

import argparse

from meshtrain.cli.verbs import Verb
from meshtrain.errors import ConfigError
from meshtrain.supervise import launch, ssh
from meshtrain.supervise.launch import CLUSTER
from meshtrain.supervise.restart_policy import Settings


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting."""
    defaults = Settings()
    settings = {
        "nproc": (int, "processes on this host"),
        "simulate_devices": (int, "CPU devices of each process"),
        "max_restarts": (int, "restarts after a crash or a stall, within --window"),
        "window": (float, "time over which --max_restarts limits the restarts"),
        "min_nproc": (
            int,
            "smallest number of processes, over all hosts, to continue with if some are lost",
        ),
        "stall_seconds": (
            float,
            "seconds without a step after which a process is considered stuck",
        ),
        "grace": (float, "seconds that processes have to save when asked to stop"),
        "nnodes": (int, "number of hosts, by default from the launcher's variables, or 1"),
        "node_rank": (int, "rank of this host, by default from the launcher's variables, or 0"),
        "coordinator": (
            str,
            "address where node 0 listens, by default from the launcher's variables",
        ),
        "join_seconds": (float, "seconds to wait for all hosts"),
        "ports": (str, "ports of which node 0 uses a free one for the processes"),
    }
    for name, (kind, text) in settings.items():
        # Whether these are given matters: see `_place`.
        default = argparse.SUPPRESS if name in CLUSTER else getattr(defaults, name)
        text += "" if default in (None, argparse.SUPPRESS) else f" (default: {default})"
        metavar = {int: "N", float: "SECONDS", str: "HOST:PORT"}[kind]
        metavar = "LOW-HIGH" if name == "ports" else metavar
        flags.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    flags.add_argument(
        "--hosts", metavar="A,B,...", help="start the run on these hosts with ssh, from this one"
    )
    flags.add_argument(
        "--force",
        action="store_true",
        help="start more processes and devices than this machine is likely to have the cores and memory for",
    )


def run(args: argparse.Namespace) -> int:
    """Launches the run and returns its exit code."""
    settings = dict(vars(args))
    arguments, hosts = settings.pop("rest"), settings.pop("hosts")
    if hosts is None:
        return launch.launch(arguments, **settings)
    address = settings.pop("coordinator", None)
    if ignored := [f"--{name}" for name in CLUSTER if name in settings]:
        raise ConfigError(
            f"--hosts={hosts}: sets {' and '.join(ignored)} for each host; omit these"
        )
    Settings(**settings)  # its faults are the same on all hosts
    defaults = vars(Settings())
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in settings.items()
        if value != defaults[name]
    ]
    return ssh.launch(ssh.parse_hosts(hosts), flags, arguments, address)


VERB = Verb(
    summary="start the processes of a run, and restart them",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    forwards=True,
)
