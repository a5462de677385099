"""From what the user wrote to typed settings: every fault is found, named and told at once.

A config is sections of keys (see configs/default.py). `parse` turns them into frozen dataclasses,
calls the builders that it points to, and checks sections against each other; what is wrong comes
as one ConfigError with a line for each fault, before anything is compiled.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshtrain.config.schema import (
    CheckpointConfig,
    DivergenceConfig,
    EvalConfig,
    HealthConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)
from meshtrain.errors import ConfigError, did_you_mean, nearest_multiples
from meshtrain.parallel.mesh import AXES, MeshConfig

SECTIONS = ("mesh", "rules", "train", "pipeline", "model", "data", "optim")
SECTIONS += ("eval", "checkpoint", "divergence", "health")
NOT_YET = ("expert", "context")  # axes that this version cannot use


@dataclass(frozen=True)
class Config:
    """The settings of a run, and what its builders made."""

    mesh: MeshConfig  # without a -1
    rules: tuple
    train: TrainConfig
    pipeline: PipelineConfig
    optim: OptimConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    divergence: DivergenceConfig
    health: HealthConfig
    build_optimizer: Callable[[Any], Any]  # of a learning-rate schedule
    model: Any  # None where the caller brings a model
    train_data: Any  # None where the caller brings data
    heldout_data: Any  # None also where eval.batches is 0
    raw: dict  # the sections as given, for the record


def resolve(path: str, *, key: str) -> Callable:
    """Returns the function that "package.module:function" points to; `key` is where it was written."""
    module, _, name = str(path).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{key}={path}: no package.module:function that can be imported ({error})"
        raise ConfigError(message) from error
    if not callable(function):
        raise ConfigError(f"{key}={path}: is a {type(function).__name__}, not a function")
    return function


def build_data(section: Mapping, *, split: str) -> Any:
    """Returns what a `data` section builds, of one split; raises ConfigError with every fault."""
    build = resolve(section.get("build"), key="data.build")
    (bound,), faults = bind("data", section, build, given=["split"])
    if faults:
        raise ConfigError(*faults)
    return bound(split=split)


def parse(config: Mapping, *, num_devices: int, own: Iterable[str] = ()) -> Config:
    """Returns the settings with what they build, or raises ConfigError with every fault found.

    `config` is a ConfigDict or a dict of sections. `own` says what the caller brings instead:
    "model", "data" or both; those sections are not read.
    """
    raw = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    read = _Reader(raw)
    mesh = read.section("mesh", MeshConfig)
    train = read.section("train", TrainConfig)
    pipeline = read.section("pipeline", PipelineConfig)
    evaluation = read.section("eval", EvalConfig)
    checkpoint = read.section("checkpoint", CheckpointConfig)
    divergence = read.section("divergence", DivergenceConfig)
    health = read.section("health", HealthConfig)
    optim, build_optimizer = read.builder("optim", OptimConfig, given=["learning_rate"])
    (build_model,) = [None] if "model" in own else read.builder("model")
    (build_data,) = [None] if "data" in own else read.builder("data", given=["split"])

    optim = read.attempt(optim)
    read.faults += _check_rules(raw["rules"])
    if mesh:
        resolved = read.attempt(mesh.resolve, num_devices)
        model = {} if "model" in own else raw["model"]
        data = {} if "data" in own else raw["data"]
        read.faults += check_layout(resolved or mesh, raw["train"], raw["pipeline"], model)
        read.faults += check_positions(model, data)
        mesh = resolved
    model = read.attempt(build_model)
    train_data = read.attempt(build_data, split="train")
    held_out = train_data and evaluation and evaluation.batches
    heldout_data = read.attempt(build_data, split="heldout") if held_out else None
    if read.faults:
        raise ConfigError(*read.faults)
    return Config(
        mesh=mesh,
        rules=tuple(tuple(rule) for rule in raw["rules"]),
        train=train,
        pipeline=pipeline,
        optim=optim,
        eval=evaluation,
        checkpoint=checkpoint,
        divergence=divergence,
        health=health,
        build_optimizer=build_optimizer,
        model=model,
        train_data=train_data,
        heldout_data=heldout_data,
        raw=raw,
    )


class _Reader:
    """Reads sections and keeps their faults, instead of stopping at the first."""

    def __init__(self, raw: Mapping):
        missing = [key for key in SECTIONS if key not in raw]
        unknown = [key for key in raw if key not in SECTIONS]
        self.raw = raw
        self.faults = [
            f"config.{key}: unknown section{did_you_mean(key, SECTIONS)}" for key in unknown
        ]
        self.faults += [
            f"config.{key}: missing section; take it from configs/default.py" for key in missing
        ]
        flat = [
            key
            for key in SECTIONS
            if key in raw and key != "rules" and not isinstance(raw[key], Mapping)
        ]
        self.faults += [f"config.{key}={raw[key]!r}: is no section of keys" for key in flat]
        if missing or flat:
            raise ConfigError(*self.faults)

    def attempt(self, make: Callable | None, *args: Any, **options: Any) -> Any:
        """Returns what `make` makes; None where there is nothing to call, or it is at fault."""
        try:
            return make and make(*args, **options)
        except ConfigError as error:
            self.faults.extend(error.faults)
            return None

    def section(self, name: str, target: type) -> Any:
        """Returns the dataclass of a section."""
        return self.attempt(self._bound(name, target)[0])

    def builder(
        self, name: str, *targets: Callable, given: Iterable[str] = ()
    ) -> list[Callable | None]:
        """Returns `targets` and the section's own `build`, each holding its keys of the section."""
        build = self.attempt(resolve, self.raw[name].get("build"), key=f"{name}.build")
        return (
            self._bound(name, *targets, build, given=given)
            if build
            else [None] * (len(targets) + 1)
        )

    def _bound(
        self, name: str, *targets: Callable, given: Iterable[str] = ()
    ) -> list[Callable | None]:
        bound, found = bind(name, self.raw[name], *targets, given=given)
        self.faults.extend(found)
        return bound


