"""The least time that a compiled step takes on a device: FLOPs, HBM bytes, collectives; its MFU.

On a device whose kernels were measured also the time that the step is expected to take.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshtrain.hardware import Device
from meshtrain.parallel.mesh import Network
from meshtrain.tools.hlo import collective_ops, kernels, traffic
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

NUM_FARTHEST = 3  # rows that are named because they are farthest from their limit

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
    # By the factors of hardware.toml, computed, not measured; None if the device has none.
    expected_seconds: float | None = None


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
    kind: str  # of its kernel, see kernels.py
    ceiling_seconds: float  # by RULE
    # As in Row; where the kind was not measured, by RULE.
    expected_seconds: float | None
    factor: float | None  # of its kind on this device, if it was measured


@dataclass(frozen=True)
class KernelRow:
    """The kernels of one kind, pass and source line, compared with their limit."""

    kind: str
    phase: str
    source: str
    runs: float
    ceiling_seconds: float  # by RULE
    expected_seconds: float

    @property
    def above_seconds(self) -> float:
        return self.expected_seconds - self.ceiling_seconds


@dataclass(frozen=True)
class Expected:
    """The time that a step is expected to take, by measured factors: computed, not measured."""

    seconds: float
    mfu: float | None
    source: str  # of the factors
    # Seconds of the kinds of kernels that have no factor: RULE stands in for it. The most first.
    by_rule: dict[str, float]
    # The rows with the most seconds above their limit by RULE, the most first.
    farthest: list[KernelRow]


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
    expected: Expected | None = None  # None for devices without measured factors of kernels


def roofline(
    module: Module,
    collectives: list[Collective],
    device: Device,
    network: Network,
    *,
    model_flops: float | None,
    skipped: tuple[str, ...] = (),
) -> Roofline:
    """Returns the roofline of a step. `model_flops`: of one device in a step, as MFU counts them.

    Loops with one of `skipped` in their name count as loops of zero iterations.
    """
    module = replace(module, skipped=skipped, _runs={})
    labels = Labels(module)
    operations = []
    instruction_seconds: dict[str, float] = {}  # of one run, by RULE
    no_time = 0.0 if device.factors else None
    rows = {name: Row(name, 0.0, 0.0, 0.0, 0.0, no_time) for name in GROUPS}
    for computation, runs in traffic.executed(module):
        for instruction in module.computations[computation].values():
            cost = _cost(module, computation, instruction, device)
            instruction_seconds[instruction.name] = cost.ceiling_seconds
            if not cost.flops and not cost.hbm_bytes:
                continue
            label = labels.label(instruction.name)
            group = cost.name or _group_of(label)
            kind = kernels.kind_of(module, computation, instruction, is_update=group == OPTIMIZER)
            # Without a factor of its kind a kernel is expected to take its time by RULE.
            factor, expected_seconds = None, None
            if device.factors:
                factor = kernels.factor_of(module, computation, instruction, kind, device.factors)
                expected_seconds = cost.ceiling_seconds
            if factor:
                expected_seconds = kernels.expected_seconds(
                    kind,
                    factor,
                    compute_seconds=cost.compute_seconds,
                    moving_seconds=cost.moving_seconds,
                )
            rows[group] = _added(rows[group], runs, cost, expected_seconds)
            operation = Operation(
                name=instruction.name,
                group=group,
                phase=label.phase,
                source=label.source,
                runs=runs,
                hbm_bytes=runs * cost.hbm_bytes,
                flops=runs * cost.flops,
                kind=kind,
                ceiling_seconds=runs * cost.ceiling_seconds,
                expected_seconds=None if expected_seconds is None else runs * expected_seconds,
                factor=factor,
            )
            operations.append(operation)
    transfers = _transfers(module, collectives, device, network, instruction_seconds)
    exposed = sum(transfer.exposed for transfer in transfers)
    total = sum(row.ceiling_seconds for row in rows.values()) + exposed
    all_known = all(module.runs(name)[1] for name, _ in traffic.executed(module))
    expected = None
    if device.factors:
        counted_flops = model_flops if all_known else None
        expected = _expected(operations, exposed, device, counted_flops, device.factors.source)
    return Roofline(
        device=device.name,
        rows=[*rows.values()],
        transfers=transfers,
        seconds=total,
        mfu=_mfu(model_flops, total, device) if all_known else None,
        rule=RULE,
        operations=sorted(operations, key=lambda operation: -operation.hbm_bytes),
        has_all_counts=all_known,
        is_balanced=bool(skipped),
        expected=expected,
    )


def _mfu(model_flops: float | None, seconds: float, device: Device) -> float | None:
    return model_flops / (device.flops_16 * seconds) if model_flops and seconds else None


def _expected(
    operations: list[Operation],
    exposed: float,
    device: Device,
    model_flops: float | None,
    source: str,
) -> Expected:
    """Returns the expected time of a step: of its kernels, and of collectives as RULE has them."""
    total = exposed
    by_rule: dict[str, float] = defaultdict(float)
    rows: dict[tuple[str, str, str], KernelRow] = {}
    for operation in operations:
        total += operation.expected_seconds
        if operation.factor is None:
            by_rule[operation.kind] += operation.ceiling_seconds
        key = (operation.kind, operation.phase, operation.source)
        row = rows.get(key, KernelRow(*key, 0.0, 0.0, 0.0))
        rows[key] = replace(
            row,
            runs=row.runs + operation.runs,
            ceiling_seconds=row.ceiling_seconds + operation.ceiling_seconds,
            expected_seconds=row.expected_seconds + operation.expected_seconds,
        )
    above = [row for row in rows.values() if row.above_seconds > 0]
    above.sort(key=lambda row: -row.above_seconds)
    return Expected(
        seconds=total,
        mfu=_mfu(model_flops, total, device),
        source=source,
        by_rule=dict(sorted(by_rule.items(), key=lambda item: -item[1])),
        farthest=above[:NUM_FARTHEST],
    )


def _group_of(label: Label) -> str:
    """Returns the group of an operation without matrix products, by its source line and pass."""
    if any(file in label.source for file in ("ops/losses.py:", "ops/loss_kernel.py:")):
        return LOSS
    is_update = label.phase == "other" and any(file in label.source for file in AFTER_GRADIENTS)
    return OPTIMIZER if is_update else ELEMENTWISE


@dataclass(frozen=True)
class Cost:
    """The cost of one run of an instruction."""

    name: str  # the group, or "" if the source line decides it
    flops: float
    hbm_bytes: float
    compute_seconds: float  # of the FLOPs at the device's peak
    moving_seconds: float  # of the bytes at its full bandwidth
    ceiling_seconds: float  # by RULE

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.moving_seconds)


def _cost(module: Module, computation: str, instruction: Instruction, device: Device) -> Cost:
    """Returns the cost of one run of an instruction."""
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
    return Cost(
        name=group,
        flops=float(sum(matmul_flops.values()) + attention_flops),
        hbm_bytes=float(hbm_bytes),
        compute_seconds=at_peak,
        moving_seconds=moving,
        ceiling_seconds=max(by_rule, moving),
    )


def _added(total: Row, runs: float, cost: Cost, expected_seconds: float | None) -> Row:
    """Returns the total with `runs` times the cost and the expected time of one run."""
    expected = None
    if expected_seconds is not None:
        expected = total.expected_seconds + runs * expected_seconds
    return Row(
        name=total.name,
        flops=total.flops + runs * cost.flops,
        hbm_bytes=total.hbm_bytes + runs * cost.hbm_bytes,
        seconds=total.seconds + runs * cost.seconds,
        ceiling_seconds=total.ceiling_seconds + runs * cost.ceiling_seconds,
        expected_seconds=expected,
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
        rate = link_rate(device, network, tensors[0].groups, tensors[0].kind)
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


def link_rate(device: Device, network: Network, groups: Groups, kind: str = "") -> float:
    """Returns the bytes/s that a device sends to the others of its group; the slowest group counts.

    Within a host over its links; to other hosts and slices over the network adapters of all members
    that the group has in its host, or of TPUs in its slice. An all-to-all sends other bytes to each
    member, so that a device's bytes for other hosts leave through its own adapter.
    """
    places = np.stack([network.slices.ravel(), network.hosts.ravel()])
    rates = {device.link}
    for group in groups:
        num_places = len({*map(tuple, places[:, [*group]].T.tolist())})
        if num_places > 1:
            num_near = len(group) / num_places  # members in the same host
            if kind == "all-to-all":
                rates.add(device.network * (len(group) - 1) / (len(group) - num_near))
            else:
                rates.add(num_near * device.network)
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
