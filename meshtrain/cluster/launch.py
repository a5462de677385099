"""Starts the processes of a run, watches them, and starts them again when one dies or hangs.

  meshtrain launch --nproc=2 --max_restarts=3 -- --config=configs/quickstart.py --workdir=runs/two

What follows -- are the arguments of `meshtrain train`, or another verb and its arguments. On several
hosts the same command runs on each; SLURM, Open MPI, torchrun's and JAX_* variables tell it its place,
or --nnodes, --node_rank and --coordinator do. A run goes on from its newest good checkpoint.
Exit codes are those of the run; 18 where it hung too often.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cluster import environment as places
from meshtrain.cluster.restart_policy import Settings
from meshtrain.cluster.supervisor import Supervisor
from meshtrain.errors import ConfigError


def launch(arguments: Sequence[str], **settings) -> int:
    """Runs `meshtrain ARGUMENTS...` in several processes and returns the exit code.

    The settings are those of `Settings`, by name. Raises ConfigError for what does not fit.
    """
    s, arguments = Settings(**settings), list(arguments)
    if not arguments:
        raise ConfigError(
            "nothing to launch: give the arguments of a run after --, such as --config=FILE"
        )
    trains = arguments[0].startswith("-") or arguments[0] == "train"
    workdir, mine = _workdir(arguments) if trains else None, places.find(os.environ)
    command = [sys.executable, "-m", "meshtrain", *arguments]
    if s.simulate_devices:
        command.append(f"--simulate_devices={s.simulate_devices}")
    if s.min_nproc and trains:
        command.append("--elastic")
    logs, cache = _folders(workdir) if workdir else (None, None)
    return Supervisor(s, workdir=workdir).run(
        command,
        logs=logs,
        environ=_environment(cache),
        local_id=mine.local_id if mine else 0,
        num_supervisors=mine.num_local if mine else 1,
    )


def _workdir(arguments: list[str]) -> Path | None:
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--workdir", nargs="?", default="")
    found = flags.parse_known_args(arguments)[0].workdir
    return Path(found) if found else None


def _folders(workdir: Path) -> tuple[Path, Path | None]:
    """Returns where logs and compiled programs go."""
    logs, cache = workdir / "logs", (workdir / "compiled").absolute()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        found = cache.stat()
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: {error.filename}: {error.strerror}; use a folder that can be written"
        ) from error
    # What is in it, is run: nobody else may have put it there.
    ours = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return logs, cache if ours else None


def _environment(cache: Path | None) -> dict[str, str]:
    """Programs are kept, so that a restart need not compile them."""
    environ = dict(os.environ)
    if cache and "JAX_COMPILATION_CACHE_DIR" not in environ:
        environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return environ


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting; a launcher's variables, if there are any, give the defaults."""
    given = Settings()
    if mine := places.find(os.environ):
        cluster = {"nnodes": mine.num_processes, "node_rank": mine.process_id}
        given = Settings(**cluster, coordinator=mine.address)
    settings = {
        "nproc": (int, "processes on this host"),
        "simulate_devices": (int, "CPU devices of each process"),
        "max_restarts": (int, "after a crash or a stall"),
        "window": (float, "seconds within which so many restarts count"),
        "min_nproc": (int, "go on with as few, over all hosts, where one cannot come back"),
        "stall_seconds": (float, "without a step until processes count as stuck"),
        "grace": (float, "seconds to save in when asked to stop"),
        "nnodes": (int, "hosts"),
        "node_rank": (int, "number of this host"),
        "coordinator": (str, "HOST:PORT where node 0 listens"),
        "join_seconds": (float, "to wait for all hosts"),
    }
    for name, (kind, text) in settings.items():
        default = getattr(given, name)
        text += "" if default is None else f" (default: {default})"
        flags.add_argument(f"--{name}", type=kind, default=default, help=text)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    settings = dict(vars(args))
    return launch(settings.pop("rest"), **settings)
