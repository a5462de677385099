"""Settings that a benchmark compares: texts such as "train.remat=full train.unroll=1"."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError


def apply(config: Any, text: str, *, num_devices: int = 1) -> Any:
    """Returns a config with these settings. Raises ConfigError for an unknown key or value."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config.to_dict()), encoding="utf-8")
        changed = load_config(str(file), overrides(text))
    parse(changed, num_devices=num_devices)
    return changed


def overrides(text: str) -> list[str]:
    """Returns the settings as arguments of a command line."""
    return [f"--config.{setting}" for setting in text.split()]


def apply_each(config: Any, texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the configs by text, and why the others are skipped, by text.

    A version that does not know a key or value still compares the others.
    """
    known, skipped = {}, {}
    for text in texts:
        try:
            known[text] = apply(config, text)
        except ConfigError as error:
            skipped[text] = " ".join(str(error).split())
    return known, skipped
