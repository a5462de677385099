"""Facts about devices, from the vendors' data sheets: peak FLOP/s, memory, links. The one table of them."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.bind import has_type
from meshtrain.errors import ConfigError, did_you_mean

GB = 1e9


@dataclass(frozen=True)
class Chip:
    """What XLA's GPU compiler asks about a GPU beyond its memory."""

    capability: str
    cores: int  # streaming multiprocessors
    clock: float  # GHz, boost
    l2: int  # MiB


@dataclass(frozen=True)
class Device:
    name: str  # as in --target=NAME:SIZE
    kinds: tuple[str, ...]  # jax's device_kind
    flops_16: (
        float  # dense bfloat16 matrix products, FLOP/s; float16 on V100, which has no bfloat16
    )
    flops_32: float  # dense float32 matrix products as jax computes them by default: TF32 where there is TF32
    memory: float  # bytes of HBM or GDDR
    bandwidth: float  # of this memory, bytes/s
    link: float  # bytes/s that a device sends to the others of its host; TPU: over one torus axis, both ways
    network: float  # bytes/s that a device sends to other hosts; TPU: to other slices; 0: unknown
    chip: Chip | None = None
    flops_8: float = 0.0  # dense 8-bit products; 0: as 16-bit
    latency: float = 0.0  # seconds of a collective of no bytes, if it was measured

    def peak(self, itemsize: float) -> float:
        """Returns the peak FLOP/s of matrix products whose elements have `itemsize` bytes."""
        if itemsize == 1 and self.flops_8:
            return self.flops_8
        return self.flops_16 if itemsize <= 2 else self.flops_32


def _nvidia(name, kinds, flops, memory, bandwidth, links, chip) -> Device:
    """Returns a row; TFLOP/s of 16, 32 and 8 bits, GB, GB/s, GB/s in one direction (host, network)."""
    tera = [1e12 * one for one in flops]
    sizes = memory * GB, bandwidth * GB, links[0] * GB, links[1] * GB
    return Device(name, kinds, tera[0], tera[1], *sizes, Chip(*chip), tera[2])


def _tpu(name, kinds, bf16, int8, memory, bandwidth, link, network) -> Device:
    """Returns a row; the MXU multiplies float32 as bfloat16 by default. A torus axis has a link each way."""
    tera = 1e12 * bf16
    return Device(
        name,
        kinds,
        tera,
        tera,
        memory * GB,
        bandwidth * GB,
        2 * link * GB,
        network * GB,
        flops_8=1e12 * int8,
    )


