"""Prints versions, processes, devices and settings, and tries a collective over all devices.

  meshtrain info                       # where a launcher starts several processes, the first prints
  meshtrain info --simulate_devices=8

The exit code is 1 where the collective gave a wrong result.
"""

import argparse
import os
import platform
import time
from typing import Any

import jax
import numpy as np

from meshtrain.cluster import distributed, environment, runtime
from meshtrain.errors import EXIT_FAILED
from meshtrain.parallel import collectives

SETTINGS = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "LIBTPU_", "TPU_")
NUM_VALUES = 1 << 18  # float32 of each member: 1 MiB


def facts() -> dict[str, str]:
    """Returns what is to be told of this process alone."""
    kinds: dict[str, int] = {}
    for device in jax.local_devices():
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        kind = device.device_kind + (f" with {limit / 2**30:.1f} GiB" if limit else "")
        kinds[kind] = kinds.get(kind, 0) + 1
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    who = {"": f"pid {os.getpid()} on {platform.node()}: {devices}"}
    return who | {key: os.environ[key] for key in sorted(os.environ) if key.startswith(SETTINGS)}


def tell(name: str, text: str) -> None:
    if jax.process_index() == 0:  # at once: what comes next may hang
        print(f"{name:17} {text}", flush=True)


def attempt(name: str, values: np.ndarray, expected: float, **members: Any) -> bool:
    """Tells how an all_reduce of these goes, and returns whether it was right on all processes."""
    seconds, right = [], True
    for _ in range(6):  # the first compiles; of the others the fastest counts
        began = time.perf_counter()
        result = collectives.all_reduce(values, **members)
        seconds.append(time.perf_counter() - began)
        right &= bool((result == expected).all())
    wrong = [number for number, one in enumerate(distributed.gather(right)) if not one]
    verdict = f"WRONG on processes {wrong}: not {expected}" if wrong else "right"
    tell("all_reduce", f"over {name}: {verdict}, {min(seconds[1:]) * 1e3:.2f} ms for 1 MiB of each")
    return not wrong


def add_flags(flags: argparse.ArgumentParser) -> None:
    environment.add_flags(flags)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    runtime.start(args)
    flagged = (args.coordinator, args.num_processes, args.process_id)
    everyone, found = distributed.gather(facts()), environment.process_info(os.environ, flagged)
    for package, version in ({"meshtrain": "not installed"} | distributed.versions()).items():
        tell(package, version)
    devices, me = jax.devices(), jax.process_index()
    version = " ".join(devices[0].client.platform_version.split())
    tell("backend", f"{devices[0].platform}: {version}")
    tell("processes", f"{len(everyone)}, from {found.source}" if found else "1, from no launcher")
    for number, one in enumerate(everyone):
        for name in {**everyone[0], **one}:
            value = one.get(name, "(not set)")
            if not name or number == 0 or everyone[0].get(name) != value:
                tell(f"process {number}", f"{name}={value}" if name else value)
    gives = [1.0 + i % 7 for i in range(len(devices))]
    own = [gives[i] for i, device in enumerate(devices) if device.process_index == me]
    rows = np.outer(own, np.ones(NUM_VALUES)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    right = attempt(f"{len(devices)} devices", rows, sum(gives), axis="device", mesh=mesh)
    if (num := len(everyone)) > 1:
        right &= attempt(f"{num} processes", rows[0] * 0 + me, num * (num - 1) // 2)
    return 0 if right else EXIT_FAILED
