"""Keys over a base config: from a YAML file, or from environment variables.

  base: quickstart        # a config of the package; default: all keys have their defaults
  train:
    steps: 200

MESHTRAIN__TRAIN__STEPS=200 sets the same key. A value is read as on the command line: the type of the key decides,
not that of YAML, for which `on` and `no` are booleans. A list is a tuple.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshtrain.errors import ConfigError

PREFIX = "MESHTRAIN__"
LITERALS = {"null": "None", "~": "None", "true": "True", "false": "False"}  # of entries of lists
FLAG = "--config."
# A key, and the key that it replaces unless it is 0.
REPLACED = {"train.epochs": "train.steps", "train.batch_per_device": "train.global_batch"}
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


class Overlay(NamedTuple):
    """The base of a YAML file, and its keys: `--config.KEY=VALUE` -> where the file says so."""

    base: str
    overrides: dict[str, str]
    lists: dict[str, str]  # key -> where, of keys whose value is a list


def of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `--config.KEY=VALUE` -> the name of the variable, for each that starts with PREFIX."""
    return {
        f"{FLAG}{name.removeprefix(PREFIX).lower().replace('__', '.')}={value}": name
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX)
    }


def of_yaml(file: Path) -> Overlay:
    """Returns what a YAML file says. Raises ConfigError if it cannot be read, or says something twice."""
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has an alias (*name); write the values out")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("it has no sections such as `train:`")
        keys = [(key, _text(node), node) for key, node in _leaves(root, "")]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"--config={file} cannot be read: {line}{error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={file} cannot be read: {_one_line(error)}") from error
    base, overrides, lists = "default", {}, {}
    for key, value, node in keys:
        place = f"{file}: line {node.start_mark.line + 1}: {key}"
        if key == "base":
            base = value
            continue
        overrides[f"{FLAG}{key}={value}"] = place
        if isinstance(node, yaml.SequenceNode):
            lists[key] = place
    return Overlay(base, overrides, lists)


def conflicts(overrides: Iterable[str], places: Mapping[str, str]) -> list[str]:
    """Returns a line for each pair of keys of which one replaces the other, if `overrides` set both."""
    found = {}
    for override in overrides:
        flag, _, value = override.partition("=")
        found[flag.removeprefix(FLAG)] = value, places.get(override, override)
    return [
        f"{found[key][1]} and {found[other][1]}: {key} replaces {other}; set one of them"
        for key, other in REPLACED.items()
        if key in found and other in found and found[key][0].strip("0.")
    ]


def renamed(fault: str, override: str, place: str) -> str:
    """Returns the fault of an override with its place instead of the flag."""
    return _one_line(fault.replace(override.partition("=")[0], place, 1))


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yields key and value of each entry that is no section."""
    seen = set()
    for name, value in node.value:
        line = f"line {name.start_mark.line + 1}: "
        if not isinstance(name, yaml.ScalarNode) or not NAME.fullmatch(name.value):
            raise ValueError(f"{line}a key is no name such as `steps`")
        if name.value in seen:
            raise ValueError(f"{line}{prefix}{name.value} is there twice")
        seen.add(name.value)
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{prefix}{name.value}.")
            continue
        is_plain = isinstance(value, yaml.ScalarNode) and value.style is None
        if is_plain and value.value.lower() in ("", "~", "null"):
            raise ValueError(f"{line}{prefix}{name.value} has no value; write '' for an empty text")
        yield prefix + name.value, value


def _text(node: yaml.Node) -> str:
    """Returns a value as on the command line; a list as a tuple."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"line {node.start_mark.line + 1}: a list holds values, no keys")
    return "(" + "".join(f"{_literal(one)}, " for one in node.value) + ")"


def _literal(node: yaml.Node) -> str:
    """Returns an entry of a list as a Python literal: a string if it has quotes or is no other literal."""
    text = _text(node)
    if getattr(node, "style", None) in ("'", '"'):
        return repr(text)
    try:
        ast.literal_eval(text := LITERALS.get(text.lower(), text))
        return text
    except (ValueError, SyntaxError):
        return repr(text)
