"""From what the user wrote to typed settings: every fault is found, named and told at once.

A config is a `ConfigDict` of sections (see configs/default.py). `load` reads one from a file and
applies `--config.KEY=VALUE` overrides; `parse` turns it into frozen dataclasses and checks them
against each other. Both raise ConfigError, one line per fault, before anything is compiled.
"""

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from meshtrain.mesh import AXES, MeshConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")
REMAT = ("none", "full", "dots")
SCHEDULES = ("constant", "cosine", "linear", "wsd")


class ConfigError(ValueError):
    """What the user has to change: one line per fault, each with the key, its value and the way out."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    global_batch: int
    num_microbatches: int
    seed: int
    log_every: int
    zero_stage: int
    remat: str
    unroll: int
    dtype: str
    param_dtype: str


@dataclass(frozen=True)
class OptimConfig:
    """What the trainer itself needs of the `optim` section; the builder gets the rest."""

    learning_rate: float
    schedule: str
    warmup_steps: int
    decay_fraction: float
    final_fraction: float
    clip_norm: float


@dataclass(frozen=True)
class EvalConfig:
    every: int
    batches: int


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int


@dataclass(frozen=True)
class Config:
    """The whole of a run's settings. The three builders are called by `train` and hold their own."""

    mesh: MeshConfig
    rules: tuple
    train: TrainConfig
    optim: OptimConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    build_model: Callable[[], Any] | None  # None: the caller brings a model
    build_data: Callable[[str], Any] | None  # of "train" or "heldout"; None: the caller brings data
    build_optimizer: Callable[[Any], Any]  # of a learning-rate schedule
    raw: dict  # as the user wrote it, for the record


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean "x"?)' for the nearest known name, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f' (did you mean "{near[0]}"?)' if near else ""


