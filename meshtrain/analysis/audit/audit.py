"""Compiles the train step of a config and compares the bytes that its collectives send with the minimum."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.analysis import collective_ops, hardware, hlo
from meshtrain.analysis.audit import minimum, warn
from meshtrain.analysis.audit.explain import explain
from meshtrain.analysis.audit.imbalance import Imbalance, imbalance
from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.mixtures import sharded_experts
from meshtrain.analysis.audit.placement import placement_of
from meshtrain.analysis.audit.sequences import sharded_attention
from meshtrain.analysis.links import Links, links
from meshtrain.analysis.roofline import Roofline, roofline
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, Config
from meshtrain.data import synthetic
from meshtrain.data.loader import from_iterable
from meshtrain.data.source import Batch, Source
from meshtrain.models.base import Model
from meshtrain.monitor.memory import Memory, memory_of
from meshtrain.monitor.units import units_of
from meshtrain.monitor.warnings import layout_warnings
from meshtrain.monitor.ways_out import Advice
from meshtrain.ops.experts import LEFTOVER
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import Network, network_of
from meshtrain.plan import auto
from meshtrain.program import Program, assemble


@dataclass(frozen=True)
class Total:
    """Bytes that each device sends per step over one axis, or over several axes together."""

    name: str
    bytes: float
    minimum: float | None  # None if unknown

    @property
    def ratio(self) -> float | None:
        return self.bytes / self.minimum if self.minimum else None


@dataclass(frozen=True)
class Audit:
    mesh: dict[str, int]
    device: str
    platform: str
    param_bytes: int  # on each device
    axes: list[Total]
    links: Links
    explanations: list[Explanation]
    extra_bytes: list[tuple[str, str, str, float]]  # axes, label, reason, bytes above the minimum
    unsent_bytes: list[tuple[str, str, float]]  # axes, role, bytes of needs that the program avoids
    warnings: list[str]
    imbalance: Imbalance | None  # of attention, if sequences are sharded
    memory: Memory | None
    ways_out: list[str]  # if the step does not fit
    roofline: Roofline | None  # None for devices without a row in `analysis.hardware`
    hlo: str = field(repr=False)  # text of the optimised program

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures, for JSON."""
        return {
            one.name: _plain(getattr(self, one.name))
            for one in dataclasses.fields(self)
            if one.name not in ("hlo", "explanations")
        }

    def total(self, *axes: str) -> Total:
        """Returns the total of the collectives over exactly these axes."""
        name = warn.axes_label(axes)
        return next((total for total in self.axes if total.name == name), Total(name, 0, 0))

    def bytes_for(self, label: str, *axes: str) -> float:
        """Returns the bytes that are sent over these axes for one purpose."""
        found = [one.collective for one in self.explanations if one.label == label]
        return sum(c.bytes for c in found if c.axes == axes)


def audit(
    config: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    devices: list[jax.Device] | None = None,
) -> Audit:
    """Compiles the step that `train` would run with these arguments, and analyses its collectives.

    `devices` (default: all) may come from a topology (`jax.experimental.topologies`).
    """
    devices = devices or jax.devices()
    config, _ = auto.resolved(config, devices=devices, model=model)
    with_files = cfg = parse(config, num_devices=len(devices))
    if data is None:  # the step needs only shapes
        cfg = _without_files(cfg)
    parts = build(cfg, model=model, data=data)
    program = assemble(cfg, parts, devices=devices)
    batch = _batch_like(cfg, program, parts.train_data)
    advice = Advice(cfg, parts, program, batch)
    with advice.when_out_of_memory(), program.active():
        compiled = program.compile(batch)
        run = cfg, parts.model, program.mesh, program.abstract_state.params, batch
        placement = placement_of(*run)
        attention = sharded_attention(cfg, parts.model, batch, placement)
        experts = sharded_experts(cfg, batch, placement)
        known = {"attention": attention, "experts": experts, "sync": program.how}
        placement = dataclasses.replace(placement, **known)
        before_compiling = [one.text for one in layout_warnings(*run)]
    device, state = program.mesh.devices.flat[0], program.abstract_state
    text = compiled.as_text()
    module = hlo.parse(text)
    advice.memory = memory_of(program, compiled, module=module)
    ways_out = [*advice.remedies()] if advice.memory and advice.memory.fits is False else []
    network = network_of(program.mesh, cfg.mesh.slices)
    found = collective_ops.find(module, placement.mesh, device.platform, network.slices.ravel())
    row, unknown_rate = _row_of(device.device_kind, network)
    flops = _model_flops(cfg, parts.model, batch, program.mesh.size)
    # With balanced routing no rows are left over.
    skipped = LEFTOVER if experts and experts.has_first_pass else ""
    explanations, ledger = explain(placement, found)
    return Audit(
        mesh=placement.mesh,
        device=f"{program.mesh.size} {device.device_kind}",
        platform=f"{device.platform} by jax {jax.__version__}",
        param_bytes=states.bytes_per_device(state.params),
        axes=_totals(explanations, () if placement.has_blocks else placement.model_axes),
        links=links([(warn.axes_label(one.axes), one) for one in found], network),
        explanations=explanations,
        extra_bytes=_extra_bytes(explanations),
        unsent_bytes=_unsent_bytes(ledger),
        warnings=unknown_rate
        + before_compiling
        + warn.warnings(placement, cfg.rules, state, explanations),
        imbalance=imbalance(with_files, placement, data, batch),
        memory=advice.memory,
        ways_out=ways_out,
        roofline=row and roofline(module, found, row, network, model_flops=flops, skipped=skipped),
        hlo=text,
    )


