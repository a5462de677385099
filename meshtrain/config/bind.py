"""Matches the keys of a section with the parameters of the function or dataclass that reads them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshtrain.errors import did_you_mean

TYPES = {float: (float, int), int: int, bool: bool, str: str, tuple: (tuple, list)}


def bind(
    section: str,
    values: Mapping[str, Any],
    target: Callable,
    *,
    given: Iterable[str] = (),
    known: Iterable[str] = (),
) -> tuple[Callable, list[str]]:
    """Returns `target` with the values as keyword arguments, and the faults: a line for each.

    Faults are unknown and missing keys and values of the wrong type. `given` are parameters that the
    caller passes later; `known` are further keys of the section, to suggest for a misspelt one.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (ValueError, TypeError):  # of some builtins
        return target, [
            f"{section}.build: {target!r} does not say which keys it takes; use another"
        ]
    required = [name for name, p in parameters.items() if _is_required(p)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    faults = [
        f"{section}.{key}={value!r}: not of type {parameters[key].annotation.__name__}"
        for key, value in values.items()
        if key in parameters and not has_type(value, parameters[key].annotation)
    ]
    faults += [f"{section}.{key}: missing" for key in required if key not in (*values, *given)]
    names = {*parameters} - {*given} | {*known}
    unknown = [key for key in values if key not in parameters and not takes_all]
    if len(unknown) == len(values) > 3:
        return target, [f"{section}.build: the function takes none of the keys of this section"]
    faults += [f"{section}.{key}: unknown key{did_you_mean(key, names)}" for key in unknown]
    return functools.partial(target, **values), faults


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value fits a parameter's annotation; an int fits float, a bool fits neither."""
    if isinstance(value, bool) and annotation in (int, float):
        return False
    return isinstance(value, TYPES.get(annotation, object))


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and parameter.kind not in variadic