def resolve(path: str) -> Callable:
    """Returns the function that "package.module:function" points to."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f'{path!r} is no "package.module:function" that can be imported: {error}'
        ) from error


# ---- reading -------------------------------------------------------------------------------------


def load(path: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """Returns the config of a Python file with `get_config()`, after `--config.KEY=VALUE` overrides."""
    file = Path(path.partition(":")[0])
    if not file.is_file():
        raise ConfigError(f"--config={path}: no such file")
    # A config file imports its siblings as `configs.default`, from whatever folder one runs.
    root = str(file.resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        config = _read_flags(path, [])
    except Exception as error:
        raise ConfigError(
            f"--config={path} cannot be read: {type(error).__name__}: {error}"
        ) from error
    overrides = _join_values(overrides)
    try:
        return _read_flags(path, overrides)
    except Exception:
        # Something in there is wrong, and absl stops at the first: try them one by one.
        faults = [fault for override in overrides if (fault := _fault_of(path, config, override))]
        raise ConfigError(*faults) from None


def _read_flags(path: str, overrides: list[str]) -> ConfigDict:
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values)
    rest = values(["meshtrain", f"--config={path}", *overrides])[1:]
    if rest:
        raise flags.Error(f"unknown argument {rest[0]}")
    return holder.value.copy_and_resolve_references()  # fails here if the file could not be read


def _join_values(arguments: Iterable[str]) -> list[str]:
    """`--config.a 1` becomes `--config.a=1`, so that each override can be judged by itself."""
    joined: list[str] = []
    for argument in arguments:
        if joined and not argument.startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def _fault_of(path: str, config: ConfigDict, override: str) -> str | None:
    try:
        _read_flags(path, [override])
        return None
    except Exception as error:
        name, _, value = override.partition("=")
        key = name.removeprefix("--no").removeprefix("--").removeprefix("config.")
        if key not in (known := _keys(config.to_dict())):
            return f"{name}: unknown key{did_you_mean(key, known)}"
        current = config
        for part in key.split("."):
            current = current[part]
        if isinstance(error, flags.Error):
            return f"{name}={value}: not of type {type(current).__name__}, like {current!r}"
        return f"{name}={value}: {error}"


def _keys(section: Mapping, prefix: str = "") -> list[str]:
    keys = []
    for key, value in section.items():
        keys.append(prefix + key)
        if isinstance(value, Mapping):
            keys += _keys(value, f"{prefix}{key}.")
    return keys


# ---- checking ------------------------------------------------------------------------------------


def parse(config: ConfigDict | Mapping, *, num_devices: int, own: Iterable[str] = ()) -> Config:
    """Returns the typed settings, or raises ConfigError with every fault of every section.

    `own` names what the caller brings: "model" or "data"; those sections are then not built.
    """
    raw = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    faults: list[str] = []
    sections = ("mesh", "rules", "train", "model", "data", "optim", "eval", "checkpoint")
    faults += [
        f"config.{key}: unknown section{did_you_mean(key, sections)}"
        for key in raw
        if key not in sections
    ]
    faults += [
        f"config.{key}: missing; take it from configs/default.py"
        for key in sections
        if key not in raw
    ]
    if any(key not in raw for key in sections):
        raise ConfigError(*faults)

    def typed(section: str, *targets: Callable, given: Iterable[str] = ()) -> list[Callable | None]:
        bound, found = bind(section, raw[section], *targets, given=given)
        faults.extend(found)
        return bound

    def built(section: str, *types: Callable, given: Iterable[str]) -> list[Callable | None]:
        try:
            build = resolve(raw[section].get("build", ""))
        except ConfigError as error:
            faults.append(f"{section}.build={error}")
            return [None] * (len(types) + 1)
        return typed(section, *types, build, given=(*given, "build"))

    (mesh,) = typed("mesh", MeshConfig)
    (train,) = typed("train", TrainConfig)
    (evaluation,) = typed("eval", EvalConfig)
    (checkpoint,) = typed("checkpoint", CheckpointConfig)
    optim, build_optimizer = built("optim", OptimConfig, given=("learning_rate",))
    (build_model,) = (None,) if "model" in own else built("model", given=())
    (build_data,) = (None,) if "data" in own else built("data", given=("split",))

    if mesh:
        try:
            mesh = mesh().resolve(num_devices)
        except ValueError as error:
            faults.append(str(error))
            mesh = None
    faults += _check_rules(raw["rules"])
    if train:
        faults += _check_train(train(), mesh)
    if optim:
        faults += _check_optim(optim())
    if mesh:
        faults += _check_mesh(mesh, {} if build_model is None else raw["model"])
    if build_data and (path := raw["data"].get("path")) and not os.path.exists(path):
        faults.append(f"data.path={path}: no such file or folder")
    if faults:
        raise ConfigError(*faults)
    return Config(
        mesh=mesh,
        rules=tuple(tuple(rule) for rule in raw["rules"]),
        train=train(),
        optim=optim(),
        eval=evaluation(),
        checkpoint=checkpoint(),
        build_model=build_model,
        build_data=build_data and (lambda split: build_data(split=split)),
        build_optimizer=build_optimizer,
        raw=raw,
    )


def bind(section: str, values: Mapping, *targets: Callable, given: Iterable[str] = ()):
    """Gives each key of a section to the first target that has a parameter of that name.

    Returns one `functools.partial` per target (None where its keys are at fault) and the faults:
    unknown and missing keys, values of the wrong type. `given` are parameters that come later.
    """
    faults: list[str] = []
    bound: list[Callable | None] = []
    left = {key: value for key, value in values.items() if key != "build"}
    parameters = [inspect.signature(target).parameters for target in targets]
    known = [name for some in parameters for name in some if name != "split"]
    for target, expected in zip(targets, parameters, strict=True):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in expected.values())
        mine = {key: value for key, value in left.items() if takes_all or key in expected}
        left = {key: value for key, value in left.items() if key not in mine}
        wrong = [
            f"{section}.{key}={value!r}: not of type {expected[key].annotation.__name__}"
            for key, value in mine.items()
            if key in expected and not _has_type(value, expected[key].annotation)
        ]
        wrong += [
            f"{section}.{name}: missing"
            for name, p in expected.items()
            if p.default is p.empty
            and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
            and name not in (*mine, *given)
        ]
        faults += wrong
        bound.append(None if wrong else functools.partial(target, **mine))
    faults += [f"{section}.{key}: unknown key{did_you_mean(key, known)}" for key in left]
    return bound, faults


def _has_type(value: Any, annotation: Any) -> bool:
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is tuple:
        return isinstance(value, (tuple, list))
    return annotation not in (bool, str) or isinstance(value, annotation)


def _choice(key: str, value: str, choices: Iterable[str]) -> list[str]:
    return [] if value in choices else [f"{key}={value!r}: use one of {', '.join(choices)}"]


def _at_least(low: int, **values: float) -> list[str]:
    """Keys are written with `__` for the dot."""
    return [f"{k.replace('__', '.')}={v}: use {low} or more" for k, v in values.items() if v < low]


def nearest_multiples(value: int, step: int) -> str:
    """Returns the legal values around `value`: '24 or 32'."""
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} or {above}" if below else f"{above}"


def _check_train(train: TrainConfig, mesh: MeshConfig | None) -> list[str]:
    faults = _at_least(0, train__steps=train.steps, train__seed=train.seed)
    faults += _at_least(
        1,
        train__num_microbatches=train.num_microbatches,
        train__log_every=train.log_every,
        train__unroll=train.unroll,
    )
    faults += _at_least(1, train__global_batch=train.global_batch)
    faults += _choice("train.dtype", train.dtype, DTYPES) + _choice(
        "train.param_dtype", train.param_dtype, DTYPES
    )
    if not train.remat.startswith("names:"):
        faults += _choice("train.remat", train.remat, (*REMAT, "names:NAME,NAME"))
    if train.zero_stage not in range(4):
        faults.append(f"train.zero_stage={train.zero_stage}: use 0, 1, 2 or 3")
    if mesh and train.num_microbatches > 0:
        step = mesh.data * mesh.fsdp * train.num_microbatches
        if train.global_batch % step:
            faults.append(
                f"train.global_batch={train.global_batch} is not divisible by mesh.data={mesh.data} x "
                f"mesh.fsdp={mesh.fsdp} x train.num_microbatches={train.num_microbatches}; "
                f"use {nearest_multiples(train.global_batch, step)}"
            )
    return faults


def _check_optim(optim: OptimConfig) -> list[str]:
    faults = _choice("optim.schedule", optim.schedule, SCHEDULES)
    faults += _at_least(
        0, optim__learning_rate=optim.learning_rate, optim__warmup_steps=optim.warmup_steps
    )
    for key in ("decay_fraction", "final_fraction"):
        if not 0 <= getattr(optim, key) <= 1:
            faults.append(f"optim.{key}={getattr(optim, key)}: use a number from 0 to 1")
    if optim.clip_norm <= 0:
        faults.append(
            f"optim.clip_norm={optim.clip_norm}: use a positive norm, or float('inf') not to clip"
        )
    return faults


def _check_mesh(mesh: MeshConfig, model: Mapping) -> list[str]:
    faults = [
        f"mesh.{axis}={getattr(mesh, axis)}: this version cannot use more than 1; put the devices on data or fsdp"
        for axis in ("pipeline", "expert", "context")
        if getattr(mesh, axis) > 1
    ]
    for key in ("num_heads", "d_ff"):
        size = model.get(key)
        if isinstance(size, int) and size % mesh.tensor:
            faults.append(
                f"model.{key}={size} is not divisible by mesh.tensor={mesh.tensor}; "
                f"use {nearest_multiples(size, mesh.tensor)}, or another mesh.tensor"
            )
    return faults


def _check_rules(rules: Any) -> list[str]:
    faults = []
    for rule in rules:
        if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)):
            faults.append(f"config.rules: {rule!r} is no (logical name, mesh axis or axes or None)")
            continue
        name, axes = rule
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if axis not in AXES:
                faults.append(
                    f"config.rules maps {name!r} to {axis!r}, which is no mesh axis{did_you_mean(axis, AXES)}"
                )
    return faults
