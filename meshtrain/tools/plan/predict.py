"""Predicts the step time of a run as `meshtrain plan` does; metrics.jsonl has both times."""

from typing import Any

import jax

from meshtrain import hardware
from meshtrain.config.schema import AXES, Config
from meshtrain.models.base import Model, Params
from meshtrain.tools.plan.cost import step_cost
from meshtrain.tools.plan.layout import Layout
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.work import tokens_of, work_of


def step_seconds(
    cfg: Config, model: Model, params: Params, batch: Any, device: hardware.Device | None
) -> float | None:
    """Returns the predicted seconds of a step; None for devices of unknown figures.

    `params` and `batch` need shapes only.
    """
    if device is None:
        return None
    layout = layout_of(cfg)
    num_devices = layout.num_devices
    # The fast links of GPUs end at the host, those of TPUs at the slice.
    per_host = jax.local_device_count() if device.chip else num_devices // cfg.mesh.slices
    machine = Machine(device, num_devices, min(per_host, num_devices))
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), batch)
    work = work_of(cfg, model, params, row)
    return step_cost(work, layout, machine, tokens_of(row)).seconds


def layout_of(cfg: Config) -> Layout:
    """Returns the layout of a config whose mesh is resolved."""
    mesh, train = cfg.mesh, cfg.train
    shards = mesh.data * mesh.fsdp * mesh.expert
    return Layout(
        **{axis: getattr(mesh, axis) for axis in AXES},
        zero_stage=train.zero_stage,
        rows=train.global_batch // shards // train.num_microbatches,
        num_microbatches=train.num_microbatches,
        schedule=cfg.pipeline.schedule,
        num_chunks=cfg.pipeline.num_chunks,
        keep=cfg.pipeline.keep,
        remat=train.remat,
        sync=cfg.sync,
        loss_chunk_mib=cfg.model.options.get("loss_chunk_mib", 0.0),
    )
