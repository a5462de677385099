"""The devices of --target=h200:8 or v5e:4x4:2, which this host lacks: a topology to compile for."""

import contextlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from meshtrain import hardware
from meshtrain.errors import ConfigError, did_you_mean, install_command
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
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any value: without one libtpu warns
    "TPU_WORKER_HOSTNAMES": "localhost",  # as above
    # A compiler uses no TPU, so several may run at once; libtpu's lock file would admit one.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings
    # jaxlib 0.12 cannot read a program of devices that are not there from the compile cache.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # no lines about the missing driver
}

# By compute capability: shared memory of a core and the most for a block (bytes), threads and
# float32 units of a core. CUDA C++ programming guide, "technical specifications per compute
# capability".
CORES = {
    "7.0": (98304, 98304, 2048, 64),
    "8.0": (167936, 166912, 2048, 64),
    "8.6": (102400, 101376, 1536, 128),
    "8.9": (102400, 101376, 1536, 128),
    "9.0": (233472, 232448, 2048, 128),
    "10.0": (233472, 232448, 2048, 128),
}


def parse(text: str) -> tuple[Device, tuple[int, ...]]:
    """Returns the device and the sizes in `NAME:SIZE[:SLICES]`.

    Sizes are hosts and devices per host of GPUs, or the torus of TPUs. `num_slices` returns SLICES,
    which only TPUs have. Raises ConfigError for an unknown device, an invalid size, and missing
    compilers.
    """
    name, _, size = text.partition(":")
    device = hardware.devices().get(name)
    if device is None:
        known = [*hardware.devices()]
        near = did_you_mean(name, known)
        raise ConfigError(f"--target={text}: unknown device{near}; use one of {', '.join(known)}")
    sizes = _sizes(size, is_gpu=device.chip is not None)
    if not sizes:
        example = "4x4, a torus, or 4x4:2, two slices"
        if device.chip:
            example = "8, or 4x8 for 4 hosts with 8 devices"
        raise ConfigError(
            f"--target={text}: {size or 'nothing'} is no size of a cluster; use {name}:{example}"
        )
    modules, extra = WHEELS[platform_of(device)]
    for module in modules:
        if not _is_installed(module):
            raise ConfigError(
                f"--target={text}: {module} is not installed; {install_command(extra)}"
            )
    return device, sizes


def _sizes(size: str, *, is_gpu: bool) -> tuple[int, ...]:
    """Returns the numbers of `SIZE[:SLICES]` without SLICES; () if it is not valid."""
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*(:[1-9]\d{0,3})?", size):
        return ()
    torus, _, slices = size.partition(":")
    sizes = tuple(map(int, torus.split("x")))
    if not is_gpu:
        return sizes if len(sizes) in (2, 3) else ()
    if slices:
        return ()
    if len(sizes) == 1:
        # As few hosts as possible, of equal size.
        num_hosts = -(-sizes[0] // DEVICES_PER_HOST)
        return (num_hosts, sizes[0] // num_hosts) if sizes[0] % num_hosts == 0 else ()
    return sizes if len(sizes) == 2 else ()


def num_slices(text: str) -> int:
    """Returns the number of slices in `NAME:SIZE[:SLICES]`."""
    parts = text.split(":")
    return int(parts[2]) if len(parts) > 2 else 1


def platform_of(device: Device) -> str:
    """Returns the name by which jax knows the compiler."""
    return "cuda" if device.chip else "tpu"


def prepare() -> None:
    """Sets the environment for compiling; call it before jax is imported."""
    os.environ.update(SETTINGS)
    nvcc = None
    if _is_installed("nvidia.cuda_nvcc"):
        nvcc = importlib.util.find_spec("nvidia.cuda_nvcc")
    if nvcc is not None and nvcc.submodule_search_locations:
        folder = Path(nvcc.submodule_search_locations[0])
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={folder}".strip()


def text_of(device: Device, num_devices: int, per_host: int) -> str:
    """Returns the value of --target: hosts x devices of GPUs, slices of TPUs.

    `per_host` is the number of devices of a host, or of a slice, whose torus gets sides as equal as
    possible.
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
    # The compilers have their own kinds of exceptions.
    try:
        if device.chip:
            description = topologies.get_topology_desc(
                platform=platform_of(device),
                topology=f"1x{size}",  # slices x hosts x devices
                target_config=gpu_config(device),
            )
        else:
            description = topologies.get_topology_desc(
                platform=platform_of(device),
                topology_name=f"{device.name}:{size}",
                num_slices=num_slices(text),
            )
        devices = list(description.devices)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"--target={text}: {reason}") from error
    if device.chip:
        _set_capability(device.chip.capability)
    return devices


def _set_capability(capability: str) -> None:
    """Makes jax check fused attention for this compute capability, not that of a local device."""
    from jax._src.cudnn import fused_attention_stablehlo as fused_attention

    fused_attention.check_compute_capability = lambda least: float(capability) >= float(least)
    fused_attention.is_cuda_compute_capability_equal = lambda other: capability == other


def gpu_config(device: Device) -> str:
    """Returns XLA's description of a GPU (openxla/xla, GpuTargetConfigProto) as text."""
    chip = device.chip
    assert chip is not None  # every GPU of the table has one
    shared, optin, threads, fpus = CORES[chip.capability]
    major, _, minor = chip.capability.partition(".")
    # Hopper's and Blackwell's matrix instructions (sm_90a, sm_100a).
    feature = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  core_count: {chip.cores} fpus_per_core: {fpus} clock_rate_ghz: {chip.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_memory_size: {device.memory:.0f} memory_bandwidth: {device.bandwidth:.0f}
  l2_cache_size: {chip.l2 << 20} device_address_bits: 64 pcie_bandwidth: 32000000000
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  device_vendor: "NVIDIA Corporation" name: "{device.kinds[0]}"
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{device.kinds[0]}"
"""


def _is_installed(module: str) -> bool:
    # Without its parent package, the search itself fails.
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False
