"""Turns a config into typed settings; reports all faults at once.

A config consists of sections of keys (see configs/default.py). `parse` returns one frozen tree of
settings; it imports no model, no data and no jax. `config.build` builds what the settings name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshtrain import moved
from meshtrain.config import checks, paths, schema
from meshtrain.config.bind import bind
from meshtrain.config.schema import SECTIONS, AdapterConfig, BuildConfig, Config, OptimConfig
from meshtrain.errors import ConfigError, did_you_mean


def parse(config: Mapping | Config, *, num_devices: int | None = None) -> Config:
    """Returns the typed config, or raises ConfigError with every fault found.

    `config` is a ConfigDict, a dict of sections, or a Config, which is returned. With `num_devices`
    a -1 in the mesh is resolved, and the mesh must use all devices. Without it a -1 stays.
    """
    if isinstance(config, Config):
        return on_devices(config, num_devices) if num_devices else config
    raw = moved.new_names(config.to_dict() if hasattr(config, "to_dict") else config)
    raw = paths.expand_home(raw)
    reader = _Reader(raw)
    settings = {
        "mesh": reader.section("mesh", schema.MeshConfig),
        "rules": raw["rules"],
        "train": reader.section("train", schema.TrainConfig),
        "pipeline": reader.section("pipeline", schema.PipelineConfig),
        "context": reader.section("context", schema.ContextConfig),
        "expert": reader.section("expert", schema.ExpertConfig),
        "sync": reader.section("sync", schema.SyncConfig),
        "model": reader.build_section("model"),
        "data": reader.build_section("data"),
        "optim": reader.section("optim", OptimConfig),
        "optimizer": reader.build_section("optim", without=OptimConfig),
        "adapter": reader.section("adapter", AdapterConfig),
        "eval": reader.section("eval", schema.EvalConfig),
        "checkpoint": reader.section("checkpoint", schema.CheckpointConfig),
        "divergence": reader.section("divergence", schema.DivergenceConfig),
        "health": reader.section("health", schema.HealthConfig),
        "monitor": reader.section("monitor", schema.MonitorConfig),
        "hardware": reader.section("hardware", schema.HardwareConfig),
    }
    reader.faults += checks.rule_faults(raw["rules"])
    mesh, train, data = settings["mesh"], settings["train"], settings["data"]
    if mesh and num_devices:
        settings["mesh"] = reader.attempt(mesh.resolve, num_devices)
        mesh = settings["mesh"] or mesh  # the other checks go on with the sizes that are known
    if mesh and train:
        settings["train"] = train = train.with_batch(mesh)
        reader.faults += checks.train_faults(mesh, train)
    if mesh and data:
        reader.faults += checks.sequence_faults(data.options, mesh.context)
    if reader.faults:
        raise ConfigError(*reader.faults)
    settings["rules"] = tuple(tuple(rule) for rule in settings["rules"])
    return Config(**settings)


def on_devices(cfg: Config, num_devices: int) -> Config:
    """Returns the config with its mesh on all of `num_devices`.

    A -1 is resolved, and so is the global batch.

    A mesh that is resolved already must have this number of devices. Raises ConfigError with every
    fault.
    """
    mesh = cfg.mesh.resolve(num_devices)
    train = cfg.train.with_batch(mesh)
    faults = checks.train_faults(mesh, train)
    faults += checks.sequence_faults(cfg.data.options, mesh.context)
    if faults:
        raise ConfigError(*faults)
    return dataclasses.replace(cfg, mesh=mesh, train=train)


class _Reader:
    """Reads sections and collects their faults, instead of stopping at the first."""

    def __init__(self, raw: Mapping):
        missing = [key for key in SECTIONS if key not in raw]
        unknown = [key for key in raw if key not in SECTIONS]
        self.raw = raw
        self.faults = [
            f"config.{key}: unknown section{did_you_mean(key, SECTIONS)}" for key in unknown
        ]
        self.faults += [
            f"config.{key}: missing section; copy it from configs/default.py" for key in missing
        ]
        not_sections = [
            key
            for key in SECTIONS
            if key in raw and key != "rules" and not isinstance(raw[key], Mapping)
        ]
        self.faults += [f"config.{key}={raw[key]!r}: not a section of keys" for key in not_sections]
        if missing or not_sections:
            raise ConfigError(*self.faults)

    def attempt(self, make: Callable, *args: Any) -> Any:
        """Returns what `make` returns; None where it raises ConfigError."""
        try:
            return make(*args)
        except ConfigError as error:
            self.faults.extend(error.faults)
            return None

    def section(self, name: str, target: type) -> Any:
        """Returns the dataclass of a section.

        That of `optim` lacks the keys of the optimizer's builder.
        """
        values = self.raw[name]
        if target is OptimConfig:
            own_keys = _names(OptimConfig)
            values = {key: value for key, value in values.items() if key in own_keys}
        make, faults = bind(name, values, target)
        self.faults += faults
        if faults:
            return None
        return self.attempt(make)

    def build_section(self, name: str, *, without: type | None = None) -> BuildConfig | None:
        """Returns a section with a `build` key, without the keys of the dataclass `without`."""
        options = dict(self.raw[name])
        build = options.pop("build", None)
        if not isinstance(build, str):
            self.faults.append(f'{name}.build={build!r}: use a path, "package.module:function"')
            return None
        for key in _names(without) if without else ():
            options.pop(key, None)
        return BuildConfig(build, MappingProxyType(options))


def _names(dataclass: type) -> list[str]:
    return [field.name for field in dataclasses.fields(dataclass)]
