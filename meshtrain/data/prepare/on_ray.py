"""Prepares the parts of an output as tasks of a Ray cluster: `meshtrain prepare --ray`."""

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

from meshtrain import console
from meshtrain.errors import ConfigError, import_optional

SECONDS_TO_CONNECT = 10.0
MAX_RETRIES = 3  # of a part whose node is lost; it resumes


def connect() -> Any:
    """Returns the package ray, connected to the cluster; raises ConfigError if there is none."""
    ray = import_optional("ray", "ray")
    if ray.is_initialized():
        return ray
    try:
        _check_that_it_listens(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"--ray: no Ray cluster is reached from here: {cause}; start one with `ray start "
            f"--head`, or set RAY_ADDRESS"
        ) from None
    return ray


def _check_that_it_listens(address: str) -> None:
    """Raises OSError if nothing listens at HOST:PORT; Ray would try for minutes.

    Ray itself reads the other forms of an address: "auto", "local", "ray://HOST:PORT".
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "//" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"RAY_ADDRESS={address}: {error}") from None


def num_parts(ray: Any, *, num_files: int, num_workers: int) -> int:
    """Returns a number of parts that keeps the processors of the cluster busy."""
    num_cpus = int(ray.cluster_resources().get("CPU", 1))
    return max(1, min(num_files, num_cpus // num_workers))


def run_parts(ray: Any, flags: list[str], *, count: int, num_workers: int, folder: str) -> None:
    """Run `meshtrain prepare` with these flags for each part, in the working directory `folder`.

    Raises ConfigError with what failed parts have printed; the others are finished by then.
    """
    task = ray.remote(_run_part).options(num_cpus=num_workers, max_retries=MAX_RETRIES)
    pending = {task.remote(flags, f"{index}/{count}", folder): index for index in range(count)}
    faults: list[str] = []
    try:
        while pending:
            (done,), _ = ray.wait([*pending], num_returns=1)
            index = pending.pop(done)
            try:
                code, printed, errors = ray.get(done)
            except ray.exceptions.RayError as error:
                code, printed = 1, ""
                errors = str(error).strip().partition("\n")[0][:300]
            if code:
                faults += errors.splitlines()[-5:] or [f"--part={index}/{count}: exit code {code}"]
            for line in printed.splitlines():
                console.say(line)
    finally:
        for reference in pending:
            with contextlib.suppress(Exception):
                ray.cancel(reference)
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _run_part(flags: list[str], part: str, folder: str) -> tuple[int, str, str]:
    """Returns the exit code, the output and the errors of a part; runs on a node of the cluster."""
    # A process of its own: it starts workers, and is killed as any other.
    command = [sys.executable, "-m", "meshtrain", "prepare", f"--part={part}", *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
    try:
        printed, errors = process.communicate()
    finally:
        process.kill()
    return process.returncode, printed, errors
