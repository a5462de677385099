"""Describes which device holds which part of each parameter, gradient, activation, sequence and expert."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import Config
from meshtrain.data.source import Batch
from meshtrain.models.base import FIRST_LAYERS_KEY, Model, Params
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import context_attention
from meshtrain.ops.attention import choose_for_context
from meshtrain.parallel import context, expert, sharding
from meshtrain.schedules import SCHEDULES

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
    is_trained: bool = True  # whether it has a gradient

    @property
    def axes(self) -> Axes:
        """The mesh axes that shard it."""
        return sum(self.spec, ())

    @property
    def is_stacked(self) -> bool:
        """Whether its first dim is the layer."""
        return self.used_by == ("block",)

    @property
    def is_first(self) -> bool:
        """Whether it belongs to a layer before the stack, which the embedding runs."""
        return self.name.startswith(f"{FIRST_LAYERS_KEY}/")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedAttention:
    """The attention of a layer, as one device computes it in a micro-batch; sizes are numbers of elements."""

    method: str  # see parallel/context.py
    num_devices: int  # that hold parts of a sequence
    query_size: int  # of the queries of the device's own part of the sequences
    output_size: int  # of what attention computes for them
    # Of the keys and of the values of this part; repeated, where the method repeats them.
    key_size: int
    value_size: int
    padding: float  # tokens over tokens without padding, where attention is computed in blocks
    itemsize: int  # bytes per element of train.dtype


@dataclass(frozen=True)
class ShardedExperts:
    """The experts of a layer, as one device computes them in a micro-batch; see parallel/expert.py."""

    gathered: Axes  # within which tokens are gathered
    others: Axes  # that shard the experts, but no tokens
    per_token: int  # experts that a token uses
    num_experts: int
    num_devices: int  # of a group along `gathered`
    num_shards: int  # of the experts
    itemsize: int  # bytes per element of train.dtype
    has_first_pass: bool  # False: all rows are computed in the loop of ops/experts.py

    @property
    def necessary(self) -> float:
        """What a dispatch of each token to its experts sends, relative to a gather; at most 1."""
        return min(1.0, self.per_token / self.num_shards)


@dataclass(frozen=True)
class Placement:
    """Which device holds what, and how often a step computes it."""

    mesh: Mapping[str, int]
    token_axes: Axes  # that shard the tokens of a batch: its rows, or each sequence
    sequence_axes: Axes  # those of them that shard each sequence
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
    # Of sharded sequences; None if they are not sharded, or their attention is unknown.
    attention: ShardedAttention | None = None
    experts: ShardedExperts | None = None  # None: none, or of a user's own model
    sync: Any = None  # a parallel.sync.Sync; None: XLA adds the gradients of the batch shards

    @property
    def model_axes(self) -> Axes:
        """Axes that shard parameters but no tokens, for example tensor and pipeline."""
        sharding_axes = {axis for leaf in self.leaves for axis in leaf.axes}
        return tuple(
            axis for axis in self.mesh if axis in sharding_axes and axis not in self.token_axes
        )

    def token_axes_of(self, leaf: Leaf) -> Axes:
        """Axes of tokens over which a leaf is gathered and its gradient summed: not those that shard experts."""
        own = {
            axis
            for name, axes in zip(leaf.dim_names, leaf.spec, strict=True)
            for axis in axes
            if name == "expert"
        }
        return tuple(axis for axis in self.token_axes if axis not in own)

    @property
    def deferred_axes(self) -> Axes:
        """Axes over which gradients are summed once, after the last micro-batch; never those of a sequence."""
        # As in program.assemble.
        axes = ("data",) if self.zero_stage >= 2 else ("data", "fsdp")
        return tuple(axis for axis in self.token_axes if axis in axes)

    @property
    def num_layers(self) -> tuple[int, int]:
        """The number of stacked layers of a device, and of layers before the stack."""
        first = {leaf.name.split("/")[1] for leaf in self.leaves if leaf.is_first}
        return max(leaf.num_layers for leaf in self.leaves), len(first)

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
    row_axes, sequence_axes = _token_axes(cfg, mesh, batch)
    token_axes = tuple(axis for axis in mesh if axis in (*row_axes, *sequence_axes))
    used_by, x = _users(cfg, model, params, batch)
    dim_names = jax.tree.leaves(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    flat = jax.tree_util.tree_leaves_with_path(params)
    num_chunks, num_ticks, keep = 1, c.num_microbatches, ""
    if mesh["pipeline"] > 1:
        num_chunks, keep = cfg.pipeline.num_chunks, cfg.pipeline.keep
        schedule = SCHEDULES[cfg.pipeline.schedule]
        table = schedule(mesh["pipeline"], c.num_microbatches, num_chunks)
        num_ticks = int(table.forward.active.any(1).sum())
    num_tokens = x.size // x.shape[-1] // math.prod(mesh[a] for a in token_axes) if x else 0
    return Placement(
        mesh=mesh,
        token_axes=token_axes,
        sequence_axes=sequence_axes,
        leaves=tuple(
            _leaf(cfg, mesh, model.is_trained, *each)
            for each in zip(flat, dim_names, used_by, strict=True)
        ),
        has_blocks=x is not None,
        num_tokens=num_tokens,
        d_model=x.shape[-1] if x else 0,
        num_microbatches=c.num_microbatches,
        num_chunks=num_chunks,
        num_ticks=num_ticks,
        pipeline_keep=keep,
        zero_stage=c.zero_stage,
        remat=c.remat,
        compute_itemsize=jnp.dtype(c.dtype).itemsize,
    )


def _token_axes(cfg: Config, mesh: Mapping[str, int], batch: Any) -> tuple[Axes, Axes]:
    """Returns the mesh axes that shard the rows of a batch, and those that shard each row of tokens."""
    rows = cfg.train.global_batch
    names, shape = ("batch",), (rows,)
    if isinstance(batch, Batch):
        names, shape = ("batch", "seq"), (rows, batch.tokens.shape[1])
    spec = _spec(sharding.spec_for(names, shape, cfg.rules, mesh), mesh)
    return spec[0], spec[1] if spec[1:] else ()


def _spec(spec: Any, mesh: Mapping[str, int]) -> Spec:
    return tuple(
        tuple(axis for axis in sharding.axes_of(entry) if mesh[axis] > 1) for entry in spec
    )


def _leaf(
    cfg: Config,
    mesh: Mapping[str, int],
    is_trained: Callable[[str], bool] | None,
    flat: Any,
    dim_names: Any,
    used_by: Axes,
) -> Leaf:
    path, leaf = flat

    def spec_from(zero_stage: int) -> Spec:
        # The same rule as in meshtrain/state.py: below this ZeRO stage, these axes shard nothing.
        is_sharded = cfg.train.zero_stage >= zero_stage
        rules = cfg.rules if is_sharded else sharding.rules_without(cfg.rules, *sharding.ZERO_AXES)
        return _spec(sharding.spec_for(dim_names, leaf.shape, rules, mesh), mesh)

    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    spec = spec_from(3)
    num_shards = math.prod(mesh[axis] for axis in spec[0]) if spec else 1
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return Leaf(
        name=name,
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
        is_trained=is_trained is None or is_trained(name),
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
    activations = jax.eval_shape(model.embed, params, batch)
    jaxprs = {
        "embed": jax.make_jaxpr(model.embed)(params, batch).jaxpr,
        "head": jax.make_jaxpr(model.head)(params, activations, batch).jaxpr,
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
    return used_by, max(jax.tree.leaves(activations), key=lambda leaf: leaf.size)


def sharded_experts(cfg: Config, batch: Any, placement: Placement) -> ShardedExperts | None:
    """Returns the experts of a layer by the active mesh and rules; None for a model without, or of the user's own."""
    if cfg.model.build != TRANSFORMER or not isinstance(batch, Batch):
        return None
    c = TransformerConfig(**cfg.model.options)
    if not c.num_experts:
        return None
    rows = cfg.train.global_batch // cfg.train.num_microbatches
    where = expert.layout(rows, batch.tokens.shape[1], c.num_experts)

    def larger(axes: Axes) -> Axes:
        return tuple(axis for axis in placement.mesh if axis in axes and placement.mesh[axis] > 1)

    num_rows = placement.num_tokens * where.num_gathered * c.experts_per_token
    return ShardedExperts(
        gathered=larger(where.gathered),
        others=larger(where.others),
        per_token=c.experts_per_token,
        num_experts=c.num_experts,
        num_devices=where.num_gathered,
        num_shards=where.num_shards,
        itemsize=jnp.dtype(cfg.train.dtype).itemsize,
        has_first_pass=num_rows >= c.num_experts,
    )


