"""The parser of a verb's flags: reports every unknown flag, one per line."""

import argparse
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from meshtrain import storage
from meshtrain.cluster import environment
from meshtrain.config.bind import flag_faults
from meshtrain.config.suggest import OTHER_NAMES, did_you_mean_flag
from meshtrain.errors import ConfigError, did_you_mean

# Arguments that may be runs on object stores.
RUNS = {"workdir", "workdirs", "paths", "source", "measured"}

# Arguments of type str that may be paths.
TEXTS = {"workdir", "config", "inputs", "output", "tokenizer", "device"}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    remedy = ""  # what to do with an argument that is unknown

    def known(self) -> list[str]:
        """Returns the flags, such as "--workdir"."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--") and "." not in name]

    def parse_args(self, args=None, namespace=None):
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            raise ConfigError(*self.unknown(rest))
        return found

    def parse_known_args(self, args=None, namespace=None):
        try:
            found, rest = super().parse_known_args(args, namespace)
        except ConfigError as error:  # such as a missing flag, because it is misspelt
            flags = [one for one in args or () if one.startswith("--") and one != "--"]
            raise ConfigError(*self.unknown(flags), *error.faults) from error
        faults: list[str] = []
        for name, value in vars(found).items():
            setattr(found, name, _expand_home(name, value))
            faults += flag_faults(name, value)
        # For messages, "--workdir="; "" for an argument that is no flag.
        keys = {
            action.dest: f"{action.option_strings[0]}=" if action.option_strings else ""
            for action in self._actions
        }
        for name, value in vars(found).items():
            if name in RUNS:
                continue
            for path in _as_list(value):
                if isinstance(path, Path) and (
                    fault := storage.url_fault(keys.get(name, ""), path)
                ):
                    faults.append(fault)
        for name in RUNS & {*vars(found)}:
            faults += self._download_metadata(found, name, keys.get(name, ""))
        if faults:
            raise ConfigError(*faults)
        # `info --network` reports a fault of the ranks among what else is set.
        is_report = getattr(found, "network", False)
        if hasattr(found, "process_id") and not is_report:  # the flags of `environment.add_flags`
            environment.check_flags(found, os.environ)
        return found, rest

    def _download_metadata(self, flags: argparse.Namespace, name: str, key: str) -> list[str]:
        """Downloads the small files of runs on object stores, in place of their URLs.

        A workdir that is given as text is opened later. Returns the faults.
        """
        faults, paths = [], []
        for path in _as_list(getattr(flags, name)):
            if isinstance(path, Path):
                from meshtrain.checkpoint import find  # here, since --help must be fast

                try:
                    path = find.download_metadata(path)
                except ConfigError as error:
                    faults.append(f"{key}{error}")
            elif path is not None:
                faults += storage.open_workdir(path).name_faults(key)
            paths.append(path)
        setattr(flags, name, paths if isinstance(getattr(flags, name), list) else paths[0])
        return faults

    def error(self, message: str) -> NoReturn:
        if choice := re.fullmatch(
            r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.+)\)", message
        ):
            name, value, choices = choice.groups()
            choices = re.findall(r"[^\s,']+", choices)
            given = f"{name}={value}" if name.startswith("-") else value
            near = did_you_mean(value, choices)
            raise ConfigError(f"{given}: use one of {', '.join(choices)}{near}")
        missing = "arguments are required" in message
        raise ConfigError(message + (f"; see {self.prog} --help" if missing else ""))

    def unknown(self, arguments: list[str]) -> list[str]:
        """Returns a fault for each argument that is no flag and no key of the config."""
        known, keys = self.known(), []
        names = [one.partition("=")[0] for one in arguments]
        if "--config.KEY" in self._option_string_actions:
            names = [name for name in names if not name.startswith(("--config.", "--noconfig."))]
            keys = list(OTHER_NAMES.values())
        return [
            f"{name}: unknown argument{did_you_mean_flag(name, known, keys)}{self.remedy}"
            for name in names
            if name not in known
        ]


def _expand_home(name: str, value: Any) -> Any:
    """Returns the value of a flag with the home folder for a leading ~, if the value is a path.

    No shell expands the ~ in --workdir=~/runs/one.
    """
    if isinstance(value, list):
        return [_expand_home(name, one) for one in value]
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if isinstance(value, str) and name in TEXTS:
        return os.path.expanduser(value)
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
