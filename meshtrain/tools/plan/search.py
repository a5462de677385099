"""Tries every legal layout of a number of devices, and ranks those that fit by their predicted step time."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, KEEP, SyncConfig
from meshtrain.errors import ConfigError
from meshtrain.ops.losses import MIB
from meshtrain.tools.plan import memory
from meshtrain.tools.plan.constraints import KEYS, mesh_faults
from meshtrain.tools.plan.cost import Cost, OverlapModel, step_cost
from meshtrain.tools.plan.layout import REMATS, Layout, overrides
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.subject import PlanInput

CHUNKS = (1, 2, 4, 8)

TIE = 0.03  # layouts whose step times differ less are equally good; those with fewer axes and more room come first

MOST, MOST_REJECTED = 20, 3  # layouts of a plan

SHORTEST_CHUNK = 512  # tokens, of `mesh.context`

SMALL_LOSS_CHUNK = 256  # MiB; further chunks save no memory that counts

LANES = 128  # of TPU registers: narrower shards are padded, and XLA gathers them element by element


@dataclass(frozen=True)
class Candidate:
    """A layout with its predictions."""

    layout: Layout
    cost: Cost
    memory: dict[str, float]  # bytes at the peak, by what they hold
    compiled_memory: float | None = None  # bytes at the peak of the compiled step

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """Candidates that fit, best first, and faster ones that do not, with the reason."""

    found: list[Candidate]
    rejected: list[tuple[Candidate, str]]
    num_tried: int


def search(
    subject: PlanInput,
    machine: Machine,
    *,
    limit: float,
    fixed: Mapping[str, Any],
    scale: float = 1.0,
    habits: OverlapModel | None = None,
) -> Plan:
    """Returns the plan. `limit` is the bytes of a device that a step may use; `fixed` are values of layouts.

    `scale` multiplies every prediction of step time.
    """

    def price(layout: Layout) -> Cost:
        return step_cost(subject.work, layout, machine, subject.seq_len, habits).times(scale)

    def candidate(layout: Layout, cost: Cost) -> Candidate:
        parts = memory.parts(subject.work, layout, subject.stored, subject.seq_len)
        return Candidate(layout, cost, parts)

    priced = [(layout, price(layout)) for layout in layouts(subject, machine, fixed)]
    found, too_large, seen, ties = [], [], set(), []
    # Memory takes longer to predict than time, so it is predicted for the fastest layouts only.
    for layout, cost in sorted(priced, key=lambda pair: pair[1].seconds):
        if ties and cost.seconds > (1 + TIE) * ties[0].seconds:
            found += _legal(subject, machine, ties, seen)
            ties = []
            if len(found) >= MOST:
                break
        one = candidate(layout, cost)
        if one.memory_bytes > limit:
            smaller = _with_small_loss_chunks(subject, layout, fixed)
            one = candidate(smaller, price(smaller)) if smaller else one
        if one.memory_bytes <= limit:
            ties.append(one)
        elif not (ties or found):
            too_large.append(one)
    found += _legal(subject, machine, ties, seen)
    too_large.sort(key=lambda one: one.memory_bytes)
    rejected = [
        (one, f"{(one.memory_bytes - limit) / 1e9:.1f} GB too much")
        for one in too_large[:MOST_REJECTED]
    ]
    return Plan(found[:MOST], rejected, len(priced))


def layouts(subject: PlanInput, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yields the layouts that are legal and that no rule of the hardware forbids."""
    for sizes in _meshes(subject, machine, fixed):
        chunk = fixed.get("loss_chunk_mib", subject.loss_chunk_mib or 0.0)
        layout = Layout(**sizes, loss_chunk_mib=chunk)
        per_shard = subject.global_batch // layout.batch_shards
        usual = {"zero_stage": (3, 1) if layout.zero_shards > 1 else (3,), "remat": REMATS}
        usual["num_microbatches"] = _divisors(per_shard)
        usual |= {name: (value,) for name, value in fixed.items() if name in usual}
        for zero_stage, num, remat in itertools.product(
            usual["zero_stage"], usual["num_microbatches"], usual["remat"]
        ):
            if per_shard % num:
                continue
            rows = per_shard // num
            one = replace(
                layout, zero_stage=zero_stage, num_microbatches=num, rows=rows, remat=remat
            )
            for pipeline in _pipelines(subject, one, fixed):
                for sync in _syncs(subject, one, machine, fixed):
                    yield replace(one, sync=sync, **pipeline)


