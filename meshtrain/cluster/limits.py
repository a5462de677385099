"""Limits simulated devices and processes to what a machine can run, before they fill it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from meshtrain.errors import ConfigError

MAX_DEVICES = 2048  # of one process: jax's ids of CPU devices have 11 bits for them

# A device is two threads and 0.2 MB; what a step takes depends on the model (quickstart replicated
# on each device: 60 MB). The bound is for numbers that no model could run with.
DEVICES_PER_CORE = 128
DEVICE_BYTES = 16 << 20

# A process that has imported jax takes 0.2 GB.
PROCESSES_PER_CORE = 16
PROCESS_BYTES = 256 << 20
MAX_PROCESSES = 10_000  # on a host
ALWAYS = 8  # devices or processes that are allowed on any machine


def check_devices(num_devices: int | None, environ: Mapping[str, str], *, force: bool) -> None:
    """Raises ConfigError if --simulate_devices or jax's own variables ask for too many CPU devices.

    Called before jax is imported: starting the devices could no longer be stopped.
    """
    faults = []
    if num_devices is not None:
        faults += device_faults("--simulate_devices", num_devices, force=force)
    else:
        flag = "--xla_force_host_platform_device_count"
        values = re.findall(rf"{flag}=(\S+)", environ.get("XLA_FLAGS", ""))
        variables = {
            f"XLA_FLAGS={flag}": values[-1] if values else "",
            "JAX_NUM_CPU_DEVICES": environ.get("JAX_NUM_CPU_DEVICES", ""),
        }
        for name, text in variables.items():
            if re.fullmatch("[0-9]{1,9}", text):
                faults += device_faults(name, int(text), force=force)
            elif text not in ("", "-1"):  # -1: jax's default
                faults.append(f"{name}={text[:99]}: use a number of devices")
    if faults:
        raise ConfigError(*faults)


def device_faults(name: str, num_devices: int, *, num_processes: int = 1, force: bool) -> list[str]:
    """Returns a fault if `num_processes` processes cannot simulate `num_devices` each, or []."""
    if num_devices < 1:
        return [f"{name}={num_devices}: use 1 or more"]
    if num_devices > MAX_DEVICES:
        return [f"{name}={num_devices}: jax has at most {MAX_DEVICES} CPU devices in a process"]
    limit = _limit(DEVICES_PER_CORE, DEVICE_BYTES)
    if force or num_devices * num_processes <= max(limit, num_processes):
        return []
    each = f" in each of {num_processes} processes" if num_processes > 1 else ""
    return [f"{name}={num_devices}{each}: {_enough_for(limit)} devices; use fewer, or --force"]


def process_faults(num_processes: int, *, force: bool) -> list[str]:
    """Returns a fault if this machine cannot run `num_processes` processes, or []."""
    limit = _limit(PROCESSES_PER_CORE, PROCESS_BYTES)
    if num_processes > MAX_PROCESSES:
        return [f"--nproc={num_processes}: use {MAX_PROCESSES} or fewer"]
    if force or num_processes <= limit:
        return []
    return [f"--nproc={num_processes}: {_enough_for(limit)} processes; use fewer, or --force"]


def _enough_for(limit: int) -> str:
    memory = available_memory() / (1 << 30)
    return (
        f"this machine has {_num_cores()} cores and {memory:.1f} GiB of free memory, "
        f"enough for {limit}"
    )


def _limit(per_core: int, num_bytes: int) -> int:
    by_cores = per_core * _num_cores()
    by_memory = available_memory() / num_bytes
    return max(ALWAYS, int(min(by_cores, by_memory)))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Limit and usage of memory, in cgroups 2 and 1.
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> float:
    """Returns the bytes that this process can still allocate; infinite if they are unknown."""
    free = []
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    if available:
        free.append(float(available[1]) * 1024)
    for limit_path, usage_path in CGROUP_FILES:
        limit = _read(limit_path).strip()
        usage = _read(usage_path).strip()
        if limit.isdecimal() and usage.isdecimal():
            free.append(float(limit) - float(usage))
    return max(0.0, min(free, default=float("inf")))


def total_memory() -> float:
    """Returns the bytes that this machine could give to processes at most, with its swap space.

    Infinite if they are unknown.
    """
    totals = [float("inf")]
    text = _read("/proc/meminfo")
    if total := re.search(r"MemTotal:\s+(\d+) kB", text):
        totals.append(float(total[1]) * 1024)
    for limit_path, _ in CGROUP_FILES:
        limit = _read(limit_path).strip()
        if limit.isdecimal():
            totals.append(float(limit))
    swap = re.search(r"SwapTotal:\s+(\d+) kB", text)
    return min(totals) + (float(swap[1]) * 1024 if swap else 0.0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
