"""Launches the processes of a run on this host: their folders, environment and supervisor."""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import console, storage
from meshtrain.cluster import environment, launchers
from meshtrain.config import checks
from meshtrain.errors import EXIT_USER, ConfigError
from meshtrain.storage import Workdir
from meshtrain.supervise import messages
from meshtrain.supervise.restart_policy import Settings
from meshtrain.supervise.supervisor import Supervisor

CLUSTER = ("coordinator", "nnodes", "node_rank")  # flags in place of the launcher's variables


def launch(arguments: Sequence[str], **settings: Any) -> int:
    """Runs `meshtrain ARGUMENTS...`, or a script, in several processes; returns the exit code.

    A script is SCRIPT.py with its arguments, after `python` or alone, or the path of any program,
    such as ./run.sh. Its processes find each other when they call `meshtrain.initialize` or
    `meshtrain.train`. `settings` are the fields of `Settings`. Raises ConfigError if one of them is
    invalid.
    """
    arguments = list(arguments)
    process, settings = _place(settings)
    s = Settings(**settings)
    secret = messages.secret_of_environment(os.environ) if s.nnodes > 1 else ""
    if s.nnodes > 1 and not secret and not s.insecure:
        raise ConfigError(
            f"{messages.SECRET_VARIABLE}: is not set, and without it anybody who reaches the port "
            f"of node 0 can join this run of {s.nnodes} hosts; set it to the same on all, such as "
            f"one output of `openssl rand -hex 32`, or give --insecure"
        )
    if not arguments:
        raise ConfigError(
            "nothing to launch: give the arguments of a run after --, such as --config=FILE"
        )
    program = program_of(arguments)
    # Of a program this is not known.
    may_train = program or arguments[0].startswith("-") or arguments[0] == "train"
    flags = _flags(arguments)
    if not program:
        _check_no_ranks(flags)
        _check_num_devices(flags, s.min_nproc)
    workdir = None
    if may_train and flags.workdir:
        if faults := checks.workdir_faults(flags.workdir):
            raise ConfigError(*faults)
        workdir = storage.open_workdir(flags.workdir)
    if not may_train:
        s = dataclasses.replace(s, grace=0.1)  # nothing to save
    command = program or [sys.executable, "-m", "meshtrain", *arguments]
    environ = _environment(quiet=s.quiet)
    if s.simulate_devices and program:
        environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(s.simulate_devices)}
    elif s.simulate_devices:
        if flags.simulate_devices:
            raise ConfigError(
                f"--simulate_devices={s.simulate_devices} and, after --, "
                f"--simulate_devices={flags.simulate_devices}: give it once"
            )
        command.append(f"--simulate_devices={s.simulate_devices}")
        if s.force:
            command.append("--force")
    if s.min_nproc and may_train and not program:
        command.append("--elastic")

    # The logs of the processes are in the workdir, before one of them has checked it.
    folders = Folders(workdir.folder if workdir else None)
    logs = folders.make()
    if workdir:
        environ |= workdir.variables()
        if s.node_rank == 0:
            _download_events(workdir)
    code = EXIT_USER
    try:
        supervisor = Supervisor(s, workdir=workdir.folder if workdir else None, secret=secret)
        code = supervisor.run(
            command,
            logs=logs,
            environ=environ,
            local_id=process.local_id if process else 0,
            num_supervisors=process.num_local if process else 1,
        )
        return code
    finally:
        folders.remove_if_unused(code)
        if workdir and code != EXIT_USER:  # perhaps another run is in it
            _upload(workdir, node_rank=s.node_rank)


def _place(
    settings: Mapping[str, Any],
) -> tuple[launchers.ProcessInfo | None, dict[str, Any]]:
    """Returns the rank of this supervisor, None if it is alone, and the settings with it.

    Flags override the launcher's variables. Raises ConfigError for a flag that would be ignored.
    """
    others = {name: value for name, value in settings.items() if name not in CLUSTER}
    address, nnodes, node_rank = (settings.get(name) for name in CLUSTER)
    if address and nnodes and node_rank is None and not launchers.find(os.environ):
        node_rank = 0
    process = environment.process_info(
        os.environ,
        (address, nnodes, node_rank),
        [f"--{name}" for name in CLUSTER],
    )
    if process:
        if process.variables:
            rank, count = process.process_id, process.num_processes
            _warn(f"node {rank} of {count}: {process.variables}; {launchers.ALONE}")
        ranks = (process.address, process.num_processes, process.process_id)
        return process, {**others, **dict(zip(CLUSTER, ranks, strict=True))}
    if nnodes is None and (address or node_rank):
        ignored = f"--coordinator={address}" if address else f"--node_rank={node_rank}"
        raise ConfigError(f"{ignored}: there is only one host; give --nnodes too, or omit it")
    if line := launchers.batch_script_line(os.environ):
        _warn(line)
    return None, others


