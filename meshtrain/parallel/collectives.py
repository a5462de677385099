"""Collectives on values of the hosts: over all processes, or along an axis of a mesh.

  loss = collectives.all_reduce(loss, "mean")        # over processes
  rows = collectives.all_gather(rows, axis="data")   # along an axis of the mesh that is set

A value is a number, a numpy array or a pytree of them; results are numpy's, of the same dtype, the
same bits on each of the N members. Without `axis` those are the processes: each gives its value and
gets its result. With it they are the positions along it: arrays have a leading dim with a row [...]
for each position of which this process holds devices (all, where it is the only one), in order, and so
have results. Processes that share a position must give the same row. `mesh` is by default that of
`jax.set_mesh`. Raises ConfigError for arguments that do not fit.

All processes make the same calls in the same order. That shapes and dtypes agree is checked when they
are new to a process, not again: one that changes them alone later on waits for the others in vain.
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
from meshtrain.errors import ConfigError, choice_faults

OPS = ("sum", "mean", "max", "min")


def all_reduce(value: Any, op: str = "sum", *, axis: str | None = None, mesh=None) -> Any:
    """Returns [...] reduced over all members: op is sum, mean, max or min; one NaN makes a NaN.

    As in numpy, a sum of bools is int64, a mean of bools or integers float64; but a sum of integers
    keeps their width and can overflow. Floats below 32 bits are added in float32.
    """
    return _run("all_reduce", op, value, axis, mesh)


def all_gather(value: Any, *, axis: str | None = None, mesh=None) -> Any:
    """Returns [N, ...]: the [...] of all members, in their order."""
    return _run("all_gather", None, value, axis, mesh)


def reduce_scatter(value: Any, op: str = "sum", *, axis: str | None = None, mesh=None) -> Any:
    """Returns [D / N, ...]: the member's slice of what `all_reduce` makes of [D, ...]."""
    return _run("reduce_scatter", op, value, axis, mesh)


def broadcast(value: Any, root: int = 0, *, axis: str | None = None, mesh=None) -> Any:
    """Returns [...] of member `root`; the others give something of the same shape and dtype."""
    return _run("broadcast", root, value, axis, mesh)


def all_to_all(value: Any, *, axis: str | None = None, mesh=None) -> Any:
    """Returns [D, ...] of [D, ...]: of N slices, slice j of member i becomes slice i of member j."""
    return _run("all_to_all", None, value, axis, mesh)


def barrier() -> None:
    """Returns when all processes are here; the devices go on meanwhile."""
    distributed.barrier("collectives")


def _run(name: str, option: Any, value: Any, axis: str | None, mesh: Any) -> Any:
    call, over_processes = f"{name}({option!r}, axis={axis!r})", axis is None and mesh is None
    mesh = _processes() if over_processes else mesh or jax.sharding.get_mesh()
    axis = "process" if over_processes else axis
    if mesh.empty:
        raise ConfigError(f"axis={axis!r} and no mesh; give mesh=, or use jax.set_mesh first")
    faults = choice_faults("axis", axis, mesh.axis_names)
    num, reduces = mesh.shape.get(axis, 1), name in ("all_reduce", "reduce_scatter")
    if reduces:
        faults += choice_faults("op", option, OPS)
    elif name == "broadcast" and option not in range(num):
        faults += [f"root={option}: use one of the {num} members, from 0"]
    if faults:
        raise ConfigError(*faults)
    paths, tree = jax.tree_util.tree_flatten_with_path(value)
    row = None if over_processes else ...
    rows = {jax.tree_util.keystr(path): np.asarray(x, order="C")[row] for path, x in paths}
    num_slices = num if name in ("reduce_scatter", "all_to_all") else 0
    terms = (option if reduces else None, len(_held(mesh, axis)), num_slices)
    faults = [f"value{key} {why}" for key, x in rows.items() if (why := _misfit(x, *terms))]
    shapes = [f"value{key} {x.dtype}{list(x.shape[1:])}" for key, x in rows.items()]
    _check_same(mesh, (call, *shapes), tuple(faults))
    inputs = rows.values()
    if not reduces:  # what only moves goes as words [..., 1 or more]: every bit stays
        inputs = [x[..., None].view(f"u{math.gcd(x.dtype.itemsize, 8)}") for x in inputs]
    # 64 bits stay 64 whatever the program around this has set, and its mesh may be another.
    with jax.enable_x64(True), jax.set_mesh(mesh):
        inputs = [to_devices(x, mesh=mesh, axis=axis) for x in inputs]
        outputs = program(name, option, mesh=mesh, axis=axis)(inputs)
    outputs = [to_host(y, mesh=mesh, axis=axis) for y in outputs]
    if not reduces:
        outputs = [y.view(x.dtype)[..., 0] for y, x in zip(outputs, rows.values(), strict=True)]
    return tree.unflatten(y[0] if over_processes else y for y in outputs)


@functools.cache
def _processes() -> jax.sharding.Mesh:
    # All devices: on CPU, a program of one of several would run amid one of all, and mix with its messages.
    devices = [jax.local_devices(process_index=i) for i in range(jax.process_count())]
    num = min(map(len, devices))
    return jax.sharding.Mesh(np.array([own[:num] for own in devices]), ("process", "device"))


