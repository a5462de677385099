"""Tasks of lm-evaluation-harness: those that it comes with, and a user's own in YAML files.

A task file may name code: `!function`, a class, a script that loads data, a metric that is
downloaded. Such a file is loaded only with --trust_code. The tasks that come with the harness are
code that the user has installed, as the harness itself. The templates of all tasks run in jinja2's
sandbox.
"""

import contextlib
import fnmatch
import functools
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshtrain import errors
from meshtrain.errors import ConfigError, did_you_mean

# Builders of `datasets` that read data and nothing else; others run code that is in the data.
DATA_FORMATS = ("json", "csv", "parquet", "text", "arrow", "xml")
REMEDY = "read the code, then add --trust_code"


class _File(NamedTuple):
    """A task file with what it includes."""

    path: Path
    config: dict[str, Any]
    functions: list[str]  # what `!function` names, with the file if it is not the harness's own


def load(
    names: Sequence[str],
    include_paths: Sequence[Path],
    *,
    num_fewshot: int | None,
    trust_code: bool,
) -> dict[str, Any]:
    """Returns tasks and groups as `lm_eval.evaluator.evaluate` expects them.

    `names` are those of tasks, groups and tags, patterns of them, or YAML files. Raises ConfigError
    for names that are unknown, tasks that cannot be loaded, and code without `trust_code`.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # each task would show several bars
    errors.import_optional("lm_eval", "evals")
    import datasets
    import lm_eval.api.model
    import lm_eval.api.task
    import tqdm
    from lm_eval.tasks import TaskManager

    # tqdm reads the variable when it is imported, and another package may have done so before.
    for module in (lm_eval.api.model, lm_eval.api.task):
        vars(module)["tqdm"] = functools.partial(tqdm.tqdm, disable=True)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else a line for each default of a task
    datasets.disable_progress_bars()
    for path in include_paths:
        if not path.is_dir():
            raise ConfigError(f"--include_path={path}: is no folder; give one with YAML files")
    own_folders = [str(path) for path in include_paths]
    manager = TaskManager(include_path=own_folders, include_defaults=False)
    if missing := _missing(names, manager.task_index):
        # The harness has 15,000 files, which it takes many seconds to read.
        folders = _harness_folders()
        known = {*folders, *manager.task_index}
        _check_names(names, known, include_paths)
        found = {folder for name in missing for folder in _folders_with(name, folders)}
        manager = TaskManager(include_path=[*sorted(found), *own_folders], include_defaults=False)
        if _missing(names, manager.task_index):  # a group of tasks in further folders
            manager = TaskManager(include_path=own_folders)
    _check_names(names, manager.task_index, include_paths)
    chosen = _chosen(names, manager.task_index)
    if not trust_code:
        faults = []
        for file in _files_of(chosen, manager.task_index).values():
            faults += _code_faults(file)
        if faults:
            raise ConfigError(*dict.fromkeys(faults))
    with sandbox(trust_code=trust_code):
        loaded = _load(manager, chosen)
    for task in loaded["tasks"].values():
        _set_fewshot(task, num_fewshot)
    faults = []
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not trust_code:
            faults.append(f"--tasks={name}: runs code that the model writes; add --trust_code")
        if getattr(task, "MULTIMODAL", False):
            faults.append(f"--tasks={name}: has images or sounds, and the model reads text")
    if faults:
        raise ConfigError(*faults)
    return loaded


def _load(manager: Any, names: Sequence[str]) -> dict[str, Any]:
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            found = manager.load([name])
        except Exception as error:  # whatever the harness and `datasets` raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--tasks={name}: cannot be loaded: {reason}") from error
        for key, values in found.items():
            loaded[key] |= values
    return loaded


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Sets the number of examples in front of each question, as the harness does."""
    own = task.get_config("num_fewshot")
    if num_fewshot is None:
        if own is None:
            task.set_config(key="num_fewshot", value=0)
    elif own != 0:  # 0 in the file: the task has none
        task.set_config(key="num_fewshot", value=num_fewshot)


@contextlib.contextmanager
def sandbox(*, trust_code: bool) -> Iterator[None]:
    """Renders the templates of tasks in a sandbox; with `trust_code` as the harness does."""
    from jinja2 import sandbox as jinja_sandbox
    from lm_eval import utils

    own = utils.env
    if trust_code:
        yield
        return
    safe = jinja_sandbox.ImmutableSandboxedEnvironment(
        loader=own.loader,
        undefined=own.undefined,
        keep_trailing_newline=own.keep_trailing_newline,
    )
    safe.filters.update(own.filters)
    utils.env = safe
    try:
        yield
    finally:
        utils.env = own


