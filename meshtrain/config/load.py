"""Reads a config: Python, YAML or JSON, environment variables, and `--config.KEY=VALUE` overrides.

A YAML file has keys over a base config:

  base: quickstart        # a config of the package; default: all keys have their defaults
  train:
    steps: 200

MESHTRAIN__TRAIN__STEPS=200 sets the same key. A value is read as on the command line: the type of
the key decides, not that of YAML, for which `on` and `no` are booleans. A list is a tuple.
"""

import ast
import copy
import decimal
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from absl import flags
from ml_collections import ConfigDict, config_flags

from meshtrain import configs, foreign, moved
from meshtrain.config.schema import OWN_DATA, OWN_MODEL
from meshtrain.config.suggest import did_you_mean_flag, did_you_mean_key
from meshtrain.configs import default
from meshtrain.errors import ConfigError, did_you_mean

ARGUMENTS = ("--config", "--workdir", "--simulate_devices", "--output", "--help")
CONFIGS = Path(configs.__file__).parent  # of the package: --config=NAME


def load_config(
    path: str, overrides: Iterable[str] = (), *, trust_code: bool = False
) -> ConfigDict:
    """Returns the config of a file with `get_config()`, with `--config.KEY=VALUE` overrides.

    `path` may also be the name of a config of the package, such as "quickstart", a YAML file (see
    overlay.py), or a run's `config.json`. The latter two may name functions outside meshtrain only
    with `trust_code`. Raises ConfigError with every invalid override.
    """
    config, faults = read(path, overrides, trust_code=trust_code)
    if faults:
        raise ConfigError(*faults)
    return config


def read(
    path: str,
    overrides: Iterable[str] = (),
    *,
    change: Callable[[ConfigDict], None] = lambda config: None,
    trust_code: bool = False,
    known: Iterable[str] = ARGUMENTS,
    environ: Mapping[str, str] | None = None,
) -> tuple[ConfigDict, list[str]]:
    """Returns the config with the valid overrides applied, and a line for each invalid one.

    `change` may set keys before the overrides are applied. `known` are the flags of the verb, to
    suggest one for a misspelt flag. Variables of `environ` such as MESHTRAIN__TRAIN__STEPS are
    overrides before the others. See `load_config` for the other arguments.
    """
    config = _read_file(path, trust_code)
    change(config)
    places = overrides_of_environment(environ or {})
    config, faults = _override_all(config, [*places], known, places)
    config, faults_of_arguments = _override_all(config, _join_values(overrides), known, {})
    return config.copy_and_resolve_references(), faults + faults_of_arguments


def _override_all(
    config: ConfigDict, overrides: list[str], known: Iterable[str], places: Mapping[str, str]
) -> tuple[ConfigDict, list[str]]:
    """Returns what `read` returns, with references between keys.

    A fault of an override in `places` names its place.
    """
    overrides, places = _with_new_keys(overrides, places)
    conflicts = conflicting_overrides(overrides, places)
    overrides += _without_replacements(config, overrides)
    try:
        return _override(config, overrides), conflicts
    except Exception:
        # absl stops at the first mistake, so try the overrides one by one.
        faults = {override: _fault_of(config, override, known) for override in overrides}
        valid = [override for override, fault in faults.items() if not fault]
        faults = [
            name_place(fault, override, places[override]) if override in places else fault
            for override, fault in faults.items()
            if fault
        ]
        return _override(config, valid), conflicts + faults


