"""Collectives on host values: over all processes, or along a mesh axis.

  loss = collectives.all_reduce(loss, "mean")        # over processes
  rows = collectives.all_gather(rows, axis="data")   # along an axis of the active mesh

A value is a number, a numpy array or a pytree of these. Results are numpy arrays of the same dtype,
and bit-identical on all N members. Without `axis` the members are the processes: each passes its
value and gets its result. With `axis` the members are the positions along that mesh axis: arguments
and results have a leading dim with one row [...] per position that has a device of this process, in
order (all positions if there is one process). Processes that share a position must pass the same
row. `mesh` defaults to the mesh of `jax.set_mesh`. Raises ConfigError for invalid arguments.

`all_reduce` of op sum or mean may choose who sends to whom (parallel/grad_sync.py):

  total = collectives.all_reduce(rows, axis="data", pattern="hierarchical")

All processes must make the same calls in the same order. They compare shapes and dtypes only when
these are new: if later one process alone returns to shapes that it has used before, the call hangs.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.cluster import distributed
from meshtrain.config.schema import AXES, SYNC_PATTERNS
from meshtrain.errors import ConfigError, choice_faults
from meshtrain.parallel import grad_sync
from meshtrain.parallel.mesh import network_of

OPS = ("sum", "mean", "max", "min")

REDUCTIONS = ("all_reduce", "reduce_scatter")  # the collectives that have an op


def all_reduce(
    value: Any,
    op: str = "sum",
    *,
    axis: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    pattern: str = "xla",
) -> Any:
    """Returns [...] reduced over all members: op is sum, mean, max or min; any NaN gives NaN.

    As in numpy, a sum of bools is int64, and a mean of bools or integers is float64; but a sum of
    integers keeps their dtype and can overflow. Floats of less than 32 bits are added in float32.
    `pattern` is xla, hierarchical, ring or tree; max and min have only xla.
    """
    return _run("all_reduce", value, option=op, axis=axis, mesh=mesh, pattern=pattern)


def all_gather(
    value: Any, *, axis: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Any:
    """Returns [N, ...]: the [...] of all members, in order."""
    return _run("all_gather", value, axis=axis, mesh=mesh)


def reduce_scatter(
    value: Any, op: str = "sum", *, axis: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Any:
    """Returns [D / N, ...]: the member's slice of the `all_reduce` of [D, ...]."""
    return _run("reduce_scatter", value, option=op, axis=axis, mesh=mesh)


