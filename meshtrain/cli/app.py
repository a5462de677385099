"""The command line: verbs, shared flags, and one line per error in these or in configs.

Such errors end with exit code 2.

A process that runs alone imports jax only after it has checked the flags and the config, so that
`--help`, a misspelt key and verbs that need no devices are quick.
"""

import argparse
import contextlib
import errno
import faulthandler
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain import console, storage
from meshtrain.cli import verbs
from meshtrain.cli.parser import Parser
from meshtrain.cli.verbs import Verb
from meshtrain.cluster import environment, progress
from meshtrain.config import checks, load
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, Config
from meshtrain.errors import (
    EXIT_FAILED,
    EXIT_USER,
    ConfigError,
    TransientError,
    did_you_mean,
    disk_fault,
    lost_process_fault,
    memory_fault,
)
from meshtrain.tools.plan import constraints

HELP = ("help", "--help", "-h")


def command(arguments: list[str]) -> int:
    """Runs `meshtrain ARGUMENTS...` and returns the exit code."""
    first, *rest = arguments or ["help"]
    if first == "help" and rest:
        first, rest = rest[0], ["--help"]
    if first in HELP:
        return _with_complete_output(lambda: _print_lines(_overview()))
    if first == "--version":
        return _with_complete_output(lambda: _print_lines([f"meshtrain {meshtrain.__version__}"]))
    if first.startswith("-"):
        first, rest = "train", arguments
    if first not in verbs.NAMES:
        fault = f"{first}: unknown verb; use one of {', '.join(verbs.NAMES)}"
        fault += did_you_mean(first, verbs.NAMES)
        console.say(console.line_of(fault), stream="stderr")
        return EXIT_USER
    return main(first, rest)


def _overview() -> list[str]:
    return [
        "usage: meshtrain VERB [FLAGS]; flags without a verb are those of train",
        "",
        *(f"  {name:12}{verbs.load(name).summary}" for name in verbs.NAMES),
        "",
        "meshtrain VERB --help describes a verb; meshtrain --version prints the version.",
    ]


def _print_lines(lines: list[str]) -> int:
    console.say(*lines)
    return 0


def main(name: str, argv: list[str] | None = None) -> int:
    """Runs the verb of this name and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        run = functools.partial(report_errors, lambda: _run(name, argv), name)
        # A run logs to its workdir what stdout does not accept; of the other verbs, the output is
        # the result.
        return run() if name in ("train", "launch") else _with_complete_output(run)
    except SystemExit as end:  # after --help
        code = end.code
    return _with_complete_output(lambda: code)


def _with_complete_output(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`.

    It is EXIT_FAILED if stdout broke, except by a reader that has ended, such as head.
    """
    code = run()
    sys.stdout.flush()
    error = console.faults.get("stdout")
    if error and getattr(error, "errno", None) != errno.EPIPE and not code:
        fault = f"stdout: {console.describe(error)}: the output is incomplete"
        console.say(fault, stream="stderr")
        return EXIT_FAILED
    return code


