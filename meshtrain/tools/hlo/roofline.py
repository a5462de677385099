"""The least time that a compiled step takes on a device: FLOPs, HBM bytes, collectives; its MFU."""

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

# What kernels reach: cuBLAS at the sizes of a training step about 80 % of the peak; fused attention
# at head dims of 64 to 128, forward and backward together, about 45 % (FlashAttention-3,
# arXiv 2407.08608, figures 5 and 6).
MATMUL_SHARE, ATTENTION_SHARE = 0.80, 0.45
RULE = (
    f"matrix products at {MATMUL_SHARE:.0%} of the peak, fused attention at {ATTENTION_SHARE:.0%}, "
    f"HBM at its full bandwidth, exposed collectives at the links' full rate, nothing else overlaps"
)

# The groups of operations, in the order in which they are printed.
MATMULS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "norms and elementwise"
LOSS, OPTIMIZER = "loss", "optimizer"
GROUPS = (MATMULS, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER)

# The files whose operations, outside the two passes, belong to the optimizer's update.
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
    # At the device's peak: the longer of FLOPs and HBM traffic, operation by operation.
    seconds: float
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
    # The ceiling; None if the model has no count of FLOPs, or a loop has no known length.
    mfu: float | None
    rule: str
    operations: list[Operation]  # costliest first, by HBM bytes
    has_all_counts: bool  # False: a loop of unknown length counts as one iteration
    # Loops over the rows of experts beyond an equal share count as zero iterations.
    is_balanced: bool = False


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
    labels = Labels(module)
    operations = []
    instruction_seconds: dict[str, float] = {}  # of one run, by RULE
    rows = {name: Row(name, 0.0, 0.0, 0.0, 0.0) for name in GROUPS}
    for computation, runs in traffic.executed(module):
        for instruction in module.computations[computation].values():
            cost = _cost(module, computation, instruction, device)
            instruction_seconds[instruction.name] = cost.ceiling_seconds
            if not cost.flops and not cost.hbm_bytes:
                continue
            label = labels.label(instruction.name)
            group = cost.name or _group_of(label)
            rows[group] = _added(rows[group], runs, cost)
            operation = Operation(
                name=instruction.name,
                group=group,
                phase=label.phase,
                source=label.source,
                runs=runs,
                hbm_bytes=runs * cost.hbm_bytes,
                flops=runs * cost.flops,
            )
            operations.append(operation)
    transfers = _transfers(module, collectives, device, network, instruction_seconds)
    total = sum(row.ceiling_seconds for row in rows.values())
    total += sum(transfer.exposed for transfer in transfers)
    all_known = all(module.runs(name)[1] for name, _ in traffic.executed(module))
    mfu = None
    if model_flops and total and all_known:
        mfu = model_flops / (device.flops_16 * total)
    return Roofline(
        device=device.name,
        rows=[*rows.values()],
        transfers=transfers,
        seconds=total,
        mfu=mfu,
        rule=RULE,
        operations=sorted(operations, key=lambda operation: -operation.hbm_bytes),
        has_all_counts=all_known,
        is_balanced=bool(skipped),
    )


def _group_of(label: Label) -> str:
    """Returns the group of an operation without matrix products, by its source line and pass."""
    if "ops/losses.py:" in label.source:
        return LOSS
    is_update = label.phase == "other" and any(file in label.source for file in AFTER_GRADIENTS)
    return OPTIMIZER if is_update else ELEMENTWISE


def _cost(module: Module, computation: str, instruction: Instruction, device: Device) -> Row:
    """Returns the cost of one run; its name is the group, or "" if the source line decides it."""
    matmul_flops = traffic.matmul_flops(module, computation, instruction)
    attention_flops = traffic.attention_flops(module, computation, instruction)
    hbm_bytes = traffic.hbm_bytes(module, computation, instruction)
    if attention_flops:
        group = ATTENTION
        at_peak = attention_flops / device.flops_16
        by_rule = at_peak / ATTENTION_SHARE
    else:
        group = MATMULS if matmul_flops else ""
        at_peak = sum(flops / device.peak(itemsize) for itemsize, flops in matmul_flops.items())
        by_rule = at_peak / MATMUL_SHARE
    moving = hbm_bytes / device.bandwidth
    return Row(
        name=group,
        flops=float(sum(matmul_flops.values()) + attention_flops),
        hbm_bytes=float(hbm_bytes),
        seconds=max(at_peak, moving),
        ceiling_seconds=max(by_rule, moving),
    )


def _added(total: Row, runs: float, cost: Row) -> Row:
    """Returns the total with `runs` times the cost of one run."""
    return Row(
        name=total.name,
        flops=total.flops + runs * cost.flops,
        hbm_bytes=total.hbm_bytes + runs * cost.hbm_bytes,
        seconds=total.seconds + runs * cost.seconds,
        ceiling_seconds=total.ceiling_seconds + runs * cost.ceiling_seconds,
    )