def _syncs(
    subject: PlanInput, layout: Layout, machine: Machine, fixed: Mapping[str, Any]
) -> Iterator[SyncConfig]:
    """Yields the ways to add gradients: the config's; if gradients are compressed, also the hierarchical one.

    Compression rounds, so only the config or --fix chooses it. In float32 another pattern than XLA's never wins on
    devices whose library knows the topology: it sends the same bytes, and computation hides none of them.
    """
    given = {name: fixed[name] for name in ("wire", "pattern") if name in fixed}
    one = replace(subject.cfg.sync, **given)
    yield one
    if one.wire != "float32" and one.pattern == "xla" and "pattern" not in fixed:
        num, stride = layout.members
        if 1 < machine.parts_inside(num, stride) < num:
            yield replace(one, pattern="hierarchical")


def _with_small_loss_chunks(
    subject: PlanInput, layout: Layout, fixed: Mapping[str, Any]
) -> Layout | None:
    """Returns the layout with smaller parts of the logits, which is slower; None if that saves little."""
    if subject.loss_chunk_mib is None or "loss_chunk_mib" in fixed:
        return None
    mib = layout.logits_bytes(subject.work.vocab_size, subject.seq_len) / MIB
    mib = min(mib, layout.loss_chunk_mib or mib)
    return replace(layout, loss_chunk_mib=SMALL_LOSS_CHUNK) if mib > 2 * SMALL_LOSS_CHUNK else None


