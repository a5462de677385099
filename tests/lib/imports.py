"""The imports of the package, read from its source: nothing is imported or run."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.lib.paths import ROOT

FILES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "meshtrain").rglob("*.py")}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(file: str) -> str:
    """meshtrain/data/loader.py -> data.loader; the package itself is "." """
    parts = Path(file).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."


MODULES = {module_of(file): file for file in FILES}


def names_in(node: ast.stmt) -> Iterator[str]:
    """Yields the dotted names that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import of {node.module}"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            is_module = name.removeprefix("meshtrain.") in MODULES
            yield name if is_module else node.module


def imported_names(file: str) -> set[str]:
    """Returns every dotted name that a file imports, at the top or within a function."""
    return {name for node in ast.walk(parsed(FILES[file])) for name in names_in(node)}


def own_imports(file: str, *, in_functions: bool | None = None) -> set[str]:
    """Returns the modules of the package that a file imports, such as data.loader.

    With `in_functions`, only those that are imported within a function, or only those that are not.
    """
    at_top = {id(node) for node in parsed(FILES[file]).body}
    modules = set()
    for node in ast.walk(parsed(FILES[file])):
        if in_functions is not None and in_functions == (id(node) in at_top):
            continue
        for name in names_in(node):
            if name.startswith("meshtrain."):
                modules.add(name.removeprefix("meshtrain."))
    return modules - {module_of(file)}


def longest_chain() -> list[str]:
    """Returns the longest chain of modules of which each imports the next, within functions too."""
    imports = {module: own_imports(file) for module, file in MODULES.items() if module != "."}

    @functools.cache
    def chain_from(module: str) -> list[str]:
        chains = [chain_from(imported) for imported in sorted(imports.get(module, ()))]
        return [module, *max(chains, key=len, default=[])]

    return max(map(chain_from, imports), key=len)


def folder_of(module: str) -> str:
    """data.prepare.inputs -> data; a module in the package itself, such as train, is its own.

    The folders of tools/ are told apart: tools.plan.
    """
    parts = module.split(".")
    if parts[0] == "tools" and len(parts) > 2:
        return ".".join(parts[:2])
    return parts[0]


def mutual_folders() -> list[tuple[str, str]]:
    """Returns the pairs of folders that import each other, within functions too."""
    pairs = set()
    for module, file in MODULES.items():
        for imported in own_imports(file):
            pairs.add((folder_of(module), folder_of(imported)))
    return sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)
