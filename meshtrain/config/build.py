"""Builds model, optimizer and data with the functions that the keys `build` of their sections name."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from meshtrain.config import checks
from meshtrain.config.bind import bind
from meshtrain.config.schema import BuildConfig, Config, OptimConfig
from meshtrain.errors import ConfigError


class Parts(NamedTuple):
    """What a run consists of besides its settings."""

    model: Any  # models.base.Model
    make_optimizer: Callable[[Any], Any]  # learning-rate schedule -> optax.GradientTransformation
    train_data: Any = None  # data.source.Source, or what the caller passed
    heldout_data: Any = None  # a Source; None if eval.batches is 0 or the caller passed data


def build(cfg: Config, *, model: Any = None, data: Any = None) -> Parts:
    """Builds all parts, or raises ConfigError with every fault; `model` and `data` replace what is configured."""
    faults = checks.position_faults(cfg) if model is None and data is None else []

    def attempt(make: Callable, *args: Any) -> Any:
        try:
            return make(*args)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    model = attempt(build_model, cfg) if model is None else model
    make_optimizer = attempt(optimizer_builder, cfg)
    heldout = None
    if data is None:
        data = attempt(build_data, cfg.data, "train")
        heldout = cfg.eval.batches and data and attempt(build_data, cfg.data, "heldout")
    if faults:
        raise ConfigError(*faults)
    return Parts(model, make_optimizer, data, heldout or None)


def build_model(cfg: Config) -> Any:
    """Returns the Model of section `model`; raises ConfigError with every fault."""
    faults = checks.model_faults(cfg)
    bound, found = _bound("model", cfg.model)
    try:
        model = None if found else bound()
    except ConfigError as error:
        found += error.faults
    if faults or found:
        raise ConfigError(*faults, *found)
    return model


def optimizer_builder(cfg: Config) -> Callable[[Any], Any]:
    """Returns the function learning-rate schedule -> optax.GradientTransformation of section `optim`."""
    bound, faults = _bound(
        "optim",
        cfg.optimizer,
        given=["learning_rate"],
        known=OptimConfig.__dataclass_fields__,
    )
    if faults:
        raise ConfigError(*faults)
    return bound


def build_data(section: BuildConfig, split: str) -> Any:
    """Returns the Source of one split, "train" or "heldout"; raises ConfigError with every fault."""
    bound, faults = _bound("data", section, given=["split"])
    if faults:
        raise ConfigError(*faults)
    return bound(split=split)


def _bound(
    name: str, section: BuildConfig, *, given: Iterable[str] = (), known: Iterable[str] = ()
) -> tuple[Callable, list[str]]:
    function = resolve(section.build, key=f"{name}.build")
    return bind(name, section.options, function, given=given, known=known)


def resolve(path: str, *, key: str) -> Callable:
    """Returns the function that "package.module:function" names; `key` is its config key, for errors."""
    module, _, name = str(path).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{key}={path}: no package.module:function that can be imported ({error})"
        raise ConfigError(message) from error
    if not callable(function):
        raise ConfigError(f"{key}={path}: is a {type(function).__name__}, not a function")
    return function
