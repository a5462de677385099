"""Starts the processes of a run, supervises them, and restarts all of them if one dies or hangs.

  meshtrain launch --nproc=2 --max_restarts=3 -- --config=configs/quickstart.py --workdir=runs/two

After -- come the arguments of `meshtrain train`, or another verb and its arguments. On several hosts,
run the same command on each one; the rank of a host is read from SLURM, Open MPI, torchrun or JAX_*
variables, or from --nnodes, --node_rank and --coordinator. After a restart the run resumes from its
newest valid checkpoint. The exit code is the run's; 18 if it hung too often.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cluster import environment
from meshtrain.cluster.restart_policy import Settings
from meshtrain.cluster.supervisor import Supervisor
from meshtrain.errors import ConfigError


def launch(arguments: Sequence[str], **settings) -> int:
    """Runs `meshtrain ARGUMENTS...` in several processes and returns the exit code.

    `settings` are the fields of `Settings`. Raises ConfigError if one of them is invalid.
    """
    s, arguments = Settings(**settings), list(arguments)
    if not arguments:
        raise ConfigError(
            "nothing to launch: give the arguments of a run after --, such as --config=FILE"
        )
    is_training = arguments[0].startswith("-") or arguments[0] == "train"
    workdir = _workdir(arguments) if is_training else None
    if not is_training:
        s = dataclasses.replace(s, grace=0.1)  # nothing to save
    process = environment.process_info(os.environ)  # of this supervisor
    command = [sys.executable, "-m", "meshtrain", *arguments]
    if s.simulate_devices:
        command.append(f"--simulate_devices={s.simulate_devices}")
    if s.min_nproc and is_training:
        command.append("--elastic")
    logs, cache = _make_folders(workdir) if workdir else (None, None)
    return Supervisor(s, workdir=workdir).run(
        command,
        logs=logs,
        environ=_environment(cache),
        local_id=process.local_id if process else 0,
        num_supervisors=process.num_local if process else 1,
    )


def _workdir(arguments: list[str]) -> Path | None:
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--workdir", nargs="?", default="")
    found = flags.parse_known_args(arguments)[0].workdir
    return Path(found) if found else None


def _make_folders(workdir: Path) -> tuple[Path, Path | None]:
    """Returns the folders of logs and of compiled programs; the second is None if it is not safe to use."""
    logs, cache = workdir / "logs", (workdir / "compiled").absolute()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        found = cache.stat()
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: {error.filename}: {error.strerror}; use a folder that can be written"
        ) from error
    # The programs in it are executed, so no other user may be able to write there.
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return logs, cache if is_private else None


def _environment(cache: Path | None) -> dict[str, str]:
    """Returns the environment of the processes, with a compile cache: a restart does not recompile."""
    environ = dict(os.environ)
    if cache and "JAX_COMPILATION_CACHE_DIR" not in environ:
        environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return environ


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting; the launcher's variables, if there are any, set the defaults."""
    defaults = Settings()
    if process := environment.process_info(os.environ):
        cluster = {"nnodes": process.num_processes, "node_rank": process.process_id}
        defaults = Settings(**cluster, coordinator=process.address)
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
        "nnodes": (int, "number of hosts"),
        "node_rank": (int, "rank of this host"),
        "coordinator": (str, "address where node 0 listens"),
        "join_seconds": (float, "seconds to wait for all hosts"),
    }
    for name, (kind, text) in settings.items():
        default = getattr(defaults, name)
        text += "" if default is None else f" (default: {default})"
        metavar = {int: "N", float: "SECONDS", str: "HOST:PORT"}[kind]
        flags.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Launches the run and returns its exit code."""
    settings = dict(vars(args))
    return launch(settings.pop("rest"), **settings)