# ---- names ----


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).expanduser().is_file()


def _missing(names: Sequence[str], index: Mapping[str, Any]) -> list[str]:
    """Returns the names that the index does not have, of those given and of what groups name."""
    pending = list(names)
    seen: set[str] = set()
    missing = []
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in index:
            pending += _member_names(index[name])
        elif _is_file(name):
            pending += _members(_read(Path(name).expanduser()).config)
        elif not fnmatch.filter(index, name):
            missing.append(name)
    return missing


# Where a file of the harness may name a task, a group or a tag; also where it names something else.
KEY_LINE = re.compile(rb"""^["']?(?:task|group|tag)["']?[ ]*:(.*)$""", re.MULTILINE)
LIST_ITEM = re.compile(rb"^[ ]*-[ ]+(.*)$", re.MULTILINE)
NAME = re.compile(rb"""[^\s"',:#\[\]]+""")


def _harness_folders() -> dict[str, set[str]]:
    """Returns the folders of the harness whose files may define a task, a group or a tag, by name.

    The files are searched, not parsed, which would take many times as long.
    """
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    defined: dict[str, set[str]] = {}
    listed: dict[str, set[str]] = {}
    for folder in sorted(root.iterdir()):
        if not folder.is_dir():
            continue
        for parent, _, files in os.walk(folder):
            for file in files:
                # Included files often have no extension.
                if os.path.splitext(file)[1] not in ("", ".yaml", ".yml"):
                    continue
                content = Path(parent, file).read_bytes()
                for pattern, found in ((KEY_LINE, defined), (LIST_ITEM, listed)):
                    for line in pattern.findall(content):
                        for name in NAME.findall(line):
                            names = found.setdefault(name.decode(errors="replace"), set())
                            names.add(str(folder))
    return listed | defined


def _folders_with(name: str, folders: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    for match in [name] if name in folders else fnmatch.filter(folders, name):
        found |= folders[match]
    return found


def _check_names(
    names: Sequence[str], known: Collection[str], include_paths: Sequence[Path]
) -> None:
    """Raises ConfigError for names that are neither known, nor patterns of them, nor files."""
    faults = []
    for name in names:
        if name in known or _is_file(name) or fnmatch.filter(known, name):
            continue
        # The harness skips files that it cannot read.
        unreadable = _unreadable(name, include_paths)
        fault = f"--tasks={name}: is no task{did_you_mean(name, list(known))}"
        fault += "; use one of lm-evaluation-harness, or --include_path=DIR"
        faults += unreadable or [fault]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _chosen(names: Sequence[str], index: Mapping[str, Any]) -> list[str]:
    """Returns the names without patterns."""
    chosen = []
    for name in names:
        chosen += fnmatch.filter(sorted(index), name) or [name]
    return list(dict.fromkeys(chosen))


def _unreadable(name: str, include_paths: Sequence[Path]) -> list[str]:
    """Returns the faults of the files that cannot be read, and that may define the task `name`."""
    faults = []
    for folder in include_paths:
        for path in sorted(folder.glob("**/*.yaml")):
            try:
                _read(path)
            except ConfigError as error:
                if _may_define(path, name):
                    faults += error.faults
    return faults


def _may_define(path: Path, name: str) -> bool:
    """Returns whether a file has the name of a task, or a line that may define it."""
    found = {path.stem}
    with contextlib.suppress(OSError):
        for line in KEY_LINE.findall(path.read_bytes()):
            found.update(one.decode(errors="replace") for one in NAME.findall(line))
    return bool(fnmatch.filter(found, name))


def _member_names(entry: Any) -> list[str]:
    """Returns the names of what a group or a tag consists of."""
    if entry.kind.name == "TAG":
        return [*entry.tags]
    return _members(entry.cfg or {}) if entry.kind.name == "GROUP" else []


def _members(config: Mapping[str, Any]) -> list[str]:
    """Returns the tasks and groups that a group names and does not define itself."""
    names = []
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, str):
            names.append(member)
        elif isinstance(member, dict) and isinstance(member.get("task"), list):
            names += _members(member)
        elif isinstance(member, dict) and not _defines_task(member):
            names += [member[key] for key in ("task", "group") if isinstance(member.get(key), str)]
    return names


