"""Modules of the package that are loaded when their names are first used.

After `import meshtrain`, which loads none of them, `meshtrain.ops.embedding.lookup` is found.
"""

import functools
import importlib
import sys
from types import ModuleType


def load_module(package: str, name: str) -> ModuleType:
    """Returns the module of a package with this name; raises AttributeError if there is none."""
    # Python itself asks for names such as __path__, and __main__ is a program.
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def load_modules_of(package: str) -> None:
    """Lets a package, whose `__init__` calls this, load its modules as attributes."""
    # Not a function `__getattr__` there: a type checker would accept any name of the package.
    vars(sys.modules[package])["__getattr__"] = functools.partial(load_module, package)
