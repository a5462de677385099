"""Compiles the train step of a config and compares the bytes that its collectives send with the minimum."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import hardware
from meshtrain import state as states
from meshtrain.config.build import build
from meshtrain.config.schema import AXES, Config
from meshtrain.data import synthetic
from meshtrain.data.loader import from_iterable
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.monitor.warnings import layout_warnings
from meshtrain.monitor.writer import units_of
from meshtrain.ops.experts import LEFTOVER
from meshtrain.parallel import context, sharding
from meshtrain.parallel.mesh import Network, network_of
from meshtrain.program import Program, assemble
from meshtrain.tools.audit import minimum
from meshtrain.tools.audit import warnings as audit_warnings
from meshtrain.tools.audit.explain import explain
from meshtrain.tools.audit.layout import Placement, placement_of, sharded_attention, sharded_experts
from meshtrain.tools.audit.minimum import ExplainedBytes, Explanation
from meshtrain.tools.hlo import collective_ops, hlo
from meshtrain.tools.hlo.memory import Memory, memory_of
from meshtrain.tools.hlo.oom_advice import MemoryAdvice
from meshtrain.tools.hlo.roofline import Roofline, roofline
from meshtrain.tools.hlo.traffic import Links, link_traffic
from meshtrain.tools.plan import auto

NUM_BATCHES = 4

FULL_ROWS = "rows of one document; the data is not read"


@dataclass(frozen=True)
class Imbalance:
    """Pairs of a query and a key that it attends to: the most on a device, over the mean of all devices."""

    contiguous: float  # if device i held the i-th part of each sequence
    zigzag: float  # in the order of `context.order`, which runs use
    of: str  # the rows that were counted


def imbalance(cfg: Config, placement: Placement, data: Any, batch: Any) -> Imbalance | None:
    """Returns the imbalance of a few batches of `data`, of the config's data if it is None, else of full rows.

    None if the mesh does not shard sequences. Windows are ignored.
    """
    if not placement.sequence_axes:
        return None
    source = _source_of_data(cfg) if data is None else data
    size, length = cfg.train.global_batch, batch.tokens.shape[1]
    rows, of = [np.broadcast_to(np.arange(length), (size, length))], FULL_ROWS
    if isinstance(source, Source):
        batches = [source.read(n * size + np.arange(size)) for n in range(NUM_BATCHES)]
        rows = [_positions(one) for one in batches]
        of = f"{NUM_BATCHES} batches of {source.description or 'the data'}"
    num_devices = placement.num_devices(placement.sequence_axes)
    groups = placement.num_devices(placement.token_axes) // num_devices
    orders = np.arange(length), context.order(length, num_devices)
    ratios = [[_ratio(one[:, order], groups, num_devices) for one in rows] for order in orders]
    contiguous, zigzag = (float(np.mean(each)) for each in ratios)
    return Imbalance(contiguous, zigzag, of)


def _source_of_data(cfg: Config) -> Source | None:
    """Returns the config's training data; None if it is in files that are not there."""
    path = cfg.data.options.get("path")
    if cfg.data.build in synthetic.FILES_BUILDS and not (path and Path(path).exists()):
        return None
    try:
        return build(cfg).train_data
    except ConfigError:
        return None


def _positions(batch: Batch) -> np.ndarray:
    """Returns the position of each token in its document, (B, S)."""
    if batch.positions is not None:
        return np.asarray(batch.positions)
    return np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)


def _ratio(positions: np.ndarray, groups: int, num_devices: int) -> float:
    """Returns the most pairs of a device over the mean; `groups` of devices share the rows."""
    # A query attends to itself and to all earlier tokens of its document.
    pairs = (positions + 1).reshape(groups, -1, num_devices, positions.shape[1] // num_devices)
    pairs = pairs.sum((1, 3))
    return pairs.max() / pairs.mean()


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
        name = audit_warnings.axes_label(axes)
        return next((total for total in self.axes if total.name == name), Total(name, 0, 0))

    def bytes_for(self, label: str, *axes: str) -> float:
        """Returns the bytes that are sent over these axes for one purpose."""
        found = [one.collective for one in self.explanations if one.label == label]
        return sum(c.bytes for c in found if c.axes == axes)


def audit(
    config: Config | Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    devices: list[jax.Device] | None = None,
) -> Audit:
    """Compiles the step that `train` would run with these arguments, and analyses its collectives.

    `devices` (default: all) may come from a topology (`jax.experimental.topologies`).
    """
    devices = devices or jax.devices()
    with_files = cfg = auto.resolve(config, devices=devices, model=model)
    if data is None:  # the step needs only shapes
        cfg = _without_files(cfg)
    parts = build(cfg, model=model, data=data)
    program = assemble(cfg, parts, devices=devices)
    batch = _batch_like(cfg, program, parts.train_data)
    advice = MemoryAdvice(cfg, parts, program, batch)
    with advice.when_out_of_memory(), program.active():
        compiled = program.compile(batch)
        run = cfg, parts.model, program.mesh, program.abstract_state.params, batch
        placement = placement_of(*run)
        attention = sharded_attention(cfg, parts.model, batch, placement)
        experts = sharded_experts(cfg, batch, placement)
        known = {"attention": attention, "experts": experts, "sync": program.sync}
        placement = dataclasses.replace(placement, **known)
        before_compiling = [one.text for one in layout_warnings(*run)]
    device, state = program.mesh.devices.flat[0], program.abstract_state
    text = compiled.as_text()
    module = hlo.parse(text)
    advice.memory = memory_of(program, compiled, module=module)
    ways_out = [*advice.remedies()] if advice.memory and advice.memory.fits is False else []
    network = network_of(program.mesh, cfg.mesh.slices)
    found = collective_ops.find_collectives(
        module, placement.mesh, device.platform, network.slices.ravel()
    )
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
        links=link_traffic([(audit_warnings.axes_label(one.axes), one) for one in found], network),
        explanations=explanations,
        extra_bytes=_extra_bytes(explanations),
        unsent_bytes=_unsent_bytes(ledger),
        warnings=unknown_rate
        + before_compiling
        + audit_warnings.warnings(placement, cfg.rules, state, explanations),
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
    unknown = f"no roofline: meshtrain/hardware.py has no rate of the network between slices of {row.name}"
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
        name = audit_warnings.axes_label(explanation.collective.axes)
        sent[name] += explanation.collective.bytes
        needed[name] += explanation.needed_bytes
    return [
        Total(name, sent[name], None if {*name.split(" x ")} & {*unknown} else needed[name])
        for name in sorted(sent)
    ]


def _extra_bytes(explanations: list[Explanation]) -> list[tuple[str, str, str, float]]:
    merged = Counter()
    for explanation in explanations:
        axes = audit_warnings.axes_label(explanation.collective.axes)
        for reason, fraction in (explanation.fractions or {explanation.reason: 1}).items():
            merged[axes, explanation.label, reason] += fraction * explanation.extra_bytes
    return [(*key, num_bytes) for key, num_bytes in merged.most_common() if num_bytes > 0.5]


def _unsent_bytes(ledger: ExplainedBytes) -> list[tuple[str, str, float]]:
    """Returns the needs of the layout that no collective meets, because the program avoids them."""
    axes = {need.key: audit_warnings.axes_label(need.axes) for need in ledger.needs}
    merged = Counter()
    for key, num_bytes in ledger.unclaimed.items():
        if key[0] != minimum.SEPARATE_INPUT_GRADIENTS:
            merged[axes[key], key[0]] += num_bytes
    return [(*key, num_bytes) for key, num_bytes in merged.most_common() if num_bytes > 0.5]
