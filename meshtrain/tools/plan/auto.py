"""Config key `mesh.auto`: the planner's layout for the devices of this job."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshtrain import hardware
from meshtrain.cluster import distributed
from meshtrain.config.parse import on_devices, parse
from meshtrain.config.schema import Config, MeshConfig
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.parallel.mesh import host_of
from meshtrain.tools.plan import constraints, search, text
from meshtrain.tools.plan import machine as machines
from meshtrain.tools.plan.cost import OverlapModel
from meshtrain.tools.plan.layout import overrides
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.subject import PlanInput

MEMORY = 0.9  # part of a device's memory that a step may use

# Measured devices share their cores with what they send, so computation hides nothing.
MEASURED_OVERLAP = OverlapModel(sends_hidden=0.0, data_hidden=0.0, gathers_hidden=0.0)


def resolve(
    config: Config | Mapping[str, Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    model: Model | None = None,
) -> Config:
    """Returns the typed config on `devices`, by default all of this job.

    With `mesh.auto` it has the layout that is predicted to be fastest, and `layout_reasons` say why: sizes of the mesh
    above 1 are kept; the other axes, ZeRO stage, micro-batches, remat and the pipeline are chosen. All processes must
    call it, and get the choice of process 0. Raises ConfigError if the mesh does not fit or no layout does.
    """
    cfg = parse(config)
    devices = devices or jax.devices()
    if not cfg.mesh.auto:
        return on_devices(cfg, len(devices))
    if "seq_len" not in cfg.data.options:
        raise ConfigError("mesh.auto=True: the planner needs data.seq_len; set the sizes of mesh")
    raw = cfg.to_dict()
    fixed = constraints.auto_sizes(raw)
    if faults := constraints.fixed_faults(raw, fixed, len(devices)):
        raise ConfigError(*faults)
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(slices=cfg.mesh.slices))
    subject, machine = PlanInput(cfg, model=model), _machine(devices)
    limit = MEMORY * machine.device.memory
    plan = search.search(
        subject,
        machine,
        limit=limit,
        fixed=fixed,
        scale=machine.of_xla,
        habits=MEASURED_OVERLAP if machine.kind == "measured" else None,
    )
    if not plan.found:
        raise ConfigError(f"mesh.auto=True: {search.way_out(subject, machine, plan, limit, fixed)}")
    best, *others = plan.found
    reasons = [
        f"{text.name_of(best.layout)}: the fastest of {plan.num_tried:,} layouts by `meshtrain plan`, "
        f"{best.seconds:.3g} s a step"
    ]
    if others:
        reasons.append(f"{text.name_of(others[0].layout)} {text.why_slower(others[0], best)}")
    values, reasons = distributed.broadcast([overrides(best.layout), reasons])
    cfg = dataclasses.replace(cfg.with_keys(values), layout_reasons=tuple(reasons))
    return on_devices(cfg, len(devices))


def _machine(devices: Sequence[jax.Device]) -> Machine:
    """Returns devices of the table, or measured ones. `per_host` is what shares the fast links."""
    device = hardware.device_of(devices[0].device_kind)
    groups = {*map(host_of, devices)}
    return Machine(
        device or machines.measure_host(), len(devices), max(1, len(devices) // len(groups))
    )