# Links: NVLink (V100 300, A100 600, H100 900, B200 1800 GB/s both ways together) or PCIe 4 (64); network: one
# NIC per GPU of the vendor's own servers (DGX-1 4 x 100 Gb/s for 8 GPUs, DGX A100 200, DGX H100 and B200 400),
# else 100 Gb/s.
# name, kinds, (16, 32, 8 bits), GB, GB/s, (host, network), (capability, cores, GHz, MiB of L2)
DEVICES = (
    _nvidia(
        "v100",
        ("Tesla V100-SXM2-16GB",),
        (125, 15.7, 0),
        16,
        900,
        (150, 6.25),
        ("7.0", 80, 1.53, 6),
    ),
    _nvidia(
        "v100-32gb",
        ("Tesla V100-SXM2-32GB",),
        (125, 15.7, 0),
        32,
        900,
        (150, 6.25),
        ("7.0", 80, 1.53, 6),
    ),
    _nvidia(
        "a100",
        ("NVIDIA A100-SXM4-80GB",),
        (312, 156, 0),
        80,
        2039,
        (300, 25),
        ("8.0", 108, 1.41, 40),
    ),
    _nvidia(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB",),
        (312, 156, 0),
        40,
        1555,
        (300, 25),
        ("8.0", 108, 1.41, 40),
    ),
    _nvidia(
        "a100-pcie",
        ("NVIDIA A100 80GB PCIe",),
        (312, 156, 0),
        80,
        1935,
        (32, 12.5),
        ("8.0", 108, 1.41, 40),
    ),
    _nvidia(
        "a100-pcie-40gb",
        ("NVIDIA A100-PCIE-40GB",),
        (312, 156, 0),
        40,
        1555,
        (32, 12.5),
        ("8.0", 108, 1.41, 40),
    ),
    _nvidia("a10", ("NVIDIA A10",), (125, 62.5, 0), 24, 600, (32, 12.5), ("8.6", 72, 1.695, 6)),
    _nvidia("l4", ("NVIDIA L4",), (121, 60, 242), 24, 300, (32, 12.5), ("8.9", 58, 2.04, 48)),
    _nvidia("l40", ("NVIDIA L40",), (181, 90.5, 362), 48, 864, (32, 12.5), ("8.9", 142, 2.49, 96)),
    _nvidia("l40s", ("NVIDIA L40S",), (362, 183, 733), 48, 864, (32, 12.5), ("8.9", 142, 2.52, 96)),
    _nvidia(
        "rtx4090",
        ("NVIDIA GeForce RTX 4090",),
        (165.2, 82.6, 330.3),
        24,
        1008,
        (32, 12.5),
        ("8.9", 128, 2.52, 72),
    ),
    _nvidia(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        (989.5, 494.7, 1979),
        80,
        3350,
        (450, 50),
        ("9.0", 132, 1.98, 50),
    ),
    _nvidia(
        "h100-pcie",
        ("NVIDIA H100 PCIe",),
        (756, 378, 1513),
        80,
        2000,
        (64, 50),
        ("9.0", 114, 1.755, 50),
    ),
    _nvidia(
        "h100-nvl",
        ("NVIDIA H100 NVL",),
        (835, 417.5, 1671),
        94,
        3900,
        (300, 50),
        ("9.0", 132, 1.785, 50),
    ),
    _nvidia(
        "h200", ("NVIDIA H200",), (989.5, 494.7, 1979), 141, 4800, (450, 50), ("9.0", 132, 1.98, 50)
    ),
    _nvidia(
        "gh200",
        ("NVIDIA GH200 480GB",),
        (989.5, 494.7, 1979),
        96,
        4000,
        (450, 50),
        ("9.0", 132, 1.98, 50),
    ),
    _nvidia(
        "b200",
        ("NVIDIA B200",),
        (2250, 1125, 4500),
        180,
        7700,
        (900, 50),
        ("10.0", 148, 1.965, 126),
    ),
    _tpu("v4", ("TPU v4",), 275, 0, 32, 1200, 45, 0),
    _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 394, 16, 819, 45, 3.125),
    _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 918, 95, 2765, 90, 6.25),
    _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 1836, 32, 1640, 90, 12.5),
)

BY_NAME = {device.name: device for device in DEVICES}

BY_KIND = {kind: device for device in DEVICES for kind in device.kinds}


def device_of(kind: str) -> Device | None:
    """Returns the row of jax's device kind. None if it is unknown: variants of a product differ, and so do
    parts of a device (MIG)."""
    return BY_KIND.get(kind)


def peak_flops(kind: str, given: float = 0.0) -> float | None:
    """Returns the peak that MFU divides by: `given` (config.hardware.peak_flops), else by the device's kind."""
    device = device_of(kind)
    return given or (device and device.flops_16)


FILE_FIELDS = ("flops_16", "flops_32", "flops_8", "memory", "bandwidth", "link", "network")


def device_named(name: str) -> Device:
    """Returns a device of the table, or that of a file NAME.toml.

    The file has `base`, a device of the table, and the fields of `hardware.Device` that differ, in FLOP/s, bytes and
    bytes/s: base = "h200", network = 25e9. Raises ConfigError.
    """
    if not name.endswith(".toml"):
        if name in BY_NAME:
            return BY_NAME[name]
        near = did_you_mean(name, BY_NAME)
        raise ConfigError(
            f"--device={name}: unknown{near}; use one of {', '.join(BY_NAME)}, or a file NAME.toml"
        )
    try:
        values = tomllib.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--device={name}: cannot be read: {error}") from error
    base = values.pop("base", None)
    faults = []
    if base not in BY_NAME:
        faults.append(f"{name}: base={base!r}: use one of {', '.join(BY_NAME)}")
    for field, value in values.items():
        if field not in FILE_FIELDS:
            near = did_you_mean(field, FILE_FIELDS)
            faults.append(f"{name}: {field}: unknown{near}; use base and {', '.join(FILE_FIELDS)}")
        elif not (has_type(value, float) and 0 < value < math.inf):
            faults.append(f"{name}: {field}={value!r}: use a positive number, such as 25e9")
    if faults:
        raise ConfigError(*faults)
    return dataclasses.replace(BY_NAME[base], name=Path(name).stem, **values)
