"""Tries every legal layout of a number of devices; ranks those that fit by predicted step time."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config.parse import on_devices
from meshtrain.config.schema import AXES, KEEP, SyncConfig
from meshtrain.errors import ConfigError, divisors
from meshtrain.ops.losses import MIB
from meshtrain.tools.plan import memory
from meshtrain.tools.plan.constraints import KEYS, mesh_faults
from meshtrain.tools.plan.cost import Cost, OverlapModel, step_cost
from meshtrain.tools.plan.layout import Layout, overrides, with_layout
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.plan_input import PlanInput

# Layouts whose step times differ less are equally good; those with fewer axes and more room come
# first.
TIE = 0.03
MOST, MOST_REJECTED = 20, 3  # layouts of a plan


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

    candidates: list[Candidate]
    rejected: list[tuple[Candidate, str]]
    num_tried: int


def search(
    plan_input: PlanInput,
    machine: Machine,
    *,
    limit: float,
    fixed: Mapping[str, Any],
    scale: float = 1.0,
    overlap: OverlapModel | None = None,
) -> Plan:
    """Returns the plan.

    `limit` is the bytes of a device that a step may use; `fixed` are values of layouts. `scale`
    multiplies every prediction of step time.
    """
    work, seq_len = plan_input.work, plan_input.seq_len

    def price(layout: Layout) -> Cost:
        return step_cost(work, layout, machine, seq_len, overlap).times(scale)

    def candidate_of(layout: Layout, cost: Cost) -> Candidate:
        state_bytes = plan_input.stored.bytes(layout)
        return Candidate(layout, cost, memory.parts(work, layout, state_bytes, seq_len))

    priced = [(layout, price(layout)) for layout in layouts(plan_input, machine, fixed)]
    priced.sort(key=lambda pair: pair[1].seconds)
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    ties: list[Candidate] = []
    seen: set[tuple] = set()
    # Memory takes longer to predict than time, so it is predicted for the fastest layouts only.
    for layout, cost in priced:
        if ties and cost.seconds > (1 + TIE) * ties[0].seconds:
            fitting += _accepted(plan_input, machine, ties, seen)
            ties = []
            if len(fitting) >= MOST:
                break
        candidate = candidate_of(layout, cost)
        if candidate.memory_bytes > limit:
            smaller = _with_small_loss_chunks(plan_input, layout, fixed)
            if smaller:
                candidate = candidate_of(smaller, price(smaller))
        if candidate.memory_bytes <= limit:
            ties.append(candidate)
        elif not (ties or fitting):
            too_large.append(candidate)
    fitting += _accepted(plan_input, machine, ties, seen)

    too_large.sort(key=lambda candidate: candidate.memory_bytes)
    rejected = []
    for candidate in too_large[:MOST_REJECTED]:
        excess = candidate.memory_bytes - limit
        rejected.append((candidate, f"{excess / 1e9:.1f} GB too much"))
    return Plan(fitting[:MOST], rejected, len(priced))


MAX_ROWS = 1 << 20  # of a device


def with_largest_batch(
    plan_input: PlanInput, machine: Machine, *, limit: float, fixed: Mapping[str, Any]
) -> PlanInput | None:
    """Returns the plan's input with the most rows for which a layout fits; None if none does.

    The number of rows is a multiple of that of the devices. `num_microbatches` has to be fixed:
    with more of them any batch fits.
    """

    def with_rows(rows: int) -> PlanInput:
        train = replace(plan_input.cfg.train, global_batch=rows * machine.num_devices)
        return replace(plan_input, cfg=replace(plan_input.cfg, train=train))

    def fits(rows: int) -> bool:
        plan = search(with_rows(rows), machine, limit=limit, fixed=fixed)
        return bool(plan.candidates)

    fitting, too_many = 0, 1
    while too_many <= MAX_ROWS and fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return with_rows(fitting) if fitting else None


def _accepted(
    plan_input: PlanInput, machine: Machine, ties: list[Candidate], seen: set[tuple]
) -> Iterator[Candidate]:
    """Yields the candidates that the trainer accepts, simplest first.

    Of each mesh and schedule there is one, unless `seen` has it already.
    """

    def simplicity(candidate: Candidate) -> tuple:
        num_axes = sum(size > 1 for size in candidate.layout.sizes().values())
        return num_axes, candidate.seconds, candidate.memory_bytes

    for candidate in sorted(ties, key=simplicity):
        layout = candidate.layout
        kind = (*layout.sizes().values(), layout.schedule, layout.num_chunks)
        if kind in seen:
            continue
        try:
            on_devices(with_layout(plan_input.cfg, layout), machine.num_devices)
        except ConfigError:
            continue
        seen.add(kind)
        yield candidate


# ---- the layouts that are tried ----

CHUNKS = (1, 2, 4, 8)
MOST_PIPELINED = 4096  # micro-batches in a pipeline: more shorten its bubble no further
SHORTEST_CHUNK = 512  # tokens, of `mesh.context`
SMALL_LOSS_CHUNK = 256  # MiB; further chunks save no memory that counts

# Of TPU registers: narrower shards are padded, and XLA gathers them element by element.
LANES = 128


def layouts(plan_input: PlanInput, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yields the layouts that are legal and that no rule of the hardware forbids."""
    loss_chunk_mib = fixed.get("loss_chunk_mib", plan_input.loss_chunk_mib or 0.0)
    for sizes in _meshes(plan_input, machine, fixed):
        mesh = Layout(**sizes, loss_chunk_mib=loss_chunk_mib)
        rows_per_shard = plan_input.global_batch // mesh.batch_shards
        choices = {
            "zero_stage": (3, 1) if mesh.zero_shards > 1 else (3,),
            "num_microbatches": divisors(rows_per_shard),
            "remat": [name for name, *_ in plan_input.work.kept],
        }
        for name in choices.keys() & fixed.keys():
            choices[name] = (fixed[name],)
        for zero_stage, num_microbatches, remat in itertools.product(*choices.values()):
            if rows_per_shard % num_microbatches:
                continue
            layout = replace(
                mesh,
                zero_stage=zero_stage,
                num_microbatches=num_microbatches,
                rows=rows_per_shard // num_microbatches,
                remat=remat,
            )
            for pipeline in _pipelines(plan_input, layout, fixed):
                for sync in _syncs(plan_input, layout, machine, fixed):
                    yield replace(layout, sync=sync, **pipeline)