def broadcast(
    value: Any, root: int = 0, *, axis: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Any:
    """Returns [...] of member `root`; the others pass any value of the same shape and dtype."""
    return _run("broadcast", value, option=root, axis=axis, mesh=mesh)


def all_to_all(
    value: Any, *, axis: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Any:
    """Returns [D, ...] for [D, ...]: slice j (of N) of member i becomes slice i of member j."""
    return _run("all_to_all", value, axis=axis, mesh=mesh)


def barrier() -> None:
    """Waits until all processes have called it; does not wait for devices."""
    distributed.barrier("collectives")


def _run(
    name: str,
    value: Any,
    *,
    option: Any = None,
    axis: str | None,
    mesh: jax.sharding.Mesh | None,
    pattern: str = "xla",
) -> Any:
    """Returns the result of the collective `name`; `option` is its op or root."""
    given_pattern = f", pattern={pattern!r}" if pattern != "xla" else ""
    call = f"{name}({option!r}, axis={axis!r}{given_pattern})"
    over_processes = axis is None and mesh is None
    if over_processes:
        mesh, axis = _process_mesh(), "process"
    else:
        mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        raise ConfigError(f"axis={axis!r} and no mesh; give mesh=, or use jax.set_mesh first")
    if faults := _argument_faults(name, option, axis, mesh, pattern):
        raise ConfigError(*faults)

    # Over processes there is one row, which has no dim of its own in the value.
    reduces = name in REDUCTIONS
    paths, tree = jax.tree_util.tree_flatten_with_path(value)
    rows: dict[str, np.ndarray] = {}
    for path, leaf in paths:
        array = np.asarray(leaf, order="C")
        rows[jax.tree_util.keystr(path)] = array[None] if over_processes else array
    value_faults = []
    for key, array in rows.items():
        fault = _value_fault(
            array,
            op=option if reduces else None,
            num_rows=len(_local_positions(mesh, axis)),
            num_slices=mesh.shape[axis] if name in ("reduce_scatter", "all_to_all") else 0,
        )
        if fault:
            value_faults.append(f"value{key} {fault}")
    shapes = [f"value{key} {array.dtype}{list(array.shape[1:])}" for key, array in rows.items()]
    _check_same(mesh, (call, *shapes), tuple(value_faults))

    inputs = [*rows.values()]
    # Data that is only moved is sent as unsigned words [..., 1 or more]: every bit is preserved.
    if not reduces:
        inputs = [x[..., None].view(f"u{math.gcd(x.dtype.itemsize, 8)}") for x in inputs]
    # The caller may have another mesh active, and 64-bit dtypes disabled.
    with jax.enable_x64(True), jax.set_mesh(mesh):
        arrays = [to_devices(x, mesh=mesh, axis=axis) for x in inputs]
        collective = program(name, option, mesh=mesh, axis=axis, pattern=pattern)
        results = collective(arrays)
    outputs = [to_host(y, mesh=mesh, axis=axis) for y in results]
    if not reduces:
        outputs = [y.view(x.dtype)[..., 0] for y, x in zip(outputs, rows.values(), strict=True)]
    return tree.unflatten(y[0] if over_processes else y for y in outputs)


def _argument_faults(
    name: str, option: Any, axis: str, mesh: jax.sharding.Mesh, pattern: str
) -> list[str]:
    faults = choice_faults("axis", axis, mesh.axis_names)
    num_members = mesh.shape.get(axis, 1)
    if name in REDUCTIONS:
        faults += choice_faults("op", option, OPS)
    elif name == "broadcast" and option not in range(num_members):
        faults.append(f"root={option}: use a member from 0 to {num_members - 1}")
    return faults or _pattern_faults(pattern, option, mesh, axis)


@functools.cache
def _process_mesh() -> jax.sharding.Mesh:
    # All devices: on CPU, the messages of a program on one of several devices could get mixed with
    # those of a program on all of them that is still running.
    devices = [jax.local_devices(process_index=i) for i in range(jax.process_count())]
    num = min(map(len, devices))
    return jax.sharding.Mesh(np.array([local[:num] for local in devices]), ("process", "device"))


@functools.lru_cache
def _local_positions(mesh: jax.sharding.Mesh, axis: str) -> list[int]:
    """Returns the positions along the axis at which this process has devices."""
    process_indices = np.vectorize(lambda device: device.process_index)(mesh.devices)
    others = tuple(i for i, other in enumerate(mesh.axis_names) if other != axis)
    return np.flatnonzero((process_indices == jax.process_index()).any(others)).tolist()


def _value_fault(rows: np.ndarray, *, op: str | None, num_rows: int, num_slices: int) -> str:
    """Returns the fault of an array, or ""."""
    dtype, shape = rows.dtype, rows.shape
    kinds = "biufV" if op in ("max", "min") else "biufcV"  # V: bfloat16, float8
    unsupported = not dtype.isnative or dtype in (np.longdouble, np.clongdouble)
    if dtype.hasobject or (op and (unsupported or dtype.kind not in kinds)):
        accepted = "bools and native numbers of up to 64 bits"
        return f"has dtype {dtype}; {op or 'this call'} accepts {accepted}"
    if shape[:1] != (num_rows,):
        return f"has shape {shape}; use a leading dim of {num_rows}, one row per position"
    if num_slices and (len(shape) < 2 or shape[1] % num_slices or not shape[1]):
        return f"has shape {shape[1:]}; use a first dim of {num_slices} or a multiple"
    return ""


@functools.lru_cache(maxsize=10_000)
def _check_same(mesh: jax.sharding.Mesh, call: tuple[str, ...], faults: tuple[str, ...]) -> None:
    """Raises ConfigError for faults of any process, and for calls that differ between processes.

    If the mesh leaves out all devices of some process, checks only this process.
    """
    all_in_mesh = len({device.process_index for device in mesh.devices.flat}) == jax.process_count()
    calls = distributed.gather([call, faults]) if all_in_mesh else [[call, faults]]
    for i, (other, other_faults) in enumerate(calls):
        if other_faults:
            prefix = f"process {i}: " if len(calls) > 1 else ""
            raise ConfigError(*(prefix + fault for fault in other_faults))
        for first, ith in itertools.zip_longest(calls[0][0], other, fillvalue="nothing"):
            if first != ith:
                difference = f"{first} on process 0, {ith} on process {i}"
                raise ConfigError(f"{call[0]}: {difference}; use the same on all processes")


def _pattern_faults(pattern: str, op: Any, mesh: jax.sharding.Mesh, axis: str) -> list[str]:
    if faults := choice_faults("pattern", pattern, SYNC_PATTERNS):
        return faults
    if pattern != "xla" and op in ("max", "min"):
        return [f"pattern={pattern!r}: it adds, and op={op!r} does not; use pattern='xla'"]
    if pattern == "hierarchical" and not _num_parts(mesh, axis):
        return [
            f"pattern='hierarchical': hosts do not hold equal, contiguous parts of {axis!r}; "
            f"use another mesh, or pattern='xla'"
        ]
    return []


@functools.lru_cache
def _num_parts(mesh: jax.sharding.Mesh, axis: str) -> int:
    """Returns how many hosts (or slices) the members along the axis span; 0 if in unequal parts."""
    # The mesh may have axes of any names: this one becomes `data`, all others together `tensor`.
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    sizes = {"data": len(rows), "tensor": rows.size // len(rows)}
    grid = rows.reshape([sizes.get(name, 1) for name in AXES])
    network = network_of(jax.sharding.Mesh(grid, AXES))
    number = network.num_islands("data")
    return 0 if number == 1 and network.link_along("data") != "host" else number


def program(
    name: str, option: Any, *, mesh: jax.sharding.Mesh, axis: str, pattern: str = "xla"
) -> Any:
    """Returns the jitted collective of a list of global arrays [N, ...].

    `option` is op, root or None.
    """
    # A cache tells arguments by name from those by position, so there is one way to call it.
    return _program(name, option, mesh, axis, pattern)


@functools.lru_cache
def _program(name: str, option: Any, mesh: jax.sharding.Mesh, axis: str, pattern: str) -> Any:
    num_members = mesh.shape[axis]
    levels = grad_sync.levels_of(pattern, num_members, max(1, _num_parts(mesh, axis)))

    def add(y: jax.Array) -> jax.Array:
        if not y.size:
            return y
        return grad_sync.all_reduce(y.reshape(-1), (axis,), levels)[0].reshape(y.shape)

    def collective(x: jax.Array) -> jax.Array:
        if name == "all_gather":
            return lax.all_gather(x, axis)
        if name == "all_to_all":
            return lax.all_to_all(x, axis, 0, 0, tiled=True)
        if name == "broadcast":
            # x holds unsigned words: adding zeros preserves every bit.
            return lax.psum(jnp.where(lax.axis_index(axis) == option, x, 0), axis)
        reduce_dtype, result_dtype = _dtypes(x.dtype, option)
        y = x.astype(reduce_dtype)
        is_scattered = name == "reduce_scatter"
        if option in ("max", "min"):
            y = lax.pmax(y, axis) if option == "max" else lax.pmin(y, axis)
            # On CPU, XLA loses a NaN when it compares it with a number.
            if jnp.issubdtype(reduce_dtype, jnp.floating):
                num_nan = lax.psum(jnp.isnan(x).astype(jnp.int32), axis)
                y = jnp.where(num_nan > 0, jnp.nan, y)
            if is_scattered:
                num_rows = x.shape[0] // num_members
                y = lax.dynamic_slice_in_dim(y, lax.axis_index(axis) * num_rows, num_rows)
        elif is_scattered:
            y = lax.psum_scatter(y, axis, tiled=True)
        else:
            y = add(y)
        if option == "mean":
            y = y / num_members
        return y.astype(result_dtype)

    def collectives(rows: list[jax.Array]) -> list[jax.Array]:
        return [collective(row[0])[None] for row in rows]

    # Manual over all axes: on CPU, adding bfloat16 in a partially manual region aborts the process.
    on_devices = jax.shard_map(
        collectives,
        mesh=mesh,
        in_specs=jax.P(axis),
        out_specs=jax.P(axis),
        # `check_vma` cannot prove that a grouped exchange ends with equal sums, so it is off.
        check_vma=pattern == "xla",
    )
    return jax.jit(on_devices)


def _dtypes(dtype: Any, op: str) -> tuple[Any, Any]:
    """Returns the dtype in which the devices reduce, and the dtype of the result."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.float32 if dtype.itemsize < 4 else dtype, dtype
    if op == "mean":
        return jnp.float64, jnp.float64
    if dtype != jnp.bool:
        return dtype, dtype
    return (jnp.int64, jnp.int64) if op == "sum" else (jnp.uint8, dtype)


def to_devices(rows: np.ndarray, *, mesh: jax.sharding.Mesh, axis: str) -> jax.Array:
    """Returns the global array [N, ...]; `rows` are those at the positions of this process."""
    shape = (mesh.shape[axis], *rows.shape[1:])
    positions = _local_positions(mesh, axis)

    def row(index: tuple[slice, ...]) -> np.ndarray:
        return rows[[positions.index(index[0].start or 0)]]

    return jax.make_array_from_callback(shape, jax.NamedSharding(mesh, jax.P(axis)), row)


def to_host(array: jax.Array, *, mesh: jax.sharding.Mesh, axis: str) -> np.ndarray:
    """Returns the rows of a global array [N, ...] at the positions of this process."""
    # jax 0.10 gives shards without values a wrong shape.
    if not array.size:
        return np.zeros((len(_local_positions(mesh, axis)), *array.shape[1:]), array.dtype)
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate(jax.device_get([shards[position] for position in sorted(shards)]))
