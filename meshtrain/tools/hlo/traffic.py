"""FLOPs and HBM bytes of the operations of a compiled program.

A kernel reads each operand once and writes each result once: what is between the instructions of a fusion stays in
registers. Of a slice only the part is counted, of an in-place update only what is written.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshtrain.parallel.mesh import LINKS, Network
from meshtrain.tools.hlo.collective_ops import KINDS, Collective, Groups
from meshtrain.tools.hlo.hlo import Array, Instruction, Module

# Instructions that move nothing; the bodies of the last ones are counted instead.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier optimization-barrier "
    "partition-id replica-id add-dependency domain while conditional call async-start async-update".split()
)

PASSING = ("bitcast", "reshape", "transpose", "convert", "copy")  # of each element its own

MESSAGES = ("send", "recv")  # between TPU slices

SLICES = ("dynamic-slice", "slice", "gather")

MATMUL = re.compile(r'custom_call_target="[^"]*(cublas|gemm)')

ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')


def executed(module: Module) -> Iterator[tuple[str, float]]:
    """Yields the computations whose instructions are kernels of their own, and how often each runs in a step."""
    found, todo = {module.entry}, [module.entry]
    while todo:
        for one in module.computations[todo.pop()].values():
            called = {*one.called} - found if one.opcode in FREE else ()
            found |= {*called}
            todo += called
    for name in module.computations:
        if name in found and (count := module.runs(name)[0]):
            yield name, count


def hbm_bytes(module: Module, computation: str, one: Instruction) -> float:
    """Returns the bytes that one run of an instruction reads and writes; those of collectives are not counted."""
    kind = one.opcode.removesuffix("-start")
    if one.opcode in FREE or one.opcode.endswith("-done") or kind in (*KINDS, *MESSAGES):
        return 0
    body = module.computations[computation]
    operands = [body[name] for name in dict.fromkeys(one.operands) if name in body]
    if one.opcode == "fusion":
        inner = module.computations[one.called[0]]
        parameters = {int(p.operand_text): p for p in inner.values() if p.opcode == "parameter"}
        read = {
            name: _elements_read(module, one.called[0], parameters[number])
            * parameters[number].results[0].itemsize
            for number, name in enumerate(one.operands)
        }
        return sum(read.values()) + _written(inner)
    if one.opcode in SLICES:
        return 2 * _size(one.results) + sum(_size(each.results) for each in operands[1:])
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return _update_bytes(body, one) + sum(_size(each.results) for each in operands[1:])
    if one.opcode == "copy":
        return 2 * _size(one.results)
    if kind == "copy":
        return 2 * _size(operands[0].results)
    results = one.results
    if one.opcode == "custom-call" and len(results) > 1:
        results = tuple(
            array for array in results if array.dtype not in ("u8", "s8")
        )  # without workspace
    return _size(results) + sum(_size(each.results) for each in operands)


def _size(arrays: tuple[Array, ...]) -> float:
    return sum(array.size * array.itemsize for array in arrays)


def _elements_read(module: Module, computation: str, value: Instruction) -> float:
    """Returns how many elements of a value a fusion needs: all, unless each use is a slice or in place."""
    if value.is_root:
        return value.results[0].size
    total = 0.0
    for user in module.users[computation, value.name]:
        is_first = user.operands[0] == value.name
        if user.opcode in PASSING or (user.opcode in SLICES and is_first):
            total += _elements_read(module, computation, user)
        elif user.opcode == "scatter" and is_first:
            total += module.computations[computation][user.operands[-1]].results[0].size
        elif not (user.opcode == "dynamic-update-slice" and is_first):
            return value.results[0].size
    return min(total, value.results[0].size)


def _written(inner: dict[str, Instruction]) -> float:
    """Returns the bytes that a fusion writes."""
    root = next(each for each in inner.values() if each.is_root)
    outputs = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for output in outputs:
        update, size = _through(inner, output), _size(output.results)
        if update.opcode in ("dynamic-update-slice", "scatter"):
            buffer = _through(inner, inner[update.operands[0]])
            size = min(size, _update_bytes(inner, update)) if buffer.opcode == "parameter" else size
        total += size
    return total


def _through(inner: dict[str, Instruction], value: Instruction) -> Instruction:
    """Returns the instruction whose elements a value passes on."""
    while value.opcode in PASSING:
        value = inner[value.operands[0]]
    return value


def _update_bytes(body: dict[str, Instruction], one: Instruction) -> float:
    """Returns the bytes that an update in place writes: of a slice, or of the rows of a scatter."""
    update = body[one.operands[1 if one.opcode == "dynamic-update-slice" else -1]]
    return update.results[0].size * one.results[0].itemsize


def matmul_flops(module: Module, computation: str, one: Instruction) -> dict[float, float]:
    """Returns the FLOPs of the matrix products in an instruction, by bytes per element of their operands."""
    flops: dict[float, float] = {}
    if one.opcode == "fusion":
        for inner in module.computations[one.called[0]].values():
            for itemsize, count in matmul_flops(module, one.called[0], inner).items():
                flops[itemsize] = flops.get(itemsize, 0) + count
        return flops
    body = module.computations[computation]
    is_library = one.opcode == "custom-call" and MATMUL.search(one.attributes)
    if one.opcode == "dot" or is_library:
        left = body[one.operands[0]].results[0]
        dims = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', one.attributes)
        contracted = (
            math.prod(left.shape[int(n)] for n in re.findall(r"\d+", dims[1])) if dims else 1
        )
        return {left.itemsize: 2.0 * one.results[0].size * contracted}
    if one.opcode == "convolution":  # as TPUs multiply matrices
        kernel = body[one.operands[1]].results[0]
        labels = re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
        if labels:
            return {
                kernel.itemsize: 2.0
                * one.results[0].size
                * kernel.size
                / kernel.shape[labels[1].index("o")]
            }
    return flops


def attention_flops(module: Module, computation: str, one: Instruction) -> float:
    """Returns the FLOPs of cuDNN's fused attention: two products forward, five backward; half if causal."""
    found = one.opcode == "custom-call" and ATTENTION.search(one.attributes)
    if not found:
        return 0
    body = module.computations[computation]
    query, key = (
        body[name].results[0].shape for name in one.operands[:2]
    )  # (B, S, H, K), (B, T, G, K)
    products = 5 if "Backward" in found[1] else 2
    half = 0.5 if "CAUSAL" in one.attributes else 1
    return 2 * products * half * math.prod(query) * key[1]


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a device sends per step over one axis, or several together, by link: the mean of all devices."""

    axes: str
    host: float
    hosts: float
    slices: float


@dataclass(frozen=True)
class Links:
    by_axes: list[LinkBytes]
    leaving_host: float  # bytes per step, of the host that sends most
    leaving_slice: float
    num_hosts: int
    num_slices: int


def link_traffic(named: Iterable[tuple[str, Collective]], network: Network) -> Links:
    """Returns the bytes of the collectives, each with the name of its axes, by link."""
    hosts, slices = network.hosts.ravel(), network.slices.ravel()
    # A slice within a host is simulated: its devices count as a host of their own.
    islands = np.unique(np.stack([slices, hosts]), axis=1, return_inverse=True)[1].ravel()
    of_device = {link: np.zeros(hosts.size) for link in LINKS}
    by_axes: dict[str, Counter] = {}
    routes: dict = {}
    for axes, one in named:
        key = one.kind, one.groups
        if key not in routes:
            routes[key] = _routes(*key, islands, slices)
        row = by_axes.setdefault(axes, Counter())
        for link, sent in routes[key].items():
            of_device[link] += one.bytes * sent
            row[link] += one.bytes * sent.mean()
    between_hosts, between_slices = of_device["hosts"], of_device["slices"]
    return Links(
        by_axes=[
            LinkBytes(axes, *(by_axes[axes][link] for link in LINKS)) for axes in sorted(by_axes)
        ],
        leaving_host=float(np.bincount(islands, between_hosts + between_slices).max()),
        leaving_slice=float(np.bincount(slices, between_slices).max()),
        num_hosts=len({*islands.tolist()}),
        num_slices=len({*slices.tolist()}),
    )


def _routes(kind: str, groups: Groups, hosts: np.ndarray, slices: np.ndarray) -> dict:
    """Returns for each link the part of a collective's bytes that each device sends over it."""
    sent = np.zeros((len(LINKS), hosts.size))
    for group in groups:
        members = np.array(group)
        if kind == "collective-permute":
            sources, targets, part = members[:1], members[1:], 1.0
        elif "all-to-all" in kind:
            sources, targets = (one.ravel() for one in np.meshgrid(members, members, indexing="ij"))
            part = 1 / max(1, len(members) - 1)
        else:
            sources = members[np.lexsort((members, hosts[members], slices[members]))]
            targets, part = np.roll(sources, -1), 1.0
        is_other_slice = slices[sources] != slices[targets]
        is_other_host = hosts[sources] != hosts[targets]
        link = np.where(is_other_slice, 2, np.where(is_other_host, 1, 0))
        np.add.at(sent, (link, sources), part * (sources != targets))
    return dict(zip(LINKS, sent, strict=True))
