"""What the verbs that run a config share: its flags, simulated devices, and a user's faults as lines."""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from meshtrain import checkpoint, huggingface
from meshtrain.cluster import distributed, progress
from meshtrain.cluster.rendezvous import MeetingError
from meshtrain.config import files as configfile
from meshtrain.config.parse import Config, parse
from meshtrain.errors import EXIT_FAILED, EXIT_USER, ConfigError
from meshtrain.parallel import xla as compiler
from meshtrain.parallel.mesh import AXES


def plain_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser without flags, whose faults are ConfigErrors."""
    flags = argparse.ArgumentParser(
        prog=f"meshtrain {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.error = _fault
    return flags


def parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with --config, --simulate_devices and --config.KEY; a verb adds its own flags."""
    flags = plain_parser(verb, description)
    flags.add_argument(
        "--config", required=True, metavar="FILE", help="a Python file with get_config()"
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of the config")
    add_devices(flags)
    return flags


def add_devices(flags: argparse.ArgumentParser) -> None:
    """Adds what says on which devices, and with which other processes; see `start`."""
    flags.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    several = flags.add_argument_group(
        "several processes",
        "launchers tell this in variables, see meshtrain/cluster/environment.py",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--num_processes", type=int, metavar="N")
    several.add_argument("--process_id", type=int, metavar="I")
    several.add_argument(
        "--join_seconds",
        type=float,
        metavar="S",
        default=distributed.JOIN_SECONDS,
        help="to wait for all processes (default: %(default)s)",
    )


def start(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any; simulated devices come before (`simulate`)."""
    distributed.initialize(
        args.coordinator, args.num_processes, args.process_id, join_seconds=args.join_seconds
    )


def settings(
    flags: argparse.ArgumentParser,
    argv: list[str] | None,
    prepare: Callable[[argparse.Namespace, Any], None] = lambda args, config: None,
) -> tuple[argparse.Namespace, Any]:
    """Returns the verb's flags and the config with its overrides, after making the devices ready.

    `prepare` may change the config before it is checked. Raises ConfigError with every fault.
    """
    args, overrides = flags.parse_known_args(argv)
    _make_ready(args)
    config, faults = configfile.read(args.config, overrides)
    prepare(args, config)
    start(args)
    with distributed.together():
        if any(distributed.gather(bool(faults))):
            raise ConfigError(*faults, *_faults_of(config))
    return args, config


def of_run(
    flags: argparse.ArgumentParser, argv: list[str] | None, *, own: Iterable[str] = ()
) -> tuple[argparse.Namespace, Config]:
    """Returns the verb's flags and the settings of the run in --workdir, on all devices that there are.

    Unless overrides say otherwise the devices are on `fsdp`. What the caller brings itself (`own`, as in
    `config.parse`) is not built. Raises ConfigError with every fault.
    """
    flags.add_argument(
        "--workdir",
        type=Path,
        required=True,
        metavar="DIR",
        help="of a run, or WORKDIR/checkpoints/STEP",
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of its config")
    add_devices(flags)
    args, overrides = flags.parse_known_args(argv)
    _make_ready(args)
    file = checkpoint.workdir_of(args.workdir) / "config.json"
    if not file.is_file():
        raise ConfigError(f"--workdir={args.workdir}: no run there (config.json is missing)")
    if huggingface.is_folder(file.parent):
        raise ConfigError(f"--workdir={args.workdir}: {huggingface.ADVICE}")
    start(args)
    config, faults = configfile.read(str(file), overrides, change=_on_all_devices)
    with distributed.together():
        try:
            cfg = parse(config, num_devices=jax.device_count(), own=own)
        except ConfigError as error:
            raise ConfigError(*faults, *error.faults) from error
        if faults:
            raise ConfigError(*faults)
        return args, cfg


def _on_all_devices(config: Any) -> None:
    """Sets what depends on the devices that a run was trained on."""
    config.mesh.update({**dict.fromkeys(AXES, 1), "fsdp": -1})
    rows = jax.device_count()
    config.train.update(
        global_batch=-(-config.train.global_batch // rows) * rows, num_microbatches=1
    )


def _make_ready(args: argparse.Namespace) -> None:
    logging.getLogger("absl").setLevel(logging.WARNING)
    compiler.run_in_place()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Orbax's: what fails in a save we tell
    if args.simulate_devices is not None:
        simulate(args.simulate_devices)


def simulate(num_devices: int) -> None:
    """Makes this process run on simulated CPU devices; to be called before anything starts a backend."""
    if num_devices < 1:
        raise ConfigError(f"--simulate_devices={num_devices}: use 1 or more")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    if num_devices > 1:
        # A CPU program of several devices hangs in its collectives when read back from the cache.
        jax.config.update("jax_enable_compilation_cache", False)


def told(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`; what the user has to change goes to stderr, a line for each fault.

    Of several processes one that fails does not wait for the others.
    """
    # All stacks to stderr, also of a process that is stuck: its supervisor asks for them.
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    try:
        code = run()
    except ConfigError as error:
        print(error, file=sys.stderr)
        lost = isinstance(error, MeetingError) and progress.VARIABLE in os.environ
        code = EXIT_FAILED if lost else EXIT_USER
    except Exception:
        if distributed.num_processes() > 1:
            traceback.print_exc()
            distributed.leave(EXIT_FAILED, together=False)
        raise
    distributed.leave(code, together=True)
    return code


def _fault(message: str) -> None:
    raise ConfigError(message)


def _faults_of(config: Any) -> tuple[str, ...]:
    """What else is wrong, so that all is told at once."""
    try:
        parse(config, num_devices=jax.device_count())
        return ()
    except ConfigError as error:
        return error.faults
