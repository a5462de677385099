"""Starts `meshtrain launch` on several hosts with ssh: one command instead of one on each host.

All hosts have the same folder, with the same Python at the same path, and ssh reaches them without
a password.
"""

import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from meshtrain.cluster import launchers, signals
from meshtrain.errors import EXIT_FAILED, ConfigError
from meshtrain.supervise import messages

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
REACH_SECONDS = 30  # within which a host has to answer
TICK = 0.2  # seconds between checks
LOST = 255  # exit code of ssh itself

# Variables of this host that the runs need too.
FORWARDED = re.compile("PYTHONPATH|(JAX|XLA|NCCL|LIBTPU)_.*|MESHTRAIN__.*")

# The secret comes as the first line of the input, not on the command line, which all users of the
# host can read. The end of the input, when this host closes it or is lost, asks the run to save and
# stop.
SCRIPT = """
IFS= read -r MESHTRAIN_SECRET && export MESHTRAIN_SECRET && cd {folder} || exit 2
exec 3<&0
{command} </dev/null 3<&- & run=$!
{{ cat <&3 >/dev/null; kill -TERM $run; }} 2>/dev/null & watch=$!
wait $run; code=$?
kill $watch 2>/dev/null
exit $code
"""


def parse_hosts(text: str) -> list[str]:
    """Returns the hosts of --hosts=[USER@]HOST,...; raises ConfigError if one is invalid."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        # Neither begins with a dash: ssh would read that as an option.
        if not re.fullmatch(r"(\w[\w.-]*@)?\w[\w.:-]*", host, re.ASCII):
            raise ConfigError(
                f"--hosts={text}: {host!r} is not a host; use names such as a,b or user@a,user@b"
            )
    names = {host.rpartition("@")[2].lower() for host in hosts}
    if len(names) < len(hosts):
        raise ConfigError(
            f"--hosts={text}: a host is given twice; use --nproc for several processes on a host"
        )
    return hosts


def launch(
    hosts: Sequence[str], flags: Sequence[str], arguments: Sequence[str], address: str | None
) -> int:
    """Runs `meshtrain launch FLAGS -- ARGUMENTS` on all hosts and returns the exit code of the run.

    `address` is HOST:PORT of the supervisors on the first host, by default its name and a random
    port. The first signal asks the run to save and stop. Raises ConfigError if a host cannot be
    reached, lacks this folder or this Python, or cannot look up the address.
    """
    if not address:
        name = _name_of(hosts[0])
        name = f"[{name}]" if ":" in name else name
        port = launchers.FIRST_PORT + secrets.randbelow(launchers.NUM_PORTS)
        address = f"{name}:{port}"
    _check(hosts, address)
    secret = messages.secret_of_environment(os.environ) or secrets.token_hex(32)
    with signals.stop_event() as stop:
        runs: dict[str, subprocess.Popen] = {}
        inputs: list[IO[bytes]] = []
        for rank, host in enumerate(hosts):
            command = [sys.executable, "-m", "meshtrain", "launch"]
            command += [
                f"--nnodes={len(hosts)}",
                f"--node_rank={rank}",
                f"--coordinator={address}",
            ]
            command += [*flags, "--", *arguments]
            # In a session of its own: Ctrl-C must not end ssh before the run has saved.
            run = subprocess.Popen(
                [*SSH, host, _script(command)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            assert run.stdin is not None  # it is a pipe
            run.stdin.write(f"{secret}\n".encode())
            run.stdin.flush()
            runs[host] = run
            inputs.append(run.stdin)
        while any(run.poll() is None for run in runs.values()):
            if stop.is_set():
                for pipe in inputs:
                    pipe.close()
            time.sleep(TICK)
    codes = []
    for host, run in runs.items():
        if run.returncode == LOST:
            print(f"launch: {host}: the connection was lost", file=sys.stderr)
        else:
            codes.append(run.returncode)
    # The code of the first failure, or 0.
    return max(codes, key=lambda code: code != 0, default=EXIT_FAILED)


def _script(command: Sequence[str]) -> str:
    """Returns the command line of ssh, for the shell of any user."""
    variables = [f"{name}={value}" for name, value in _variables(os.environ).items()]
    script = SCRIPT.format(
        folder=shlex.quote(os.getcwd()),
        command=shlex.join(["env", *variables, *command]),
    )
    return shlex.join(["sh", "-c", script])


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this host that all hosts get."""
    return {
        name: value
        for name, value in environ.items()
        if FORWARDED.fullmatch(name) and name not in launchers.JAX_VARIABLES
    }


# Prints why a name cannot be looked up.
LOOK_UP = """
import socket, sys
try:
    socket.getaddrinfo(sys.argv[1], None)
except (OSError, UnicodeError) as error:
    print(getattr(error, "strerror", None) or error)
    sys.exit(3)
"""
NOT_LOOKED_UP = 3  # its exit code


def _name_of(host: str) -> str:
    """Returns the name or address of a host, which for ssh may have an alias (`ssh -G`)."""
    alias = host.rpartition("@")[2]
    try:
        done = subprocess.run(
            ["ssh", "-G", host], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return alias  # `_check` reports it
    name = re.search(r"^hostname (\S+)$", done.stdout, re.M)
    return name[1] if name else alias


def _check(hosts: Sequence[str], address: str) -> None:
    """Raises ConfigError with a line for each host that cannot be used.

    It is not reached, lacks folder or Python, or cannot look up `address`, HOST:PORT of the first.
    """
    folder, python = os.getcwd(), sys.executable
    name = address.rpartition(":")[0].strip("[]")
    look_up = shlex.join([python, "-I", "-S", "-c", LOOK_UP, name])
    script = f"cd {shlex.quote(folder)} && test -x {shlex.quote(python)} || exit 2; {look_up}"
    test = shlex.join(["sh", "-c", script])

    def host_fault(host: str) -> str:
        command = [*SSH, "-o", f"ConnectTimeout={REACH_SECONDS}", host, test]
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            return "ssh is not installed here"
        if done.returncode == LOST:
            lines = done.stderr.strip().splitlines()
            reason = lines[-1] if lines else ""
            return f"{host}: {reason}; it must be reached with ssh without a password"
        if done.returncode == NOT_LOOKED_UP:
            return (
                f"{host}: cannot look up {name}, the first host: {done.stdout.strip()}; "
                f"use a name or an address that all hosts know, or --coordinator=HOST:PORT"
            )
        if done.returncode:
            return f"{host}: lacks {folder} or {python}, which all hosts need"
        return ""

    with ThreadPoolExecutor(len(hosts)) as threads:
        faults = [fault for fault in threads.map(host_fault, hosts) if fault]
    if faults:
        raise ConfigError(*(f"--hosts: {fault}" for fault in dict.fromkeys(faults)))