def _meshes(
    subject: PlanInput, machine: Machine, fixed: Mapping[str, Any]
) -> Iterator[dict[str, int]]:
    num = machine.num_devices
    names = [axis for axis in AXES if axis != "data"]
    options = {axis: [fixed[axis]] if axis in fixed else _divisors(num) for axis in names}
    if not subject.work.num_experts:
        options["expert"] = [fixed.get("expert", 1)]
    for row in itertools.product(*options.values()):
        used = math.prod(row)
        if num % used:
            continue
        sizes = dict(zip(names, row, strict=True)) | {"data": num // used}
        if fixed.get("data", sizes["data"]) != sizes["data"]:
            continue
        if not (_faults(subject, sizes) or _rules(subject, machine, sizes)):
            yield sizes


def _faults(subject: PlanInput, sizes: dict[str, int]) -> list[str]:
    """Returns why the trainer refuses a mesh."""
    faults = mesh_faults(subject.raw, sizes)
    num_layers, stages = subject.work.num_layers, sizes["pipeline"]
    if stages > 1 and not subject.has_blocks:
        faults.append(f"mesh.pipeline={stages}: the model is no stack of blocks")
    elif num_layers % stages:
        faults.append(f"mesh.pipeline={stages} does not divide {num_layers} layers")
    if sizes["context"] > 1 and not subject.shards_sequences:
        faults.append(f"mesh.context={sizes['context']}: the model does not shard sequences")
    return faults


def _rules(subject: PlanInput, machine: Machine, sizes: dict[str, int]) -> list[str]:
    """Returns why a mesh that the trainer accepts is slow on this hardware."""
    seq_len, d_model = subject.seq_len, subject.work.d_model
    context, tensor, fsdp = sizes["context"], sizes["tensor"], sizes["fsdp"]
    reasons = []
    if context > 1 and seq_len < 2 * SHORTEST_CHUNK * context:
        reasons.append(
            f"mesh.context={context} cuts {seq_len} tokens into chunks of less than {SHORTEST_CHUNK}: a device "
            f"works on two, and attention of shorter ones leaves it idle"
        )
    if tensor > machine.per_host:
        reasons.append(
            f"mesh.tensor={tensor} is more than the {machine.per_host} devices of a host: each layer would wait "
            f"for the network"
        )
    if machine.kind == "tpu" and fsdp > 1 and d_model // fsdp < LANES:
        reasons.append(f"mesh.fsdp={fsdp} leaves less than {LANES} lanes of {d_model}")
    return reasons


def _pipelines(
    subject: PlanInput, layout: Layout, fixed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    P, M = layout.pipeline, layout.num_microbatches
    if P == 1:
        yield {}
        return
    if M < P and "num_microbatches" not in fixed:
        return  # most of the stages would be idle most of the time
    for chunks in (fixed["num_chunks"],) if "num_chunks" in fixed else CHUNKS:
        if subject.work.num_layers % (P * chunks) or (chunks > 1 and M % P):
            continue
        schedule = fixed.get("schedule", "interleaved" if chunks > 1 else "1f1b")
        if (schedule == "interleaved") != (chunks > 1):
            continue
        for keep in (fixed["keep"],) if "keep" in fixed else KEEP:
            yield {"schedule": schedule, "num_chunks": chunks, "keep": keep}


def _legal(
    subject: PlanInput, machine: Machine, ties: list[Candidate], seen: set[tuple]
) -> Iterator[Candidate]:
    """Yields the candidates that the trainer accepts, one of each mesh and schedule that is not in `seen`."""

    def simplest(one: Candidate):
        axes = sum(size > 1 for size in one.layout.sizes().values())
        return axes, one.seconds, one.memory_bytes

    for one in sorted(ties, key=simplest):
        kind = (*one.layout.sizes().values(), one.layout.schedule, one.layout.num_chunks)
        if kind in seen:
            continue
        try:
            parse(settings(subject, one.layout), num_devices=machine.num_devices)
        except ConfigError:
            continue
        seen.add(kind)
        yield one


def settings(subject: PlanInput, layout: Layout) -> dict[str, Any]:
    """Returns the config with this layout."""
    return with_keys(subject.raw, overrides(layout))


def with_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config with other values of keys such as mesh.data."""
    raw = copy.deepcopy(dict(config))
    for key, value in keys.items():
        section, _, name = key.partition(".")
        raw[section][name] = value
    return raw


def way_out(
    subject: PlanInput, machine: Machine, plan: Plan, limit: float, fixed: Mapping[str, Any]
) -> str:
    """Returns a line that says why no layout was found, and the nearest one."""
    who = f"{machine.num_devices} {machine.device.name}"
    if not plan.num_tried:
        return f"{who}: no layout is legal{_why_none(subject, machine, fixed)}"
    if not plan.rejected:
        return f"{who}: the trainer accepts no layout; fix less"
    one, reason = plan.rejected[0]
    need = one.memory_bytes / machine.device.memory
    return (
        f"{who}: no layout fits {limit / 1e9:.0f} GB on each; the nearest needs {one.memory_bytes / 1e9:.1f} GB "
        f"({reason}): "
        + " ".join(f"{key}={value}" for key, value in overrides(one.layout).items())
        + f"; use about {math.ceil(need * machine.num_devices)} devices, or devices with more memory"
    )


def _why_none(subject: PlanInput, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Returns what refuses the fixed values with the rest of the devices on `data`."""
    sizes = {axis: fixed.get(axis, 1) for axis in AXES}
    sizes["data"] = fixed.get("data", machine.num_devices // math.prod(sizes.values()))
    faults = [*_faults(subject, sizes), *_rules(subject, machine, sizes)]
    of_fixed = [f"{key}={fixed[name]}" for key in KEYS if (name := key.partition(".")[2]) in fixed]
    given = f" with {' '.join(of_fixed)}" if of_fixed else ""
    reason = faults[0] if faults else "the batch, the layers and the fixed keys exclude each other"
    return f"{given}: {reason}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