def _defines_task(member: Mapping[str, Any]) -> bool:
    return "dataset_path" in member or "custom_dataset" in member


# ---- code ----


def _files_of(names: Sequence[str], index: Mapping[str, Any]) -> dict[Path, _File]:
    """Returns the files of tasks, of the groups among them, and of what those consist of."""
    files: dict[Path, _File] = {}
    pending = list(names)
    seen = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        entry = index.get(name)
        if entry is not None and entry.yaml_path is None:
            pending += [*entry.tags]
            continue
        if entry is None and not _is_file(name):
            continue  # a task that a group defines in its own file
        path = Path(name).expanduser() if entry is None else Path(entry.yaml_path)
        file = _read(path)
        files[file.path] = file
        pending += _members(file.config)
    return files


def _read(path: Path) -> _File:
    """Returns a task file with what it includes; functions are read as texts."""
    functions: list[str] = []
    config = _read_config(path.resolve(), functions, ())
    return _File(path.resolve(), config, functions)


def _read_config(path: Path, functions: list[str], included_by: Sequence[Path]) -> dict[str, Any]:
    if path in included_by:
        raise ConfigError(f"{path}: includes itself")

    class Loader(yaml.SafeLoader):
        """Reads `!function` as a text."""

    def function(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        text = str(getattr(node, "value", ""))
        if not _is_of_harness(path):
            functions.append(f"{path}: line {node.start_mark.line + 1}: !{suffix} {text}")
        return text

    # Tags of Python objects, which some loaders of YAML build, are a fault.
    Loader.add_multi_constructor("!", function)
    try:
        with open(path, "rb") as file:
            config = Loader(file).get_single_data()
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {reason}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}, not a task")
    included = config.pop("include", None) or []
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        other = (path.parent / str(name)).resolve()
        merged |= _read_config(other, functions, (*included_by, path))
    return merged | config


def _is_of_harness(path: Path) -> bool:
    import lm_eval.tasks

    return path.is_relative_to(Path(lm_eval.tasks.__file__).resolve().parent)


def _code_faults(file: _File) -> list[str]:
    """Returns a fault for each way in which a file would run code."""
    faults = [f"{one}: is code; {REMEDY}" for one in file.functions]
    for config in _configs(file.config):
        faults += [f"{file.path}: {fault}; {REMEDY}" for fault in _metric_faults(config)]
        if not _is_of_harness(file.path):
            faults += [f"{file.path}: {fault}; {REMEDY}" for fault in _own_faults(config)]
    return faults


def _configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the config of a file, and those of the tasks that a group in it defines."""
    yield config
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, dict):
            yield from _configs(member)


def _metric_faults(config: Mapping[str, Any]) -> list[str]:
    """Returns a fault for each metric that the harness would download as code."""
    import lm_eval.api.metrics  # noqa: F401 - fills the registry
    from lm_eval.api.registry import metric_registry

    if "process_results" in config:  # its metrics are functions of the file
        return []
    faults = []
    metrics = config.get("metric_list")
    for entry in metrics if isinstance(metrics, list) else ():
        name = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        if entry.get("hf_evaluate") is True or name not in metric_registry:
            faults.append(
                f"metric {name} is none of the harness, and is loaded as code of the library "
                f"evaluate"
            )
    return faults


def _own_faults(config: Mapping[str, Any]) -> list[str]:
    """Returns a fault for each way in which a user's task would run code without `!function`."""
    from datasets import packaged_modules

    faults = []
    if "class" in config:
        faults.append(f"class {config['class']} is code")
    prompt = str(config.get("use_prompt") or "")
    if prompt.startswith("promptsource:") or ".yaml" in prompt.partition(":")[0]:
        faults.append(f"use_prompt {prompt} loads other files")
    path = str(config.get("dataset_path") or "")
    folder = Path(path).expanduser()
    is_script = path.endswith(".py") or (folder / f"{folder.name}.py").is_file()
    if is_script:
        faults.append(f"dataset_path {path} is a script")
    builder_folder = Path(packaged_modules.__file__).parent / path
    is_builder = path.isidentifier() and builder_folder.is_dir()
    if is_builder and path not in DATA_FORMATS:
        faults.append(f"dataset_path {path} is none of {', '.join(DATA_FORMATS)}")
    options = config.get("dataset_kwargs")
    if isinstance(options, dict) and options.get("trust_remote_code"):
        faults.append("dataset_kwargs has trust_remote_code")
    return faults