def _meshes(
    plan_input: PlanInput, machine: Machine, fixed: Mapping[str, Any]
) -> Iterator[dict[str, int]]:
    """Yields the sizes of each mesh of all devices; `data` has what the other axes leave."""
    num_devices = machine.num_devices
    names = [axis for axis in AXES if axis != "data"]
    choices = {axis: [fixed[axis]] if axis in fixed else divisors(num_devices) for axis in names}
    if not plan_input.work.num_experts:
        choices["expert"] = [fixed.get("expert", 1)]
    for row in itertools.product(*choices.values()):
        used = math.prod(row)
        if num_devices % used:
            continue
        sizes = dict(zip(names, row, strict=True))
        sizes["data"] = num_devices // used
        if fixed.get("data", sizes["data"]) != sizes["data"]:
            continue
        if not (_faults(plan_input, sizes) or _rules(plan_input, machine, sizes)):
            yield sizes


def _faults(plan_input: PlanInput, sizes: dict[str, int]) -> list[str]:
    """Returns why the trainer rejects a mesh."""
    faults = mesh_faults(plan_input.cfg, sizes)
    num_layers, stages = plan_input.work.num_layers, sizes["pipeline"]
    if stages > 1 and plan_input.model.block is None:
        faults.append(f"mesh.pipeline={stages}: the model is no stack of blocks")
    elif num_layers % stages:
        faults.append(f"mesh.pipeline={stages} does not divide {num_layers} layers")
    if sizes["context"] > 1 and not plan_input.model.shards_sequences:
        faults.append(f"mesh.context={sizes['context']}: the model does not shard sequences")
    return faults


def _rules(plan_input: PlanInput, machine: Machine, sizes: dict[str, int]) -> list[str]:
    """Returns why a mesh that the trainer accepts is slow on this hardware."""
    seq_len, d_model = plan_input.seq_len, plan_input.work.d_model
    context, tensor, fsdp = sizes["context"], sizes["tensor"], sizes["fsdp"]
    reasons = []
    if context > 1 and seq_len < 2 * SHORTEST_CHUNK * context:
        reasons.append(
            f"mesh.context={context} cuts {seq_len} tokens into chunks of less than "
            f"{SHORTEST_CHUNK}: a device works on two, and attention of shorter ones leaves it idle"
        )
    if tensor > machine.per_host:
        reasons.append(
            f"mesh.tensor={tensor} is more than the {machine.per_host} devices of a host: each "
            f"layer would wait for the network"
        )
    if machine.kind == "tpu" and fsdp > 1 and d_model // fsdp < LANES:
        reasons.append(f"mesh.fsdp={fsdp} leaves less than {LANES} lanes of {d_model}")
    return reasons


