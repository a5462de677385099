"""The lines that a run logs before it compiles, warnings about settings without effect, and its last line."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.config import schema as sync_keys
from meshtrain.config.schema import AXES, Config
from meshtrain.data.source import Source
from meshtrain.errors import nearest_multiples
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params, trained_part
from meshtrain.models.transformer_config import VOCAB_MULTIPLE
from meshtrain.monitor.writer import Units
from meshtrain.optim import muon
from meshtrain.optim.muon import NS_STEPS
from meshtrain.parallel import sharding
from meshtrain.parallel.grad_sync import Sync
from meshtrain.parallel.mesh import network_of
from meshtrain.schedules import SCHEDULES
from meshtrain.state import TrainState


def start_lines(
    cfg: Config,
    model: Model,
    abstract_state: TrainState,
    units: Units,
    data: Any,
    how: Sync | None = None,
) -> Iterator[str]:
    """Yields the lines to log before compiling: mesh, parameters, memory, batch, schedule, data."""
    attention = ""  # first, because an error must be the only line
    if units.name == "tokens" and model.attention:
        attention = model.attention(units.per_sample, cfg.train.dtype, units.packed)
    used = [f"{axis} {size}" for axis in AXES if (size := getattr(cfg.mesh, axis)) > 1]
    slices = f" · {cfg.mesh.slices} slices" if cfg.mesh.slices > 1 else ""
    device = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    sizes = " x ".join(used) or "one device"
    yield f"mesh        {sizes}{slices} · {device} · jax {jax.__version__}"
    count = states.count(abstract_state.params)
    of_trained = states.count(trained_part(abstract_state.params, model.is_trained))
    trained = f" · {of_trained:,} trained" if model.is_trained else ""
    active = f" · {count - model.num_inactive:,} active" if model.num_inactive else ""
    yield f"parameters  {count:,}{active}{trained} · {cfg.train.param_dtype}, computed in {cfg.train.dtype}"
    sizes = [
        states.bytes_per_device(tree) / 1e6
        for tree in (abstract_state.params, abstract_state.opt_state)
    ]
    yield f"per device  {sizes[0]:,.2f} MB of parameters, {sizes[1]:,.2f} MB of optimizer state"
    per_step = cfg.train.global_batch * units.per_sample
    yield f"step        {per_step:,} {units.name} in {cfg.train.num_microbatches} micro-batches"
    if cfg.mesh.pipeline > 1:
        yield f"pipeline    {_pipeline(cfg)}"
    if sync_keys.changed_sync_key(cfg.sync):
        yield f"gradients   {_synchronisation(cfg, how)}"
    if attention:
        yield f"attention   {attention}"
    if cfg.optimizer.build == "meshtrain.optim.muon:muon":
        params = trained_part(abstract_state.params, model.is_trained)
        sizes = jax.tree.leaves(params)[0].sharding.mesh.shape
        cost = muon.cost(
            params,
            model.trained_axes,
            cfg.rules,
            sizes,
            num_steps=cfg.optimizer.options.get("ns_steps", NS_STEPS),
        )
        yield f"muon        {cost.describe()} per update and device"
    if units.flops:
        yield f"FLOPs       {units.flops:,.0f} per token: 6 N + 12 L d S, N without embedding tables"
    if isinstance(data, Source):
        yield f"data        {data.description}"


def _pipeline(cfg: Config) -> str:
    P, M, V = cfg.mesh.pipeline, cfg.train.num_microbatches, cfg.pipeline.num_chunks
    table = SCHEDULES[cfg.pipeline.schedule](P, M, V)
    chunks = f" of {V} chunks" if V > 1 else ""
    live = (
        f"{table.num_live} micro-batches" if V == 1 else f"{table.num_live} chunks of micro-batches"
    )
    return (
        f"{cfg.pipeline.schedule}, {P} stages{chunks} · bubble {table.bubble:.1%} of a step"
        f" · up to {live} live, {cfg.pipeline.keep} kept"
    )


def _synchronisation(cfg: Config, how: Sync | None) -> str:
    if how is None:
        return (
            f"summed by XLA: {sync_keys.changed_sync_key(cfg.sync)} has no slow network to apply to"
        )
    dtypes = ["float32"] * (len(how.levels) - 1) + [cfg.sync.wire]
    stages = [f"{dtype} among {n.size}" for dtype, n in zip(dtypes, how.levels, strict=True)]
    if how.wire:
        stages[-1] += f" ({how.wire.bytes_per_element:.3f} bytes per element)"
    kept = " · what a step loses is added to the next" if how.feedback else ""
    return f"summed over {' x '.join(how.axes)}: {cfg.sync.pattern}, {', then '.join(stages)}{kept}"


def final_line(
    step: int, cfg: Config, eval_loss: float | None, data: Any, workdir: Path | None
) -> str:
    """Returns the last line of a run."""
    if step < cfg.train.steps:
        saved = (
            f"saved in {workdir}; run the same command to resume"
            if workdir
            else "not saved: no workdir"
        )
        return f"stopped after {step} of {cfg.train.steps} steps · {saved}"
    line = f"done: {step} steps"
    if eval_loss is not None:
        line += f" · held-out loss {eval_loss:.4f}"
    if isinstance(data, Source) and data.baseline is not None:
        line += f" · unigram entropy {data.baseline:.4f} nats per token"
    return line


# Axes along which every layer communicates, from the outermost to the innermost.
LAYER_AXES = ("expert", "context", "tensor")

# Replicated parameters are reported from this fraction of the parameter bytes on a device, or these bytes.
MIN_FRACTION, MIN_BYTES = 0.01, 64 << 20

# The key of section `model` that sets the size of a dim of meshtrain's own models.
MODEL_KEYS = {
    "embed": "d_model",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "mlp": "d_ff",
    "vocab": "vocab_size",
}


class RunWarning(NamedTuple):
    text: str
    fields: Mapping[str, Any]  # of the event


def layout_warnings(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params, batch: Any
) -> Iterator[RunWarning]:
    """Yields the warnings that need only shapes, while mesh and rules are active; `params` has shardings."""
    yield from unsharded(cfg, model, mesh, params)
    yield from crossing(mesh)
    yield from _unmarked_names(cfg, model, params, batch)


def unsharded(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params
) -> Iterator[RunWarning]:
    """Warns about parameters that stay replicated because an axis does not divide a dim of theirs.

    One warning for each axis and dim. At ZeRO stage 1 and 2, `fsdp` shards optimizer state, at stage 0 nothing.
    """
    stage, sizes = cfg.train.zero_stage, mesh.shape
    rules = cfg.rules if stage else sharding.rules_without(cfg.rules, *sharding.ZERO_AXES)
    names = jax.tree.leaves(model.axes, is_leaf=lambda node: isinstance(node, tuple))
    groups = defaultdict(list)
    for (path, leaf), dims in zip(jax.tree.leaves_with_path(params), names, strict=True):
        for axis, (dim, axes) in sharding.not_divisible(dims, leaf.shape, rules, sizes).items():
            axes = tuple(one for one in axes if sizes[one] > 1)
            groups[axis, dims[dim], leaf.shape[dim], axes].append((path, leaf))
    enough = min(MIN_FRACTION * states.bytes_per_device(params), MIN_BYTES)
    for (axis, name, size, axes), leaves in groups.items():
        num_bytes = states.bytes_per_device([leaf for _, leaf in leaves])
        if num_bytes < enough:
            continue
        largest = max(leaves, key=lambda item: states.bytes_per_device(item[1]))[0]
        key = MODEL_KEYS.get(name) if model.attention else None
        is_key_size = key and cfg.model.options.get(key) == size  # a vocabulary may be padded
        what = f"model.{key}={size}" if is_key_size else f"dim {name!r} of {size}"
        replicated = (
            "are" if stage == 3 or axis not in sharding.ZERO_AXES else "have their optimizer state"
        )
        replicated += " by design" if name == "kv_heads" else ""
        yield RunWarning(
            f"{' x '.join(f'mesh.{one}={sizes[one]}' for one in axes)} does not divide {what}: "
            f"{num_bytes / 1e6:,.2f} MB of parameters on each device, such as "
            f"{jax.tree_util.keystr(largest, simple=True, separator='/')}, {replicated} replicated over {axis}; "
            f"use {_sizes_that_divide(axis, axes, sizes, name, size, key)}",
            dict(about="unsharded", axis=axis, dim=name, size=size, bytes=num_bytes),
        )


def _sizes_that_divide(
    axis: str,
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    name: str,
    size: int,
    key: str | None,
) -> str:
    """Returns the nearest sizes of the axis, and of the dim, with which the product of `axes` divides the dim."""
    product = math.prod(sizes[one] for one in axes)
    others = product // sizes[axis]
    fits = [n for n in range(1, size // others + 1) if size % (n * others) == 0]
    below = [n for n in fits if n < sizes[axis]][-1:]
    above = [n for n in fits if n > sizes[axis]][:1]
    of_axis = " or ".join(map(str, below + above))
    step = math.lcm(product, VOCAB_MULTIPLE) if key == "vocab_size" else product
    of_dim = f"{f'model.{key}=' if key else f'{name!r} of '}{nearest_multiples(size, step)}"
    return f"mesh.{axis}={of_axis}, or {of_dim}" if of_axis else of_dim


def crossing(mesh: jax.sharding.Mesh) -> Iterator[RunWarning]:
    """Warns about axes of LAYER_AXES whose groups of devices are not within one fast network."""
    kind = {"cpu": "processes", "tpu": "slices"}.get(mesh.devices.flat[0].platform, "hosts")
    network = network_of(mesh)
    num_inside = int(np.unique(network.hosts, return_counts=True)[1].min())
    for axis in LAYER_AXES:
        number, size = AXES.index(axis), mesh.shape[axis]
        if network.link_along(axis) == "host":
            continue
        inner = math.prod(mesh.shape[one] for one in AXES[number + 1 :])
        fits = math.gcd(size, max(1, num_inside // inner))
        yield RunWarning(
            f"mesh.{axis}={size} crosses {kind}, and every layer communicates along {axis}: "
            f"mesh.{axis}={fits} stays within each of them",
            dict(about="crossing", axis=axis, size=size, inside=fits),
        )


def _unmarked_names(cfg: Config, model: Model, params: Params, batch: Any) -> Iterator[RunWarning]:
    """Warns about names in `train.remat` that the model does not mark; program.py checks declared names."""
    remat = cfg.train.remat
    if not remat.startswith("names:"):
        return
    marked = marked_names(model, params, batch, cfg.train.dtype)
    for name in remat.removeprefix("names:").split(","):
        if name not in marked:
            known = f"; it marks {', '.join(sorted(marked))}" if marked else " with checkpoint_name"
            yield RunWarning(
                f"train.remat={remat}: nothing is saved for {name!r}, because the model marks no value of that "
                f"name{known}",
                dict(about="remat", name=name, marked=sorted(marked)),
            )


def marked_names(model: Model, params: Params, batch: Any, dtype: str) -> set[str]:
    """Returns the names of `checkpoint_name` in a block, or in the loss of a model without blocks."""
    found: set[str] = set()

    def policy(primitive, *_, **parameters):
        if primitive.name == "name":
            found.add(parameters["name"])
        return False

    def trace(params, batch):
        params = blocks.to_compute_dtype(params, dtype)
        if model.block is None:
            run, args = lambda *args: model.loss(*args, batch, jax.random.key(0)), (params,)
        else:
            layer = jax.tree.map(lambda stacked: stacked[0], model.stack(params["layers"]))
            run, args = lambda *args: model.block(*args, batch), (layer, model.embed(params, batch))
        # The policy sees what `train.remat` may save, the forward passes of custom gradients too.
        return jax.vjp(jax.checkpoint(run, policy=policy), *args)[0]

    jax.eval_shape(trace, params, batch)
    return found


def setting_warnings(cfg: Config, data: Any) -> Iterator[RunWarning]:
    warmup, steps = cfg.optim.warmup_steps, cfg.train.steps
    if warmup >= steps > 0:
        yield RunWarning(
            f"optim.warmup_steps={warmup} is not below train.steps={steps}: the run ends before "
            f"optim.learning_rate={cfg.optim.learning_rate:g} is reached",
            dict(about="warmup", warmup_steps=warmup, steps=steps),
        )
    if cfg.optimizer.build == "meshtrain.optim.others:schedule_free_adamw":
        if cfg.optim.schedule != "constant":
            yield RunWarning(
                f"optim.schedule={cfg.optim.schedule}: schedule-free AdamW averages the parameters in place of a "
                f"decay; use optim.schedule=constant, with a warm-up",
                dict(about="schedule", schedule=cfg.optim.schedule),
            )
        if "bfloat16" in (cfg.optim.moment_dtype, cfg.train.param_dtype):
            yield RunWarning(
                "optim.build=meshtrain.optim.others:schedule_free_adamw: its averages are a difference of parameters "
                "that bfloat16 rounds; use float32 for optim.moment_dtype and train.param_dtype",
                dict(about="dtype", moment_dtype=cfg.optim.moment_dtype),
            )
    for text in data.warnings if isinstance(data, Source) else ():
        yield RunWarning(text, dict(about="data"))
