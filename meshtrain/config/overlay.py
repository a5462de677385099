"""Keys over a base config: from a YAML file, or from environment variables.

  base: quickstart        # a config of the package; default: all keys have their defaults
  train:
    steps: 200

MESHTRAIN__TRAIN__STEPS=200 sets the same key. A value is read as on the command line: the type of the key decides,
not that of YAML, for which `on` and `no` are booleans.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from meshtrain.errors import ConfigError

PREFIX = "MESHTRAIN__"
LITERALS = {"null": "None", "~": "None", "true": "True", "false": "False"}  # of entries of lists
FLAG = "--config."


class Overlay(NamedTuple):
    """The base of a YAML file, and its keys: `--config.KEY=VALUE` -> where the file says so."""

    base: str
    overrides: dict[str, str]


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
        text = file.read_text()
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has an alias (*name); write the values out")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("it has no sections such as `train:`")
        keys = [*_leaves(root, "")]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"--config={file} cannot be read: {line}{error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={file} cannot be read: {error}") from error
    base = next((value for key, value, _ in keys if key == "base"), "default")
    overrides = {
        f"{FLAG}{key}={value}": f"{file}: line {line}: {key}"
        for key, value, line in keys
        if key != "base"
    }
    return Overlay(base, overrides)


def renamed(fault: str, override: str, place: str) -> str:
    """Returns the fault of an override with its place instead of the flag."""
    return fault.replace(override.partition("=")[0], place, 1)


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, str, int]]:
    """Yields key, value and line number of each entry that is no section."""
    seen = set()
    for name, value in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode):
            raise ValueError(f"line {line}: a key is no text")
        if name.value in seen:
            raise ValueError(f"line {line}: {prefix}{name.value} is there twice")
        seen.add(name.value)
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{prefix}{name.value}.")
        else:
            yield prefix + name.value, _text(value), line


def _text(node: yaml.Node) -> str:
    """Returns a value as on the command line; a list as a tuple."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"line {node.start_mark.line + 1}: a list holds values, no keys")
    return "(" + "".join(f"{_literal(one)}, " for one in node.value) + ")"


def _literal(node: yaml.Node) -> str:
    """Returns an entry of a list as a Python literal: a number if it is one and has no quotes, else a string."""
    text = _text(node)
    if getattr(node, "style", None) in ("'", '"'):
        return repr(text)
    try:
        ast.literal_eval(text := LITERALS.get(text, text))
        return text
    except (ValueError, SyntaxError):
        return repr(text)