TRANSFORMER = "meshtrain.models.transformer:build"


def sharded_attention(
    cfg: Config, model: Model, batch: Any, placement: Placement
) -> ShardedAttention | None:
    """Returns the attention of a layer by the active mesh and rules; None if sequences are not sharded.

    None as well for a model of the user's own, whose heads are unknown.
    """
    is_known = model.attention is not None and cfg.model.build == TRANSFORMER
    if not is_known or not isinstance(batch, Batch):
        return None
    seq_len = batch.tokens.shape[1]
    num_devices = sharding.num_shards("seq", seq_len)
    if num_devices == 1:
        return None
    c = TransformerConfig(**cfg.model.options)
    num_tokens = placement.num_tokens
    H, G, dtype = c.num_heads, c.num_kv_heads, cfg.train.dtype
    shapes = dict(seq_len=seq_len, head_dim=max(c.query_size, c.value_size), dtype=dtype)
    shapes |= dict(num_heads=H, num_kv_heads=G, packed=batch.segments is not None)
    shapes |= dict(softcap=c.attention_softcap, dropout=c.dropout > 0)
    method, _ = choose_for_context(c.attention_impl, **shapes)
    num_shards = sharding.num_shards("heads", H)
    if method == "ulysses":
        G *= context.kv_repeats(H, G, num_devices * num_shards)
    of_queries = num_tokens * H // num_shards
    of_keys = num_tokens * G // sharding.num_shards("kv_heads", G)
    return ShardedAttention(
        method=method,
        num_devices=num_devices,
        query_size=of_queries * c.query_size,
        output_size=of_queries * c.value_size,
        key_size=of_keys * c.query_size,
        value_size=of_keys * c.value_size,
        padding=_padding(c.attention_impl, seq_len // (2 * num_devices)),
        itemsize=jnp.dtype(dtype).itemsize,
    )


def _padding(implementation: str, length: int) -> float:
    """Returns the tokens of a chunk of `length` in whole blocks, over `length`."""
    block = context_attention.block_size(implementation, length)
    return -(-length // block) * block / length
