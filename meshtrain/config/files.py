"""Reads a config file and the `--config.KEY=VALUE` overrides of a command line."""

import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from meshtrain.errors import ConfigError, did_you_mean

ARGUMENTS = ("--config", "--workdir", "--simulate_devices", "--output", "--help")


def load_config(path: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """Returns the config of a Python file with `get_config()`, with `--config.KEY=VALUE` overrides applied.

    `path` may also be a run's `config.json`. Raises ConfigError with every invalid override.
    """
    config, faults = read(path, overrides)
    if faults:
        raise ConfigError(*faults)
    return config


def read(
    path: str,
    overrides: Iterable[str] = (),
    *,
    change: Callable[[ConfigDict], None] = lambda config: None,
) -> tuple[ConfigDict, list[str]]:
    """Returns the config with the valid overrides applied, and a line for each invalid one.

    `change` may set keys before the overrides are applied.
    """
    config = _read_file(path)
    change(config)
    overrides = _join_values(overrides)
    try:
        return _override(config, overrides), []
    except Exception:
        # absl stops at the first mistake, so try the overrides one by one.
        faults = {override: _fault_of(config, override) for override in overrides}
        valid = [override for override, fault in faults.items() if not fault]
        return _override(config, valid), [fault for fault in faults.values() if fault]


def reject_huggingface(folder: Path) -> None:
    """Raises ConfigError if the config.json in a folder was written by Hugging Face transformers."""
    try:
        found = "architectures" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return
    if found:
        raise ConfigError(
            f"{folder} is a Hugging Face folder; convert it first: meshtrain convert FOLDER WORKDIR"
        )


def _read_file(path: str) -> ConfigDict:
    name, _, argument = path.partition(":")
    file = _find(name)
    if file is None:
        raise ConfigError(f"--config={path}: no such file")
    if file.suffix == ".json":
        return _read_json(file)
    # A config file imports others as `configs.default`, whatever the current folder is, and may name a
    # model in its own folder.
    if (root := str(file.parent.parent)) not in sys.path:
        sys.path.insert(0, root)
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec = importlib.util.spec_from_file_location("config_file", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(argument) if argument else module.get_config()
        return config if isinstance(config, ConfigDict) else ConfigDict(config)
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"--config={path} cannot be read: {kind}: {error}") from error


def _find(name: str) -> Path | None:
    """Returns the path of a config file; outside a checkout, configs/NAME.py of the installed package."""
    installed = importlib.util.find_spec("configs")
    folders = installed.submodule_search_locations if installed else None
    roots = [Path(folder).parent for folder in folders or ()]
    paths = [Path(name), *(root / name for root in roots if name.startswith("configs/"))]
    return next((path.resolve() for path in paths if path.is_file()), None)


def _read_json(file: Path) -> ConfigDict:
    try:
        raw = json.loads(file.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not an object of sections")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config={file} cannot be read: {error}") from error
    return ConfigDict(_with_tuples(raw)).lock()


def _with_tuples(value: Any) -> Any:
    """Returns the value with JSON lists replaced by tuples, as configs have them."""
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _override(config: ConfigDict, overrides: list[str]) -> ConfigDict:
    """Returns a copy with the overrides applied; then resolves references between keys."""
    values = flags.FlagValues()
    arguments = ["meshtrain", *overrides]
    changed = copy.deepcopy(config)
    holder = config_flags.DEFINE_config_dict(
        "config", changed, flag_values=values, sys_argv=arguments
    )
    if rest := values(arguments)[1:]:
        raise flags.Error(f"unknown argument {rest[0]}")
    return holder.value.copy_and_resolve_references()


def _join_values(arguments: Iterable[str]) -> list[str]:
    """Rewrites `--config.a 1` as `--config.a=1`, so that each override is one string."""
    joined: list[str] = []
    for argument in arguments:
        if joined and not argument.startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def _fault_of(config: ConfigDict, override: str) -> str | None:
    try:
        _override(config, [override])
        return None
    except Exception as error:
        name, _, value = override.partition("=")
        if not name.removeprefix("--no").removeprefix("--").startswith("config."):
            # An argument of another verb is unknown here, but must not be suggested for itself.
            others = [argument for argument in ARGUMENTS if argument != name]
            return f"{name}: unknown argument{did_you_mean(name, others)}"
        key = name.removeprefix("--no").removeprefix("--").removeprefix("config.")
        if key not in (known := _keys(config.to_dict())):
            return f"{name}: unknown key{did_you_mean(key, known)}"
        current = config
        for part in key.split("."):
            current = current[part]
        if isinstance(current, ConfigDict):
            return (
                f"{name}={value}: is a section; set its keys, such as {name}.{next(iter(current))}"
            )
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
