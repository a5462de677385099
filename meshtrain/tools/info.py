"""Prints versions, processes, devices and settings, and tests an all-reduce; or draws a mesh."""

import argparse
import os
import platform
import time
from typing import Any

import jax
import numpy as np

from meshtrain import console, hardware
from meshtrain.cluster import distributed, environment
from meshtrain.config.parse import on_devices
from meshtrain.config.schema import AXES, Config
from meshtrain.errors import EXIT_FAILED
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools import collectives, mesh_drawing

SETTING_PREFIXES = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "LIBTPU_", "TPU_")
NUM_VALUES = 1 << 18  # float32 values per device or process: 1 MiB


def describe_process() -> dict[str, str]:
    """Returns this process's settings by name, and its host and devices under the key ""."""
    kinds: dict[str, int] = {}
    for device in jax.local_devices():
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        kind = device.device_kind + (f" with {limit / 2**30:.1f} GiB" if limit else "")
        kinds[kind] = kinds.get(kind, 0) + 1
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    process = {"": f"pid {os.getpid()} on {platform.node()}: {devices}"}
    names = [name for name in sorted(os.environ) if name.startswith(SETTING_PREFIXES)]
    return process | {name: os.environ[name] for name in names}


def print_row(name: str, text: str) -> None:
    # Flushed, because the next step may hang.
    if jax.process_index() == 0:
        console.say(f"{name:17} {text}")


def check_all_reduce(name: str, values: np.ndarray, expected: float, **members: Any) -> bool:
    """Times an all-reduce, prints the result, and returns whether it was right on all processes."""
    seconds, is_right = [], True
    # The first call compiles; the fastest of the others is printed.
    for _ in range(6):
        start = time.perf_counter()
        result = collectives.all_reduce(values, **members)
        seconds.append(time.perf_counter() - start)
        is_right &= bool((result == expected).all())
    wrong = [process for process, ok in enumerate(distributed.gather(is_right)) if not ok]
    verdict = f"WRONG on processes {wrong}: not {expected}" if wrong else "right"
    duration = f"{min(seconds[1:]) * 1e3:.2f} ms for 1 MiB each"
    print_row("all_reduce", f"over {name}: {verdict}, {duration}")
    return not wrong


def print_report(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit code."""
    processes = distributed.gather(describe_process())
    flags = (args.coordinator, args.num_processes, args.process_id)
    process_info = environment.process_info(os.environ, flags)
    for package, version in distributed.versions().items():
        print_row(package, version)
    devices = jax.devices()
    version = " ".join(devices[0].client.platform_version.split())
    print_row("backend", f"{devices[0].platform}: {version}")
    source = f"from {process_info.source}" if process_info else "without a launcher"
    print_row("processes", f"{len(processes)}, {source}")
    for number, process in enumerate(processes):
        for name in {**processes[0], **process}:
            value = process.get(name, "(not set)")
            if not name or number == 0 or processes[0].get(name) != value:
                print_row(f"process {number}", f"{name}={value}" if name else value)
    return 0 if _all_reduces_are_right(devices, len(processes)) else EXIT_FAILED


def _all_reduces_are_right(devices: list[jax.Device], num_processes: int) -> bool:
    """Tests an all-reduce over the devices, and one over the processes if there are several."""
    process_index = jax.process_index()
    # Values that differ between neighbours, and whose sums float32 has exactly.
    values = [1.0 + number % 7 for number in range(len(devices))]
    local_values = [
        value
        for value, device in zip(values, devices, strict=True)
        if device.process_index == process_index
    ]
    rows = np.outer(local_values, np.ones(NUM_VALUES)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    name = f"{len(devices)} devices"
    is_right = check_all_reduce(name, rows, sum(values), axis="device", mesh=mesh)
    if num_processes > 1:
        row = rows[0] * 0 + process_index
        total = num_processes * (num_processes - 1) // 2
        is_right &= check_all_reduce(f"{num_processes} processes", row, total)
    return is_right


def print_mesh(args: argparse.Namespace, cfg: Config) -> int:
    """Draws a config's mesh on this job's devices or `args.device`; returns the exit code."""
    with distributed.raise_on_all_processes():
        cfg = on_devices(cfg, args.devices or jax.device_count())
        slices = cfg.mesh.slices
        if args.device:
            sizes = [getattr(cfg.mesh, axis) for axis in AXES]
            grid = mesh_drawing.grid_of_sizes(sizes, args.devices_per_host, slices, args.device)
        else:
            device = hardware.device_of(jax.devices()[0].device_kind)
            grid = mesh_drawing.grid_of_mesh(make_mesh(cfg.mesh), slices, device)
        lines = [*mesh_drawing.lines(cfg, grid)]
    if jax.process_index() == 0:
        console.say(*lines)
    return 0
