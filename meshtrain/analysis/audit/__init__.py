"""Compiles the step of a config and compares what its collectives move with the least that they could."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.analysis import collective_ops as collectives
from meshtrain.analysis import hlo
from meshtrain.analysis.audit import placement as layout
from meshtrain.analysis.audit import warn
from meshtrain.analysis.audit.explain import explain
from meshtrain.analysis.audit.ledger import Explained, Ledger
from meshtrain.analysis.audit.minimum import APART
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import Config
from meshtrain.data import synthetic
from meshtrain.data.loader import from_iterable
from meshtrain.data.source import Source
from meshtrain.models.base import Model
from meshtrain.parallel import sharding
from meshtrain.program import Program, assemble


@dataclass(frozen=True)
class Total:
    """What one axis, or several together, carry per device and step."""

    name: str
    bytes: float
    minimum: float | None  # None where it is not known

    @property
    def ratio(self) -> float | None:
        return self.bytes / self.minimum if self.minimum else None


@dataclass(frozen=True)
class Audit:
    mesh: dict[str, int]
    device: str
    platform: str
    held: int  # bytes of parameters on each device
    axes: list[Total]
    explained: list[Explained]
    excess: list[tuple[str, str, str, float]]  # axes, label, reason, bytes
    saved: list[tuple[str, str, float]]  # axes, role, bytes that the layout has room for
    warnings: list[str]

    def total(self, *axes: str) -> Total:
        """Returns what these axes carry together."""
        name = warn.name_of(axes)
        return next((total for total in self.axes if total.name == name), Total(name, 0, 0))

    def moved(self, label: str, *axes: str) -> float:
        """Returns the bytes that these axes carry for one purpose."""
        of = [one.collective for one in self.explained if one.label == label]
        return sum(c.bytes for c in of if c.axes == axes)


def audit(
    config: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    devices: list[jax.Device] | None = None,
) -> Audit:
    """Compiles the step that `train` would run, with the same arguments, and reads what it moves.

    Other `devices` than all of them may be a topology's (`jax.experimental.topologies`).
    """
    devices = devices or jax.devices()
    cfg = parse(config, num_devices=len(devices))
    if data is None:  # only shapes matter, so no file is read
        section = dataclasses.replace(cfg.data, build=synthetic.without_files(cfg.data.build))
        cfg = dataclasses.replace(cfg, data=section)
    parts = build(cfg, model=model, data=data)
    program = assemble(cfg, parts, devices=devices)
    batch = _batch_like(cfg, program, parts.train_data)
    with program.active():
        compiled = program.compile(batch)
        plan = layout.plan(cfg, program, batch)
    device, state = program.mesh.devices.flat[0], program.abstract_state
    found = collectives.find(hlo.parse(compiled.as_text()), plan.mesh, device.platform)
    explained, ledger = explain(plan, found)
    return Audit(
        mesh=plan.mesh,
        device=f"{program.mesh.size} {device.device_kind}",
        platform=f"{device.platform} by jax {jax.__version__}",
        held=states.bytes_per_device(state.params),
        axes=_totals(explained, () if plan.is_stack else plan.model_axes),
        explained=explained,
        excess=_excess(explained),
        saved=_saved(ledger),
        warnings=warn.warnings(plan, cfg.rules, state, explained),
    )


def _batch_like(cfg: Config, program: Program, data: Any) -> Any:
    """Returns the shapes of a global batch, and where the loader puts them."""
    size = cfg.train.global_batch
    source = data if isinstance(data, Source) else from_iterable(data, global_batch=size)
    spec = sharding.spec_for(("batch",), (size,), cfg.rules, program.mesh.shape)
    place = jax.sharding.NamedSharding(program.mesh, spec)

    def like(leaf):
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=place)

    return jax.tree.map(like, source.read(np.arange(size)))


def _totals(explained: list[Explained], unknown: Iterable[str]) -> list[Total]:
    """Returns bytes and minimum by axes. Needs that the program does without are not in the minimum."""
    moved, needed = Counter(), Counter()
    for one in explained:
        name = warn.name_of(one.collective.axes)
        moved[name] += one.collective.bytes
        needed[name] += one.needed
    return [
        Total(name, moved[name], None if {*name.split(" x ")} & {*unknown} else needed[name])
        for name in sorted(moved)
    ]


def _excess(explained: list[Explained]) -> list[tuple[str, str, str, float]]:
    merged = Counter()
    for one in explained:
        for why, part in (one.parts or {one.reason: 1}).items():
            merged[warn.name_of(one.collective.axes), one.label, why] += part * one.excess
    return [(*key, moved) for key, moved in merged.most_common() if moved > 0.5]


def _saved(ledger: Ledger) -> list[tuple[str, str, float]]:
    """Returns what the layout has room for that nothing moved."""
    axes = {need.key: warn.name_of(need.axes) for need in ledger.needs}
    merged = Counter()
    for key, left in ledger.left.items():
        merged[axes[key], key[0]] += left * (key[0] != APART)
    return [(*key, left) for key, left in merged.most_common() if left > 0.5]
