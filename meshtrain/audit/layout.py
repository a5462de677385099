"""What the settings of a run say about who holds which part of what, and who reads it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain import sharding
from meshtrain.config import Config
from meshtrain.program import Program

Axes = tuple[str, ...]  # mesh axes, in the order of the mesh


@dataclass(frozen=True)
class Leaf:
    """A parameter, and the mesh axes larger than 1 that cut each dim of it, its gradient and its moments."""

    name: str  # layers/mlp/up/kernel
    argument: str  # as the compiled step calls it: state.params['layers']['mlp']['up']['kernel']
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    itemsize: int  # stored
    compute_itemsize: int  # cast to train.dtype
    dims: tuple[Axes, ...]
    grad_dims: tuple[Axes, ...]
    moment_dims: tuple[Axes, ...]
    passes: int  # of a micro-batch that read it: forward, backward
    users: tuple[str, ...]  # of "embed", "block", "head"

    @property
    def axes(self) -> Axes:
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def grad_axes(self) -> Axes:
        return tuple(axis for dim in self.grad_dims for axis in dim)

    @property
    def moment_axes(self) -> Axes:
        return tuple(axis for dim in self.moment_dims for axis in dim)

    @property
    def is_stacked(self) -> bool:
        return self.names[:1] == ("layers",)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_layers(self) -> int:
        return self.shape[0] if self.is_stacked else 1


@dataclass(frozen=True)
class Layout:
    """Who holds which part of what."""

    mesh: Mapping[str, int]
    batch_axes: Axes
    leaves: tuple[Leaf, ...]
    is_stack: bool
    x_size: int  # elements of a device's activations between blocks, of one micro-batch, whole along model axes
    tokens: int  # positions among them; 0 where the model is no stack
    x_axes: Axes  # model axes that cut them
    num_microbatches: int
    zero_stage: int
    remat: str
    itemsize: int  # of what is computed

    @property
    def model_axes(self) -> Axes:
        """Those that cut the work on a row, not the rows: they cut parameters, not the batch."""
        cutting = {axis for leaf in self.leaves for axis in leaf.axes} - {*self.batch_axes}
        return tuple(axis for axis in self.mesh if axis in cutting)

    @property
    def width(self) -> int:
        """Elements of x for each position."""
        return self.x_size // self.tokens if self.tokens else 0

    def share(self, axes: Axes) -> int:
        """Returns the number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)


def plan(cfg: Config, program: Program, batch: Any) -> Layout:
    """Returns the layout of a program for batches like this one (arrays, or their shapes)."""
    mesh = dict(program.mesh.shape)
    names = jax.tree.leaves(program.model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    flat = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    rows = sharding.spec_for(("batch",), (cfg.train.global_batch,), cfg.rules, mesh)
    batch_axes = _ordered(rows, mesh)
    read = _readers(cfg, program, batch)
    leaves = tuple(
        _leaf(path, leaf, leaf_names, cfg, mesh, *passes)
        for (path, leaf), leaf_names, passes in zip(flat, names, read, strict=True)
    )
    size, tokens, x_axes = _activations(cfg, program, batch, mesh, batch_axes)
    return Layout(
        mesh=mesh,
        batch_axes=batch_axes,
        leaves=leaves,
        is_stack=program.model.block is not None,
        x_size=size,
        tokens=tokens,
        x_axes=x_axes,
        num_microbatches=cfg.train.num_microbatches,
        zero_stage=cfg.train.zero_stage,
        remat=cfg.train.remat,
        itemsize=jnp.dtype(cfg.train.dtype).itemsize,
    )


def _ordered(spec: Any, mesh: Mapping[str, int]) -> Axes:
    axes = {axis for dim in _dims(spec, mesh) for axis in dim}
    return tuple(axis for axis in mesh if axis in axes)


def _dims(spec: Any, mesh: Mapping[str, int]) -> tuple[Axes, ...]:
    """Returns the axes larger than 1 that cut each dim."""
    several = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in spec]
    return tuple(tuple(axis for axis in dim if mesh[axis] > 1) for dim in several)


