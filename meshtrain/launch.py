"""Starts the processes of a run, watches them, and starts them again when one dies or hangs.

  meshtrain launch --nproc=2 --max_restarts=3 -- --config=configs/quickstart.py --workdir=runs/two

What follows -- are the arguments of `meshtrain train`, or another verb and its arguments. On several
hosts the same command runs on each; SLURM, Open MPI, torchrun's and JAX_* variables tell it its place,
or --nnodes, --node_rank and --coordinator do. A run goes on from its newest good checkpoint.
Exit codes are those of the run; 18 where it hung too often.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain import cli
from meshtrain import place as places
from meshtrain.attempts import Settings
from meshtrain.errors import ConfigError
from meshtrain.supervisor import Supervisor


def launch(arguments: Sequence[str], **settings) -> int:
    """Runs `meshtrain ARGUMENTS...` in several processes and returns the exit code.

    The settings are those of `Settings`, by name. Raises ConfigError for what does not fit.
    """
    s, arguments = Settings(**settings), list(arguments)
    if not arguments:
        raise ConfigError(
            "nothing to launch: give the arguments of a run after --, such as --config=FILE"
        )
    workdir, mine = _workdir(arguments), places.find(os.environ)
    command = [sys.executable, "-m", "meshtrain", *arguments]
    if s.simulate_devices:
        command.append(f"--simulate_devices={s.simulate_devices}")
    if s.min_nproc and arguments[0].startswith("-"):  # else it is a verb that does not train
        command.append("--elastic")
    return Supervisor(s, workdir=workdir).run(
        command,
        logs=_logs(workdir),
        environ=_environment(workdir),
        local_id=mine.local_id if mine else 0,
        num_supervisors=mine.num_local if mine else 1,
    )


def _workdir(arguments: list[str]) -> Path | None:
    for number, argument in enumerate(arguments):
        if argument.startswith("--workdir="):
            return Path(argument.partition("=")[2])
        if argument == "--workdir" and number + 1 < len(arguments):
            return Path(arguments[number + 1])
    return None


def _logs(workdir: Path | None) -> Path | None:
    if workdir is None:
        return None
    try:
        (logs := workdir / "logs").mkdir(parents=True, exist_ok=True)
        return logs
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: {error.strerror}; use a folder that can be written"
        ) from error


def _environment(workdir: Path | None) -> dict[str, str]:
    """Programs are kept in the workdir, so that a restart need not compile them."""
    environ = dict(os.environ)
    if workdir and "JAX_COMPILATION_CACHE_DIR" not in environ:
        cache = (workdir / "compiled").absolute()
        cache.mkdir(mode=0o700, exist_ok=True)
        found = cache.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:  # what is in it, is run
            environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
            environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return environ


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    own, arguments = argv, []
    if "--" in argv:
        own, arguments = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    return cli.told(lambda: launch(arguments, **_flags(own)))


def _flags(own: list[str]) -> dict:
    """Returns the settings that are given, or that a launcher has set for this host."""
    given = Settings()
    flags = cli.plain_parser("launch", __doc__)
    told = {
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
    mine = places.find(os.environ)
    if mine:
        cluster = {"nnodes": mine.num_processes, "node_rank": mine.process_id}
        given = Settings(**cluster, coordinator=mine.address)
    for name, (kind, text) in told.items():
        default = getattr(given, name)
        text += "" if default is None else f" (default: {default})"
        flags.add_argument(f"--{name}", type=kind, default=default, help=text)
    return vars(flags.parse_args(own))


if __name__ == "__main__":
    sys.exit(main())
