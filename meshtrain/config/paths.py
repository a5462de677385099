"""Paths in a config, made absolute."""

import os
from typing import Any


def absolute(key: str, value: Any) -> Any:
    """Returns a path, or the paths of a mixture, so that it can be used from any folder."""
    if key == "mixture":
        return tuple(
            (absolute("path", one[0]), *one[1:]) if isinstance(one, tuple) and one else one
            for one in value
        )
    is_path = key.endswith("path") and isinstance(value, str) and value and "://" not in value
    return os.path.abspath(value) if is_path else value