def bind(section: str, values: Mapping, *targets: Callable, given: Iterable[str] = ()):
    """Gives each key of a section to the first target that has a parameter of that name.

    Returns one `functools.partial` per target (None where its keys are at fault) and the faults:
    unknown and missing keys, values of the wrong type. `given` are parameters that come later.
    """
    faults: list[str] = []
    bound: list[Callable | None] = []
    left = {key: value for key, value in values.items() if key != "build"}
    signatures = [inspect.signature(target).parameters for target in targets]
    known = {name for parameters in signatures for name in parameters} - {"split"}
    for target, parameters in zip(targets, signatures, strict=True):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        mine = {key: left.pop(key) for key in list(left) if takes_all or key in parameters}
        wrong = [
            f"{section}.{key}={value!r}: not of type {parameters[key].annotation.__name__}"
            for key, value in mine.items()
            if key in parameters and not _has_type(value, parameters[key].annotation)
        ]
        required = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        wrong += [f"{section}.{name}: missing" for name in required if name not in (*mine, *given)]
        faults += wrong
        bound.append(None if wrong else functools.partial(target, **mine))
    faults += [f"{section}.{key}: unknown key{did_you_mean(key, known)}" for key in left]
    return bound, faults


def _has_type(value: Any, annotation: Any) -> bool:
    wanted = {float: (float, int), int: int, bool: bool, str: str, tuple: (tuple, list)}.get(
        annotation, object
    )
    return isinstance(value, wanted) and not (
        isinstance(value, bool) and annotation in (int, float)
    )


def check_layout(mesh: MeshConfig, train: Mapping, pipeline: Mapping, model: Mapping) -> list[str]:
    """What must divide what. An axis that is still -1, for want of devices, counts as 1."""
    size = {axis: max(1, getattr(mesh, axis)) for axis in AXES}
    faults = [
        f"mesh.{axis}={size[axis]}: this version cannot use more than 1; put the devices on data or fsdp"
        for axis in NOT_YET
        if size[axis] > 1
    ]
    for key in ("num_heads", "d_ff"):
        value = model.get(key)
        if _has_type(value, int) and value % size["tensor"]:
            faults.append(
                f"model.{key}={value} is not divisible by mesh.tensor={size['tensor']}; "
                f"use {nearest_multiples(value, size['tensor'])}, or another mesh.tensor"
            )
    layers, chunks = model.get("num_layers"), pipeline.get("num_chunks")
    if size["pipeline"] > 1 and _has_type(layers, int) and _has_type(chunks, int):
        faults += uneven_layers(layers, size["pipeline"], chunks)
    batch, parts = train.get("global_batch"), train.get("num_microbatches")
    if _has_type(batch, int) and _has_type(parts, int) and parts > 0:
        step = size["data"] * size["fsdp"] * parts
        if batch < 1 or batch % step:
            faults.append(
                f"train.global_batch={batch} is not divisible by mesh.data={size['data']} x "
                f"mesh.fsdp={size['fsdp']} x train.num_microbatches={parts}; "
                f"use {nearest_multiples(batch, step)}"
            )
    return faults


def uneven_layers(num_layers: int, num_stages: int, num_chunks: int) -> list[str]:
    """A fault where the stages' chunks would differ in length, which is waiting time for all but one."""
    pieces = num_stages * num_chunks
    if pieces < 1 or num_layers % pieces == 0:
        return []
    return [
        f"model.num_layers={num_layers} is not divisible by mesh.pipeline={num_stages} x "
        f"pipeline.num_chunks={num_chunks}; use {nearest_multiples(num_layers, pieces)}"
    ]


def check_positions(model: Mapping, data: Mapping) -> list[str]:
    """A fault where sequences are longer than the table of learned positions: jax would use its last row."""
    rows, seq_len = model.get("max_seq_len"), data.get("seq_len")
    if model.get("positions") != "learned" or not (
        _has_type(rows, int) and _has_type(seq_len, int)
    ):
        return []
    if seq_len <= rows:
        return []
    return [
        f"data.seq_len={seq_len} is more than model.max_seq_len={rows}; use the same, or positions='rope'"
    ]


def _check_rules(rules: Any) -> list[str]:
    faults = []
    for rule in rules if isinstance(rules, (tuple, list)) else [rules]:
        axes = rule[1] if isinstance(rule, (tuple, list)) and len(rule) == 2 else 0
        axes = (axes,) if isinstance(axes, str) else () if axes is None else axes
        if not isinstance(axes, (tuple, list)) or not isinstance(rule[0], str):
            faults.append(f"config.rules: {rule!r} is no (logical name, mesh axis or axes or None)")
            continue
        for axis in axes:
            if axis not in AXES:
                faults.append(
                    f"config.rules maps {rule[0]!r} to {axis!r}, no mesh axis{did_you_mean(axis, AXES)}"
                )
        if len({*axes}) < len(axes):
            faults.append(f"config.rules maps {rule[0]!r} to {rule[1]!r}; use each axis once")
    return faults
