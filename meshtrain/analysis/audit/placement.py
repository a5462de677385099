"""What the settings of a run say about who holds which part of what."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import Config
from meshtrain.parallel import sharding
from meshtrain.parallel.pipeline.schedules import SCHEDULES
from meshtrain.program import Program

Axes = tuple[str, ...]  # mesh axes, in the order of the mesh
Dims = tuple[Axes, ...]  # those larger than 1 that cut each dim of an array


@dataclass(frozen=True)
class Leaf:
    """A parameter, and what cuts it, its gradient and its moments."""

    name: str  # layers/mlp/up/kernel
    argument: str  # as the compiled step calls it: state.params['layers']['mlp']['up']['kernel']
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    itemsize: int  # stored
    compute_itemsize: int  # cast to train.dtype
    dims: Dims
    grad_dims: Dims
    moment_dims: Dims
    users: tuple[str, ...]  # of "embed", "block", "head"; nothing where the model is no stack
    num_layers: int  # on a device; 1 where it is no part of the stack

    @property
    def axes(self) -> Axes:
        return sum(self.dims, ())

    @property
    def is_stacked(self) -> bool:
        return self.users == ("block",)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Who holds which part of what."""

    mesh: Mapping[str, int]
    batch_axes: Axes
    leaves: tuple[Leaf, ...]
    is_stack: bool
    tokens: int  # positions that a device has of a micro-batch; 0 where the model is no stack
    width: int  # elements between blocks for each of them
    num_microbatches: int
    num_chunks: int  # of layers on a stage; 1 without a pipeline
    num_ticks: int  # with forwards, as many as with backwards; micro-batches without a pipeline
    keep: str  # pipeline.keep; empty without a pipeline
    zero_stage: int
    remat: str
    itemsize: int  # of what is computed

    @property
    def model_axes(self) -> Axes:
        """Those that cut the work on a row, not the rows: they cut parameters, not the batch."""
        cutting = {axis for leaf in self.leaves for axis in leaf.axes} - {*self.batch_axes}
        return tuple(axis for axis in self.mesh if axis in cutting)

    @property
    def late_axes(self) -> Axes:
        """Those of the batch along which sums of gradients wait for the last micro-batch."""
        return tuple(axis for axis in self.batch_axes if self.zero_stage < 2 or axis == "data")

    @property
    def x_bytes(self) -> int:
        """What goes from block to block, of a micro-batch on a device."""
        return self.tokens * self.width * self.itemsize

    @property
    def runs_again(self) -> int:
        """How often a stage runs a chunk again on the way back: from its input, and for remat."""
        return (self.keep == "inputs") + (self.keep != "" and self.remat != "none")

    @property
    def idle(self) -> float:
        """Micro-batches' worth of ticks in which a stage has no work, and computes all the same."""
        return self.num_ticks / self.num_chunks - self.num_microbatches

    def share(self, axes: Axes) -> int:
        """Returns the number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    def local(self, leaf: Leaf, dims: Dims, whole_along: Axes) -> list[int]:
        """Returns the shape of a leaf cut by `dims`, but whole along some axes."""
        cuts = (self.share(tuple(axis for axis in dim if axis not in whole_along)) for dim in dims)
        return [size // cut for size, cut in zip(leaf.shape, cuts, strict=True)]


def plan(cfg: Config, program: Program, batch: Any) -> Layout:
    """Returns the layout of a program for batches like this one (arrays, or their shapes)."""
    mesh, c = dict(program.mesh.shape), cfg.train
    rows = sharding.spec_for(("batch",), (c.global_batch,), cfg.rules, mesh)
    batch_axes = {axis for dim in _dims(rows, mesh) for axis in dim}
    batch_axes = tuple(axis for axis in mesh if axis in batch_axes)
    users, x = _readers(cfg, program, batch)
    names = jax.tree.leaves(program.model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    flat = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    num_chunks, num_ticks, keep = 1, c.num_microbatches, ""
    if mesh["pipeline"] > 1:
        num_chunks, keep = cfg.pipeline.num_chunks, cfg.pipeline.keep
        schedule = SCHEDULES[cfg.pipeline.schedule]
        table = schedule(mesh["pipeline"], c.num_microbatches, num_chunks)
        num_ticks = int(table.forward.active.any(1).sum())
    return Layout(
        mesh=mesh,
        batch_axes=batch_axes,
        leaves=tuple(_leaf(cfg, mesh, *each) for each in zip(flat, names, users, strict=True)),
        is_stack=x is not None,
        tokens=x.size // x.shape[-1] // math.prod(mesh[axis] for axis in batch_axes) if x else 0,
        width=x.shape[-1] if x else 0,
        num_microbatches=c.num_microbatches,
        num_chunks=num_chunks,
        num_ticks=num_ticks,
        keep=keep,
        zero_stage=c.zero_stage,
        remat=c.remat,
        itemsize=jnp.dtype(c.dtype).itemsize,
    )


def _dims(spec: Any, mesh: Mapping[str, int]) -> Dims:
    return tuple(
        tuple(axis for axis in sharding.axes_of(entry) if mesh[axis] > 1) for entry in spec
    )


def _leaf(cfg: Config, mesh: Mapping[str, int], flat: Any, names: Any, users: Axes) -> Leaf:
    path, leaf = flat

    def dims_from(stage: int) -> Dims:
        # As state.plan has it: below its stage, fsdp cuts nothing.
        rules = cfg.rules if cfg.train.zero_stage >= stage else sharding.without(cfg.rules, "fsdp")
        return _dims(sharding.spec_for(names, leaf.shape, rules, mesh), mesh)

    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    dims = dims_from(3)
    cut = math.prod(mesh[axis] for axis in dims[0]) if dims else 1
    return Leaf(
        name=jax.tree_util.keystr(path, simple=True, separator="/"),
        argument="state.params" + jax.tree_util.keystr(path),
        shape=leaf.shape,
        names=tuple(names),
        itemsize=leaf.dtype.itemsize,
        compute_itemsize=jnp.dtype(cfg.train.dtype).itemsize if floating else leaf.dtype.itemsize,
        dims=dims,
        grad_dims=dims_from(2),
        moment_dims=dims_from(1),
        users=users,
        num_layers=leaf.shape[0] // cut if users == ("block",) else 1,
    )


def _readers(cfg: Config, program: Program, batch: Any) -> tuple[list[Axes], Any]:
    """Returns which functions read each parameter, and the shape of what goes from block to block."""

    def like(leaf, dtype=None, rows=1):
        shape = (leaf.shape[0] // rows, *leaf.shape[1:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, dtype or leaf.dtype)

    model, params = program.model, program.abstract_state.params
    if model.block is None:
        return [()] * len(jax.tree.leaves(params)), None
    params = jax.tree.map(
        lambda p: like(p, cfg.train.dtype if jnp.issubdtype(p.dtype, jnp.floating) else None),
        params,
    )
    batch = jax.tree.map(lambda leaf: like(leaf, rows=cfg.train.num_microbatches), batch)
    x = jax.eval_shape(model.embed, params, batch)
    readers = {
        "embed": jax.make_jaxpr(model.embed)(params, batch).jaxpr,
        "head": jax.make_jaxpr(model.head)(params, x, batch).jaxpr,
    }
    read = {
        name: {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars}
        for name, jaxpr in readers.items()
    }
    users = [
        ("block",)
        if path[0].key == "layers"
        else tuple(name for name, jaxpr in readers.items() if id(jaxpr.invars[n]) in read[name])
        for n, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))
    ]
    return users, x