def _with_new_keys(
    overrides: list[str], places: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the overrides with the new names of their keys, and their places."""
    renamed, new_places = [], dict(places)
    for override in overrides:
        flag, separator, value = override.partition("=")
        key = flag.removeprefix(FLAG)
        new_override = override
        if key in moved.KEYS:
            moved.report(key, moved.KEYS[key])
            new_override = f"{FLAG}{moved.KEYS[key]}{separator}{value}"
        renamed.append(new_override)
        if override in new_places:
            new_places[new_override] = new_places.pop(override)
    return renamed, new_places


def _without_replacements(config: ConfigDict, overrides: Iterable[str]) -> list[str]:
    """Returns overrides that set to 0 what would replace a key that `overrides` set.

    So train.steps, set over a file with train.epochs, is what the run takes.
    """
    keys = {override.partition("=")[0].removeprefix(FLAG) for override in overrides}
    return [
        f"{FLAG}{key}=0"
        for key, replaced in REPLACED.items()
        if replaced in keys and key not in keys and _value(config, key)
    ]


def is_huggingface(folder: Path) -> bool:
    """Returns whether a folder's config.json was written by Hugging Face transformers."""
    try:
        config = foreign.read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    # The config.json of a run has sections.
    return isinstance(config, dict) and ("architectures" in config or "model_type" in config)


def _read_file(path: str, trust_code: bool) -> ConfigDict:
    file, argument = _find_with_argument(path)
    if file is None:
        name = path.partition(":")[0]
        names = sorted(found.stem for found in CONFIGS.glob("[!_]*.py"))
        raise ConfigError(
            f"--config={path}: no such file, and none of the package's configs"
            f"{did_you_mean(name, names)}; use a path, or one of {', '.join(names)}"
        )
    if file.suffix == ".json":
        return _read_json(file, trust_code)
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(file, trust_code)
    # A config file may name a model in its own folder. The folder comes last: its files must not
    # replace installed modules.
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec = importlib.util.spec_from_file_location("config_file", file)
        if spec is None or spec.loader is None:
            raise ConfigError(
                f"--config={path}: use a .py file with get_config(), a .yaml file, or a run's "
                "config.json"
            )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"--config={path} cannot be read: it has no function get_config()")
        config = module.get_config(argument) if argument else module.get_config()
        if config is None:
            raise ConfigError(f"--config={path}: get_config() returned None; return the config")
        return config if isinstance(config, ConfigDict) else ConfigDict(config)
    except ConfigError:
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == "configs":
            hint = "; write `from meshtrain.configs import default`"
        raise ConfigError(
            f"--config={path} cannot be read: {_describe(error, file)}{hint}"
        ) from error


def _describe(error: Exception, file: Path) -> str:
    """Returns what an exception in a config file says, with the line of the file."""
    numbers = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    line = f"line {numbers[-1]}: " if numbers else ""
    # ml_collections lists every key and its value.
    if key := re.search(r'Key "(\w+)" does not exist and cannot be added', str(error)):
        near = re.search(r'Did you mean "(\w+)"', str(error))
        return f"{line}{key[1]}: unknown key" + (f' (did you mean "{near[1]}"?)' if near else "")
    return f"{line}{type(error).__name__}: {error}"


def _find_with_argument(path: str) -> tuple[Path | None, str]:
    """Returns the file and the argument of FILE or FILE:ARGUMENT; None for a file that is missing.

    The path of a file may have colons too, so the longest path that exists is the file.
    """
    name, argument = path, ""
    while (file := _find(name)) is None and ":" in name:
        name, _, last = name.rpartition(":")
        argument = f"{last}:{argument}" if argument else last
    return file, argument


def _find(name: str) -> Path | None:
    """Returns the path of a config file.

    NAME and configs/NAME.py also mean a config of the package.
    """
    paths = [Path(os.path.expanduser(name))]
    if re.fullmatch(r"\w+", name):
        paths = [CONFIGS / f"{name}.py"]
    elif name.startswith("configs/"):
        paths.append(CONFIGS / name.removeprefix("configs/"))
    return next((path.resolve() for path in paths if path.is_file()), None)


def _read_json(file: Path, trust_code: bool) -> ConfigDict:
    try:
        raw = foreign.read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config={file} cannot be read: {error}") from error
    if not trust_code:
        _reject_foreign_code(file, raw)
    raw = moved.new_names(raw)
    return ConfigDict(_with_tuples(_with_added_keys(raw))).lock()


# Sections, and keys of others, that files of earlier versions lack. Anything else that is missing
# is a mistake.
ADDED_SECTIONS = ("context", "expert", "sync", "adapter", "monitor")
ADDED_KEYS = {
    "train": ("epochs", "batch_per_device", "kernels", "trainable"),
    "data": ("per_process",),
    "checkpoint": ("export", "export_every"),
    "adapter": ("dropout", "rslora", "experts", "init_from"),
}


# Of the data that the package builds; other builders have keys of their own.
ADDED_DATA_KEYS = (
    *("phases", "weights", "max_epochs", "heldout_path", "shuffle_documents"),
    *("fim_rate", "fim_spm_rate", "fim_tokens", "cache_gb"),
    *("field", "template", "num_workers", "index_path", "learned"),
)