def _leaf(path, leaf, names, cfg: Config, mesh, passes: int, users: tuple[str, ...]) -> Leaf:
    def dims_from(stage: int) -> tuple[Axes, ...]:
        # As state.plan has it: below its stage, fsdp cuts nothing.
        within = cfg.rules if cfg.train.zero_stage >= stage else sharding.without(cfg.rules, "fsdp")
        return _dims(sharding.spec_for(names, leaf.shape, within, mesh), mesh)

    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return Leaf(
        name=jax.tree_util.keystr(path, simple=True, separator="/"),
        argument="state.params" + jax.tree_util.keystr(path),
        shape=leaf.shape,
        names=tuple(names),
        itemsize=leaf.dtype.itemsize,
        compute_itemsize=jnp.dtype(cfg.train.dtype).itemsize if floating else leaf.dtype.itemsize,
        dims=dims_from(3),
        grad_dims=dims_from(2),
        moment_dims=dims_from(1),
        passes=passes,
        users=users,
    )


def _activations(cfg, program, batch, mesh, batch_axes) -> tuple[int, int, Axes]:
    """Returns size, positions and model axes of what one device passes from block to block."""
    if program.model.block is None:
        return 0, 0, ()
    x = jax.eval_shape(program.model.embed, _cast(cfg, program), _micro(cfg, batch))
    cut = math.prod(mesh[axis] for axis in batch_axes)
    names = ("batch", "residual_seq", "residual")
    known = {name for name, _ in cfg.rules}
    axes: Axes = ()
    if x.ndim == 3 and known.issuperset(names):
        axes = _ordered(sharding.spec_for(names, x.shape, cfg.rules, mesh), mesh)
    return (
        x.size // cut,
        x.size // x.shape[-1] // cut,
        tuple(a for a in axes if a not in batch_axes),
    )


def _micro(cfg: Config, batch: Any) -> Any:
    """Returns the shapes of one micro-batch."""
    parts = cfg.train.num_microbatches
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // parts, *leaf.shape[1:]), leaf.dtype),
        batch,
    )


def _cast(cfg: Config, program: Program) -> Any:
    """Returns the shapes of the parameters as the loss sees them."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(
            p.shape, cfg.train.dtype if jnp.issubdtype(p.dtype, jnp.floating) else p.dtype
        ),
        program.abstract_state.params,
    )


def _readers(cfg: Config, program: Program, batch: Any) -> list[tuple[int, tuple[str, ...]]]:
    """Returns for each parameter how many passes of a micro-batch read it, and which functions.

    A pass is a moment at which it has to be there whole: forward, and backward unless that needs it
    no more (a table that was looked up) or follows at once (the head).
    """
    model, params, micro = program.model, _cast(cfg, program), _micro(cfg, batch)
    if model.block is None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        read = _reads(
            lambda params, key, batch: model.loss(params, batch, key).loss, params, key, micro
        )
        return [(forward + backward, ()) for forward, backward in read]
    x = jax.eval_shape(model.embed, params, micro)
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params["layers"])
    embed = _reads(lambda params, batch: model.embed(params, batch), params, micro)
    head = _reads(lambda px, batch: model.head(*px, batch).loss, (params, x), micro)
    block = _reads(lambda lx, batch: model.block(*lx, batch), (layer, x), micro)
    in_layers = [path[0].key == "layers" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    blocks, found = iter(block), []
    for number, stacked in enumerate(in_layers):
        if stacked:
            found.append((sum(next(blocks)), ("block",)))
            continue
        by_embed, by_head = embed[number], head[number]
        users = ("embed",) * by_embed[0] + ("head",) * by_head[0]
        found.append((sum(by_embed) + by_head[0], users))
    return found


def _reads(function: Callable, tree: Any, *rest: Any) -> list[tuple[bool, bool]]:
    """Returns for each leaf of `tree` whether the function reads it, and whether its derivative does again."""

    def both(tree, *rest):
        _, pullback = jax.vjp(lambda tree: function(tree, *rest), tree)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(both)(tree, *rest).jaxpr
    made_by = {id(result): eqn for eqn in jaxpr.eqns for result in eqn.outvars}

    def behind(variable):
        while (eqn := made_by.get(id(variable))) and len(eqn.invars) == 1:
            variable = eqn.invars[0]  # cast, transposed, reshaped, constrained
        return variable

    used = {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars}
    again = {id(behind(variable)) for variable in jaxpr.outvars}
    leaves = jaxpr.invars[: len(jax.tree.leaves(tree))]
    return [(id(leaf) in used, id(leaf) in again) for leaf in leaves]
