"""Compiles the train step of a config and compares what its collectives send with the minimum."""

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
from meshtrain.config.parse import parse
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
from meshtrain.parallel.dispatch import ROUNDS
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
    """Query/key pairs of attention: the most on a device, over the mean of all devices."""

    contiguous: float  # if device i held the i-th part of each sequence
    zigzag: float  # in the order of `context.order`, which runs use
    of: str  # the rows that were counted


def imbalance(cfg: Config, placement: Placement, data: Any, batch: Any) -> Imbalance | None:
    """Returns the imbalance of a few batches of `data`; None if the mesh does not shard sequences.

    If `data` is None, the config's data is read; if its files are not there, full rows are counted.
    Windows are ignored.
    """
    if not placement.sequence_axes:
        return None
    source = _source_of_data(cfg) if data is None else data
    size, length = cfg.train.global_batch, batch.tokens.shape[1]
    if isinstance(source, Source):
        batches = [source.read(n * size + np.arange(size)) for n in range(NUM_BATCHES)]
        positions = [_positions(read) for read in batches]
        of = f"{NUM_BATCHES} batches of {source.description or 'the data'}"
    else:
        positions = [np.broadcast_to(np.arange(length), (size, length))]
        of = FULL_ROWS
    num_devices = placement.num_devices(placement.sequence_axes)
    num_groups = placement.num_devices(placement.token_axes) // num_devices

    def mean_ratio(order: np.ndarray) -> float:
        ratios = [_ratio(rows[:, order], num_groups, num_devices) for rows in positions]
        return float(np.mean(ratios))

    return Imbalance(
        contiguous=mean_ratio(np.arange(length)),
        zigzag=mean_ratio(context.order(length, num_devices)),
        of=of,
    )


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