def parser_of(name: str) -> Parser:
    """Returns the parser of all flags of a verb."""
    verb = verbs.load(name)
    flags = Parser(
        prog=f"meshtrain {name}",
        description=verb.help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_flags(flags)
    if verb.reads == "config":
        _add_config_flags(flags, is_required=not verb.config_is_optional)
    elif verb.reads == "run":
        _add_run_flags(flags)
    return flags


def _add_config_flags(flags: Parser, *, is_required: bool) -> None:
    flags.add_argument(
        "--config",
        required=is_required,
        metavar="FILE",
        help="a Python file with get_config(), the name of a config of the package, such as "
        "quickstart, a YAML file, a run's config.json, or a Hugging Face folder, whose model and "
        "parameters a run begins with",
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of the config")
    _add_common_flags(flags)


def _add_run_flags(flags: Parser) -> None:
    flags.add_argument(
        "--workdir",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of a run, of one checkpoint: WORKDIR/checkpoints/STEP, or of a Hugging Face "
        "model",
    )
    flags.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of its config")
    _add_common_flags(flags)


def _run(name: str, argv: list[str]) -> int:
    verb = verbs.load(name)
    flags = parser_of(name)
    if verb.reads == "config":
        args, cfg = _read_config(verb, flags, argv)
        return verb.run(args, cfg)
    if verb.reads == "run":
        args, cfg = _read_run(flags, argv)
        return verb.run(args, cfg)
    rest: list[str] = []
    if verb.forwards:
        flags.remedy = "; the arguments of the run come after --"
        if "--" in argv:
            argv, rest = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args = flags.parse_args(argv)
    args.rest = rest
    return verb.run(args)


def _read_config(
    verb: Verb, flags: Parser, argv: list[str]
) -> tuple[argparse.Namespace, Config | None]:
    """Returns the flags and the config, after joining the other processes.

    The config is parsed here, once: before jax is loaded if this process runs alone, else when the
    processes have joined, which determines the number of devices.
    """
    args, overrides = flags.parse_known_args(argv)
    config, faults = None, []
    if args.config is not None:
        path, change = source_of_config(args.config)
        config, faults = load.read(
            path,
            overrides,
            change=change,
            trust_code=args.trust_code,
            known=flags.known(),
            environ=os.environ,
        )
    elif overrides:
        keys = [override for override in overrides if override.startswith("--config.")]
        missing = [f"{key}: add --config=FILE" for key in keys]
        raise ConfigError(*missing, *flags.unknown(overrides))
    if verb.prepare:
        verb.prepare(args, config)

    asked_devices = getattr(args, "devices", None)  # devices that need not be there
    device_flag = "--devices" if asked_devices else "--simulate_devices"
    if args.num_devices is not None:
        device_flag = "--num_devices"

    def parse_for(num_devices: int | None, num_processes: int = 1) -> Config | None:
        """Returns the typed config; raises ConfigError with every fault."""
        cfg, config_faults = None, []
        if config is not None:
            num_devices = None if verb.ignores_mesh else asked_devices or num_devices
            cfg, config_faults = _parse(
                config,
                num_devices,
                flag=device_flag,
                num_processes=num_processes if device_flag == "--simulate_devices" else 1,
            )
        if faults or config_faults:
            raise ConfigError(*faults, *config_faults)
        return cfg

    if not verb.needs_devices(args):
        return args, parse_for(None)
    cfg = None
    is_alone = _is_alone(args)
    if is_alone:
        # Before jax is loaded, which takes seconds; the data's own reader checks the rest.
        cfg = parse_for(args.num_devices or args.simulate_devices)
        if verb.reads_data and (missing := checks.missing_data(cfg) or _missing_objects(cfg)):
            raise ConfigError(*missing)

    with console.quiet(getattr(args, "quiet", False)), console.progress("starting the devices", 0):
        from meshtrain.cluster import distributed, runtime

        runtime.start(args)
    if not is_alone:
        # A fault of one process ends all, so that none waits for it.
        with distributed.raise_on_all_processes():
            import jax

            cfg = parse_for(jax.device_count(), distributed.num_processes())
    return args, cfg


def source_of_config(path: str) -> tuple[str, Callable[[Any], None]]:
    """Returns what --config names as a file to read, and the change of its config.

    A Hugging Face folder stands for the default config with its model and its parameters.
    """
    folder = Path(os.path.expanduser(path))
    folder = folder.parent if folder.name == "config.json" else folder
    if not load.is_huggingface(folder):
        return path, lambda config: None
    from meshtrain.huggingface import start

    return "default", lambda config: start.set_model(config, folder)


def _missing_objects(cfg: Config) -> list[str]:
    """Returns a fault for each URL of data that has no prepared data, or whose store is away."""
    urls = checks.data_urls(cfg)
    if not urls:
        return []
    from meshtrain.data import remote

    faults = [(url, remote.url_fault(url)) for url in urls]
    return [f"data.path={url}: {fault}" for url, fault in faults if fault]


def _parse(
    config: Any, num_devices: int | None, *, flag: str, num_processes: int
) -> tuple[Config | None, list[str]]:
    """Returns the typed config, and its faults.

    With `num_devices`, these include those of a mesh that does not fit them.

    `flag` is the one that sets the number of devices, of each of `num_processes`, for messages.
    """
    is_auto = checks.is_auto(config)
    try:
        cfg = parse(config, num_devices=None if is_auto else num_devices)
    except ConfigError as error:
        return None, _advising(flag, num_processes, error)
    if is_auto and num_devices:
        sizes = constraints.auto_sizes(cfg.mesh)
        sized = constraints.with_batch(cfg, num_devices)
        return cfg, constraints.fixed_faults(sized, sizes, num_devices)
    return cfg, []


def _advising(flag: str, num_processes: int, error: ConfigError) -> list[str]:
    """Returns the faults with the way to get a number of devices in this verb and run."""

    def advice(match: re.Match) -> str:
        num_devices = int(match[1])
        if num_devices % num_processes:
            return f"a number of processes that divides {num_devices}"
        return f"{flag}={num_devices // num_processes}"

    return [re.sub(r"--simulate_devices=(\d+)", advice, fault) for fault in error.faults]


def _read_run(flags: Parser, argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Returns the flags and the config of the run in --workdir, with all devices on `fsdp`."""
    args, overrides = flags.parse_known_args(argv)
    from meshtrain.checkpoint import find

    file = find.workdir_of(args.workdir) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"--workdir={args.workdir}: not a run (config.json is missing); give the workdir of a "
            "run, or a Hugging Face folder"
        )
    with console.progress("starting the devices", 0):
        from meshtrain.cluster import distributed, runtime

        runtime.start(args)
    import jax

    def change(config: Any) -> None:
        if load.is_huggingface(file.parent):
            from meshtrain.huggingface import start

            start.set_stored_model(config, file.parent)
        _use_all_devices(config)

    config, faults = load.read(
        "default" if load.is_huggingface(file.parent) else str(file),
        overrides,
        change=change,
        trust_code=args.trust_code,
        known=flags.known(),
    )
    with distributed.raise_on_all_processes():
        try:
            cfg = parse(config, num_devices=jax.device_count())
        except ConfigError as error:
            raise ConfigError(*faults, *error.faults) from error
        faults += checks.own_model_faults(cfg)
        if faults:
            raise ConfigError(*faults)
        return args, cfg


def _add_common_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--trust_code",
        action="store_true",
        help="run functions outside meshtrain that a config.json, a YAML file or a task names",
    )
    environment.add_flags(flags)


def _use_all_devices(config: Any) -> None:
    """Changes the mesh and the batch size to fit the devices of now, not of the training run."""
    import jax

    # parse() reports what is not a section.
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        config.mesh.update({**dict.fromkeys((*AXES, "slices"), 1), "fsdp": -1})
        # Round the batch up to a multiple of the number of devices.
        num_devices = jax.device_count()
        global_batch = -(-config.train.global_batch // num_devices) * num_devices
        config.train.update(global_batch=global_batch, num_microbatches=1)


def _is_alone(args: argparse.Namespace) -> bool:
    """Returns whether this process is the only one of the run: no other process waits for it."""
    given = (args.coordinator, args.num_processes, args.process_id)
    return environment.process_info(os.environ, given) is None


def report_errors(run: Callable[[], int], verb: str) -> int:
    """Calls `run` and returns its exit code; prints a ConfigError to stderr, one line per fault.

    So does a lack of memory or of disk space, in one line; of memory, the verb decides what it
    advises to lower.
    With several processes, a process that crashes exits at once, without waiting for the others.
    """
    # On SIGUSR1, print the stacks of all threads, even in a stuck process: the supervisor sends it.
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    try:
        code = run()
    except ConfigError as error:
        faults = [console.line_of(storage.readable(fault)) for fault in error.faults]
        console.say(*faults, stream="stderr")
        may_pass = isinstance(error, TransientError) and progress.VARIABLE in os.environ
        code = EXIT_FAILED if may_pass else EXIT_USER
    except Exception as error:
        if fault := environment.jax_variable_fault(error, os.environ):
            console.say(fault, stream="stderr")
            return EXIT_USER
        if fault := memory_fault(error, verb) or disk_fault(error):
            console.say(fault, stream="stderr")
            _exit_if_failed(EXIT_USER, wait_for_others=False)
            return EXIT_USER
        if _num_processes() > 1:
            if fault := lost_process_fault(error):
                console.say(fault, stream="stderr")
            else:
                traceback.print_exc()
            _exit_if_failed(EXIT_FAILED, wait_for_others=False)
        raise
    _exit_if_failed(code, wait_for_others=True)
    return code


def _num_processes() -> int:
    """Returns the number of joined processes: 1 unless cluster.distributed has been imported."""
    distributed = sys.modules.get("meshtrain.cluster.distributed")
    return distributed.num_processes() if distributed else 1


def _exit_if_failed(code: int, *, wait_for_others: bool) -> None:
    if _num_processes() > 1:
        distributed = sys.modules["meshtrain.cluster.distributed"]
        distributed.exit_failed_process(code, wait_for_others=wait_for_others)
