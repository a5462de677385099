"""Shows a config: all its keys, what differs between two, or what a key means.

  meshtrain config --config=quickstart --config.train.steps=20    all keys; marks what is changed
  meshtrain config --diff default runs/first/config.json          the keys that differ
  meshtrain config --keys microbatch                              keys with this in name or meaning

The first prints YAML, which `--config=FILE` reads. A config is a Python file with get_config(), the
name of a config of the package, a YAML file, or a run's config.json.
"""

import argparse
import fnmatch
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.config import describe, load
from meshtrain.config.schema import Config
from meshtrain.config.suggest import did_you_mean_key
from meshtrain.configs import default
from meshtrain.errors import ConfigError

ALL = "*"  # the pattern of --keys without one
WIDTH = 88


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--diff", nargs=2, metavar=("A", "B"), help="print the keys that differ")
    flags.add_argument(
        "--keys",
        nargs="?",
        const=ALL,
        metavar="PATTERN",
        help="print keys with default and meaning: all, those with a word in them, or train.*",
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Checks that one thing is asked for; keeps the config as it is written."""
    asked = [name for name in ("diff", "keys") if getattr(args, name) is not None]
    asked += ["config"] * (config is not None)
    if len(asked) != 1:
        given = " and ".join(f"--{name}" for name in asked) or "nothing to show"
        raise ConfigError(f"{given}: use one of --config=FILE, --diff A B and --keys [PATTERN]")
    args.written = config


def run(args: argparse.Namespace, cfg: Config | None) -> int:
    """Prints what is asked for; returns the exit code."""
    if args.keys is not None:
        console.say(*keys(args.keys))
    elif args.diff is not None:
        console.say(*differences(*(_read(path, args.trust_code) for path in args.diff)))
    else:
        console.say(*as_yaml(args.written.to_dict()))
    return 0


# ---- one config ----


def as_yaml(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a YAML file with all keys; what differs from the default is marked."""
    defaults = default.get_config().to_dict()
    order = [entry.name for entry in describe.entries(describe.source())]
    yield "base: default"
    for name in sorted(config, key=_place(order)):
        section = config[name]
        if not isinstance(section, Mapping):
            yield ""
            yield from _marked(name, section, defaults.get(name, _Missing), indent="")
            continue
        yield ""
        yield f"{name}:"
        for key in sorted(section, key=_place(order, f"{name}.")):
            known = defaults.get(name, {}).get(key, _Missing)
            yield from _marked(key, section[key], known, indent="  ")


def _place(order: Sequence[str], prefix: str = "") -> Callable[[str], tuple]:
    """Returns the sort key of names: as in configs/default.py, others at the end."""
    places = {name: number for number, name in enumerate(order)}
    return lambda name: (places.get(prefix + name, len(places)), name)


class _Missing:
    """Stands for a key that the default config does not have."""


def _marked(key: str, value: Any, known: Any, *, indent: str) -> Iterator[str]:
    """Yields `key: value`, with a comment if the default is another."""
    if isinstance(value, tuple) and any(isinstance(one, tuple) for one in value):
        mark = "" if value == known else "  # changed"
        yield f"{indent}{key}:{mark}"
        for one in value:
            yield f"{indent}  - {_text(one)}"
        return
    line = f"{indent}{key}: {_text(value)}"
    if known is _Missing:
        line = f"{line:<40}  # new"
    elif value != known:
        line = f"{line:<40}  # default: {_text(known)}"
    yield line


def _text(value: Any) -> str:
    """Returns a value as YAML that `--config=FILE` reads."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if value is None:
        return "null"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


# ---- two configs ----


def _read(path: str, trust_code: bool) -> dict[str, Any]:
    try:
        return load.load_config(path, trust_code=trust_code).to_dict()
    except ConfigError as error:
        faults = [fault.replace("--config=", "--diff: ", 1) for fault in error.faults]
        raise ConfigError(*faults) from error


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yields `key: value in a -> value in b` for each key that differs."""
    before, after = dict(leaves(a)), dict(leaves(b))
    found = False
    for key in {**before, **after}:
        pair = [values.get(key, _Missing) for values in (before, after)]
        if pair[0] != pair[1]:
            found = True
            shown = ["nothing" if value is _Missing else _text(value) for value in pair]
            yield f"{key}: {shown[0]} -> {shown[1]}"
    if not found:
        yield "no key differs"


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a config, with their sections, and their values."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- what keys mean ----


def keys(pattern: str) -> Iterator[str]:
    """Yields key, default and meaning of the keys that the pattern selects.

    A pattern with * or ? must fit the name; another has to be in the name or in the meaning. Raises
    ConfigError if there are none.
    """
    values = dict(leaves(default.get_config().to_dict()))
    entries = [entry for entry in describe.entries(describe.source()) if entry.name in values]

    def is_selected(entry: describe.Entry) -> bool:
        if set(pattern) & set("*?["):
            return fnmatch.fnmatch(entry.name, pattern)
        return pattern.lower() in f"{entry.name} {entry.comment}".lower()

    selected = [entry for entry in entries if is_selected(entry)]
    if not selected:
        near = did_you_mean_key(pattern, [entry.name for entry in entries])
        raise ConfigError(f"--keys={pattern}: no key has this in its name or meaning{near}")
    for entry in selected:
        value = values[entry.name]
        shown = _text(value) if not isinstance(value, tuple) or len(value) < 4 else "[...]"
        yield f"{entry.name}: {shown}  ({type(value).__name__})"
        yield from textwrap.wrap(
            entry.comment, WIDTH, initial_indent="    ", subsequent_indent="    "
        )


VERB = Verb(
    summary="show the keys of a config, what they mean, what differs",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    config_is_optional=True,
    prepare=prepare,
    needs_devices=lambda args: False,
)