@functools.lru_cache
def _held(mesh: jax.sharding.Mesh, axis: str) -> list[int]:
    """Returns the positions along the axis that this process holds devices of."""
    own = np.vectorize(lambda device: device.process_index == jax.process_index())(mesh.devices)
    others = tuple(i for i, other in enumerate(mesh.axis_names) if other != axis)
    return np.flatnonzero(own.any(others)).tolist()


def _misfit(rows: np.ndarray, op: str | None, num_held: int, num_slices: int) -> str:
    """Returns what is wrong with an array, or nothing."""
    dtype, shape = rows.dtype, rows.shape
    kinds = "biufV" if op in ("max", "min") else "biufcV"  # V: bfloat16 and the like
    alien = not dtype.isnative or dtype in (np.longdouble, np.clongdouble)
    if dtype.hasobject or op and (alien or dtype.kind not in kinds):
        return f"has dtype {dtype}; {op or 'this'} takes bools and native numbers of up to 64 bits"
    if shape[:1] != (num_held,):
        return f"has shape {shape}; use a leading dim of {num_held}, a row for each position"
    if num_slices and (len(shape) < 2 or shape[1] % num_slices or not shape[1]):
        return f"has shape {shape[1:]}; use a first dim of {num_slices}, or a multiple"
    return ""


@functools.lru_cache(maxsize=10_000)
def _check_same(mesh: jax.sharding.Mesh, call: tuple[str, ...], faults: tuple[str, ...]) -> None:
    """Raises ConfigError for faults of any process and where calls differ, unless some have no part."""
    all_here = len({device.process_index for device in mesh.devices.flat}) == jax.process_count()
    calls = distributed.gather([call, faults]) if all_here else [[call, faults]]
    for i, (other, found) in enumerate(calls):
        if found:
            where = f"process {i}: " if len(calls) > 1 else ""
            raise ConfigError(*(where + fault for fault in found))
        for ours, theirs in itertools.zip_longest(calls[0][0], other, fillvalue="nothing"):
            if ours != theirs:
                differ = f"{ours} on process 0, {theirs} on process {i}"
                raise ConfigError(f"{call[0]}: {differ}; use the same on all")


@functools.lru_cache
def program(name: str, option: Any, *, mesh: jax.sharding.Mesh, axis: str) -> Any:
    """Returns the jitted function of a list of global arrays [N, ...]; `option` is op, root or None."""
    num = mesh.shape[axis]

    def member(x: jax.Array) -> jax.Array:
        if name == "all_gather":
            return lax.all_gather(x, axis)
        if name == "all_to_all":
            return lax.all_to_all(x, axis, 0, 0, tiled=True)
        if name == "broadcast":  # of words: adding zeros keeps every bit
            return lax.psum(jnp.where(lax.axis_index(axis) == option, x, 0), axis)
        wide, result = _dtypes(x.dtype, option)
        y, scatter = x.astype(wide), name == "reduce_scatter"
        if option in ("max", "min"):
            y = lax.pmax(y, axis) if option == "max" else lax.pmin(y, axis)
            if jnp.issubdtype(wide, jnp.floating):  # XLA on CPU drops a NaN that meets a number
                y = jnp.where(lax.psum(jnp.isnan(x).astype(jnp.int32), axis) > 0, jnp.nan, y)
            rows = x.shape[0] // num if scatter else 0
            y = lax.dynamic_slice_in_dim(y, lax.axis_index(axis) * rows, rows) if scatter else y
        else:
            y = lax.psum_scatter(y, axis, tiled=True) if scatter else lax.psum(y, axis)
        return (y / num if option == "mean" else y).astype(result)

    # Manual over all axes: on CPU, adding bfloat16 in a region that is not aborts the process.
    share = functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P(axis), out_specs=jax.P(axis))
    return jax.jit(share(lambda xs: [member(x[0])[None] for x in xs]))


def _dtypes(dtype: Any, op: str) -> tuple[Any, Any]:
    """Returns the dtype in which the devices reduce, and that of the result."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.float32 if dtype.itemsize < 4 else dtype, dtype
    if op == "mean":
        return jnp.float64, jnp.float64
    if dtype != jnp.bool:
        return dtype, dtype
    return (jnp.int64, jnp.int64) if op == "sum" else (jnp.uint8, dtype)


def to_devices(rows: np.ndarray, *, mesh: jax.sharding.Mesh, axis: str) -> jax.Array:
    """Returns the global array [N, ...] of which this process gives the rows that it holds."""
    shape, held = (mesh.shape[axis], *rows.shape[1:]), _held(mesh, axis)
    where = jax.NamedSharding(mesh, jax.P(axis))
    return jax.make_array_from_callback(shape, where, lambda i: rows[[held.index(i[0].start or 0)]])


def to_host(array: jax.Array, *, mesh: jax.sharding.Mesh, axis: str) -> np.ndarray:
    """Returns the rows of a global array [N, ...] that this process holds, one for each position."""
    if not array.size:  # jax 0.10 gives shards without values a wrong shape
        return np.zeros((len(_held(mesh, axis)), *array.shape[1:]), array.dtype)
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate(jax.device_get([shards[position] for position in sorted(shards)]))