def _transfers(
    module: Module,
    collectives: list[Collective],
    device: Device,
    network: Network,
    instruction_seconds: Mapping[str, float],
) -> list[Transfer]:
    """Returns the time of the collectives, by axes and kind, and how much of it no work hides."""
    work = {
        name: WorkBetween(module, name, instruction_seconds) for name, _ in traffic.executed(module)
    }
    computation_of = {
        instruction: name for name, body in module.computations.items() for instruction in body
    }
    tensors_of: dict[str, list[Collective]] = defaultdict(list)
    for tensor in collectives:
        tensors_of[tensor.name].append(tensor)

    transfers: dict[tuple[str, str], Transfer] = {}
    for name, tensors in tensors_of.items():
        rate = link_rate(device, network, tensors[0].groups)
        seconds = sum(tensor.bytes for tensor in tensors) / rate
        runs = tensors[0].count
        hidden = runs * _hidden(module, computation_of[name], name, seconds / runs, work)
        # A combined collective is exposed as a whole; each tensor has its share of that.
        for tensor in tensors:
            axes = " x ".join(tensor.axes) if tensor.axes else "several axes"
            key = (axes, tensor.kind)
            total = transfers.get(key, Transfer(axes, tensor.kind, 0.0, rate, 0.0, 0.0))
            tensor_seconds = tensor.bytes / rate
            share = tensor_seconds / seconds if seconds else 0
            transfers[key] = replace(
                total,
                bytes=total.bytes + tensor.bytes,
                seconds=total.seconds + tensor_seconds,
                exposed=total.exposed + share * (seconds - hidden),
            )
    return [transfers[key] for key in sorted(transfers)]


def link_rate(device: Device, network: Network, groups: Groups) -> float:
    """Returns the bytes/s that a device sends to the others of its group; the slowest group counts.

    Within a host over its links; to other hosts and slices over the network adapters of all members
    that the group has in its host, or of TPUs in its slice.
    """
    places = np.stack([network.slices.ravel(), network.hosts.ravel()])
    rates = {device.link}
    for group in groups:
        num_places = len({*map(tuple, places[:, [*group]].T.tolist())})
        if num_places > 1:
            rates.add(len(group) / num_places * device.network)
    return min(rates)


class WorkBetween:
    """The seconds of other work in a computation, in the order of its schedule.

    A second hides one collective only.
    """

    def __init__(self, module: Module, computation: str, instruction_seconds: Mapping[str, float]):
        body = module.computations[computation]
        self.position = {name: index for index, name in enumerate(body)}
        self.left = [
            _span(module, computation, instruction, instruction_seconds)
            for instruction in body.values()
        ]

    def take(self, start: int, end: int, seconds: float) -> float:
        """Uses up to `seconds` of the work between two positions; returns how much there was."""
        taken = 0.0
        for index in range(start + 1, end):
            part = min(self.left[index], seconds - taken)
            self.left[index] -= part
            taken += part
        return taken


def _span(
    module: Module,
    computation: str,
    instruction: Instruction,
    instruction_seconds: Mapping[str, float],
) -> float:
    """Returns the seconds of an instruction, with those of the loop or branches that it runs."""
    if instruction.opcode not in traffic.FREE:
        return instruction_seconds.get(instruction.name, 0.0)
    num_trips = 1
    if instruction.opcode == "while":
        known = module.num_trips(computation, instruction)
        num_trips = 1 if known is None else known
    return num_trips * sum(
        _span(module, name, inner, instruction_seconds)
        for name in instruction.called
        for inner in module.computations[name].values()
    )


def _hidden(
    module: Module, computation: str, name: str, seconds: float, work: dict[str, WorkBetween]
) -> float:
    """Returns how many of a collective's seconds the work between its start and its end hides."""
    start = module.computations[computation][name]
    for caller, instruction in module.callers[computation]:
        if instruction.opcode == "async-start":
            computation, start = caller, instruction
    if computation not in work:
        return 0.0
    body = module.computations[computation]
    if collective_ops.transfer_of(start):
        end = collective_ops.end_of_transfer(start, body)
    else:
        is_sync = '"is_sync":true' in start.attributes.replace(" ", "")
        if is_sync or start.opcode not in [f"{kind}-start" for kind in (*KINDS, "async")]:
            return 0.0
        end = _end_of_async(module, computation, start)
    position = work[computation].position
    # Without an end in this computation the collective ends in the loop's next iteration.
    end_position = position[end.name] if end else len(body)
    return work[computation].take(position[start.name], end_position, seconds)


def _end_of_async(module: Module, computation: str, start: Instruction) -> Instruction | None:
    """Returns the last -update or -done of an asynchronous operation; None if it has none here."""
    end, value = None, start
    while value is not None:
        users = module.users[computation, value.name]
        value = next((user for user in users if user.opcode.endswith(("-done", "-update"))), None)
        end = value or end
    return end
