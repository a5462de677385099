"""Runs a function on another mesh than the one that it holds."""

import functools
import types
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshtrain.tools.verify import causes


def on_mesh(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Returns a copy of a function that holds `mesh` in place of other meshes with its axes.

    A function holds what its closure and the globals that it names hold, and the functions among
    them. `jax.shard_map` without a mesh, too, keeps the ambient mesh of its first call.
    """
    return _copied(function, mesh, {})


def _copied(value: Any, mesh: Mesh, copies: dict[int, Any]) -> Any:
    """Returns a value with the meshes in it replaced; `copies` are those of functions, by id."""
    if isinstance(value, Mesh | AbstractMesh) and set(value.axis_names) == set(mesh.axis_names):
        return mesh
    if isinstance(value, NamedSharding) and set(value.mesh.axis_names) == set(mesh.axis_names):
        return NamedSharding(mesh, value.spec)
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, functools.partial):
        arguments = [_copied(one, mesh, copies) for one in value.args]
        options = {name: _copied(one, mesh, copies) for name, one in value.keywords.items()}
        return functools.partial(_copied(value.func, mesh, copies), *arguments, **options)
    if isinstance(value, types.MethodType):
        return types.MethodType(_copied(value.__func__, mesh, copies), value.__self__)
    return _copied_function(value, mesh, copies) if _is_function(value) else value


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _copied_function(function: Any, mesh: Mesh, copies: dict[int, Any]) -> Any:
    code, names = function.__code__, function.__globals__
    is_own = not causes.is_library(code.co_filename)
    if not is_own and function.__closure__ is None:
        return function
    cells = tuple(types.CellType() for _ in code.co_freevars)
    if is_own:
        names = dict(names)
    copy = types.FunctionType(code, names, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copies[id(function)] = copy  # before its parts, of which one may be the function itself
    for cell, held in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(held.cell_contents, mesh, copies)
        except ValueError:  # a variable that has no value yet
            pass
    if is_own:
        for name in _names_in(code) & names.keys():
            names[name] = _copied(names[name], mesh, copies)
    return copy


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names of globals in a function, and in the functions that it defines."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))
