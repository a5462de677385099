"""Reading a config file and the `--config.KEY=VALUE` overrides of a command line."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from meshtrain.errors import ConfigError, did_you_mean

ARGUMENTS = ("--config", "--workdir", "--simulate_devices", "--help")


def load(path: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """Returns the config of a Python file with `get_config()`, after `--config.KEY=VALUE` overrides.

    Raises ConfigError with every override that does not fit.
    """
    config, faults = read(path, overrides)
    if faults:
        raise ConfigError(*faults)
    return config


def read(path: str, overrides: Iterable[str] = ()) -> tuple[ConfigDict, list[str]]:
    """Returns the config with the overrides that fit, and a line for each that does not."""
    file = Path(path.partition(":")[0])  # what follows a colon is get_config's argument
    if not file.is_file():
        raise ConfigError(f"--config={path}: no such file")
    # A config file imports its siblings as `configs.default`, from whatever folder one runs.
    root = str(file.resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        config = _read_flags(path, [])
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"--config={path} cannot be read: {kind}: {error}") from error
    overrides = _join_values(overrides)
    try:
        return _read_flags(path, overrides), []
    except Exception:
        # Something in there is wrong, and absl stops at the first: try them one by one.
        faults = {override: _fault_of(path, config, override) for override in overrides}
        good = [override for override, fault in faults.items() if not fault]
        return _read_flags(path, good), [fault for fault in faults.values() if fault]


def _read_flags(path: str, overrides: list[str]) -> ConfigDict:
    values = flags.FlagValues()
    arguments = ["meshtrain", f"--config={path}", *overrides]
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    rest = values(arguments)[1:]
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
        if not name.removeprefix("--no").removeprefix("--").startswith("config."):
            return f"{name}: unknown argument{did_you_mean(name, ARGUMENTS)}"
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
