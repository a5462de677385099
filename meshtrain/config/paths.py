"""Paths in a config: with the home folder for ~, and made absolute."""

import os
from collections.abc import Callable, Mapping
from typing import Any


def expand_home(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a config with the home folder for the ~ that a path begins with."""
    return _with_changed_paths(raw, os.path.expanduser)


def absolute(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a config with paths that can be used from any folder."""
    return _with_changed_paths(raw, os.path.abspath)


def of_data(options: Mapping[str, Any]) -> list[str]:
    """Returns all paths and URLs that a section `data` names."""
    found: list[str] = []

    def collect(path: str) -> str:
        found.append(path)
        return path

    for key, value in options.items():
        _changed(key, _as_tuples(value), collect)
    return found


def _as_tuples(value: Any) -> Any:
    """Returns lists, which a config in JSON has, as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _with_changed_paths(raw: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Returns the sections with `change(path)` for the paths of data, checkpoints and tasks."""

    def change_local(path: str) -> str:
        return path if "://" in path else change(path)

    changed = dict(raw)
    for name in ("data", "checkpoint", "adapter", "eval"):
        section = raw.get(name)
        if isinstance(section, Mapping):
            changed[name] = {
                key: _changed(key, value, change_local) for key, value in section.items()
            }
    return changed


def _changed(key: str, value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value after the change if it is a path, or the paths of mixtures."""
    if key == "mixture" and isinstance(value, tuple):
        return tuple(_changed_entry(entry, change) for entry in value)
    if key == "phases" and isinstance(value, tuple):
        return tuple(_changed_phase(phase, change) for phase in value)
    is_path = key == "init_from" or key.endswith("path")
    if is_path and isinstance(value, str) and value:
        return change(value)
    return value


def _changed_entry(entry: Any, change: Callable[[str], str]) -> Any:
    """Returns an entry (PATH, WEIGHT) of a mixture; anything else as it is."""
    if not isinstance(entry, tuple) or not entry:
        return entry
    path, *weight = entry
    return (_changed("path", path, change), *weight)


def _changed_phase(phase: Any, change: Callable[[str], str]) -> Any:
    """Returns an entry (LENGTH, MIXTURE) of phases; anything else as it is."""
    if not isinstance(phase, tuple) or len(phase) != 2:
        return phase
    length, parts = phase
    return length, _changed("path" if isinstance(parts, str) else "mixture", parts, change)
