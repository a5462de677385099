"""Finds the line of a model's code that makes one device disagree with itself.

By the jaxpr of its loss: which equation leaves float64, which one differs between two traces, and
which one is the first whose result for a row depends on other rows, or on the row's number.
"""

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np

TOLERANCE = 1e-8  # relative to the largest value of an intermediate result

# Frames of these are not the user's code.
LIBRARIES = re.compile(r"/site-packages/(jax|jaxlib|flax|optax|numpy|chex|equinox|haiku)/")
FOLDERS = (f"{Path(__file__).parents[2]}/", f"{sysconfig.get_paths()['stdlib']}/")

# What jax adds to the names of scopes: "transpose(jvp(layer 0))" is that of "layer 0".
TRANSFORMS = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\(|\)")


# ---- lines of the user's code ----


def place(equation: Any, outer: str = "") -> str:
    """Returns where the user's code made an equation: "model.py:12 (Block.__call__)".

    `outer` is the place of the equation that calls this one, for code of libraries that jax has
    traced before.
    """
    frames = getattr(equation.source_info.traceback, "frames", ())
    line, layer = "", ""
    for frame in frames:  # the innermost first
        function = frame.function_name.rpartition("<locals>.")[2]
        if not is_library(frame.file_name):
            line = f"{Path(frame.file_name).name}:{frame.line_num} ({function})"
            break
        if "/flax/" in frame.file_name and function.endswith("__call__"):
            layer = f"flax's {function.removesuffix('.__call__')}"
    if not line:
        return outer
    scopes = TRANSFORMS.sub("", str(equation.source_info.name_stack)).split("/")
    # jax names the scope of an einsum by its text.
    scope = "/".join(one for one in scopes if one and "->" not in one)
    return ", in ".join(filter(None, (line, layer, scope)))


def place_of_error(error: Exception) -> str:
    """Returns " (model.py:12)", the innermost line of the user's code that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def place_of(jaxpr: Any, *primitives: str) -> str | None:
    """Returns the place of the first equation of these primitives, or None."""
    for equation, where in equations(jaxpr):
        if equation.primitive.name in primitives:
            return where
    return None


def is_library(file: str) -> bool:
    """Returns whether a file is one of jax's, Python's or the package's, not the user's."""
    is_frozen = file.startswith("<frozen")
    is_library = LIBRARIES.search(file) or "site-packages" not in file and file.startswith(FOLDERS)
    return is_frozen or bool(is_library)


# ---- equations ----


def equations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """Yields every equation of a jaxpr with its place, those within an equation before it."""
    for equation in jaxpr.eqns:
        where = place(equation, outer)
        for inner in _inner(equation):
            yield from equations(inner, where)
        yield equation, where


def _inner(equation: Any) -> list[Any]:
    """Returns the jaxprs that an equation calls."""
    params = jax.tree.leaves(list(equation.params.values()))
    return [getattr(one, "jaxpr", one) for one in params if hasattr(one, "eqns")]


def sizes_of_scan(equation: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a scan; its slices follow them.

    By the shapes, since the parameters of the equation differ between versions of jax: an
    iteration gets slices with one dim less.
    """
    (jaxpr,) = _inner(equation)

    def num_unsliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        are_equal = [a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True)]
        return are_equal.index(False) if False in are_equal else len(are_equal)

    num_carry = num_unsliced(equation.outvars, jaxpr.outvars)
    return num_unsliced(equation.invars, jaxpr.invars) - num_carry, num_carry


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(getattr(value.aval, "dtype", None) or np.int32, jnp.inexact)


def _is_literal(value: Any) -> bool:
    return isinstance(value, jax_core.Literal)


def _live(
    jaxpr: Any, is_live: Sequence[bool] | None = None, outer: str = ""
) -> list[tuple[Any, str]]:
    """Returns the equations that the outputs of a jaxpr depend on through floats, with places.

    `is_live` says which outputs count. A cast for a metric, or for a comparison, is not among
    them. Of an equation that calls others, these are returned.
    """
    outputs = zip(jaxpr.outvars, is_live or [True] * len(jaxpr.outvars), strict=True)
    needed = {id(value) for value, counts in outputs if counts and not _is_literal(value)}
    found = []
    for equation in reversed(jaxpr.eqns):
        live_outputs = [id(value) in needed and _is_float(value) for value in equation.outvars]
        if not any(live_outputs):
            continue
        inputs = [value for value in equation.invars if not _is_literal(value)]
        needed |= {id(value) for value in inputs if _is_float(value)}
        inner, where = _inner(equation), place(equation, outer)
        for one in reversed(inner):
            # The outputs of a loop may depend on each other.
            is_loop = equation.primitive.name in ("scan", "while")
            matches = not is_loop and len(one.outvars) == len(live_outputs)
            found += reversed(_live(one, live_outputs if matches else None, where))
        if not inner:
            found.append((equation, where))
    return found[::-1]


# ---- float64 ----

