"""Formats the lines that a run logs before it compiles, and its last line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from meshtrain import state as states
from meshtrain.config import sync as sync_keys
from meshtrain.config.schema import AXES, Config
from meshtrain.data.source import Source
from meshtrain.models.base import Model, trained_part
from meshtrain.monitor.units import Units
from meshtrain.optimizers import NS_STEPS
from meshtrain.parallel import orthogonal
from meshtrain.parallel.pipeline.schedules import SCHEDULES
from meshtrain.parallel.sync import Sync
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
    if sync_keys.changed(cfg.sync):
        yield f"gradients   {_synchronisation(cfg, how)}"
    if attention:
        yield f"attention   {attention}"
    if cfg.optimizer.build == "meshtrain.optimizers:muon":
        params = trained_part(abstract_state.params, model.is_trained)
        sizes = jax.tree.leaves(params)[0].sharding.mesh.shape
        cost = orthogonal.cost(
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
        return f"summed by XLA: {sync_keys.changed(cfg.sync)} has no slow network to apply to"
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
