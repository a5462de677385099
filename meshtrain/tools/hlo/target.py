"""The devices of --target=h200:8 or --target=v5e:4x4:2, which this host lacks: a topology to compile for."""

import contextlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from meshtrain import hardware
from meshtrain.errors import ConfigError, did_you_mean
from meshtrain.hardware import Device

DEVICES_PER_HOST = 8

# Modules that compiling needs, by platform, and the extra of pyproject.toml that brings them.
WHEELS = {
    "cuda": (
        ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc", "nvidia.nvjitlink", "nvidia.cudnn"),
        "aot-gpu",
    ),
    "tpu": (("libtpu",), "aot-tpu"),
}

THREE_DIMENSIONAL = ("v4", "v5p")  # the tori of other TPUs have two dimensions

SETTINGS = {
    "JAX_PLATFORMS": "cpu",  # this host's own GPU stays free
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask for the metadata of a Google Cloud host
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any value, so that libtpu does not warn that it found none
    "TPU_WORKER_HOSTNAMES": "localhost",  # as above
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings
    "TF_CPP_MIN_LOG_LEVEL": "2",  # no lines about the missing driver
}

# By compute capability: shared memory of a core and the most for a block (bytes), threads and float32 units of
# a core. CUDA C++ programming guide, table "technical specifications per compute capability".
CORES = {
    "7.0": (98304, 98304, 2048, 64),
    "8.0": (167936, 166912, 2048, 64),
    "8.6": (102400, 101376, 1536, 128),
    "8.9": (102400, 101376, 1536, 128),
    "9.0": (233472, 232448, 2048, 128),
    "10.0": (233472, 232448, 2048, 128),
}


def parse(text: str) -> tuple[Device, tuple[int, ...]]:
    """Returns the device and the sizes in `NAME:SIZE[:SLICES]`: hosts and devices per host of GPUs, the torus of TPUs.

    `num_slices` returns SLICES, which only TPUs have. Raises ConfigError for an unknown device, a size that is
    none, and missing compilers.
    """
    name, _, size = text.partition(":")
    torus, _, slices = size.partition(":")
    device = hardware.devices().get(name)
    if device is None:
        known = [*hardware.devices()]
        raise ConfigError(
            f"--target={text}: unknown device{did_you_mean(name, known)}; use one of {', '.join(known)}"
        )
    sizes = (
        tuple(int(one) for one in torus.split("x"))
        if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*(:[1-9]\d{0,3})?", size)
        else ()
    )
    if device.chip and len(sizes) == 1:
        hosts = -(-sizes[0] // DEVICES_PER_HOST)
        sizes = (hosts, sizes[0] // hosts) if sizes[0] % hosts == 0 else ()
    if len(sizes) not in ((2,) if device.chip else (2, 3)) or (device.chip and slices):
        example = (
            "8, or 4x8 for 4 hosts with 8 devices"
            if device.chip
            else "4x4, a torus, or 4x4:2, two slices"
        )
        raise ConfigError(
            f"--target={text}: {size or 'nothing'} is no size of a cluster; use {name}:{example}"
        )
    modules, extra = WHEELS[platform_of(device)]
    if missing := [one for one in modules if not _is_installed(one)]:
        raise ConfigError(
            f"--target={text}: {missing[0]} is not installed; pip install 'meshtrain[{extra}]'"
        )
    return device, sizes


def num_slices(text: str) -> int:
    """Returns the number of slices in `NAME:SIZE[:SLICES]`."""
    return int((*text.split(":"), 1)[2])


def platform_of(device: Device) -> str:
    """Returns the name by which jax knows the compiler."""
    return "cuda" if device.chip else "tpu"


def prepare() -> None:
    """Sets the environment for compiling; call it before jax is imported."""
    os.environ.update(SETTINGS)
    if _is_installed("nvidia.cuda_nvcc"):
        folder = Path(importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations[0])
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={folder}".strip()


def text_of(device: Device, num_devices: int, per_host: int) -> str:
    """Returns the value of --target: hosts x devices of GPUs, slices of TPUs.

    `per_host` is the number of devices of a host, or of a slice, whose torus gets sides as equal as possible.
    """
    groups = num_devices // per_host
    if device.chip:
        return f"{device.name}:{groups}x{per_host}"
    sides = [1] * (3 if device.name in THREE_DIMENSIONAL else 2)
    for factor in _prime_factors(per_host):
        sides[sides.index(min(sides))] *= factor
    size = "x".join(map(str, sorted(sides)))
    return f"{device.name}:{size}" + (f":{groups}" if groups > 1 else "")


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors, largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.insert(0, divisor)
            number //= divisor
        divisor += 1
    return factors


def devices_of(text: str) -> list[Any]:
    """Returns the devices of `NAME:SIZE`. Call `prepare` first. Raises ConfigError, as `parse`."""
    from jax.experimental import topologies

    device, sizes = parse(text)
    size = "x".join(map(str, sizes))
    try:
        if device.chip:
            topology = f"1x{size}"  # slices x hosts x devices
            options = dict(topology=topology, target_config=gpu_config(device))
        else:
            slices = num_slices(text)
            options = dict(topology_name=f"{device.name}:{size}", num_slices=slices)
        devices = list(
            topologies.get_topology_desc(platform=platform_of(device), **options).devices
        )
    except Exception as error:  # the compilers' own kinds
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"--target={text}: {reason}") from error
    if device.chip:
        _set_capability(device.chip.capability)
    return devices


def _set_capability(capability: str) -> None:
    """Makes jax check fused attention for this compute capability; it would ask the local device."""
    from jax._src.cudnn import fused_attention_stablehlo as fused_attention

    fused_attention.check_compute_capability = lambda least: float(capability) >= float(least)
    fused_attention.is_cuda_compute_capability_equal = lambda other: capability == other


def gpu_config(device: Device) -> str:
    """Returns XLA's description of a GPU (openxla/xla, GpuTargetConfigProto) as text."""
    chip = device.chip
    shared, optin, threads, fpus = CORES[chip.capability]
    major, _, minor = chip.capability.partition(".")
    # Hopper's and Blackwell's matrix instructions (sm_90a, sm_100a).
    feature = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  core_count: {chip.cores} fpus_per_core: {fpus} clock_rate_ghz: {chip.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_memory_size: {device.memory:.0f} memory_bandwidth: {device.bandwidth:.0f}
  l2_cache_size: {chip.l2 << 20} device_address_bits: 64 pcie_bandwidth: 32000000000
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  device_vendor: "NVIDIA Corporation" name: "{device.kinds[0]}"
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{device.kinds[0]}"
"""


def _is_installed(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # its parent package is not installed
        return importlib.util.find_spec(module) is not None
    return False