def _ratio(positions_BS: np.ndarray, num_groups: int, num_devices: int) -> float:
    """Returns the most pairs of a device over the mean.

    `num_groups` groups share the rows; the `num_devices` devices of each share every sequence.
    """
    # A query attends to itself and to all earlier tokens of its document.
    pairs_BS = positions_BS + 1
    shape = (num_groups, -1, num_devices, pairs_BS.shape[1] // num_devices)
    device_pairs = pairs_BS.reshape(shape).sum((1, 3))
    return device_pairs.max() / device_pairs.mean()


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
    roofline: Roofline | None  # None for devices that hardware.toml does not have
    hlo: str = field(repr=False)  # text of the optimised program

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures, for JSON."""
        names = [field.name for field in dataclasses.fields(self)]
        left_out = ("hlo", "explanations")
        return {name: _plain(getattr(self, name)) for name in names if name not in left_out}

    def total(self, *axes: str) -> Total:
        """Returns the total of the collectives over exactly these axes."""
        name = audit_warnings.axes_label(axes)
        totals = {total.name: total for total in self.axes}
        return totals.get(name, Total(name, 0, 0))

    def bytes_for(self, label: str, *axes: str) -> float:
        """Returns the bytes that are sent over these axes for one purpose."""
        total = 0.0
        for explanation in self.explanations:
            if explanation.label == label and explanation.collective.axes == axes:
                total += explanation.collective.bytes
        return total


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
    with_files = cfg = auto.resolve(parse(config), devices=devices, model=model)
    if data is None:
        # The step needs only shapes.
        cfg = _without_files(cfg)
    parts = build(cfg, model=model, data=data)
    program = assemble(cfg, parts, devices=devices)
    batch = _batch_like(cfg, program, parts.train_data)
    advice = MemoryAdvice(cfg, parts, program, batch)
    with advice.when_out_of_memory(), program.active():
        compiled = program.compile(batch)
        placement = _placement(cfg, parts.model, program, batch)
        config_warnings = layout_warnings(
            cfg, parts.model, program.mesh, program.abstract_state.params, batch
        )

    text = compiled.as_text()
    # With balanced routing no tokens are left over for further rounds.
    module = dataclasses.replace(hlo.parse(text), skipped=(ROUNDS,))
    device, state = program.mesh.devices.flat[0], program.abstract_state
    network = network_of(program.mesh, cfg.mesh.slices)
    collectives = collective_ops.find_collectives(
        module, placement.mesh, device.platform, network.slices.ravel()
    )
    explanations, ledger = explain(placement, collectives)
    named = [(audit_warnings.axes_label(c.axes), c) for c in collectives]

    advice.memory = memory_of(program, compiled, module=module)
    remedies = []
    if advice.memory and advice.memory.fits is False:
        remedies = [*advice.remedies()]

    table_device, unknown_rate = _table_device(device.device_kind, network)
    step_roofline = None
    if table_device:
        # With balanced routing no rows are left over.
        has_first_pass = placement.experts and placement.experts.has_first_pass
        step_roofline = roofline(
            module,
            collectives,
            table_device,
            network,
            model_flops=_model_flops(cfg, parts.model, batch, program.mesh.size),
            skipped=(LEFTOVER, ROUNDS) if has_first_pass else (),
        )
    return Audit(
        mesh=placement.mesh,
        device=f"{program.mesh.size} {device.device_kind}",
        platform=f"{device.platform} by jax {jax.__version__}",
        param_bytes=states.bytes_per_device(state.params),
        axes=_totals(explanations, () if placement.has_blocks else placement.model_axes),
        links=link_traffic(named, network),
        explanations=explanations,
        extra_bytes=_extra_bytes(explanations),
        unsent_bytes=_unsent_bytes(ledger),
        warnings=[
            *unknown_rate,
            *(warning.text for warning in config_warnings),
            *audit_warnings.warnings(placement, cfg.rules, state, explanations),
        ],
        imbalance=imbalance(with_files, placement, data, batch),
        memory=advice.memory,
        ways_out=remedies,
        roofline=step_roofline,
        hlo=text,
    )


def _placement(cfg: Config, model: Model, program: Program, batch: Any) -> Placement:
    """Returns the placement with what the active mesh and rules say of attention and experts."""
    placement = placement_of(cfg, model, program.mesh, program.abstract_state.params, batch)
    return dataclasses.replace(
        placement,
        attention=sharded_attention(cfg, model, batch, placement),
        experts=sharded_experts(cfg, batch, placement),
        sync=program.sync,
    )


def _table_device(kind: str, network: Network) -> tuple[hardware.Device | None, list[str]]:
    """Returns the device of hardware.toml, or None and a warning if it lacks a rate."""
    device = hardware.device_of(kind)
    if device is None or device.network or network.link_along(*AXES) == "host":
        return device, []
    warning = (
        f"no roofline: meshtrain/hardware.toml has no rate of the network between slices of "
        f"{device.name}"
    )
    return None, [warning]


def _without_files(cfg: Config) -> Config:
    """Returns the config with synthetic data in place of files."""
    build_name = synthetic.without_files(cfg.data.build)
    options = dict(cfg.data.options)
    if build_name != cfg.data.build and options.get("packing") == "best_fit":
        # Synthetic documents end with this token; rows have several of them, as when packed.
        options["separator"] = 0
    data = dataclasses.replace(cfg.data, build=build_name, options=options)
    return dataclasses.replace(cfg, data=data)


def _model_flops(cfg: Config, model: Model, batch: Any, num_devices: int) -> float | None:
    """Returns the FLOPs of a device in a step, as MFU counts them; None if unknown."""
    units = units_of(batch, model)
    return units.flops and units.flops * units.per_sample * cfg.train.global_batch / num_devices


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _batch_like(cfg: Config, program: Program, data: Any) -> Any:
    """Returns the shapes of a global batch, with the sharding that the loader gives them."""
    size = cfg.train.global_batch
    if isinstance(data, Source):
        batch = data.read(np.arange(1))
    else:
        batch = from_iterable(data, global_batch=size).read(np.arange(size))
    # The loader shards sequences only of a Batch.
    names = ("batch", "seq") if isinstance(batch, Batch) else ("batch",)

    def like(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        shape = (size, *np.shape(leaf)[1:])
        spec = sharding.spec_for(names, shape[: len(names)], cfg.rules, program.mesh.shape)
        batch_sharding = jax.sharding.NamedSharding(program.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)

    return jax.tree.map(like, batch)


def _totals(explanations: list[Explanation], unknown: Iterable[str]) -> list[Total]:
    """Returns the bytes and the minimum by axes; the minimum is None for the axes in `unknown`.

    The minimum leaves out needs that the program avoids.
    """
    sent, needed = Counter(), Counter()
    unknown_labels = set()
    for explanation in explanations:
        axes = explanation.collective.axes
        label = audit_warnings.axes_label(axes)
        sent[label] += explanation.collective.bytes
        needed[label] += explanation.needed_bytes
        if {*(axes or ())} & {*unknown}:
            unknown_labels.add(label)
    return [
        Total(label, sent[label], None if label in unknown_labels else needed[label])
        for label in sorted(sent)
    ]


def _extra_bytes(explanations: list[Explanation]) -> list[tuple[str, str, str, float]]:
    """Returns the bytes above the minimum by axes, label and reason, the most first."""
    merged = Counter()
    for explanation in explanations:
        axes = audit_warnings.axes_label(explanation.collective.axes)
        fractions = explanation.fractions or {explanation.reason: 1}
        for reason, fraction in fractions.items():
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
