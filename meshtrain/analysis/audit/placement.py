"""Describes which device holds which part of each parameter, gradient and activation of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import Config
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.pipeline.schedules import SCHEDULES

Axes = tuple[str, ...]  # mesh axes, in the order of the mesh
Spec = tuple[Axes, ...]  # for each dim of an array, the mesh axes larger than 1 that shard it


@dataclass(frozen=True)
class Leaf:
    """A parameter, and how it, its gradient and its optimizer moments are sharded."""

    name: str  # layers/mlp/up/kernel
    argument: str  # its name in the compiled step: state.params['layers']['mlp']['up']['kernel']
    shape: tuple[int, ...]
    dim_names: tuple[str | None, ...]  # logical names
    itemsize: int  # bytes per element as stored
    compute_itemsize: int  # bytes per element after the cast to train.dtype
    spec: Spec
    grad_spec: Spec
    moment_spec: Spec
    used_by: tuple[str, ...]  # of "embed", "block", "head"; empty if the model has no blocks
    num_layers: int  # on each device; 1 outside the stacked layers

    @property
    def axes(self) -> Axes:
        """The mesh axes that shard it."""
        return sum(self.spec, ())

    @property
    def is_stacked(self) -> bool:
        """Whether its first dim is the layer."""
        return self.used_by == ("block",)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """Which device holds what, and how often a step computes it."""

    mesh: Mapping[str, int]
    batch_axes: Axes  # that shard the batch
    leaves: tuple[Leaf, ...]
    has_blocks: bool  # False: only a loss function is known, not its layers
    num_tokens: int  # of a micro-batch on each device; 0 without blocks
    d_model: int  # elements per token between blocks; 0 without blocks
    num_microbatches: int
    num_chunks: int  # of layers on each stage; 1 without a pipeline
    num_ticks: (
        int  # that have a forward, and as many a backward; num_microbatches without a pipeline
    )
    pipeline_keep: str  # pipeline.keep; empty without a pipeline
    zero_stage: int
    remat: str
    compute_itemsize: int  # bytes per element of train.dtype

    @property
    def model_axes(self) -> Axes:
        """Axes that shard parameters but not the batch, for example tensor and pipeline."""
        sharding_axes = {axis for leaf in self.leaves for axis in leaf.axes}
        return tuple(
            axis for axis in self.mesh if axis in sharding_axes and axis not in self.batch_axes
        )

    @property
    def deferred_axes(self) -> Axes:
        """Batch axes over which gradients are summed once, after the last micro-batch."""
        return tuple(axis for axis in self.batch_axes if self.zero_stage < 2 or axis == "data")

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations between two blocks, for a micro-batch on one device."""
        return self.num_tokens * self.d_model * self.compute_itemsize

    @property
    def num_recomputes(self) -> int:
        """How often a backward recomputes its chunk: once if only inputs are kept, once more for remat."""
        return (self.pipeline_keep == "inputs") + (
            self.pipeline_keep != "" and self.remat != "none"
        )

    @property
    def idle_microbatches(self) -> float:
        """Ticks in which a stage computes only to stay in lock step, in units of a micro-batch."""
        return self.num_ticks / self.num_chunks - self.num_microbatches

    def num_devices(self, axes: Axes) -> int:
        """Returns the number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    def local_shape(self, leaf: Leaf, spec: Spec, replicated_over: Axes) -> list[int]:
        """Returns the shape of a leaf on one device: sharded by `spec`, except over `replicated_over`."""
        num_shards = (
            self.num_devices(tuple(axis for axis in dim if axis not in replicated_over))
            for dim in spec
        )
        return [size // num for size, num in zip(leaf.shape, num_shards, strict=True)]


def placement_of(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params, batch: Any
) -> Placement:
    """Returns the placement of a run. `params` and `batch` are arrays, or their shapes."""
    mesh, c = dict(mesh.shape), cfg.train
    batch_spec = sharding.spec_for(("batch",), (c.global_batch,), cfg.rules, mesh)
    batch_axes = {axis for dim in _spec(batch_spec, mesh) for axis in dim}
    batch_axes = tuple(axis for axis in mesh if axis in batch_axes)
    used_by, x = _users(cfg, model, params, batch)
    dim_names = jax.tree.leaves(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    flat = jax.tree_util.tree_leaves_with_path(params)
    num_chunks, num_ticks, keep = 1, c.num_microbatches, ""
    if mesh["pipeline"] > 1:
        num_chunks, keep = cfg.pipeline.num_chunks, cfg.pipeline.keep
        schedule = SCHEDULES[cfg.pipeline.schedule]
        table = schedule(mesh["pipeline"], c.num_microbatches, num_chunks)
        num_ticks = int(table.forward.active.any(1).sum())
    return Placement(
        mesh=mesh,
        batch_axes=batch_axes,
        leaves=tuple(
            _leaf(cfg, mesh, *each) for each in zip(flat, dim_names, used_by, strict=True)
        ),
        has_blocks=x is not None,
        num_tokens=x.size // x.shape[-1] // math.prod(mesh[a] for a in batch_axes) if x else 0,
        d_model=x.shape[-1] if x else 0,
        num_microbatches=c.num_microbatches,
        num_chunks=num_chunks,
        num_ticks=num_ticks,
        pipeline_keep=keep,
        zero_stage=c.zero_stage,
        remat=c.remat,
        compute_itemsize=jnp.dtype(c.dtype).itemsize,
    )


def _spec(spec: Any, mesh: Mapping[str, int]) -> Spec:
    return tuple(
        tuple(axis for axis in sharding.axes_of(entry) if mesh[axis] > 1) for entry in spec
    )


def _leaf(cfg: Config, mesh: Mapping[str, int], flat: Any, dim_names: Any, used_by: Axes) -> Leaf:
    path, leaf = flat

    def spec_from(zero_stage: int) -> Spec:
        # The same rule as in meshtrain/state.py: below this ZeRO stage, fsdp shards nothing.
        is_sharded = cfg.train.zero_stage >= zero_stage
        rules = cfg.rules if is_sharded else sharding.rules_without(cfg.rules, "fsdp")
        return _spec(sharding.spec_for(dim_names, leaf.shape, rules, mesh), mesh)

    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    spec = spec_from(3)
    num_shards = math.prod(mesh[axis] for axis in spec[0]) if spec else 1
    return Leaf(
        name=jax.tree_util.keystr(path, simple=True, separator="/"),
        argument="state.params" + jax.tree_util.keystr(path),
        shape=leaf.shape,
        dim_names=tuple(dim_names),
        itemsize=leaf.dtype.itemsize,
        compute_itemsize=jnp.dtype(cfg.train.dtype).itemsize if is_float else leaf.dtype.itemsize,
        spec=spec,
        grad_spec=spec_from(2),
        moment_spec=spec_from(1),
        used_by=used_by,
        num_layers=leaf.shape[0] // num_shards if used_by == ("block",) else 1,
    )


def _users(cfg: Config, model: Model, params: Params, batch: Any) -> tuple[list[Axes], Any]:
    """Returns which functions read each parameter, and the shape of the activations between blocks."""

    def like(leaf, dtype=None, num_parts=1):
        shape = (leaf.shape[0] // num_parts, *leaf.shape[1:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, dtype or leaf.dtype)

    if model.block is None:
        return [()] * len(jax.tree.leaves(params)), None
    params = jax.tree.map(
        lambda p: like(p, cfg.train.dtype if jnp.issubdtype(p.dtype, jnp.floating) else None),
        params,
    )
    batch = jax.tree.map(lambda leaf: like(leaf, num_parts=cfg.train.num_microbatches), batch)
    x = jax.eval_shape(model.embed, params, batch)
    jaxprs = {
        "embed": jax.make_jaxpr(model.embed)(params, batch).jaxpr,
        "head": jax.make_jaxpr(model.head)(params, x, batch).jaxpr,
    }
    read = {
        name: {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars}
        for name, jaxpr in jaxprs.items()
    }
    used_by = [
        ("block",)
        if path[0].key == "layers"
        else tuple(name for name, jaxpr in jaxprs.items() if id(jaxpr.invars[n]) in read[name])
        for n, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))
    ]
    return used_by, x
