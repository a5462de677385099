"""Config key `mesh.auto`: the planner's layout for the devices of this job."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshtrain import hardware
from meshtrain.cluster import distributed
from meshtrain.config.build import build_data
from meshtrain.config.parse import on_devices
from meshtrain.config.schema import Config, MeshConfig
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.parallel.mesh import host_of
from meshtrain.tools.plan import constraints, from_config, search
from meshtrain.tools.plan import machine as machines
from meshtrain.tools.plan.cost import OverlapModel
from meshtrain.tools.plan.layout import name_of, overrides
from meshtrain.tools.plan.machine import Machine

MEMORY = 0.9  # part of a device's memory that a step may use

# Measured devices share their cores with what they send, so computation hides nothing.
MEASURED_OVERLAP = OverlapModel(sends_hidden=0.0, data_hidden=0.0, gathers_hidden=0.0)


def resolve(
    cfg: Config,
    *,
    devices: Sequence[jax.Device] | None = None,
    model: Model | None = None,
    batch: Any = None,
) -> Config:
    """Returns the config on `devices`, by default all of this job.

    With `mesh.auto` it has the layout that is predicted to be fastest, and `layout_reasons` say
    why. Sizes of the mesh above 1 are kept; the other axes, ZeRO stage, micro-batches, remat and
    the pipeline are chosen. `batch` is one of the caller's data, with any number of rows. All
    processes must call it, and get the choice of process 0. Raises ConfigError if the mesh does not
    fit, or if no layout does.
    """
    devices = devices or jax.devices()
    if not cfg.mesh.auto:
        return on_devices(cfg, len(devices))
    cfg = constraints.with_batch(cfg, len(devices))
    fixed = constraints.auto_sizes(cfg.mesh)
    # Only of the data of this package are the shapes known from the config.
    if batch is None and not cfg.data.build.startswith("meshtrain."):
        batch = build_data(cfg.data, "train").read(np.arange(1))
    faults = constraints.fixed_faults(cfg, fixed, len(devices))
    if faults:
        raise ConfigError(*faults)

    cfg = dataclasses.replace(cfg, mesh=MeshConfig(slices=cfg.mesh.slices))
    row = None if batch is None else from_config.first_row(batch)
    platform = devices[0].platform
    plan_input = from_config.plan_input(cfg, platform=platform, model=model, row=row)
    # What the trainer rejects for other reasons than sizes.
    if row is not None and not isinstance(row, Batch):
        fixed.setdefault("context", 1)
    if not jax.tree.leaves(plan_input.model.axes):  # no dim has a name, so none can be sharded
        fixed.setdefault("fsdp", 1)
        fixed.setdefault("tensor", 1)
    machine = _machine(devices)
    limit = MEMORY * machine.device.memory
    plan = search.search(
        plan_input,
        machine,
        limit=limit,
        fixed=fixed,
        overlap=MEASURED_OVERLAP if machine.kind == "measured" else None,
    )
    if not plan.candidates:
        reason = search.way_out(plan_input, machine, plan, limit, fixed)
        raise ConfigError(f"mesh.auto=True: {reason}")

    best, *others = plan.candidates
    reasons = [
        f"{name_of(best.layout)}: the fastest of {plan.num_tried:,} layouts by `meshtrain plan`, "
        f"{best.seconds:.3g} s a step"
    ]
    if others:
        reasons.append(f"{name_of(others[0].layout)} {search.why_slower(others[0], best)}")
    # Measured devices differ a little between processes, and so could their choices.
    keys, reasons = distributed.broadcast([overrides(best.layout), reasons])
    cfg = dataclasses.replace(cfg.with_keys(keys), layout_reasons=tuple(reasons))
    return on_devices(cfg, len(devices))


def _machine(devices: Sequence[jax.Device]) -> Machine:
    """Returns devices of the table, or measured ones. `per_host` is what shares the fast links."""
    device = hardware.device_of(devices[0].device_kind)
    hosts = {host_of(device) for device in devices}
    per_host = max(1, len(devices) // len(hosts))
    return Machine(device or machines.measure_host(), len(devices), per_host)