def _with_added_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the sections of a file of an earlier version with the defaults of what came later."""
    defaults = default.get_config().to_dict()
    raw = dict(raw)
    for name in ADDED_SECTIONS:
        raw.setdefault(name, defaults[name])
    for name, keys in ADDED_KEYS.items():
        if isinstance(raw.get(name), dict):
            added = {key: defaults[name][key] for key in keys}
            raw[name] = {**added, **raw[name]}
    # Of data that was passed in Python, so that the command line can name other data.
    data = raw.get("data")
    if isinstance(data, dict) and data.get("build") == OWN_DATA:
        raw["data"] = {**defaults["data"], **data}
    elif isinstance(data, dict) and str(data.get("build")).startswith("meshtrain.data."):
        added = {key: defaults["data"][key] for key in ADDED_DATA_KEYS}
        raw["data"] = {**added, **data}
    model = raw.get("model")
    # The keys of the built-in model; those of another one are its own.
    if isinstance(model, dict) and model.get("build") == defaults["model"]["build"]:
        raw["model"] = {**defaults["model"], **model}
    return raw


def _read_yaml(file: Path, trust_code: bool) -> ConfigDict:
    base, places, lists = overlay_of_yaml(file)
    if not re.fullmatch(r"\w+", base):
        if not base.endswith(".py"):
            raise ConfigError(f"{file}: base={base}: use a name such as quickstart, or a .py file")
        if not trust_code:
            raise ConfigError(
                f"{file}: base={base}: is a file, which a {file.name} may not run; use the name of "
                "a config of the package, or if you trust it, add --trust_code"
            )
        base = str(file.parent / base)
    try:
        config = _read_file(base, trust_code)
    except ConfigError as error:
        raise ConfigError(*(f"{file}: base: {fault}" for fault in error.faults)) from error
    changed, faults = _override_all(config, [*places], (), places)
    for key, place in lists.items():
        value = _value(config, key)
        is_known = any(fault.startswith(place) for fault in faults)
        if not (is_known or value is None or isinstance(value, tuple)):
            faults.append(f"{place}: is a list; not of type {type(value).__name__}, like {value!r}")
    if faults:
        raise ConfigError(*faults)
    if not trust_code:
        _reject_foreign_code(file, changed.to_dict())
    return changed


def _value(config: ConfigDict, key: str) -> Any:
    """Returns the value of a key such as train.steps, None if there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping | ConfigDict) else None
    return config


def _reject_foreign_code(file: Path, raw: dict[str, Any]) -> None:
    """Raises ConfigError if a config that is data names a function outside this package."""
    own = ("meshtrain.", OWN_MODEL, OWN_DATA)
    faults = [
        f"{file}: {name}.build={section['build']}: is code outside meshtrain, which a {file.name} "
        "may not run; if you trust it, add --trust_code"
        for name, section in raw.items()
        if isinstance(section, dict) and not str(section.get("build", "meshtrain.")).startswith(own)
    ]
    if faults:
        raise ConfigError(*faults)


def _with_tuples(value: Any) -> Any:
    """Returns the value with JSON lists replaced by tuples, as configs have them."""
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _override(config: ConfigDict, overrides: list[str]) -> ConfigDict:
    """Returns a copy with the overrides applied."""
    values = flags.FlagValues()
    arguments = ["meshtrain", *(_with_literal(config, override) for override in overrides)]
    changed = copy.deepcopy(config)
    holder = config_flags.DEFINE_config_dict(
        "config", changed, flag_values=values, sys_argv=arguments
    )
    if rest := values(arguments)[1:]:
        raise flags.Error(f"unknown argument {rest[0]}")
    # raises the error of a reference that cannot be computed
    holder.value.copy_and_resolve_references()
    return holder.value


def _with_literal(config: ConfigDict, override: str) -> str:
    """Returns an override with its value as a Python literal: a,b -> ("a", "b"), and 1e3 -> 1000.

    Other overrides than those of lists and whole numbers are returned as they are.
    """
    flag, separator, value = override.partition("=")
    current = _value(config, flag.removeprefix(FLAG))
    if type(current) is int and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE]\+?\d{1,2}", value):
        number = decimal.Decimal(value)
        return f"{flag}={int(number)}" if number == int(number) else override
    if not (separator and isinstance(current, tuple)) or re.search(r"""[][(){}'"]""", value):
        return override
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if any(re.search(r"\s", entry) for entry in entries):
        return override
    return f"{flag}=({''.join(f'{_literal(entry)}, ' for entry in entries)})"


