"""Draws a mesh as text: devices, their hosts, the link along each axis, what each axis shards."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.config.build import RunParts, build_model, optimizer_builder
from meshtrain.config.schema import AXES, Config
from meshtrain.hardware import Device
from meshtrain.models.base import trained_part
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import Network, network_of
from meshtrain.program import optimizer_and_state

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
    """The devices in the shape of the mesh: their numbers, and the hosts and slices they are in."""

    numbers: np.ndarray
    network: Network
    name: str  # of the devices
    device: Device | None = None  # with the speed of the links, if it is known

    def sizes(self) -> dict[str, int]:
        """Returns the size of each axis."""
        return dict(zip(AXES, self.numbers.shape, strict=True))


def grid_of_mesh(mesh: jax.sharding.Mesh, num_slices: int, device: Device | None) -> Grid:
    """Returns the grid of devices that are there, numbered in the order of `jax.devices()`."""
    number_of_device = {device: number for number, device in enumerate(jax.devices())}
    numbers = np.vectorize(number_of_device.get, otypes=[int])(mesh.devices)
    kind = mesh.devices.flat[0].device_kind
    return Grid(numbers, network_of(mesh, num_slices), kind, device)


def grid_of_sizes(sizes: Sequence[int], per_host: int, num_slices: int, device: Device) -> Grid:
    """Returns the grid of absent devices, `per_host` neighbours on each host (TPU: each slice)."""
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    hosts = numbers // per_host
    slices = hosts
    if device.chip:
        # Slices of GPUs are simulated: they divide the data axis.
        data_size = sizes[AXES.index("data")]
        along_data = np.arange(data_size) * num_slices // data_size
        shape = [-1 if axis == "data" else 1 for axis in AXES]
        slices = np.broadcast_to(along_data.reshape(shape), numbers.shape)
    return Grid(numbers, Network(hosts, slices), device.name, device)


def lines(cfg: Config, grid: Grid) -> Iterator[str]:
    """Yields the drawing of a config's mesh.

    Raises ConfigError for what the model or the optimizer rejects.
    """
    # A faulty model is an error, and must be its only line: nothing is yielded before this.
    placement_lines = [*_placement_lines(cfg, grid.sizes())]
    used = [f"{axis} {size}" for axis, size in grid.sizes().items() if size > 1]
    num_hosts = len(np.unique(grid.network.hosts))
    num_slices = len(np.unique(grid.network.slices))
    title = f"mesh {' x '.join(used) or 'one device'} · {grid.numbers.size} {grid.name}"
    title += f" · {num_hosts} host{'s' * (num_hosts > 1)}"
    if num_slices > 1:
        title += f" · {num_slices} slices"
    yield title
    if used:
        yield ""
        yield from device_lines(grid)
        yield ""
        yield from _axis_lines(cfg, grid)
    yield ""
    yield from placement_lines


def device_lines(grid: Grid) -> Iterator[str]:
    """Yields the devices: columns are the last axis that is used, rows the others; with hosts."""
    sizes = grid.sizes()
    *outer, last = [axis for axis in AXES if sizes[axis] > 1]
    rows = grid.numbers.reshape(-1, sizes[last])
    hosts = grid.network.hosts.reshape(-1, sizes[last])
    has_hosts = len(np.unique(hosts)) > 1
    # Where each row is on one host, the host has a line above its rows; else each device names it.
    has_host_lines = has_hosts and all(len({*row}) == 1 for row in hosts.tolist())
    names = []
    for row, row_hosts in zip(rows.tolist(), hosts.tolist(), strict=True):
        if has_hosts and not has_host_lines:
            pairs = zip(row, row_hosts, strict=True)
            names.append([f"h{host} d{number}" for number, host in pairs])
        else:
            names.append([f"d{number}" for number in row])

    heads = [f"{last} {number}" for number in range(sizes[last])]
    label_widths = [len(f"{axis} {sizes[axis] - 1}") + 2 for axis in outer]
    left = sum(label_widths) + 2
    cell_width = 2 + max(len(name) for row in [heads, *names] for name in row)
    columns = _shown_columns(sizes[last], max(2, (WIDTH - left) // cell_width))
    yield (" " * left + _cells(heads, columns, cell_width)).rstrip()

    host = None
    previous: tuple[int, ...] = ()
    for number, row in enumerate(names[:MAX_ROWS]):
        if has_host_lines and host != int(hosts[number][0]):
            host = int(hosts[number][0])
            yield f"host {host}"
            previous = ()
        # Only what differs from the row above is labelled.
        outer_sizes = [sizes[axis] for axis in outer]
        index = tuple(map(int, np.unravel_index(number, outer_sizes))) if outer else ()
        label_text = ""
        for dim, (axis, width) in enumerate(zip(outer, label_widths, strict=True)):
            is_same = index[: dim + 1] == previous[: dim + 1]
            label_text += f"{'' if is_same else f'{axis} {index[dim]}':{width}}"
        previous = index
        yield f"  {label_text}{_cells(row, columns, cell_width)}".rstrip()
    if len(names) > MAX_ROWS:
        yield f"  ... {len(names) - MAX_ROWS:,} more rows, up to d{rows.max()}"


def _shown_columns(number: int, most: int) -> list[int | None]:
    """Returns the columns to show; None stands for those in between."""
    if number <= most:
        return [*range(number)]
    return [*range(most - 2), None, number - 1]


def _cells(names: Sequence[str], columns: Sequence[int | None], width: int) -> str:
    texts = ["..." if column is None else names[column] for column in columns]
    return "".join(f"{text:{width}}" for text in texts)


def _axis_lines(cfg: Config, grid: Grid) -> Iterator[str]:
    """Yields the slowest link along each axis that is used, and what moves along it in a step."""
    sizes = grid.sizes()
    used = [axis for axis in AXES if sizes[axis] > 1]
    rows = [("axis", "size", "link", "in a step")]
    names = LINK_NAMES
    if grid.device and not grid.device.chip:
        # All hosts of a TPU slice share its fast network.
        names = {**names, "host": "within a slice", "hosts": "between slices"}
    for axis in used:
        link = grid.network.link_along(axis)
        rate = 0.0
        if grid.device:
            rate = grid.device.link if link == "host" else grid.device.network
        text = names[link] + (f", {rate / 1e9:.4g} GB/s" if rate else "")
        traffic = TRAFFIC_OF_FSDP[cfg.train.zero_stage] if axis == "fsdp" else TRAFFIC[axis]
        rows.append((axis, str(sizes[axis]), text, traffic))
    yield from _table(rows)


def _placement_lines(cfg: Config, sizes: dict[str, int]) -> Iterator[str]:
    """Yields the axes that shard each kind of parameter, and the bytes of the state on a device."""
    model = build_model(cfg)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    parts = RunParts(model, optimizer_builder(cfg, model))
    with jax.sharding.use_abstract_mesh(mesh), sharding.use_rules(cfg.rules):
        abstract = optimizer_and_state(cfg, parts, mesh)
    state, grad_shardings = abstract.state, abstract.grad_shardings
    rows = [("dims", "sharded over", "on each", "MB", "parameters")]
    yield from _table([*rows, *_kinds(state.params, model.axes), _batch_row(cfg, sizes)])
    yield ""
    gradients = jax.tree.map(
        lambda leaf, grad_sharding: leaf.update(sharding=grad_sharding),
        trained_part(state.params, model.is_trained),
        grad_shardings,
    )
    stored = {
        "parameters": state.params,
        "gradients": gradients,
        "optimizer state": state.opt_state,
    }
    rows = [(f"on each device, ZeRO stage {cfg.train.zero_stage}", "MB", "of")]
    for name, tree in stored.items():
        on_each = states.bytes_per_device(tree) / 1e6
        total = states.bytes_of(tree) / 1e6
        rows.append((name, f"{on_each:,.2f}", f"{total:,.2f}"))
    yield from _table(rows)


def _kinds(params: Any, axes: Any) -> list[tuple[str, ...]]:
    """Returns a row for the parameters of the same dims and sharding; the most bytes come first."""
    kinds: dict[tuple, list] = {}
    all_names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree.leaves_with_path(params)
    for (path, leaf), names in zip(leaves, all_names, strict=True):
        key = tuple(name or "-" for name in names), tuple(leaf.sharding.spec)
        kinds.setdefault(key, []).append((path, leaf))

    rows = []
    for (names, spec), members in kinds.items():
        leaves = [leaf for _, leaf in members]
        on_each, total = states.bytes_per_device(leaves), states.bytes_of(leaves)
        first_path, first_leaf = members[0]
        label = jax.tree_util.keystr(first_path, simple=True, separator="/")
        if len(members) > 1:
            label += f" and {len(members) - 1} more"
        row = (
            ", ".join(names),
            _sharded_over(names, spec, first_leaf.sharding.mesh.shape),
            f"1/{round(total / on_each)}" if total > on_each else "all",
            f"{total / 1e6:,.2f}",
            label,
        )
        rows.append((total, row))
    rows.sort(key=lambda entry: -entry[0])
    return [row for _, row in rows]


def _sharded_over(names: Sequence[str], spec: Sequence[Any], sizes: Mapping[str, int]) -> str:
    """Returns the dims with the axes that shard them, such as `embed: fsdp`, or "-"."""
    texts = []
    for name, entry in zip(names, spec, strict=True):
        axes = [axis for axis in sharding.axes_of(entry) if sizes[axis] > 1]
        if axes:
            texts.append(f"{name}: {'+'.join(axes)}")
    return ", ".join(texts) or "-"


def _batch_row(cfg: Config, sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the row of a batch, whose dims have the names batch and seq."""
    names = ("batch", "seq")
    num_rows = cfg.train.global_batch
    shape = (num_rows, cfg.data.options.get("seq_len", 1))
    spec = sharding.spec_for(names, shape, cfg.rules, sizes)
    num_parts = math.prod(sizes[axis] for entry in spec for axis in sharding.axes_of(entry))
    num_microbatches = cfg.train.num_microbatches
    label = f"the batch: {num_rows:,} rows, "
    label += f"{num_microbatches} micro-batch{'es' * (num_microbatches > 1)}"
    return (
        ", ".join(names),
        _sharded_over(names, spec, sizes),
        f"1/{num_parts}" if num_parts > 1 else "all",
        "",
        label,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields rows with aligned columns; numbers, such as sizes, to the right."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    are_numbers = [all(map(_is_number, column[1:])) for column in columns]
    for row in rows:
        cells = []
        for cell, width, is_number in zip(row, widths, are_numbers, strict=True):
            cells.append(cell.rjust(width) if is_number else cell.ljust(width))
        yield "  ".join(cells).rstrip()


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(",", "").replace(".", "").isdigit()
