"""Matches the keys of a section with parameters of the function or dataclass that reads them."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshtrain.config.suggest import did_you_mean_key

MAY_BE_INF = ("optim.clip_norm", "divergence.spike_sigmas")
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

    Faults are unknown and missing keys and values of the wrong type. `given` are parameters that
    the caller passes later; `known` are further keys of the section, to suggest for a misspelt one.
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
    own = target.__module__.partition(".")[0] == "meshtrain"
    faults += [
        fault
        for key, value in values.items()
        for fault in number_faults(f"{section}.{key}", value, own)
    ]
    faults += [f"{section}.{key}: missing" for key in required if key not in (*values, *given)]
    keys = [f"{section}.{name}" for name in {*parameters} - {*given} | {*known}]
    unknown = [key for key in values if key not in parameters and not takes_all]
    if len(unknown) == len(values) > 3:
        name = getattr(target, "__name__", target)
        return target, [f"{section}.build: {name} takes none of the keys of section {section}"]
    for key in unknown:
        name = f"{section}.{key}"
        faults.append(f"{name}: unknown key{did_you_mean_key(name, keys)}")
    return functools.partial(target, **values), faults


def number_faults(name: str, value: Any, own: bool = True) -> list[str]:
    """Returns the faults of the numbers in a value: NaN, and integers that are too large.

    `own`: whether the value is read by meshtrain, whose steps, sizes and positions are int32 and
    whose only numbers that may be inf are in MAY_BE_INF; other programs may use 64 bits.
    """
    if isinstance(value, (tuple, list)):
        return [fault for entry in value for fault in number_faults(name, entry, own)]
    if isinstance(value, float):
        may_be_inf = not own or (name in MAY_BE_INF and value > 0)
        if math.isnan(value) or (math.isinf(value) and not may_be_inf):
            return [f"{name}={value}: use a finite number"]
    if isinstance(value, int):
        bits = 63 if not own or name.endswith("seed") else 31
        if not -(2**bits) <= value < 2**bits:
            return [f"{name}={_short(value)}: use a number below 2^{bits}"]
    return []


def flag_faults(name: str, value: Any) -> list[str]:
    """Returns the faults of the number that a flag is set to; inf is left to the verb."""
    return [] if value == math.inf else number_faults(f"--{name}", value)


def _short(value: int) -> str:
    """Returns an integer as text; one of many digits as a power of two."""
    if abs(value) < 10**40:
        return str(value)
    sign = "-" if value < 0 else ""
    return f"{sign}2^{value.bit_length() - 1}..."


def has_type(value: Any, annotation: Any) -> bool:
    """Returns whether a value fits a parameter's annotation.

    An int fits float, a bool fits neither.
    """
    if isinstance(value, bool) and annotation in (int, float):
        return False
    return isinstance(value, TYPES.get(annotation, object))


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and parameter.kind not in variadic
