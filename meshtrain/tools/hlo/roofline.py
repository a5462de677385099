"""The least time that a compiled step takes on a device, by FLOPs, HBM bytes and collectives; the MFU that follows."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshtrain.hardware import Device
from meshtrain.parallel.mesh import Network
from meshtrain.tools.hlo import collective_ops, traffic
from meshtrain.tools.hlo.collective_ops import KINDS, Collective, Groups
from meshtrain.tools.hlo.hlo import Instruction, Module
from meshtrain.tools.hlo.labels import Label, Labels

# What kernels reach: cuBLAS at the sizes of a training step about 80 % of the peak; fused attention at head dims
# of 64 to 128, forward and backward together, about 45 % (FlashAttention-3, arXiv 2407.08608, figures 5 and 6).
MATMUL_SHARE, ATTENTION_SHARE = 0.80, 0.45

RULE = (
    f"matrix products at {MATMUL_SHARE:.0%} of the peak, fused attention at {ATTENTION_SHARE:.0%}, HBM at its full "
    f"bandwidth, exposed collectives at the links' full rate, nothing else overlaps"
)

GROUPS = ("matrix products", "attention", "norms and elementwise", "loss", "optimizer")

AFTER_GRADIENTS = (
    "meshtrain/step.py:",
    "meshtrain/optim/base.py:",
    "meshtrain/grads.py:",
    "meshtrain/models/blocks.py:",
    "meshtrain/state.py:",
)


@dataclass(frozen=True)
class Row:
    """One kind of work; numbers per step and device."""

    name: str
    flops: float
    hbm_bytes: float
    seconds: (
        float  # at the device's peak: the longer of FLOPs and HBM traffic, operation by operation
    )
    ceiling_seconds: float  # by RULE


@dataclass(frozen=True)
class Transfer:
    """The collectives of one kind over the same axes."""

    name: str
    kind: str
    bytes: float
    rate: float  # bytes/s of the link
    seconds: float
    exposed: float  # seconds in which no other work can hide them


@dataclass(frozen=True)
class Operation:
    """One instruction, with all its runs in a step."""

    name: str
    group: str
    phase: str
    source: str
    runs: float
    hbm_bytes: float
    flops: float


@dataclass(frozen=True)
class Roofline:
    device: str
    rows: list[Row]
    transfers: list[Transfer]
    seconds: float  # a step's, by RULE
    # The ceiling; None if the model does not count its FLOPs, or the program's loops do not say how long they are.
    mfu: float | None
    rule: str
    operations: list[Operation]  # costliest first, by HBM bytes
    has_all_counts: bool  # False: a loop of unknown length counts as one iteration
    is_balanced: bool = (
        False  # loops over the rows of experts beyond an equal share count as zero iterations
    )


def roofline(
    module: Module,
    collectives: list[Collective],
    device: Device,
    network: Network,
    *,
    model_flops: float | None,
    skipped: str = "",
) -> Roofline:
    """Returns the roofline of a step. `model_flops`: of one device in a step, as MFU counts them.

    Loops with `skipped` in their name count as loops of zero iterations, if it is not empty.
    """
    module = replace(module, skipped=skipped, _runs={})
    labels, operations, seconds_of = Labels(module), [], {}
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for computation, runs in traffic.executed(module):
        for one in module.computations[computation].values():
            numbers, group = _cost(module, computation, one, device)
            seconds_of[one.name] = numbers[3]
            if not numbers[:2].any():
                continue
            label = labels.label(one.name)
            group = group or _group_of(label)
            sums[group] += runs * numbers
            flops, size = map(float, runs * numbers[:2])
            source = label.source
            operations.append(Operation(one.name, group, label.phase, source, runs, size, flops))
    transfers = _transfers(module, collectives, device, network, seconds_of)
    rows = [Row(name, *map(float, sums[name])) for name in GROUPS]
    total = sum(row.ceiling_seconds for row in rows) + sum(one.exposed for one in transfers)
    all_known = all(module.runs(name)[1] for name, _ in traffic.executed(module))
    is_ceiling = model_flops and total and all_known
    return Roofline(
        device=device.name,
        rows=rows,
        transfers=transfers,
        seconds=total,
        mfu=model_flops / (device.flops_16 * total) if is_ceiling else None,
        rule=RULE,
        operations=sorted(operations, key=lambda one: -one.hbm_bytes),
        has_all_counts=all_known,
        is_balanced=bool(skipped),
    )


def _group_of(label: Label) -> str:
    """Returns the group of an operation that multiplies no matrices, by its source line and pass."""
    if "ops/losses.py:" in label.source:
        return "loss"
    is_update = label.phase == "other" and any(file in label.source for file in AFTER_GRADIENTS)
    return "optimizer" if is_update else "norms and elementwise"


def _cost(
    module: Module, computation: str, one: Instruction, device: Device
) -> tuple[np.ndarray, str]:
    """Returns FLOPs, HBM bytes, seconds at the peak and by RULE of one run; and the group, "" if it is by source."""
    products = traffic.matmul_flops(module, computation, one)
    attention = traffic.attention_flops(module, computation, one)
    size = traffic.hbm_bytes(module, computation, one)
    at_peak = sum(flops / device.peak(itemsize) for itemsize, flops in products.items())
    by_rule = at_peak / MATMUL_SHARE
    if attention:
        at_peak = attention / device.flops_16
        by_rule = at_peak / ATTENTION_SHARE
    moving = size / device.bandwidth
    flops = sum(products.values()) + attention
    group = GROUPS[1] if attention else GROUPS[0] if products else ""
    return np.array([flops, size, max(at_peak, moving), max(by_rule, moving)]), group


def _transfers(
    module, collectives, device, network, seconds_of: Mapping[str, float]
) -> list[Transfer]:
    work = {name: WorkBetween(module, name, seconds_of) for name, _ in traffic.executed(module)}
    home = {one: name for name, body in module.computations.items() for one in body}
    found: dict[tuple, list[float]] = {}
    by_instruction: dict[str, list[Collective]] = defaultdict(list)
    for one in collectives:
        by_instruction[one.name].append(one)
    for name, parts in by_instruction.items():
        rate = link_rate(device, network, parts[0].groups)
        seconds = sum(part.bytes for part in parts) / rate
        runs = parts[0].count
        hidden = _hidden(module, home[name], name, seconds / runs, work) * runs
        for part in parts:
            label = " x ".join(part.axes) if part.axes else "several axes"
            share = part.bytes / rate / seconds if seconds else 0
            row = found.setdefault((label, part.kind), [0.0, rate, 0.0, 0.0])
            row[0] += part.bytes
            row[2] += part.bytes / rate
            row[3] += share * (seconds - hidden)
    return [Transfer(*key, *row) for key, row in sorted(found.items())]


def link_rate(device: Device, network: Network, groups: Groups) -> float:
    """Returns the bytes/s that a device sends to the others of its group; the slowest group counts.

    Within a host over its links; to other hosts and slices over the network adapters of all members that the
    group has in its host, or of TPUs in its slice.
    """
    places = np.stack([network.slices.ravel(), network.hosts.ravel()])
    rates = {device.link}
    for group in groups:
        num_places = len({*map(tuple, places[:, [*group]].T.tolist())})
        if num_places > 1:
            rates.add(len(group) / num_places * device.network)
    return min(rates)


class WorkBetween:
    """The seconds of other work in a computation, in the order of its schedule; a second hides one collective only."""

    def __init__(self, module: Module, computation: str, seconds_of: Mapping[str, float]):
        body = module.computations[computation]
        self.position = {name: index for index, name in enumerate(body)}
        self.left = [_span(module, computation, one, seconds_of) for one in body.values()]

    def take(self, start: int, end: int, seconds: float) -> float:
        """Uses up to `seconds` of the work between two positions; returns how much there was."""
        taken = 0.0
        for index in range(start + 1, end):
            part = min(self.left[index], seconds - taken)
            self.left[index] -= part
            taken += part
        return taken


def _span(
    module: Module, computation: str, one: Instruction, seconds_of: Mapping[str, float]
) -> float:
    """Returns the seconds of an instruction, with those of the loop or the branches that it runs."""
    if one.opcode not in traffic.FREE:
        return seconds_of.get(one.name, 0.0)
    trips = module.num_trips(computation, one) if one.opcode == "while" else 1
    return (1 if trips is None else trips) * sum(
        _span(module, name, inner, seconds_of)
        for name in one.called
        for inner in module.computations[name].values()
    )


def _hidden(
    module: Module, computation: str, name: str, seconds: float, work: dict[str, WorkBetween]
) -> float:
    """Returns how many of a collective's seconds the work between its start and its end hides."""
    one = module.computations[computation][name]
    for caller, instruction in module.callers[computation]:
        if instruction.opcode == "async-start":
            computation, one = caller, instruction
    is_sync = '"is_sync":true' in one.attributes.replace(" ", "")
    starts = [f"{kind}-start" for kind in (*KINDS, "async")]
    is_message = bool(collective_ops.transfer_of(one))
    if computation not in work or not is_message and (one.opcode not in starts or is_sync):
        return 0.0
    body, last, value = module.computations[computation], None, one
    if is_message:
        last, value = collective_ops.end_of_transfer(one, body), None
    while value is not None:  # through async-update
        users = module.users[computation, value.name]
        value = next((u for u in users if u.opcode.endswith(("-done", "-update"))), None)
        last = value or last
    # Without an end in this computation the collective ends in the loop's next iteration.
    end = work[computation].position[last.name] if last else len(body)
    return work[computation].take(work[computation].position[one.name], end, seconds)
