"""What a benchmark prints and keeps: a table, and a JSON file named MODEL_HARDWARE_DATE.

A record holds what its figures depend on (versions, hardware, flags, commit, load) and every raw
sample, so that another reader can take another median.
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

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch")


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser that shows the script's docstring, with the flag of its record."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="a file, or a folder to name one in"
    )
    return parser


def about(args: argparse.Namespace, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Returns what figures depend on; to be asked before measuring, for the load of the machine.

    `devices` names them where this process must not take hold of one.
    """
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": list(devices) or [device.device_kind for device in jax.devices()],
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "flags": {key: str(value) for key, value in vars(args).items()},
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith(("XLA_", "JAX_"))
        },
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows that have the same columns; floats with four figures, None as "-"."""
    cells = [[_text(value) for value in row.values()] for row in rows]
    lines = [[str(name) for name in rows[0]], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))


def save(output: Path | None, record: Mapping[str, Any], *, model: str) -> None:
    """Writes the record to that file, or by its own name to that folder; nowhere if there is none."""
    if output is None:
        return
    if output.is_dir():
        output /= f"{name_of(model, record)}.json"
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {output}")


def name_of(model: str, record: Mapping[str, Any]) -> str:
    """Returns MODEL_HARDWARE_DATE, the hardware as jax names the devices, or the number of cores."""
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
    """Returns the commit of the tree; GIT_COMMIT says it of one that is no checkout."""
    git = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # no git here
        if found := subprocess.run(git, capture_output=True, text=True).stdout.strip():
            return found
    return os.environ.get("GIT_COMMIT")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), None)
