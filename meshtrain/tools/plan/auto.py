"""Config key `mesh.auto`: the planner's layout for the devices of this job."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshtrain import hardware
from meshtrain.cluster import distributed
from meshtrain.config import checks
from meshtrain.config.schema import AXES
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.parallel.mesh import host_of
from meshtrain.tools.plan import constraints, from_config, search
from meshtrain.tools.plan import machine as machines
from meshtrain.tools.plan.cost import OverlapModel
from meshtrain.tools.plan.layout import name_of, overrides, with_keys
from meshtrain.tools.plan.machine import Machine

MEMORY = 0.9  # part of a device's memory that a step may use

# Measured devices share their cores with what they send, so computation hides nothing.
MEASURED_OVERLAP = OverlapModel(sends_hidden=0.0, data_hidden=0.0, gathers_hidden=0.0)


def resolve(
    config: Mapping[str, Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    model: Model | None = None,
) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the config with the layout that is predicted to be fastest, and lines that say why.

    Sizes of the mesh above 1 are kept; the other axes, ZeRO stage, micro-batches, remat and the
    pipeline are chosen. A config without `mesh.auto` is returned as it is. All processes must call
    it, and get the choice of process 0. Raises ConfigError if no layout fits.
    """
    raw = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    if not checks.is_auto(raw):
        return config, []
    if "seq_len" not in raw["data"]:
        raise ConfigError("mesh.auto=True: the planner needs data.seq_len; set the sizes of mesh")
    devices = devices or jax.devices()
    fixed = constraints.auto_sizes(raw)
    faults = constraints.fixed_faults(raw, fixed, len(devices))
    if faults:
        raise ConfigError(*faults)

    raw["mesh"] = {**dict.fromkeys(AXES, 1), "slices": raw["mesh"]["slices"], "auto": False}
    plan_input = from_config.plan_input(raw, model=model)
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
    lines = [
        f"{name_of(best.layout)}: the fastest of {plan.num_tried:,} layouts by `meshtrain plan`, "
        f"{best.seconds:.3g} s a step"
    ]
    if others:
        lines.append(f"{name_of(others[0].layout)} {search.why_slower(others[0], best)}")
    # Measured devices differ a little between processes, and so could their choices.
    keys, lines = distributed.broadcast([overrides(best.layout), lines])
    return with_keys(raw, keys), lines


def _machine(devices: Sequence[jax.Device]) -> Machine:
    """Returns devices of the table, or measured ones. `per_host` is what shares the fast links."""
    device = hardware.device_of(devices[0].device_kind)
    hosts = {host_of(device) for device in devices}
    per_host = max(1, len(devices) // len(hosts))
    return Machine(device or machines.measure_host(), len(devices), per_host)
