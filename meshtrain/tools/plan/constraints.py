"""The values that --fix gives to layouts, checked before jax is loaded."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshtrain import moved
from meshtrain.config import checks, schema
from meshtrain.config.schema import AXES, KEEP, Config, MeshConfig
from meshtrain.errors import ConfigError, did_you_mean, nearest_divisors
from meshtrain.schedules import SCHEDULES
from meshtrain.tools.plan.layout import REMATS

# The values that each key of a layout may have, as the command line has the keys; None: any number
# from 1 up.
KEYS: dict[str, tuple | None] = {
    **{f"mesh.{axis}": None for axis in AXES},
    "train.zero_stage": (0, 1, 2, 3),
    "train.num_microbatches": None,
    "train.remat": REMATS,
    "pipeline.schedule": tuple(SCHEDULES),
    "pipeline.num_chunks": None,
    "pipeline.keep": KEEP,
    "sync.dtype": schema.SYNC_DTYPES,
    "sync.pattern": schema.SYNC_PATTERNS,
    "model.loss_chunk_mib": None,
}


def mesh_faults(cfg: Config, sizes: Mapping[str, int]) -> list[str]:
    """Returns why the trainer rejects a mesh for the model and the data of a config.

    Axes without a size count as 1.
    """
    mesh = MeshConfig(**sizes)
    faults = checks.batch_faults(mesh, global_batch=cfg.train.global_batch, num_microbatches=1)
    faults += checks.tensor_faults(cfg.model.options, mesh.tensor)
    faults += checks.expert_faults(cfg.model.options, mesh.expert)
    faults += checks.sequence_faults(cfg.data.options, mesh.context)
    return faults


def fixed_faults(
    cfg: Config, fixed: Mapping[str, Any], num_devices: int, flags: Mapping[str, str] | None = None
) -> list[str]:
    """Returns why no mesh of the devices has the sizes of axes that are fixed.

    `flags` has the flag that fixes each one, for messages; without it, the config does.
    """
    sizes = {axis: fixed[axis] for axis in AXES if axis in fixed}
    if num_devices % math.prod(sizes.values()) == 0:
        return mesh_faults(cfg, sizes)
    (axis, size), *others = sizes.items()
    use = f"{nearest_divisors(num_devices, size)}, or " if not others else ""
    prefixes = {axis: f"{flag}=" for axis, flag in (flags or {}).items()}
    given = " ".join(f"{prefixes.get(axis, '')}mesh.{axis}={size}" for axis, size in sizes.items())
    return [f"{given}: {num_devices} devices are not divisible by it; use {use}other sizes"]


def with_batch(cfg: Config, num_devices: int) -> Config:
    """Returns the config with the global batch of `train.batch_per_device` on all devices.

    `mesh.auto` compares layouts of one batch, which the step must have.
    """
    train = cfg.train
    if not train.batch_per_device:
        return cfg
    global_batch = train.batch_per_device * num_devices
    train = dataclasses.replace(train, global_batch=global_batch, batch_per_device=0)
    return dataclasses.replace(cfg, train=train)


def auto_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Returns the sizes of the mesh that `mesh.auto` keeps."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    return {axis: size for axis, size in sizes.items() if size > 1}


def values(flags: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns the values of layouts that (flag, KEY=VALUE) fix, by field of Layout.

    Raises ConfigError for keys that no layout sets and values that a key cannot have.
    """
    fixed, faults = {}, []
    for name, flag in flags:
        key, _, value = flag.partition("=")
        if key in moved.KEYS:
            moved.report(key, moved.KEYS[key])
            key = moved.KEYS[key]
        if key not in KEYS:
            near = did_you_mean(key, KEYS)
            faults.append(f"{name}={flag}: unknown key{near}; use one of {', '.join(KEYS)}")
            continue
        possible = KEYS[key]
        if possible is None:
            is_valid = value.isdecimal() and int(value) >= 1
            allowed = "a number from 1 up"
        else:
            choices = [str(choice) for choice in possible]
            is_valid = value in choices
            allowed = f"one of {', '.join(choices)}"
        if not is_valid:
            faults.append(f"{name}={flag}: use {allowed}")
            continue
        fixed[key.rpartition(".")[2]] = int(value) if value.isdecimal() else value
    if faults:
        raise ConfigError(*faults)
    return fixed
