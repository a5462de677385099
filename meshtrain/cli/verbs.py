"""The verbs of `meshtrain`: each is one module of this folder, which ends with its `VERB`."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

# In the order in which `meshtrain help` lists them.
NAMES = (
    "train",
    "launch",
    "init",
    "config",
    "info",
    "prepare",
    "convert",
    "generate",
    "evaluate",
    "verify",
    "plan",
    "audit",
    "profile",
    "report",
    "schedule",
    "checkpoint",
    "completion",
)


@dataclass(frozen=True)
class Verb:
    """One verb of the command.

    `run` returns the exit code. It gets the flags, and the `Config` of a verb that reads a config
    or a run. Its module imports jax only there, since jax takes seconds to load.
    """

    summary: str
    help: str  # what --help prints
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., int]
    # "config": --config=FILE with its overrides; "run": --workdir=DIR of a run
    reads: Literal["flags", "config", "run"] = "flags"
    config_is_optional: bool = False  # without --config the verb gets None
    # The verb sets the mesh and the batch itself, so that those of the config need not fit the
    # devices.
    ignores_mesh: bool = False
    # Whether a verb that reads a config uses devices, by its flags; without them jax is not loaded.
    needs_devices: Callable[[argparse.Namespace], bool] = lambda args: True
    reads_data: bool = False  # the data must exist before jax is loaded
    # Checks the flags and changes the config, a ConfigDict, before it is checked and jax is loaded.
    prepare: Callable[[argparse.Namespace, Any], None] | None = None
    forwards: bool = False  # accepts the arguments of another verb after --


def load(name: str) -> Verb:
    """Returns the verb of this name, which must be in NAMES."""
    return importlib.import_module(f"meshtrain.cli.{name}").VERB
