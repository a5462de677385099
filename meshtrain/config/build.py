"""Builds model, optimizer and data with the functions that `build` of their sections names."""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from meshtrain.config import checks
from meshtrain.config.bind import bind
from meshtrain.config.rounding import to_12_digits
from meshtrain.config.schema import OWN_DATA, BuildConfig, Config, OptimConfig
from meshtrain.errors import ConfigError, did_you_mean

# What the function of each section returns; by name, because this module imports no jax.
KINDS = {"model": "Model", "data": "Source", "optim": "GradientTransformation"}

# The functions of the package that `build` of each section may name.
BUILDERS = {
    "model": ("meshtrain.models.transformer:build",),
    "data": (
        "meshtrain.data.tokens:build",
        "meshtrain.data.chat:build",
        "meshtrain.data.rows:build",
        "meshtrain.data.synthetic:build",
    ),
    "optim": (
        "meshtrain.optim.base:adamw",
        "meshtrain.optim.others:lion",
        "meshtrain.optim.others:adafactor",
        "meshtrain.optim.others:schedule_free_adamw",
        "meshtrain.optim.muon:muon",
    ),
}


class RunParts(NamedTuple):
    """What a run consists of besides its settings."""

    model: Any  # models.base.Model
    make_optimizer: Callable[[Any], Any]  # learning-rate schedule -> optax.GradientTransformation
    train_data: Any = None  # data.source.Source, or what the caller passed
    heldout_data: Any = None  # a Source; None if eval.batches is 0 or the caller passed data


def build(cfg: Config, *, model: Any = None, data: Any = None) -> RunParts:
    """Builds all parts, or raises ConfigError with every fault.

    `model` and `data` replace what is configured.
    """
    faults = checks.position_faults(cfg) if model is None and data is None else []

    def attempt(make: Callable, *args: Any) -> Any:
        try:
            return make(*args)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    model = attempt(build_model, cfg) if model is None else attempt(adapted, model, cfg)
    make_optimizer = attempt(optimizer_builder, cfg, model)
    heldout = None
    if data is None:
        data = attempt(build_data, cfg.data, "train")
        heldout = cfg.eval.batches and data and attempt(build_data, cfg.data, "heldout")
    if faults:
        raise ConfigError(*faults)
    return RunParts(model, make_optimizer, data, heldout or None)


def with_steps(
    cfg: Config, data: Any, *, num_rows: int | None = None, step: int = 0, position: int = 0
) -> Config:
    """Returns the settings with the steps of `train.epochs`, including a partial last batch.

    `data` is a Source, or an iterable of batches with a length. The rows of an epoch of an
    iterable are `num_rows`, see `loader.rows_of_epoch`, or as many as its batches can hold. A run
    that resumes at `step`, with sample `position`, takes as many more steps as the remaining
    samples need: the batches before may have had another size. Raises ConfigError if the size of
    the data is not known.
    """
    if not (epochs := cfg.train.epochs):
        return cfg
    global_batch = cfg.train.global_batch
    if hasattr(data, "read"):
        size = data.size
    elif num_rows:
        size = num_rows
    else:
        size = len(data) * global_batch if hasattr(data, "__len__") else None
    if not size:
        raise ConfigError(
            f"train.epochs={epochs:g}: this data has no size, so it has no epochs; set train.steps "
            "and train.epochs=0, or give an iterable with a length (__len__)"
        )
    remaining = max(to_12_digits(epochs * size) - position, 0)
    steps = step + math.ceil(to_12_digits(remaining / global_batch))
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=steps, epochs=0.0))


def build_model(cfg: Config) -> Any:
    """Returns the Model of section `model`; raises ConfigError with every fault."""
    if faults := checks.own_model_faults(cfg):
        raise ConfigError(*faults)
    faults = checks.model_faults(cfg) + checks.remat_faults(cfg)
    make_model, key_faults = _bind_builder("model", cfg.model)
    faults += key_faults
    model = None
    if not key_faults:
        try:
            model = _checked("model", cfg.model, make_model())
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return adapted(model, cfg)