def _join_values(arguments: Iterable[str]) -> list[str]:
    """Rewrites `--config.a 1` as `--config.a=1`, so that each override is one string."""
    joined: list[str] = []
    for argument in arguments:
        if joined and not argument.startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def _fault_of(config: ConfigDict, override: str, known_flags: Iterable[str]) -> str | None:
    try:
        _override(config, [override])
        return None
    except Exception as error:
        name, _, value = override.partition("=")
        if not name.removeprefix("--no").removeprefix("--").startswith("config."):
            # An argument of another verb is unknown here, but must not be suggested for itself.
            others = [argument for argument in known_flags if argument != name]
            near = did_you_mean_flag(name, others, _keys(config.to_dict()))
            return f"{name}: unknown argument{near}"
        key = name.removeprefix("--no").removeprefix("--").removeprefix("config.")
        if key not in (known := _keys(config.to_dict())):
            return f"{name}: unknown key{did_you_mean_key(key, known)}"
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


MAX_YAML_BYTES = 1 << 20  # the parser takes a second for it
VARIABLE_PREFIX = "MESHTRAIN__"
LITERALS = {"null": "None", "~": "None", "true": "True", "false": "False"}  # of entries of lists
FLAG = "--config."

# A key, and the key that it replaces unless it is 0.
REPLACED = {"train.epochs": "train.steps", "train.batch_per_device": "train.global_batch"}
KEY_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


class Overlay(NamedTuple):
    """The base of a YAML file, and its keys: `--config.KEY=VALUE` -> where the file says so."""

    base: str
    overrides: dict[str, str]
    lists: dict[str, str]  # key -> where, of keys whose value is a list


def overrides_of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `--config.KEY=VALUE` -> name of the variable, for each that starts with PREFIX."""
    return {
        f"{FLAG}{name.removeprefix(VARIABLE_PREFIX).lower().replace('__', '.')}={value}": name
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLE_PREFIX)
    }


def overlay_of_yaml(file: Path) -> Overlay:
    """Returns what a YAML file says.

    Raises ConfigError if it cannot be read, or says something twice.
    """
    try:
        text = foreign.read_utf8(file, max_bytes=MAX_YAML_BYTES)
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has an alias (*name); write the values out")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("it has no sections such as `train:`")
        keys = [(key, _yaml_text(node), node) for key, node in _yaml_leaves(root, "")]
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


def conflicting_overrides(overrides: Iterable[str], places: Mapping[str, str]) -> list[str]:
    """Returns a line for each pair of keys in `overrides` of which one replaces the other."""
    found = {}
    for override in overrides:
        flag, _, value = override.partition("=")
        found[flag.removeprefix(FLAG)] = value, places.get(override, override)
    return [
        f"{found[key][1]} and {found[other][1]}: {key} replaces {other}; set one of them"
        for key, other in REPLACED.items()
        if key in found and other in found and found[key][0].strip("0.")
    ]


def name_place(fault: str, override: str, place: str) -> str:
    """Returns the fault of an override with its place instead of the flag."""
    return _one_line(fault.replace(override.partition("=")[0], place, 1))


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _yaml_leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yields key and value of each entry that is no section."""
    seen = set()
    for name, value in node.value:
        line = f"line {name.start_mark.line + 1}: "
        if not isinstance(name, yaml.ScalarNode) or not KEY_NAME.fullmatch(name.value):
            raise ValueError(f"{line}a key is no name such as `steps`")
        if name.value in seen:
            raise ValueError(f"{line}{prefix}{name.value} is there twice")
        seen.add(name.value)
        if isinstance(value, yaml.MappingNode):
            yield from _yaml_leaves(value, f"{prefix}{name.value}.")
            continue
        is_plain = isinstance(value, yaml.ScalarNode) and value.style is None
        if is_plain and value.value.lower() in ("", "~", "null"):
            raise ValueError(f"{line}{prefix}{name.value} has no value; write '' for an empty text")
        yield prefix + name.value, value


def _yaml_text(node: yaml.Node) -> str:
    """Returns a value as on the command line; a list as a tuple."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"line {node.start_mark.line + 1}: a list holds values, no keys")
    return "(" + "".join(f"{_yaml_literal(one)}, " for one in node.value) + ")"


def _yaml_literal(node: yaml.Node) -> str:
    """Returns an entry of a list as a Python literal; one with quotes is a string."""
    text = _yaml_text(node)
    if getattr(node, "style", None) in ("'", '"'):
        return repr(text)
    return _literal(text)


def _literal(text: str) -> str:
    """Returns a text as a Python literal: as it is if it is one, else as a string."""
    try:
        ast.literal_eval(text := LITERALS.get(text.lower(), text))
        return text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return repr(text)
