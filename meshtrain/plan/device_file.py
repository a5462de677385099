"""A device that the table of hardware lacks, from a TOML file: what differs from a device of the table."""

import dataclasses
import math
import tomllib
from pathlib import Path

from meshtrain.analysis import hardware
from meshtrain.analysis.hardware import Device
from meshtrain.config.bind import has_type
from meshtrain.errors import ConfigError, did_you_mean

FIELDS = ("flops_16", "flops_32", "flops_8", "memory", "bandwidth", "link", "network")


def device_of(name: str) -> Device:
    """Returns a device of the table, or that of a file NAME.toml.

    The file has `base`, a device of the table, and the fields of `hardware.Device` that differ, in FLOP/s, bytes and
    bytes/s: base = "h200", network = 25e9. Raises ConfigError.
    """
    if not name.endswith(".toml"):
        if name in hardware.BY_NAME:
            return hardware.BY_NAME[name]
        near = did_you_mean(name, hardware.BY_NAME)
        raise ConfigError(
            f"--device={name}: unknown{near}; use one of {', '.join(hardware.BY_NAME)}, or a file NAME.toml"
        )
    try:
        values = tomllib.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--device={name}: cannot be read: {error}") from error
    base = values.pop("base", None)
    faults = []
    if base not in hardware.BY_NAME:
        faults.append(f"{name}: base={base!r}: use one of {', '.join(hardware.BY_NAME)}")
    for field, value in values.items():
        if field not in FIELDS:
            near = did_you_mean(field, FIELDS)
            faults.append(f"{name}: {field}: unknown{near}; use base and {', '.join(FIELDS)}")
        elif not (has_type(value, float) and 0 < value < math.inf):
            faults.append(f"{name}: {field}={value!r}: use a positive number, such as 25e9")
    if faults:
        raise ConfigError(*faults)
    return dataclasses.replace(hardware.BY_NAME[base], name=Path(name).stem, **values)