def adapted(model: Any, cfg: Config) -> Any:
    """Returns the Model with section `adapter` and `train.trainable` applied.

    Raises ConfigError if they do not fit.
    """
    if not cfg.adapter.rank and cfg.train.trainable == "*":
        return model
    return resolve("meshtrain.models.lora:adapt", key="adapter")(model, cfg)


def optimizer_builder(cfg: Config, model: Any) -> Callable[[Any], Any]:
    """Returns section `optim` as a function learning-rate schedule -> optax.GradientTransformation.

    A builder with a parameter `axes` gets the logical names of the parameters that are trained.
    """
    make, faults = _bind_builder(
        "optim",
        cfg.optimizer,
        given=["learning_rate", "axes"],
        known=OptimConfig.__dataclass_fields__,
    )
    if faults:
        raise ConfigError(*faults)
    wants_axes = model and "axes" in _parameters(make)

    def build_optimizer(learning_rate: Any) -> Any:
        given = {"axes": model.trained_axes} if wants_axes else {}
        return _checked("optim", cfg.optimizer, make(learning_rate, **given))

    return build_optimizer


def build_data(section: BuildConfig, split: str) -> Any:
    """Returns the Source of one split, "train" or "heldout"; raises ConfigError with every fault.

    A function of the user may return None for "heldout": there is no such data.
    """
    if section.build == OWN_DATA:
        raise ConfigError(
            f"data.build={OWN_DATA}: the data of this run was passed in Python; pass it to train, "
            f"or name other data, as --config.data.build={BUILDERS['data'][0]} "
            f"--config.data.path=PATH"
        )
    # per_process is about an iterable of the caller, not a key of the builder.
    options = {key: value for key, value in section.options.items() if key != "per_process"}
    make, faults = _bind_builder("data", BuildConfig(section.build, options), given=["split"])
    if not faults and not {"split", "kwargs"} & _parameters(make):
        faults = [
            f"data.build={section.build}: has no parameter `split`, which is train or heldout"
        ]
    if faults:
        raise ConfigError(*faults)
    source = make(split=split)
    if source is None and split == "heldout":
        return None
    return _checked("data", section, source)


def _bind_builder(
    name: str, section: BuildConfig, *, given: Iterable[str] = (), known: Iterable[str] = ()
) -> tuple[Callable, list[str]]:
    """Returns the function that a section names, with its keys as arguments, and faults.

    See `bind`.
    """
    key = f"{name}.build"
    function = resolve(section.build, key=key)
    # Of this package only builders are called, because a config that is data may name them.
    if section.build.startswith("meshtrain."):
        returns = getattr(function, "__annotations__", {}).get("return")
        if getattr(returns, "__name__", returns) != KINDS[name]:
            message = f"{key}={section.build}: is not a function that returns a {KINDS[name]}"
            raise ConfigError(message)
    return bind(name, section.options, function, given=given, known=known)


def _parameters(function: Callable) -> set[str]:
    """Returns the names of a function's parameters, and "kwargs" if it accepts any name."""
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        accepts_any = parameter.kind is parameter.VAR_KEYWORD
        names.add("kwargs" if accepts_any else parameter.name)
    return names


def _checked(name: str, section: BuildConfig, value: Any) -> Any:
    """Returns what a function built.

    Raises ConfigError if it is something else than its section needs.
    """
    if KINDS[name] not in [kind.__name__ for kind in type(value).__mro__]:
        kind = type(value).__name__
        raise ConfigError(f"{name}.build={section.build}: returned a {kind}, not a {KINDS[name]}")
    return value


def resolve(path: object, *, key: str) -> Callable:
    """Returns the function that "package.module:function" names.

    `key` is its config key, for errors.
    """
    module, _, name = str(path).partition(":")
    builders = BUILDERS.get(key.partition(".")[0], ())
    if builders and not name:
        raise ConfigError(
            f"{key}={path}: use one of {', '.join(builders)}, or a package.module:function of yours"
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{key}={path}: no package.module:function that can be imported ({error})"
        message += did_you_mean(path, builders)
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            message += f"; if {error.name} is a module of yours, add its folder to PYTHONPATH"
        raise ConfigError(message) from error
    if not callable(function):
        raise ConfigError(f"{key}={path}: is a {type(function).__name__}, not a function")
    return function
