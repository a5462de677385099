"""Names that users write and that have moved: the one table of old names, which are still read.

Keys of a config, functions that a key `build` names, and documented Python modules. Each old name
that a user gives is reported once, in one line.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

# Old key of a config -> new key, in the same section.
KEYS = {
    "checkpoint.keep": "checkpoint.keep_last",
    "divergence.spike": "divergence.spike_sigmas",
    "sync.block": "sync.block_size",
    "sync.exact": "sync.uncompressed",
    "sync.wire": "sync.dtype",
    "train.only": "train.trainable",
}

# Old "package.module:function" of a key `build` -> new one.
FUNCTIONS = {
    "meshtrain.optim:adamw": "meshtrain.optim.base:adamw",
    "meshtrain.optimizers:adafactor": "meshtrain.optim.others:adafactor",
    "meshtrain.optimizers:lion": "meshtrain.optim.others:lion",
    "meshtrain.optimizers:muon": "meshtrain.optim.muon:muon",
    "meshtrain.optimizers:schedule_free_adamw": "meshtrain.optim.others:schedule_free_adamw",
}

# Old module of the documented Python API -> new one.
MODULES = {
    "meshtrain.analysis.audit.audit": "meshtrain.tools.audit.audit",
    "meshtrain.analysis.drawing": "meshtrain.tools.schedule_drawing",
    "meshtrain.cluster.launch": "meshtrain.supervise.launch",
    "meshtrain.cluster.restart_policy": "meshtrain.supervise.restart_policy",
    "meshtrain.config.files": "meshtrain.config.load",
    "meshtrain.models.own": "meshtrain.models.from_modules",
    "meshtrain.parallel.collectives": "meshtrain.tools.collectives",
    "meshtrain.parallel.pipeline.schedules": "meshtrain.schedules",
    "meshtrain.verify.verify": "meshtrain.tools.verify.verify",
}

_reported: set[str] = set()


def report(old: str, new: str) -> None:
    """Prints once that an old name was given."""
    if old not in _reported:
        _reported.add(old)
        print(f"{old}: is called {new} now; the old name is still read", file=sys.stderr)


def new_names(config: Mapping[str, Any], *, is_reported: bool = True) -> dict[str, Any]:
    """Returns a config, as sections of keys, with the new names of its keys and functions.

    A key that is given under both names keeps the value of the new one. What is no section stays as
    it is.
    """
    renamed: dict[str, Any] = {}
    for name, section in config.items():
        if not isinstance(section, Mapping):
            renamed[name] = section
            continue
        keys: dict[str, Any] = {}
        for key, value in section.items():
            old, new = f"{name}.{key}", KEYS.get(f"{name}.{key}")
            if new is None:
                keys[key] = value
                continue
            if is_reported:
                report(old, new)
            keys.setdefault(new.partition(".")[2], value)
        build = keys.get("build")
        if isinstance(build, str) and build in FUNCTIONS:
            if is_reported:
                report(build, FUNCTIONS[build])
            keys["build"] = FUNCTIONS[build]
        renamed[name] = keys
    return renamed


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the new module for the name of an old one."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_package = any(old.startswith(f"{name}.") for old in MODULES)
        if name in MODULES:
            return importlib.machinery.ModuleSpec(name, self)
        # A folder that is gone, such as meshtrain.analysis, on the way to an old module.
        if is_package and importlib.machinery.PathFinder.find_spec(name, path) is None:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in MODULES:
            report(old, MODULES[old])
            sys.modules[old] = importlib.import_module(MODULES[old])


def install() -> None:
    """Lets `import` find old modules by their names in MODULES."""
    # First, since the folder of an old package may be found under its new name.
    sys.meta_path.insert(0, _Finder())
