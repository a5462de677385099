"""Paths in a config, made absolute."""

import os
from typing import Any


def absolute(key: str, value: Any) -> Any:
    """Returns a path, or the paths of a mixture, so that it can be used from any folder."""
    if key == "mixture":
        return tuple(map(_absolute_entry, value))
    is_path = key.endswith("path") and isinstance(value, str) and value and "://" not in value
    return os.path.abspath(value) if is_path else value


def _absolute_entry(entry: Any) -> Any:
    """Returns an entry (PATH, WEIGHT) of a mixture; anything else as it is."""
    if not isinstance(entry, tuple) or not entry:
        return entry
    path, *weight = entry
    return (absolute("path", path), *weight)