# Operations whose result depends on the order of additions.
SUMS = ("reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "scatter-add", "psum")


def narrowing(jaxpr: Any) -> str | None:
    """Returns where a loss leaves float64, as text; None if it computes in float64."""
    for equation, where in _live(jaxpr.jaxpr):
        wide, narrow = _widest(equation.invars), _widest(equation.outvars)
        if narrow and wide and _bits(narrow) < _bits(wide):
            return f"casts {wide} to {narrow} at {where}"
        if equation.primitive.name == "reduce_precision":
            return f"rounds to fewer bits at {where}"
    return None


def narrow_sum(jaxpr: Any) -> str | None:
    """Returns where a loss adds up in less than float64, for example values of the batch, or None.

    Sums of small integers are exact.
    """
    for equation, where in _live(jaxpr.jaxpr):
        dtype = _widest(equation.outvars)
        if equation.primitive.name in SUMS and dtype and _bits(dtype) < 64:
            return f"adds up in {dtype} at {where}"
    return None


def float_dtypes(jaxpr: Any) -> set[str]:
    """Returns the dtypes of floats that a loss depends on."""
    dtypes = {_widest(equation.outvars) for equation, _ in _live(jaxpr.jaxpr)}
    return {dtype for dtype in dtypes if dtype}


def _widest(values: Sequence[Any]) -> str | None:
    """Returns the dtype of the widest real float among the values."""
    dtypes = [value.aval.dtype for value in values if _is_float(value)]
    real = [dtype for dtype in dtypes if not jnp.issubdtype(dtype, jnp.complexfloating)]
    return str(max(real, key=_bits)) if real else None


def _bits(dtype: Any) -> int:
    return jnp.finfo(dtype).bits


# ---- the same twice ----


def nondeterminism(trace: Callable[[], Any]) -> str | None:
    """Returns where two traces of a loss differ, as text, or None.

    `trace()` returns its closed jaxpr, traced again at each call.
    """
    first, second = trace(), trace()
    pairs = zip(equations(first.jaxpr), equations(second.jaxpr), strict=False)
    # Arrays of numpy are constants of the jaxpr.
    constants = [dict(zip(one.jaxpr.constvars, one.consts, strict=True)) for one in (first, second)]
    for (one, where), (other, _) in pairs:
        is_same = one.primitive is other.primitive and len(one.invars) == len(other.invars)
        if is_same:
            values = [_known(one, constants[0]), _known(other, constants[1])]
            is_same = all(_equal(a, b) for a, b in zip(*values, strict=True))
        if not is_same:
            return (
                f"not deterministic: two traces of the loss differ at {where}; take random "
                "numbers from jax.random, with a key that is an argument"
            )
    return None


def _known(equation: Any, constants: dict[Any, Any]) -> list[Any]:
    """Returns the inputs of an equation that are known when it is traced; None for the others."""
    known = []
    for value in equation.invars:
        is_constant = not _is_literal(value) and value in constants
        known.append(value.val if _is_literal(value) else constants[value] if is_constant else None)
    return known


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    is_key = jax.dtypes.issubdtype(getattr(a, "dtype", np.int32), jax.dtypes.prng_key)
    if is_key:
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- the first equation with an unexpected result ----


def first_difference(
    function: Callable[..., Any], args: Any, other_args: Any, differs: Callable[[Any, Any], bool]
) -> str | None:
    """Returns the place of the first equation whose results `differs` tells apart, or None.

    `function` is called with two lists of arguments of the same shapes. `differs(a, b)` gets a
    result, an array of floats, of each call.
    """
    closed = jax.make_jaxpr(function)(*args)
    inputs = [jax.tree.leaves(one) for one in (args, other_args)]
    return _first_difference(closed.jaxpr, closed.consts, inputs, differs, "")


def _first_difference(
    jaxpr: Any, consts: Sequence[Any], inputs: Any, differs: Callable, outer: str
) -> str | None:
    # A value that no equation uses may be no output.
    values = [v for eqn in jaxpr.eqns for v in eqn.outvars if type(v).__name__ != "DropVar"]
    debug_info = jaxpr.debug_info._replace(result_paths=None)
    all_values = jaxpr.replace(outvars=values, debug_info=debug_info)
    run = jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(all_values, consts))
    calls = []
    for arrays in inputs:
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, arrays, strict=True))
        calls.append(known | dict(zip(values, jax.jit(run)(*arrays), strict=True)))
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            if value not in calls[0] or not _is_float(value):
                continue
            if not differs(*(np.asarray(call[value]) for call in calls)):
                continue
            inner_inputs = []
            for call in calls:
                inner_inputs.append([v.val if _is_literal(v) else call[v] for v in equation.invars])
            where = place(equation, outer)
            return _within(equation, inner_inputs, differs, where) or where
    return None


def _within(equation: Any, inputs: list[list[Any]], differs: Callable, outer: str) -> str | None:
    """Returns the place of the first difference within an equation that calls others, or None."""
    params = jax.tree.leaves(list(equation.params.values()))
    called = [one for one in params if hasattr(one, "eqns")]
    if len(called) != 1:
        return None
    jaxpr, consts = getattr(called[0], "jaxpr", called[0]), getattr(called[0], "consts", [])
    if equation.primitive.name == "scan":  # its first iteration
        first_x = sum(sizes_of_scan(equation))
        inputs = [[*one[:first_x], *(x[0] for x in one[first_x:])] for one in inputs]
    if equation.primitive.name == "while" or len(jaxpr.invars) != len(inputs[0]):
        return None
    return _first_difference(jaxpr, consts, inputs, differs, outer)


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two results differ by more than rounding."""
    largest = max(np.abs(a).max(initial=0), np.abs(b).max(initial=0))
    return not (np.abs(a - b).max(initial=0) <= TOLERANCE * largest or np.array_equal(a, b))
