"""Returns the lines that a run logs before it compiles, and its last line."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from meshtrain import state as states
from meshtrain.config import schema
from meshtrain.config.schema import AXES, Config
from meshtrain.data.source import Source, Timeline, last_sample
from meshtrain.models.base import Model, trained_part
from meshtrain.monitor.writer import Units
from meshtrain.optim import muon
from meshtrain.parallel.grad_sync import Sync
from meshtrain.schedules import SCHEDULES
from meshtrain.state import TrainState

CHAT_BUILD = "meshtrain.data.chat:build"


def start_lines(
    cfg: Config,
    model: Model,
    abstract_state: TrainState,
    *,
    units: Units,
    data: Any,
    grad_sync: Sync | None = None,
    step: int = 0,
    position: int = 0,
) -> Iterator[str]:
    """Yields the lines to log before compiling: mesh, parameters, memory, batch, schedule, data.

    The run is at `step`, and has read `position` samples.
    """
    attention = ""  # first, because an error must be the only line
    if units.name == "tokens" and model.attention:
        attention = model.attention(units.per_sample, cfg.train.dtype, units.packed)

    yield f"mesh        {_mesh(cfg)}"
    yield f"parameters  {_parameters(cfg, model, abstract_state)}"
    params_mb = states.bytes_per_device(abstract_state.params) / 1e6
    optimizer_mb = states.bytes_per_device(abstract_state.opt_state) / 1e6
    memory = f"{params_mb:,.2f} MB of parameters, {optimizer_mb:,.2f} MB of optimizer state"
    if host_mb := states.host_bytes_per_device(abstract_state.opt_state) / 1e6:
        memory += f" · in host memory {host_mb:,.2f} MB of optimizer state"
    yield f"per device  {memory}"
    per_step = cfg.train.global_batch * units.per_sample
    yield f"step        {per_step:,} {units.name} in {cfg.train.num_microbatches} micro-batches"
    if cfg.mesh.pipeline > 1:
        yield f"pipeline    {_pipeline(cfg)}"
    if schema.changed_sync_key(cfg.sync):
        yield f"gradients   {_synchronisation(cfg, grad_sync)}"
    if attention:
        yield f"attention   {attention}"
    if cfg.optimizer.build == "meshtrain.optim.muon:muon":
        params = trained_part(abstract_state.params, model.is_trained)
        cost = muon.cost(
            params,
            model.trained_axes,
            cfg.rules,
            jax.tree.leaves(params)[0].sharding.mesh.shape,
            num_steps=cfg.optimizer.options.get("ns_steps", muon.NS_STEPS),
        )
        yield f"muon        {cost.describe()} per update and device"
    if units.flops:
        rule = "6 N + 12 L d S, N without embedding tables"
        yield f"FLOPs       {units.flops:,.0f} per token: {rule}"
    if isinstance(data, Source):
        yield f"data        {data.description}"
        run = Timeline(cfg.train.steps, cfg.train.global_batch, step, position)
        for line in _parts(data, run, units):
            yield f"            {line}"


def _parts(data: Source, run: Timeline, units: Units) -> Iterator[str]:
    """Yields a line for each part of a mixture: what a run reads of it in all."""
    for part in data.parts(0, last_sample(run)) if data.parts else ():
        epochs = f", {part.samples / part.size:.2f} epochs" if part.size else ""
        yield f"{part.samples * units.per_sample:,} {units.name}{epochs} of {part.name}"


def _mesh(cfg: Config) -> str:
    sizes = {axis: getattr(cfg.mesh, axis) for axis in AXES}
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    axes = " x ".join(used) or "one device"
    slices = f" · {cfg.mesh.slices} slices" if cfg.mesh.slices > 1 else ""
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    return f"{axes}{slices} · {devices} · jax {jax.__version__}"


def _parameters(cfg: Config, model: Model, abstract_state: TrainState) -> str:
    count = states.count(abstract_state.params)
    line = f"{count:,}"
    if model.num_inactive:
        line += f" · {count - model.num_inactive:,} active"
    if model.is_trained:
        num_trained = states.count(trained_part(abstract_state.params, model.is_trained))
        line += f" · {num_trained:,} trained"
    return f"{line} · {cfg.train.param_dtype}, computed in {cfg.train.dtype}"


def _pipeline(cfg: Config) -> str:
    P, M, V = cfg.mesh.pipeline, cfg.train.num_microbatches, cfg.pipeline.num_chunks
    table = SCHEDULES[cfg.pipeline.schedule](P, M, V)
    chunks, unit = "", "micro-batches"
    if V > 1:
        chunks, unit = f" of {V} chunks", "chunks of micro-batches"
    return (
        f"{cfg.pipeline.schedule}, {P} stages{chunks} · bubble {table.bubble:.1%} of a step"
        f" · up to {table.num_live} {unit} live, {cfg.pipeline.keep} kept"
    )


def _synchronisation(cfg: Config, grad_sync: Sync | None) -> str:
    if grad_sync is None:
        key = schema.changed_sync_key(cfg.sync)
        return f"summed by XLA: {key} has no slow network to apply to"
    # From the fastest links to the slowest; only the last sums are rounded.
    dtypes = ["float32"] * (len(grad_sync.levels) - 1) + [cfg.sync.dtype]
    stages = []
    for dtype, level in zip(dtypes, grad_sync.levels, strict=True):
        stages.append(f"{dtype} among {level.size}")
    if grad_sync.wire:
        stages[-1] += f" ({grad_sync.wire.bytes_per_element:.3f} bytes per element)"
    line = f"summed over {' x '.join(grad_sync.axes)}: {cfg.sync.pattern}, {', then '.join(stages)}"
    if grad_sync.feedback:
        line += " · what a step loses is added to the next"
    return line


def final_line(
    step: int,
    cfg: Config,
    eval_loss: float | None,
    data: Any,
    workdir: Path | None,
    *,
    saved_step: int | None,
    is_last_skipped: bool,
) -> str:
    """Returns the last line of a run.

    `saved_step` is the step of its newest checkpoint; `is_last_skipped` says that the last step had
    no effect, because its float16 gradients overflowed.
    """
    if step < cfg.train.steps:
        saved = "not saved: no workdir"
        if workdir:
            saved = f"saved in {workdir}; run the same command to resume"
        if workdir and saved_step != step:
            saved = (
                f"not saved, because the loss has spiked; run the same command to resume from step "
                f"{saved_step}, without the data since"
            )
        return f"stopped after {step} of {cfg.train.steps} steps · {saved}"
    line = f"done: {step} steps"
    if is_last_skipped:
        line += " · the last update was skipped: its float16 gradients overflowed"
    if eval_loss is not None:
        line += f" · held-out loss {eval_loss:.4f}"
    if isinstance(data, Source) and data.baseline is not None:
        line += f" · unigram entropy {data.baseline:.4f} nats per token"
    return line


def next_line(cfg: Config, model: Model, data: Any, workdir: Path, step: int) -> str:
    """Returns what can be done with a run that is done after `step` steps, as commands."""
    folder = shlex.quote(str(workdir))
    program = _program()
    parts = [f"{program} report {folder} --output=report.html"]
    # Text can be generated if the config names the model, and the data has a tokenizer.
    is_own = cfg.model.build == schema.OWN_MODEL
    can_generate = not is_own and model.cached_block is not None
    if can_generate and isinstance(data, Source) and data.identity.get("tokenizer"):
        chat = " --chat" if cfg.data.build == CHAT_BUILD else ""
        parts.append(f"{program} generate --workdir={folder}{chat} --prompt=TEXT")
    # A script of the user's own has its own flags.
    prefix = "" if is_own or not isinstance(data, Source) else "--config."
    if cfg.train.epochs:
        parts.append(f"{prefix}train.epochs={2 * cfg.train.epochs:g} continues it")
    elif step:
        parts.append(f"{prefix}train.steps={2 * step} continues it")
    return f"next: {' · '.join(parts)}"


def _program() -> str:
    """Returns how a shell starts meshtrain: by its name, or by a path if that is not on PATH."""
    path = Path(sys.executable).with_name("meshtrain")
    if shutil.which("meshtrain") or not path.exists():
        return "meshtrain"
    return shlex.quote(os.path.relpath(path))
