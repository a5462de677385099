"""The command line: verbs, the flags that they share, and a user's mistakes as lines with exit code 2.

jax is imported after the flags and the config have been checked, so that `--help`, a misspelt key and
verbs that need no devices are quick.
"""

import argparse
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.cluster import environment, progress, signals
from meshtrain.cluster.rendezvous import RendezvousError
from meshtrain.config import files
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, Config
from meshtrain.errors import EXIT_FAILED, EXIT_USER, ConfigError


class Verb(NamedTuple):
    """Where a verb is, and what it reads.

    The module has a docstring, which `--help` prints, `add_flags(parser)`, and `run`, which returns the
    exit code: `run(args)`, or `run(args, settings)` for a verb that reads a config or a run. It may
    have `prepare(args, config)`, which is called before the config is checked and jax is started.
    """

    module: str
    reads: str = "flags"  # "config": --config=FILE; "run": --workdir=DIR of a run
    forwards: bool = False  # passes on the arguments after --


VERBS = {
    "train": Verb("meshtrain.main", "config"),
    "launch": Verb("meshtrain.cluster.launch", forwards=True),
    "info": Verb("meshtrain.analysis.info"),
    "prepare": Verb("meshtrain.data.prepare"),
    "convert": Verb("meshtrain.huggingface.convert"),
    "generate": Verb("meshtrain.inference.generate", "run"),
    "evaluate": Verb("meshtrain.inference.evaluate", "run"),
    "verify": Verb("meshtrain.verify.command", "config"),
    "audit": Verb("meshtrain.analysis.audit.command", "config"),
    "profile": Verb("meshtrain.analysis.profile.command", "config"),
    "schedule": Verb("meshtrain.analysis.schedule"),
    "checkpoint": Verb("meshtrain.checkpoint.command"),
}


def main(verb: str, argv: list[str] | None = None) -> int:
    """Runs a verb and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    with signals.handled_in_thread() if verb == "train" else contextlib.nullcontext():
        return report_errors(lambda: _run(verb, argv))


def _run(verb: str, argv: list[str]) -> int:
    module, reads, forwards = VERBS[verb]
    module = importlib.import_module(module)
    flags = _Parser(
        prog=f"meshtrain {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_flags(flags)
    if reads == "config":
        return module.run(*_with_config(module, flags, argv))
    if reads == "run":
        return module.run(*_with_run(flags, argv))
    rest: list[str] = []
    if forwards and "--" in argv:
        argv, rest = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args = flags.parse_args(argv)
    args.rest = rest
    return module.run(args)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> None:
        raise ConfigError(message)


def _with_config(
    module: ModuleType, flags: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, Any]:
    """Returns the flags and the config with its overrides; jax has joined all processes by then."""
    flags.add_argument(
        "--config", required=True, metavar="FILE", help="a Python file with get_config()"
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of the config")
    environment.add_flags(flags)
    args, overrides = flags.parse_known_args(argv)
    config, faults = files.read(args.config, overrides)
    if hasattr(module, "prepare"):
        module.prepare(args, config)
    alone = _is_alone(args)
    if alone and (faults := [*faults, *_faults_of(config, args.simulate_devices)]):
        raise ConfigError(*faults)
    from meshtrain.cluster import distributed, runtime

    runtime.start(args)
    if not alone:  # the others must not wait for a process that fails
        with distributed.raise_on_all_processes():
            import jax

            if faults := [*faults, *_faults_of(config, jax.device_count())]:
                raise ConfigError(*faults)
    return args, config


def _with_run(flags: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Returns the flags and the settings of the run in --workdir, changed to use all devices on `fsdp`."""
    flags.add_argument(
        "--workdir",
        type=Path,
        required=True,
        metavar="DIR",
        help="of a run, or one checkpoint: WORKDIR/checkpoints/STEP",
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of its config")
    environment.add_flags(flags)
    args, overrides = flags.parse_known_args(argv)
    from meshtrain import checkpoint

    file = checkpoint.workdir_of(args.workdir) / "config.json"
    if not file.is_file():
        raise ConfigError(f"--workdir={args.workdir}: not a run (config.json is missing)")
    try:
        files.reject_huggingface(file.parent)
    except ConfigError as error:
        raise ConfigError(f"--workdir={error}") from error
    from meshtrain.cluster import distributed, runtime

    runtime.start(args)
    import jax

    config, faults = files.read(str(file), overrides, change=_use_all_devices)
    with distributed.raise_on_all_processes():
        try:
            settings = parse(config, num_devices=jax.device_count())
        except ConfigError as error:
            raise ConfigError(*faults, *error.faults) from error
        if faults:
            raise ConfigError(*faults)
        return args, settings


def _use_all_devices(config: Any) -> None:
    """Replaces the mesh and the batch size that a run was trained with: there may be other devices now."""
    import jax

    config.mesh.update({**dict.fromkeys(AXES, 1), "fsdp": -1})
    rows = jax.device_count()
    config.train.update(
        global_batch=-(-config.train.global_batch // rows) * rows, num_microbatches=1
    )


def _faults_of(config: Any, num_devices: int | None) -> tuple[str, ...]:
    """Returns the faults of a config, of the mesh too where the number of devices is known."""
    try:
        parse(config, num_devices=num_devices)
        return ()
    except ConfigError as error:
        return error.faults


def _is_alone(args: argparse.Namespace) -> bool:
    """Whether this process is the only one of the run: no other process waits for it."""
    given = (args.coordinator, args.num_processes, args.process_id)
    return environment.process_info(os.environ, given) is None


def report_errors(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`; prints what the user has to change to stderr, a line for each fault.

    Of several processes, one that crashes does not wait for the others.
    """
    # Writes all stacks to stderr, also of a process that is stuck: its supervisor asks for them.
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    try:
        code = run()
    except ConfigError as error:
        print(error, file=sys.stderr)
        peer_missing = isinstance(error, RendezvousError) and progress.VARIABLE in os.environ
        code = EXIT_FAILED if peer_missing else EXIT_USER
    except Exception:
        if _num_processes() > 1:
            traceback.print_exc()
            _leave(EXIT_FAILED, together=False)
        raise
    _leave(code, together=True)
    return code


def _num_processes() -> int:
    """Returns the number of processes that have been joined; only cluster.distributed joins any."""
    distributed = sys.modules.get("meshtrain.cluster.distributed")
    return distributed.num_processes() if distributed else 1


def _leave(code: int, *, together: bool) -> None:
    if _num_processes() > 1:
        sys.modules["meshtrain.cluster.distributed"].exit_failed_process(
            code, wait_for_others=together
        )
