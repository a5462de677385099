"""Compares the run that wrote a checkpoint with the run that resumes from it: what may differ."""

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import moved
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config.schema import OWN_DATA, OWN_MODEL
from meshtrain.configs import default
from meshtrain.errors import ConfigError

IDENTITY = {"data": "other tokens", "tokenizer": "another tokenizer"}  # keys of Manifest.identity

HELDOUT = ("data.heldout", "data.heldout_path")

# What the model computes, and what it is trained on; all other keys may change, and are reported.
FIXED = ("model.*", "adapter.*", "data.build", "data.separator", *HELDOUT, *IDENTITY)
ALLOW = "checkpoint.allow_change"
FREE = ("model.attention_impl", "model.loss_chunk_mib")  # how it is computed


def changes(saved: Manifest, config: Mapping[str, Any]) -> dict[str, list]:
    """Returns the keys of the config that differ from those of the checkpoint: key -> [then, now].

    A key that a config of another version lacks has its default value, but `train.kernels`: earlier
    versions had plain ones alone. The request to allow changes
    is none, and so are keys of `model` where the caller passed one, and those of `data` where the
    caller passes or passed data and the other config names it.
    """
    defaults = _flatten(default.get_config().copy_and_resolve_references().to_dict())
    saved_config = moved.new_names(saved.config, is_reported=False)
    then = {**defaults, "train.kernels": "plain", **_flatten(saved_config)}
    now = {**defaults, **_flatten(config)}
    is_own_model = OWN_MODEL in (then.get("model.build"), now.get("model.build"))
    was_own_data = then.get("data.build") == OWN_DATA
    is_own_data = now.get("data.build") == OWN_DATA
    differing = {}
    for key in {**then, **now}:
        if is_own_model and key.startswith("model."):
            continue
        # Earlier versions recorded what the config named, although it was not read.
        if is_own_data and not was_own_data and key.startswith("data."):
            continue
        if was_own_data and not is_own_data and key.startswith("data.") and key != "data.build":
            continue
        if key != ALLOW and then.get(key) != now.get(key):
            differing[key] = [then.get(key), now.get(key)]
    return differing


def identity_changes(saved: Manifest, identity: Mapping[str, str]) -> dict[str, list]:
    """Returns the digests that differ from those of the checkpoint; an unknown one does not."""
    differing = {}
    for key, now in identity.items():
        then = saved.identity.get(key)
        if then and now and then != now:
            differing[key] = [then, now]
    return differing


def check(
    saved: Manifest,
    config: Mapping[str, Any],
    identity: Mapping[str, str],
    *,
    source: Path,
    only: Sequence[str] = ("*",),
) -> dict[str, list]:
    """Returns `changes` and `identity_changes` for keys that match a pattern in `only`.

    `source` is the folder of the checkpoint. Raises ConfigError if a key in FIXED has changed,
    unless checkpoint.allow_change names it.
    """
    differing = {key: pair for key, pair in changes(saved, config).items() if _matches(key, only)}
    differing |= identity_changes(saved, identity)
    allowed = config["checkpoint"].get("allow_change", "")
    faults = []
    for key, (then, now) in differing.items():
        if _matches(key, FIXED) and not (_matches(key, FREE) or is_allowed(key, allowed)):
            faults.append(_fault(key, then, now, source))
    if faults:
        raise ConfigError(*faults)
    return differing


def is_allowed(key: str, allow_change: str) -> bool:
    """Returns whether `checkpoint.allow_change` names a key."""
    return _matches(key, allow_change.split(","))


def lines(differing: Mapping[str, list]) -> list[str]:
    """Returns a line for each change."""
    return [f"changed     {key}: {then!r} -> {now!r}" for key, (then, now) in differing.items()]


def _fault(key: str, then: Any, now: Any, source: Path) -> str:
    if key in IDENTITY:
        fault = (
            f"{key}: {IDENTITY[key]} than {source} has (digest {now[:12]} instead of {then[:12]})"
        )
        remedy = f"use the {key} of that run"
    else:
        fault = f"{key}={now!r}: {source} was trained with {then!r}"
        remedy = "restore the value"
    return (
        f"{fault}; {remedy}, start a new run with --config.checkpoint.init_from, or allow it with "
        f"--config.{ALLOW}={key}"
    )


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern.strip()) for pattern in patterns)


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by "section.key", as JSON has them; `rules` is one value."""
    flat: dict[str, Any] = {}
    for name, section in json.loads(json.dumps(dict(config), default=str)).items():
        if isinstance(section, dict):
            flat |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            flat[name] = section
    return flat
