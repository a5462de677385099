"""Config key `mesh.auto`: the planner's layout for the devices of this job."""

import dataclasses
from collections.abc import Sequence

import jax

from meshtrain import hardware
from meshtrain.cluster import distributed
from meshtrain.config.parse import on_devices
from meshtrain.config.schema import Config, MeshConfig
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
) -> Config:
    """Returns the config on `devices`, by default all of this job.

    With `mesh.auto` it has the layout that is predicted to be fastest, and `layout_reasons` say
    why. Sizes of the mesh above 1 are kept; the other axes, ZeRO stage, micro-batches, remat and
    the pipeline are chosen. All processes must call it, and get the choice of process 0. Raises
    ConfigError if the mesh does not fit, or if no layout does.
    """
    devices = devices or jax.devices()
    if not cfg.mesh.auto:
        return on_devices(cfg, len(devices))
    if "seq_len" not in cfg.data.options:
        raise ConfigError("mesh.auto=True: the planner needs data.seq_len; set the sizes of mesh")
    fixed = constraints.auto_sizes(cfg.mesh)
    faults = constraints.fixed_faults(cfg, fixed, len(devices))
    if faults:
        raise ConfigError(*faults)

    cfg = dataclasses.replace(cfg, mesh=MeshConfig(slices=cfg.mesh.slices))
    plan_input = from_config.plan_input(cfg, model=model)
    machine = _machine(devices)
    limit = MEMORY * machine.device.memory
    plan = search.search(
        plan_input,
        machine,
        limit=limit,
        fixed=fixed,
        scale=machine.xla_factor,
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