def _row_of(kind: str, network: Network) -> tuple[hardware.Device | None, list[str]]:
    """Returns the row of the device, None if there is none, and a warning if it lacks the rate of a link."""
    row = hardware.device_of(kind)
    if row is None or row.network or network.link_along(*AXES) == "host":
        return row, []
    unknown = f"no roofline: meshtrain/analysis/hardware.py has no rate of the network between slices of {row.name}"
    return None, [unknown]


def _without_files(cfg: Config) -> Config:
    """Returns the config with synthetic data in place of files, in rows of several documents if it packs them."""
    build, options = synthetic.without_files(cfg.data.build), dict(cfg.data.options)
    if build != cfg.data.build and options.get("packing") == "best_fit":
        options["separator"] = 0
    return dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, build=build, options=options)
    )


def _model_flops(cfg: Config, model: Model, batch: Any, num_devices: int) -> float | None:
    """Returns the FLOPs of one device in a step, as MFU counts them; None if the model does not say."""
    units = units_of(batch, model)
    return units.flops and units.flops * units.per_sample * cfg.train.global_batch / num_devices


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _batch_like(cfg: Config, program: Program, data: Any) -> Any:
    """Returns the shapes of a global batch, with the sharding that the loader gives them."""
    size = cfg.train.global_batch
    source = data if isinstance(data, Source) else from_iterable(data, global_batch=size)
    batch = source.read(np.arange(size))
    # The loader shards sequences only of a Batch.
    names = ("batch", "seq") if isinstance(batch, Batch) else ("batch",)

    def like(leaf):
        dtype, shape = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype), np.shape(leaf)
        sizes = (size, *shape[1:])[: len(names)]
        spec = sharding.spec_for(names, sizes, cfg.rules, program.mesh.shape)
        batch_sharding = jax.sharding.NamedSharding(program.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)

    return jax.tree.map(like, batch)


def _totals(explanations: list[Explanation], unknown: Iterable[str]) -> list[Total]:
    """Returns the bytes and the minimum by axes; the minimum is None for the axes in `unknown`.

    The minimum leaves out needs that the program avoids.
    """
    sent, needed = Counter(), Counter()
    for explanation in explanations:
        name = warn.axes_label(explanation.collective.axes)
        sent[name] += explanation.collective.bytes
        needed[name] += explanation.needed_bytes
    return [
        Total(name, sent[name], None if {*name.split(" x ")} & {*unknown} else needed[name])
        for name in sorted(sent)
    ]


def _extra_bytes(explanations: list[Explanation]) -> list[tuple[str, str, str, float]]:
    merged = Counter()
    for explanation in explanations:
        axes = warn.axes_label(explanation.collective.axes)
        for reason, fraction in (explanation.fractions or {explanation.reason: 1}).items():
            merged[axes, explanation.label, reason] += fraction * explanation.extra_bytes
    return [(*key, num_bytes) for key, num_bytes in merged.most_common() if num_bytes > 0.5]


def _unsent_bytes(ledger: Ledger) -> list[tuple[str, str, float]]:
    """Returns the needs of the layout that no collective meets, because the program avoids them."""
    axes = {need.key: warn.axes_label(need.axes) for need in ledger.needs}
    merged = Counter()
    for key, num_bytes in ledger.unclaimed.items():
        if key[0] != minimum.SEPARATE_INPUT_GRADIENTS:
            merged[axes[key], key[0]] += num_bytes
    return [(*key, num_bytes) for key, num_bytes in merged.most_common() if num_bytes > 0.5]
