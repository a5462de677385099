"""Facts about devices: peak FLOP/s, memory, links. Their table is hardware.toml."""

import dataclasses
import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, did_you_mean

TABLE = Path(__file__).with_name("hardware.toml")

# What a user's device file may set, besides its base.
FILE_FIELDS = ("flops_16", "flops_32", "flops_8", "memory", "bandwidth", "link", "network")

# Of compiler options, for a GPU on which none were measured.
DEFAULT_PRESETS = ("cublas",)


@dataclass(frozen=True)
class Chip:
    """What XLA's GPU compiler asks about a GPU beyond its memory."""

    capability: str
    cores: int  # streaming multiprocessors
    clock: float  # GHz, boost
    l2: int  # MiB


@dataclass(frozen=True)
class KernelFactors:
    """Measured time of kernels over the least time at the device's peak; hardware.toml has more."""

    source: str  # the profile that they are from
    kinds: tuple[tuple[str, float], ...]  # by kind of kernel, as in meshtrain/tools/hlo/kernels.py
    # Of 16-bit matrix products, by the middle one of their three sizes M, N, K; ascending.
    product: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Device:
    """The figures of one product; hardware.toml says what they mean and where they are from."""

    name: str  # as in --target=NAME:SIZE
    kinds: tuple[str, ...]  # jax's device_kind
    flops_16: float  # FLOP/s
    flops_32: float
    memory: float  # bytes
    bandwidth: float  # bytes/s
    link: float  # bytes/s, within a host
    network: float  # bytes/s, between hosts; 0: unknown
    chip: Chip | None = None  # of a GPU
    flops_8: float = 0.0  # 0: as flops_16
    latency: float = 0.0  # seconds of a collective of no bytes, if it was measured
    factors: KernelFactors | None = None  # of kernels, if they were measured
    presets: tuple[str, ...] = DEFAULT_PRESETS  # of compiler options, see config/schema.py

    def peak(self, itemsize: float) -> float:
        """Returns the peak FLOP/s of matrix products whose elements have `itemsize` bytes."""
        if itemsize == 1 and self.flops_8:
            return self.flops_8
        return self.flops_16 if itemsize <= 2 else self.flops_32


@functools.cache
def devices() -> dict[str, Device]:
    """Returns the devices of hardware.toml by name."""
    table: dict[str, Device] = {}
    for name, values in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        table[name] = _device(name, values, table)
    return table


def _device(name: str, values: dict[str, Any], table: dict[str, Device]) -> Device:
    """Returns the device of a section of hardware.toml; its base stands before it in the table."""
    base = values.pop("base", None)
    values["kinds"] = tuple(values["kinds"])
    if "presets" in values:
        values["presets"] = tuple(values["presets"])
    if "chip" in values:
        values["chip"] = Chip(**values["chip"])
    if "factors" in values:
        values["factors"] = _kernel_factors(values["factors"])
    if base:
        return dataclasses.replace(table[base], name=name, **values)
    return Device(name, **values)


def _kernel_factors(values: dict[str, Any]) -> KernelFactors:
    """Returns the factors of a section [DEVICE.factors] of hardware.toml."""
    # A key in TOML is a text.
    product = sorted((int(size), factor) for size, factor in values["product"].items())
    return KernelFactors(
        source=values["source"],
        kinds=tuple(values["kinds"].items()),
        product=tuple(product),
    )


@functools.cache
def devices_by_kind() -> dict[str, Device]:
    """Returns the devices of hardware.toml by jax's device_kind."""
    return {kind: device for device in devices().values() for kind in device.kinds}


def device_of(kind: str) -> Device | None:
    """Returns the device of jax's device kind; None if the table does not have it.

    Variants of a product differ, and so do parts of a device (MIG).
    """
    return devices_by_kind().get(kind)


def peak_flops(kind: str, given: float = 0.0) -> float | None:
    """Returns the peak that MFU divides by: `given` (config.hardware.peak_flops) or the kind's."""
    if given:
        return given
    device = device_of(kind)
    return device.flops_16 if device else None


def device_named(name: str) -> Device:
    """Returns a device of the table, or that of a file NAME.toml.

    The file has `base`, a device of the table, and the fields of `Device` that differ, in FLOP/s,
    bytes and bytes/s: base = "h200", network = 25e9. Raises ConfigError.
    """
    if name.endswith(".toml"):
        return _device_of_file(name)
    if name not in devices():
        near = did_you_mean(name, devices())
        raise ConfigError(
            f"--device={name}: unknown{near}; use one of {', '.join(devices())}, "
            f"or a file NAME.toml"
        )
    return devices()[name]


def _device_of_file(name: str) -> Device:
    try:
        values = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--device={name}: cannot be read: {error}") from error
    base = values.pop("base", None)
    faults = []
    if base not in devices():
        faults.append(f"{name}: base={base!r}: use one of {', '.join(devices())}")
    for field, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if field not in FILE_FIELDS:
            near = did_you_mean(field, FILE_FIELDS)
            faults.append(f"{name}: {field}: unknown{near}; use base and {', '.join(FILE_FIELDS)}")
        elif not (is_number and 0 < value < math.inf):
            faults.append(f"{name}: {field}={value!r}: use a positive number, such as 25e9")
    if faults:
        raise ConfigError(*faults)
    return dataclasses.replace(devices()[base], name=Path(name).stem, **values)
