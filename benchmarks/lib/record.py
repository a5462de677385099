"""The output of a benchmark: a printed table, and a JSON record named MODEL_HARDWARE_DATE.

A record holds everything that its results depend on (versions, hardware, flags, commit, load) and
every raw sample, so that other statistics can be computed from it.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).resolve().parents[1] / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch")


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser whose --help prints the docstring of the script, with the flag --output."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="write a JSON record to this file, or to a new file in this folder",
    )
    return parser


def about(args: argparse.Namespace, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Returns what the results depend on.

    Call it before measuring, because it records the load of the machine.

    Pass the names of the devices if this process must not initialize them.
    """
    return {
        "command": " ".join(["python", *sys.argv]),
        **now(),
        "git": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": list(devices) or [device.device_kind for device in jax.devices()],
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "flags": {key: str(value) for key, value in vars(args).items()},
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith(("XLA_", "JAX_"))
        },
    }


def now() -> dict[str, Any]:
    """Returns what differs between the measurements of one process: the date, and the load."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "load": os.getloadavg()}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows with the same columns as a table; floats with four digits, None as "-"."""
    cells = [[_text(value) for value in row.values()] for row in rows]
    lines = [[str(name) for name in rows[0]], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))


def save(output: Path | None, record: Mapping[str, Any], *, model: str) -> None:
    """Writes the record to `output`: a file, a folder, or None (nowhere).

    In a folder the file gets the name from `name_of`.
    """
    if output is None:
        return
    if output.is_dir():
        output /= f"{name_of(model, record)}.json"
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")


def name_of(model: str, record: Mapping[str, Any]) -> str:
    """Returns MODEL_HARDWARE_DATE.

    The hardware is jax's name and number of devices, or the number of CPU cores.
    """
    kind = record["devices"][0]
    hardware = (
        f"cpu-{record['cores']}-cores" if kind == "cpu" else f"{kind}-x{len(record['devices'])}"
    )
    hardware = re.sub(r"[^a-z0-9]+", "-", hardware.lower())
    return f"{model}_{hardware}_{record['date'][:10]}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> str | None:
    """Returns the commit of the working tree, or GIT_COMMIT if this is not a git checkout."""
    git = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # git is not installed
        if commit := subprocess.run(git, capture_output=True, text=True).stdout.strip():
            return commit
    return os.environ.get("GIT_COMMIT")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), None)
