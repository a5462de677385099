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
from meshtrain.tools.plan import constraints
from meshtrain.tools.plan import machine as machines
from meshtrain.tools.plan.cost import OverlapModel
from meshtrain.tools.plan.layout import overrides
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

    Sizes of the mesh above 1 are kept; the other axes, ZeRO stage, micro-batches, remat and the pipeline are chosen. A
    config without `mesh.auto` is returned as it is. All processes must call it, and get the choice of process 0.
    Raises ConfigError if no layout fits.
    """
    raw = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    if not checks.is_auto(raw):
        return config, []
    # Loaded when it is used: training starts without the planner.
    from meshtrain.tools.plan import search, text
    from meshtrain.tools.plan.subject import PlanInput

    if "seq_len" not in raw["data"]:
        raise ConfigError("mesh.auto=True: the planner needs data.seq_len; set the sizes of mesh")
    fixed = constraints.auto_sizes(raw)
    if faults := constraints.fixed_faults(raw, fixed, len(devices := devices or jax.devices())):
        raise ConfigError(*faults)
    raw["mesh"] = {**dict.fromkeys(AXES, 1), "slices": raw["mesh"]["slices"], "auto": False}
    subject, machine = PlanInput(raw, model=model), _machine(devices)
    plan = search.search(
        subject,
        machine,
        limit=(limit := MEMORY * machine.device.memory),
        fixed=fixed,
        scale=machine.of_xla,
        habits=MEASURED_OVERLAP if machine.kind == "measured" else None,
    )
    if not plan.found:
        raise ConfigError(f"mesh.auto=True: {search.way_out(subject, machine, plan, limit, fixed)}")
    best, *others = plan.found
    lines = [
        f"{text.name_of(best.layout)}: the fastest of {plan.num_tried:,} layouts by `meshtrain plan`, "
        f"{best.seconds:.3g} s a step"
    ]
    if others:
        lines.append(f"{text.name_of(others[0].layout)} {text.why_slower(others[0], best)}")
    values, lines = distributed.broadcast([overrides(best.layout), lines])
    return search.with_keys(raw, values), lines


def _machine(devices: Sequence[jax.Device]) -> Machine:
    """Returns devices of the table, or measured ones. `per_host` is what shares the fast links."""
    device = hardware.device_of(devices[0].device_kind)
    groups = {*map(host_of, devices)}
    return Machine(
        device or machines.measure_host(), len(devices), max(1, len(devices) // len(groups))
    )