def program_of(arguments: Sequence[str]) -> list[str] | None:
    """Returns the command of a script or program; None for a verb of meshtrain and its flags.

    `python` is the one that runs this, whatever is first on PATH: it has the packages.
    """
    first, *others = arguments
    if first.startswith("-"):
        return None
    if first.endswith(".py"):
        first, others = "python", list(arguments)
    if re.fullmatch(r"python(3(\.\d+)?)?", first):
        if not others:
            raise ConfigError(f"{first}: nothing to run; give a script: {first} SCRIPT.py")
        script = next((one for one in others if not one.startswith("-")), "")
        if script.endswith(".py") and not Path(script).is_file():
            raise ConfigError(f"{script}: no such file; after -- comes a script, or a verb")
        return [sys.executable, *others]
    if "/" in first:
        if not shutil.which(first):
            raise ConfigError(
                f"{first}: is not a program; make it executable, or give python {first}"
            )
        return list(arguments)
    return None


def _flags(arguments: list[str]) -> argparse.Namespace:
    """Returns the flags of a run that matter to the supervisor."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--workdir", "--simulate_devices", "--num_devices", *launchers.FLAGS):
        parser.add_argument(name, nargs="?", default="")
    return parser.parse_known_args(arguments)[0]


def _check_no_ranks(flags: argparse.Namespace) -> None:
    for name in launchers.FLAGS:
        if value := getattr(flags, name.removeprefix("--")):
            raise ConfigError(
                f"{name}={value}: launch sets it for each process; give --nproc, "
                f"or on several hosts --nnodes, --node_rank and --coordinator, before --"
            )


def _check_num_devices(flags: argparse.Namespace, min_nproc: int | None) -> None:
    if min_nproc and flags.num_devices:
        raise ConfigError(
            f"--min_nproc={min_nproc} and, after --, --num_devices={flags.num_devices}: a run that "
            f"continues with fewer processes has fewer devices; omit one of the flags"
        )


def _environment(*, quiet: bool) -> dict[str, str]:
    """Returns the environment of the processes; for a restart all compilations are cached."""
    environ = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **os.environ}
    environ.pop(messages.SECRET_VARIABLE, None)  # only supervisors need it
    if quiet:
        environ[console.QUIET_VARIABLE] = "1"
    return environ


def _download_events(workdir: Workdir) -> None:
    """Downloads the events of earlier runs, to which the supervisor appends its own."""
    try:
        workdir.download({"events.jsonl"})
    except OSError as error:
        raise ConfigError(f"--workdir={error.filename}: {error.strerror}") from error


def _upload(workdir: Workdir, *, node_rank: int) -> None:
    """Uploads the logs of this host, unless the run never started, or another one is in it."""
    if node_rank == 0 and not (workdir.folder / "config.json").exists():
        return
    try:
        # The processes have ended. The other hosts write only logs of their own.
        if workdir.begin_upload(_warn, exclusive=node_rank == 0):
            _warn(f"{workdir.name}: another run is in it; the last logs of this one are not there")
            return
        try:
            workdir.push(storage.LOGS)
        finally:
            workdir.release_lock()  # node 0 has it, and uploads the events
    except OSError as error:
        _warn(f"{error.filename}: {error.strerror}; not all logs are there")


def _warn(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr)


class Folders:
    """The workdir of a run and its folder of logs."""

    def __init__(self, workdir: Path | None):
        self._workdir = workdir
        self._created: list[Path] = []  # outermost first
        self._before: set[str] = set()  # what else the workdir held

    def make(self) -> Path | None:
        """Creates both, and returns the folder of logs; None without a workdir."""
        workdir = self._workdir
        if workdir is None:
            return None
        logs = workdir / storage.LOGS
        if logs.is_symlink():
            raise ConfigError(f"{logs}: is a link; logs are not written through links, remove it")
        try:
            for folder in (*reversed(workdir.parents), workdir):
                self._mkdir(folder)
            self._before = set(os.listdir(workdir))
            self._mkdir(logs)
        except OSError as error:
            self.remove_if_unused(EXIT_USER)
            raise ConfigError(
                f"--workdir={workdir}: {error.filename}: {error.strerror}; "
                f"use a folder that can be written"
            ) from error
        return logs

    def _mkdir(self, folder: Path) -> None:
        try:
            folder.mkdir()
            self._created.append(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise

    def remove_if_unused(self, code: int) -> None:
        """Removes what `make` created if a mistake of the user has ended the run at its start.

        Nothing else has been written then. Also if nothing was started. The logs of a crash stay.
        """
        if self._workdir is None or not self._created:
            return
        with contextlib.suppress(OSError):
            is_run = "config.json" in self._before
            if is_run or {*os.listdir(self._workdir)} - {storage.LOGS} - self._before:
                return
            if code != EXIT_USER and any((self._workdir / storage.LOGS).iterdir()):
                return
        for folder in reversed(self._created):
            if folder.name == storage.LOGS and folder.parent.resolve() == self._workdir.resolve():
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty
