"""Draws a mesh as text: devices with their hosts, the link along each axis, and what is sharded over which axes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.config.build import Parts, build_model, optimizer_builder
from meshtrain.config.schema import AXES, Config
from meshtrain.hardware import Device
from meshtrain.models.base import trained_part
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import Network, network_of
from meshtrain.program import Program

MAX_ROWS = 16  # of devices; the rest is counted

WIDTH = 100

LINK_NAMES = {"host": "within a host", "hosts": "between hosts", "slices": "between slices"}

# What moves along an axis in a step.
TRAFFIC = {
    "pipeline": "activations of a micro-batch, to the next stage in each tick",
    "data": "gradients, once",
    "expert": "tokens and results of experts, in each layer",
    "context": "keys and values, or heads, in each layer; state as along fsdp",
    "tensor": "activations, in each layer",
}

TRAFFIC_OF_FSDP = (
    "gradients, once",
    "gradients and updated parameters, once",
    "gradients, for each micro-batch; updated parameters, once",
    "parameters and gradients, for each micro-batch",
)


@dataclass(frozen=True, eq=False)
class Grid:
    """The devices in the shape of the mesh: their numbers, and the hosts and slices that hold them."""

    numbers: np.ndarray
    network: Network
    name: str  # of the devices
    device: Device | None = None  # with the speed of the links, if it is known

    def sizes(self) -> dict[str, int]:
        """Returns the size of each axis."""
        return dict(zip(AXES, self.numbers.shape, strict=True))


def grid_of_mesh(mesh: jax.sharding.Mesh, num_slices: int, device: Device | None) -> Grid:
    """Returns the grid of devices that are there, numbered in the order of `jax.devices()`."""
    order = {one: number for number, one in enumerate(jax.devices())}
    numbers = np.vectorize(order.get, otypes=[int])(mesh.devices)
    kind = mesh.devices.flat[0].device_kind
    return Grid(numbers, network_of(mesh, num_slices), kind, device)


def grid_of_sizes(sizes: Sequence[int], per_host: int, num_slices: int, device: Device) -> Grid:
    """Returns the grid of absent devices, `per_host` neighbours on each host; of TPUs, in each slice."""
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    hosts = numbers // per_host
    along_data = np.arange(sizes[AXES.index("data")]) * num_slices // sizes[AXES.index("data")]
    shape = [-1 if axis == "data" else 1 for axis in AXES]
    slices = np.broadcast_to(along_data.reshape(shape), numbers.shape) if device.chip else hosts
    return Grid(numbers, Network(hosts, slices), device.name, device)


def lines(cfg: Config, grid: Grid) -> Iterator[str]:
    """Yields the drawing of a config's mesh. Raises ConfigError for what the model or the optimizer rejects."""
    sizes = grid.sizes()
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    num_hosts, num_slices = (
        len(np.unique(one)) for one in (grid.network.hosts, grid.network.slices)
    )
    parts = [" x ".join(used) or "one device", f"{grid.numbers.size} {grid.name}"]
    parts.append(f"{num_hosts} host{'s' * (num_hosts > 1)}")
    parts += [f"{num_slices} slices"] * (num_slices > 1)
    # A faulty model is an error, and must be its only line.
    placed = [*_placement_lines(cfg, sizes)]
    yield f"mesh {' · '.join(parts)}"
    if used:
        yield from ("", *device_lines(grid), "", *_axis_lines(cfg, grid))
    yield from ("", *placed)


def device_lines(grid: Grid) -> Iterator[str]:
    """Yields the devices: columns are the last axis that is used, rows the others; hosts are named."""
    sizes = grid.sizes()
    *outer, last = [axis for axis in AXES if sizes[axis] > 1]
    rows, hosts = (one.reshape(-1, sizes[last]) for one in (grid.numbers, grid.network.hosts))
    several = len(np.unique(hosts)) > 1
    within = several and all(len({*row}) == 1 for row in hosts.tolist())
    names = [
        [f"h{host} d{number}" if several and not within else f"d{number}" for number, host in pairs]
        for pairs in (
            zip(*pair, strict=True) for pair in zip(rows.tolist(), hosts.tolist(), strict=True)
        )
    ]
    heads = [f"{last} {number}" for number in range(sizes[last])]
    widths = [len(f"{axis} {sizes[axis] - 1}") + 2 for axis in outer]
    left = sum(widths) + 2
    cell = 2 + max(len(name) for row in [heads, *names] for name in row)
    shown = _shown(sizes[last], max(2, (WIDTH - left) // cell))
    yield (" " * left + "".join(_cells(heads, shown, cell))).rstrip()
    host, before = None, [None] * len(outer)
    for number, row in enumerate(names[:MAX_ROWS]):
        if within and host != (host := int(hosts[number][0])):
            yield f"host {host}"
            before = [None] * len(outer)
        index = np.unravel_index(number, [sizes[axis] for axis in outer]) if outer else ()
        labels = [
            "" if index[: dim + 1] == tuple(before[: dim + 1]) else f"{axis} {index[dim]}"
            for dim, axis in enumerate(outer)
        ]
        before = [*index]
        head = "".join(f"{label:{width}}" for label, width in zip(labels, widths, strict=True))
        yield ("  " + head + "".join(_cells(row, shown, cell))).rstrip()
    if len(names) > MAX_ROWS:
        yield f"  ... {len(names) - MAX_ROWS:,} more rows, up to d{rows.max()}"


def _shown(number: int, most: int) -> list[int | None]:
    """Returns the columns to show; None stands for those in between."""
    return [*range(number)] if number <= most else [*range(most - 2), None, number - 1]


def _cells(names: Sequence[str], shown: Sequence[int | None], width: int) -> Iterator[str]:
    return (f"{'...' if one is None else names[one]:{width}}" for one in shown)


def _axis_lines(cfg: Config, grid: Grid) -> Iterator[str]:
    """Yields the slowest link along each axis that is used, and what moves along it in a step."""
    sizes = grid.sizes()
    used = [axis for axis in AXES if sizes[axis] > 1]
    rows = [("axis", "size", "link", "in a step")]
    names = LINK_NAMES
    if grid.device and not grid.device.chip:  # of TPUs, all hosts of a slice share its fast network
        names = {**names, "host": "within a slice", "hosts": "between slices"}
    for axis in used:
        link = grid.network.link_along(axis)
        rate = grid.device and (grid.device.link if link == "host" else grid.device.network)
        text = names[link] + (f", {rate / 1e9:.4g} GB/s" if rate else "")
        traffic = TRAFFIC_OF_FSDP[cfg.train.zero_stage] if axis == "fsdp" else TRAFFIC[axis]
        rows.append((axis, str(sizes[axis]), text, traffic))
    yield from _table(rows)


def _placement_lines(cfg: Config, sizes: dict[str, int]) -> Iterator[str]:
    """Yields the axes that shard each kind of parameter, and the bytes of the state on a device."""
    model = build_model(cfg)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    parts = Parts(model, optimizer_builder(cfg, model))
    with jax.sharding.use_abstract_mesh(mesh), sharding.use_rules(cfg.rules):
        _, _, _, state, of_gradients = Program.plan(cfg, parts, mesh)
    rows = [("dims", "sharded over", "on each", "MB", "parameters")]
    yield from _table([*rows, *_kinds(state.params, model.axes), _batch_row(cfg, sizes)])
    yield ""
    gradients = jax.tree.map(
        lambda leaf, one: leaf.update(sharding=one),
        trained_part(state.params, model.is_trained),
        of_gradients,
    )
    stored = {
        "parameters": state.params,
        "gradients": gradients,
        "optimizer state": state.opt_state,
    }
    rows = [(f"on each device, ZeRO stage {cfg.train.zero_stage}", "MB", "of")]
    for name, tree in stored.items():
        each, total = states.bytes_per_device(tree) / 1e6, states.bytes_of(tree) / 1e6
        rows.append((name, f"{each:,.2f}", f"{total:,.2f}"))
    yield from _table(rows)


def _kinds(params: Any, axes: Any) -> list[tuple[str, ...]]:
    """Returns a row for all parameters with the same dims and the same sharding, those with the most bytes first."""
    kinds: dict[tuple, list] = {}
    names_of = [*jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))]
    leaves = jax.tree.leaves_with_path(params)
    for (path, leaf), names in zip(leaves, names_of, strict=True):
        key = tuple(name or "-" for name in names), tuple(leaf.sharding.spec)
        kinds.setdefault(key, []).append((path, leaf))
    rows = []
    for (names, spec), members in kinds.items():
        leaves = [leaf for _, leaf in members]
        each, total = states.bytes_per_device(leaves), states.bytes_of(leaves)
        first = jax.tree_util.keystr(members[0][0], simple=True, separator="/")
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        pairs = [
            (
                name,
                "+".join(
                    axis
                    for axis in sharding.axes_of(entry)
                    if leaves[0].sharding.mesh.shape[axis] > 1
                ),
            )
            for name, entry in zip(names, spec, strict=True)
        ]
        over = ", ".join(f"{name}: {found}" for name, found in pairs if found)
        row = ", ".join(names), over or "-", f"1/{round(total / each)}" if total > each else "all"
        rows.append((total, (*row, f"{total / 1e6:,.2f}", first + more)))
    return [row for _, row in sorted(rows, key=lambda one: -one[0])]


def _batch_row(cfg: Config, sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the row of a batch, whose dims have the names batch and seq."""
    shape = (cfg.train.global_batch, cfg.data.options.get("seq_len", 1))
    spec = sharding.spec_for(("batch", "seq"), shape, cfg.rules, sizes)
    pairs = [
        (name, [axis for axis in sharding.axes_of(entry) if sizes[axis] > 1])
        for name, entry in zip(("batch", "seq"), spec, strict=True)
    ]
    number = math.prod(sizes[axis] for _, found in pairs for axis in found)
    over = ", ".join(f"{name}: {'+'.join(found)}" for name, found in pairs if found)
    count = cfg.train.num_microbatches
    text = f"the batch: {shape[0]:,} rows, {count} micro-batch{'es' * (count > 1)}"
    return "batch, seq", over or "-", f"1/{number}" if number > 1 else "all", "", text


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields rows with aligned columns; numbers, such as sizes, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [
        all(cell.replace(",", "").replace(".", "").isdigit() or not cell for cell in column[1:])
        for column in zip(*rows, strict=True)
    ]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()
