"""Describes what each device holds: parts of parameters, gradients, sequences and experts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import Config
from meshtrain.data.source import Batch
from meshtrain.models.base import FIRST_LAYERS_KEY, Model, Params
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import context_attention, cudnn
from meshtrain.ops.attention import choose_for_chunks, choose_for_context
from meshtrain.parallel import context, dispatch, expert, sharding
from meshtrain.parallel.grad_sync import Sync
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
    """The attention of a layer, as one device computes it in a micro-batch; sizes in elements."""

    method: str  # see parallel/context.py
    num_devices: int  # that hold parts of a sequence
    query_size: int  # of the queries of the device's own part of the sequences
    output_size: int  # of what attention computes for them
    # Of the keys and of the values of this part; repeated, where the method repeats them.
    key_size: int
    value_size: int
    padding: float  # tokens over tokens without padding, where attention is computed in blocks
    is_fused: bool  # whether a kernel computes pairs of chunks; both chunks are sent together then
    itemsize: int  # bytes per element of train.dtype


@dataclass(frozen=True)
class ShardedExperts:
    """The experts of a layer, as one device computes them in a micro-batch (parallel/expert.py)."""

    gathered: Axes  # within which tokens are gathered
    others: Axes  # that shard the experts, but no tokens
    per_token: int  # experts that a token uses
    num_experts: int
    num_devices: int  # of a group along `gathered`
    num_shards: int  # of the experts
    method: str  # see parallel/expert.py
    # Tokens that a device sends to each other one: all of its own, or those of a buffer.
    num_places: int
    num_needed: float  # those of them that the other one's experts need, if all are used equally
    num_routes: int  # experts of a shard that a token can use
    itemsize: int  # bytes per element of train.dtype
    has_first_pass: bool  # False: all rows are computed in the loop of ops/experts.py

    @property
    def necessary(self) -> float:
        """The part of the sent tokens that the other devices' experts need; at most 1."""
        return min(1.0, self.num_needed / self.num_places)


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
    # Ticks that have a forward, and as many a backward; num_microbatches without a pipeline.
    num_ticks: int
    pipeline_keep: str  # pipeline.keep; empty without a pipeline
    zero_stage: int
    remat: str
    compute_itemsize: int  # bytes per element of train.dtype
    # Of sharded sequences; None if they are not sharded, or their attention is unknown.
    attention: ShardedAttention | None = None
    experts: ShardedExperts | None = None  # None: none, or of a user's own model
    sync: Sync | None = None  # None: XLA adds the gradients of the batch shards

    @property
    def model_axes(self) -> Axes:
        """Axes that shard parameters but no tokens, for example tensor and pipeline."""
        sharding_axes = {axis for leaf in self.leaves for axis in leaf.axes}
        model_axes = sharding_axes - {*self.token_axes}
        return tuple(axis for axis in self.mesh if axis in model_axes)

    def token_axes_of(self, leaf: Leaf) -> Axes:
        """Axes of tokens over which a leaf is gathered and its gradient summed.

        The axes that shard experts are not among them: each expert is on one device of a group.
        """
        expert_axes: set[str] = set()
        for name, axes in zip(leaf.dim_names, leaf.spec, strict=True):
            if name == "expert":
                expert_axes |= {*axes}
        return tuple(axis for axis in self.token_axes if axis not in expert_axes)

    @property
    def deferred_axes(self) -> Axes:
        """Axes over which gradients are summed once, after the last micro-batch.

        Those that shard each sequence are never among them.
        """
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
        """How often a backward recomputes its chunk: for its inputs and for remat."""
        for_inputs = self.pipeline_keep == "inputs"
        for_remat = self.pipeline_keep != "" and self.remat != "none"
        return for_inputs + for_remat

    @property
    def idle_microbatches(self) -> float:
        """Ticks in which a stage computes only to stay in lock step, in units of a micro-batch."""
        return self.num_ticks / self.num_chunks - self.num_microbatches

    def num_devices(self, axes: Axes) -> int:
        """Returns the number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    def local_shape(self, leaf: Leaf, spec: Spec, replicated_over: Axes) -> list[int]:
        """Returns the shape of a leaf on a device: sharded by `spec`, less `replicated_over`."""
        local = []
        for size, axes in zip(leaf.shape, spec, strict=True):
            sharded_over = tuple(axis for axis in axes if axis not in replicated_over)
            local.append(size // self.num_devices(sharded_over))
        return local


def placement_of(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params, batch: Any
) -> Placement:
    """Returns the placement of a run. `params` and `batch` are arrays, or their shapes.

    What needs the active mesh and rules is left out: see `sharded_attention`, `sharded_experts`.
    """
    sizes = dict(mesh.shape)
    train = cfg.train
    row_axes, sequence_axes = _token_axes(cfg, sizes, batch)
    token_axes = tuple(axis for axis in sizes if axis in (*row_axes, *sequence_axes))

    # Without blocks the activations are unknown, and with them the tokens of a device.
    used_by, activations = _users(cfg, model, params, batch)
    num_tokens = d_model = 0
    if activations is not None:
        d_model = activations.shape[-1]
        num_devices = math.prod(sizes[axis] for axis in token_axes)
        num_tokens = activations.size // d_model // num_devices

    num_chunks, num_ticks, keep = 1, train.num_microbatches, ""
    if sizes["pipeline"] > 1:
        num_chunks = cfg.pipeline.num_chunks
        keep = cfg.pipeline.keep
        schedule = SCHEDULES[cfg.pipeline.schedule]
        table = schedule(sizes["pipeline"], train.num_microbatches, num_chunks)
        num_ticks = int(table.forward.active.any(1).sum())

    leaves = []
    all_dim_names = jax.tree.leaves(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    flat = jax.tree_util.tree_leaves_with_path(params)
    for (path, array), dim_names, users in zip(flat, all_dim_names, used_by, strict=True):
        leaf = _leaf(
            cfg,
            sizes,
            path,
            array,
            dim_names=dim_names,
            used_by=users,
            is_trained=model.is_trained,
        )
        leaves.append(leaf)
    return Placement(
        mesh=sizes,
        token_axes=token_axes,
        sequence_axes=sequence_axes,
        leaves=tuple(leaves),
        has_blocks=activations is not None,
        num_tokens=num_tokens,
        d_model=d_model,
        num_microbatches=train.num_microbatches,
        num_chunks=num_chunks,
        num_ticks=num_ticks,
        pipeline_keep=keep,
        zero_stage=train.zero_stage,
        remat=train.remat,
        compute_itemsize=jnp.dtype(train.dtype).itemsize,
    )


def _token_axes(cfg: Config, mesh: Mapping[str, int], batch: Any) -> tuple[Axes, Axes]:
    """Returns the mesh axes that shard the rows of a batch, and those that shard each row."""
    rows = cfg.train.global_batch
    names, shape = ("batch",), (rows,)
    if isinstance(batch, Batch):
        names, shape = ("batch", "seq"), (rows, batch.tokens.shape[1])
    spec = _spec(sharding.spec_for(names, shape, cfg.rules, mesh), mesh)
    return spec[0], spec[1] if spec[1:] else ()


def _spec(spec: Any, mesh: Mapping[str, int]) -> Spec:
    """Returns a partition spec without the axes of size 1."""
    return tuple(
        tuple(axis for axis in sharding.axes_of(entry) if mesh[axis] > 1) for entry in spec
    )


def _leaf(
    cfg: Config,
    mesh: Mapping[str, int],
    path: Any,
    leaf: Any,
    *,
    dim_names: Sequence[str | None],
    used_by: tuple[str, ...],
    is_trained: Callable[[str], bool] | None,
) -> Leaf:
    """Returns the description of a parameter; `leaf` is its array or shape."""

    def spec_from(zero_stage: int) -> Spec:
        # The same rule as in meshtrain/state.py: below this ZeRO stage, these axes shard nothing.
        rules = cfg.rules
        if cfg.train.zero_stage < zero_stage:
            rules = sharding.rules_without(rules, *sharding.ZERO_AXES)
        return _spec(sharding.spec_for(dim_names, leaf.shape, rules, mesh), mesh)

    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    compute_dtype = jnp.dtype(cfg.train.dtype) if is_float else leaf.dtype
    spec = spec_from(3)
    num_layers = 1
    if used_by == ("block",):
        num_layers = leaf.shape[0] // math.prod(mesh[axis] for axis in spec[0])
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return Leaf(
        name=name,
        argument="state.params" + jax.tree_util.keystr(path),
        shape=leaf.shape,
        dim_names=tuple(dim_names),
        itemsize=leaf.dtype.itemsize,
        compute_itemsize=compute_dtype.itemsize,
        spec=spec,
        grad_spec=spec_from(2),
        moment_spec=spec_from(1),
        used_by=used_by,
        num_layers=num_layers,
        is_trained=is_trained is None or is_trained(name),
    )


def _users(cfg: Config, model: Model, params: Params, batch: Any) -> tuple[list[Axes], Any]:
    """Returns which functions read each parameter, and the shape of the activations between blocks.

    The functions are "embed", "block" and "head". Without blocks: none, and None for the shape.
    """
    if model.block is None:
        return [()] * len(jax.tree.leaves(params)), None

    def cast(leaf: Any) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, cfg.train.dtype if is_float else leaf.dtype)

    def of_microbatch(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        if shape:
            shape = (shape[0] // cfg.train.num_microbatches, *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    params = jax.tree.map(cast, params)
    batch = jax.tree.map(of_microbatch, batch)
    activations = jax.eval_shape(model.embed, params, batch)
    # A function reads a parameter if one of its equations has the argument as an operand.
    jaxprs = {
        "embed": jax.make_jaxpr(model.embed)(params, batch).jaxpr,
        "head": jax.make_jaxpr(model.head)(params, activations, batch).jaxpr,
    }
    operands = {
        name: {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars}
        for name, jaxpr in jaxprs.items()
    }
    used_by = []
    for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        users = tuple(
            name for name, jaxpr in jaxprs.items() if id(jaxpr.invars[number]) in operands[name]
        )
        used_by.append(("block",) if path[0].key == "layers" else users)
    largest = max(jax.tree.leaves(activations), key=lambda leaf: leaf.size)
    return used_by, largest


TRANSFORMER = "meshtrain.models.transformer:build"


def sharded_experts(cfg: Config, batch: Any, placement: Placement) -> ShardedExperts | None:
    """Returns the experts of a layer by the active mesh and rules.

    None for a model without experts, or of the user's own.
    """
    if cfg.model.build != TRANSFORMER or not isinstance(batch, Batch):
        return None
    model_config = TransformerConfig(**cfg.model.options)
    num_experts, per_token = model_config.num_experts, model_config.experts_per_token
    if not num_experts:
        return None
    num_rows = cfg.train.global_batch // cfg.train.num_microbatches
    expert_axes = expert.layout(num_rows, batch.tokens.shape[1], num_experts)
    num_devices = expert_axes.num_gathered
    itemsize = jnp.dtype(cfg.train.dtype).itemsize
    choice = expert.choose(
        expert_axes,
        num_tokens=placement.num_tokens,
        d_model=model_config.d_model,
        itemsize=itemsize,
        num_experts=num_experts,
        per_token=per_token,
        expert_groups=model_config.expert_groups,
    )

    def larger_than_1(axes: Axes) -> Axes:
        return tuple(axis for axis in placement.mesh if axis in axes and placement.mesh[axis] > 1)

    return ShardedExperts(
        gathered=larger_than_1(expert_axes.gathered),
        others=larger_than_1(expert_axes.others),
        per_token=per_token,
        num_experts=num_experts,
        num_devices=num_devices,
        num_shards=expert_axes.num_shards,
        method=choice.method,
        num_places=choice.num_places,
        num_needed=choice.share * placement.num_tokens,
        num_routes=dispatch.num_routes(per_token, num_experts // expert_axes.num_shards),
        itemsize=itemsize,
        has_first_pass=placement.num_tokens * num_devices * per_token >= num_experts,
    )


def sharded_attention(
    cfg: Config, model: Model, batch: Any, placement: Placement
) -> ShardedAttention | None:
    """Returns the attention of a layer by the active mesh and rules.

    None if sequences are not sharded, or for a model of the user's own, whose heads are unknown.
    """
    is_known = model.attention is not None and cfg.model.build == TRANSFORMER
    if not is_known or not isinstance(batch, Batch):
        return None
    seq_len = batch.tokens.shape[1]
    num_devices = sharding.num_shards("seq", seq_len)
    if num_devices == 1:
        return None
    model_config = TransformerConfig(**cfg.model.options)
    query_size, value_size = model_config.query_size, model_config.value_size
    num_heads, num_kv_heads = model_config.num_heads, model_config.num_kv_heads
    shapes = dict(
        seq_len=seq_len,
        head_dim=max(query_size, value_size),
        dtype=cfg.train.dtype,
        packed=batch.segments is not None,
        softcap=model_config.attention_softcap,
        sinks=model_config.attention_sinks,
        dropout=model_config.dropout > 0,
        window=model_config.local_window,
    )
    implementation = model_config.attention_impl
    method, _ = choose_for_context(
        implementation, num_heads=num_heads, num_kv_heads=num_kv_heads, **shapes
    )
    kernel, _ = choose_for_chunks(implementation, **shapes)
    is_fused = method != "ulysses" and bool(kernel)
    num_shards = sharding.num_shards("heads", num_heads)
    if method == "ulysses":
        num_kv_heads *= context.kv_repeats(num_heads, num_kv_heads, num_devices * num_shards)
    num_key_shards = sharding.num_shards("kv_heads", num_kv_heads)
    key_dims, value_dims = query_size, value_size
    if is_fused:
        num_kv_heads *= context.kv_repeats(num_heads, num_kv_heads, num_shards)
        num_key_shards = num_shards
        extra_dims = cudnn.SEGMENT_DIMS if batch.segments is not None else 0
        key_dims = value_dims = max(query_size, value_size) + extra_dims
    # Elements per dim of a head, on one device.
    queries = placement.num_tokens * num_heads // num_shards
    keys = placement.num_tokens * num_kv_heads // num_key_shards
    length = seq_len // (2 * num_devices)
    return ShardedAttention(
        method=method,
        num_devices=num_devices,
        query_size=queries * query_size,
        output_size=queries * value_size,
        key_size=keys * key_dims,
        value_size=keys * value_dims,
        padding=1.0 if is_fused else _padding(implementation, length),
        is_fused=is_fused,
        itemsize=jnp.dtype(cfg.train.dtype).itemsize,
    )


def _padding(implementation: str, length: int) -> float:
    """Returns the tokens of a chunk of `length` in whole blocks, over `length`."""
    block = context_attention.block_size(implementation, length)
    return -(-length // block) * block / length