def _pipelines(
    plan_input: PlanInput, layout: Layout, fixed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the settings of the pipeline; one that is empty without stages."""
    num_stages, num_microbatches = layout.pipeline, layout.num_microbatches
    if num_stages == 1:
        yield {}
        return
    if num_microbatches < num_stages and "num_microbatches" not in fixed:
        return  # most of the stages would be idle most of the time
    if num_microbatches > MOST_PIPELINED and "num_microbatches" not in fixed:
        return
    for num_chunks in (fixed["num_chunks"],) if "num_chunks" in fixed else CHUNKS:
        if plan_input.work.num_layers % (num_stages * num_chunks):
            continue
        if num_chunks > 1 and num_microbatches % num_stages:
            continue
        schedule = fixed.get("schedule", "interleaved" if num_chunks > 1 else "1f1b")
        if (schedule == "interleaved") != (num_chunks > 1):
            continue
        for keep in (fixed["keep"],) if "keep" in fixed else KEEP:
            yield {"schedule": schedule, "num_chunks": num_chunks, "keep": keep}


def _syncs(
    plan_input: PlanInput, layout: Layout, machine: Machine, fixed: Mapping[str, Any]
) -> Iterator[SyncConfig]:
    """Yields the ways to add gradients: the config's; if compressed, also the hierarchical one.

    Compression rounds, so only the config or --fix chooses it. In float32 another pattern than
    XLA's never wins on devices whose library knows the topology: it sends the same bytes, and
    computation hides none of them.
    """
    fixed_keys = {name: fixed[name] for name in ("dtype", "pattern") if name in fixed}
    sync = replace(plan_input.cfg.sync, **fixed_keys)
    yield sync
    if sync.dtype != "float32" and sync.pattern == "xla" and "pattern" not in fixed:
        num, stride = layout.members
        if 1 < machine.parts_inside(num, stride) < num:
            yield replace(sync, pattern="hierarchical")


def _with_small_loss_chunks(
    plan_input: PlanInput, layout: Layout, fixed: Mapping[str, Any]
) -> Layout | None:
    """Returns the layout with smaller parts of the logits, which is slower.

    Returns None if that saves little, or if the chunks are fixed.
    """
    if plan_input.loss_chunk_mib is None or "loss_chunk_mib" in fixed:
        return None
    mib = layout.logits_bytes(plan_input.work.vocab_size, plan_input.seq_len) / MIB
    mib = min(mib, layout.loss_chunk_mib or mib)
    if mib <= 2 * SMALL_LOSS_CHUNK:
        return None
    return replace(layout, loss_chunk_mib=SMALL_LOSS_CHUNK)


# ---- what is said about a plan, in every verb that makes one ----


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Returns why a layout comes after the best: how much slower it is, and in which part."""
    if candidate.seconds <= best.seconds:
        return "is as fast within the error, and has more axes or needs more memory"
    names = {**best.cost.parts, **candidate.cost.parts}
    gaps = {
        name: candidate.cost.parts.get(name, 0.0) - best.cost.parts.get(name, 0.0) for name in names
    }
    worst = max(gaps, key=gaps.get)
    slower = candidate.seconds - best.seconds
    return f"takes {slower:.3g} s more, {gaps[worst]:.3g} s of it for {worst}"


def way_out(
    plan_input: PlanInput, machine: Machine, plan: Plan, limit: float, fixed: Mapping[str, Any]
) -> str:
    """Returns a line that says why no layout was found, and the nearest one."""
    devices = f"{machine.num_devices} {machine.device.name}"
    if not plan.num_tried:
        return f"{devices}: no layout is legal{_why_none(plan_input, machine, fixed)}"
    if not plan.rejected:
        return f"{devices}: the trainer accepts no layout; fix less"
    nearest, reason = plan.rejected[0]
    need = nearest.memory_bytes / machine.device.memory
    keys = " ".join(f"{key}={value}" for key, value in overrides(nearest.layout).items())
    return (
        f"{devices}: no layout fits {limit / 1e9:.0f} GB on each; the nearest needs "
        f"{nearest.memory_bytes / 1e9:.1f} GB ({reason}): {keys}; "
        f"use about {math.ceil(need * machine.num_devices)} devices, or devices with more memory"
    )


def _why_none(plan_input: PlanInput, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Returns why the fixed values are rejected with the rest of the devices on `data`."""
    sizes = {axis: fixed.get(axis, 1) for axis in AXES}
    sizes["data"] = fixed.get("data", machine.num_devices // math.prod(sizes.values()))
    faults = _faults(plan_input, sizes) + _rules(plan_input, machine, sizes)
    fixed_keys = []
    for key in KEYS:
        name = key.partition(".")[2]
        if name in fixed:
            fixed_keys.append(f"{key}={fixed[name]}")
    given = f" with {' '.join(fixed_keys)}" if fixed_keys else ""
    reason = faults[0] if faults else "the batch, the layers and the fixed keys exclude each other"
    return f"{given}: {reason}"
