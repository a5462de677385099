"""Tries every legal layout of a number of devices, and ranks those that fit by their predicted step time."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config import checks
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, MeshConfig
from meshtrain.errors import ConfigError, did_you_mean
from meshtrain.plan import memory
from meshtrain.plan.cost import Cost, Layout, step_cost
from meshtrain.plan.machine import Machine
from meshtrain.plan.subject import Subject

REMATS = ("none", "dots", "full")
CHUNKS = (1, 2, 4, 8)
TIE = 0.03  # layouts whose step times differ less are equally good; those with fewer axes and more room come first
SHORTEST_CHUNK = 512  # tokens, of `mesh.context`
# Keys that a layout sets, as the command line has them.
KEYS = (
    *(f"mesh.{axis}" for axis in AXES),
    *(f"train.{name}" for name in ("zero_stage", "num_microbatches", "remat")),
    *(f"pipeline.{name}" for name in ("schedule", "num_chunks", "keep")),
)
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
    """Candidates that fit, best first, and near misses with the reason."""

    found: list[Candidate]
    rejected: list[tuple[Candidate, str]]
    num_tried: int


def search(
    subject: Subject,
    machine: Machine,
    *,
    limit: float,
    fixed: Mapping[str, Any],
    scale: float = 1.0,
) -> Plan:
    """Returns the plan. `limit` is the bytes of a device that a step may use; `fixed` are values of layouts.

    `scale` multiplies every prediction of step time.
    """
    fits, too_large, num_tried = [], [], 0
    for layout in layouts(subject, machine, fixed):
        num_tried += 1
        parts = memory.parts(
            subject.work, layout, subject.stored, subject.seq_len, subject.loss_chunk_mib
        )
        if sum(parts.values()) > limit:
            too_large.append((layout, parts))
            continue
        fits.append(Candidate(layout, _cost(subject, machine, layout, scale), parts))
    fits = _legal(subject, machine, sorted(fits, key=_rank(fits)))
    return Plan(fits, _near_misses(subject, machine, fits, too_large, limit, scale), num_tried)


def _cost(subject: Subject, machine: Machine, layout: Layout, scale: float) -> Cost:
    cost = step_cost(subject.work, layout, machine, subject.seq_len)
    return Cost({name: scale * seconds for name, seconds in cost.parts.items()})


def layouts(subject: Subject, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yields the layouts that are legal and that no rule of the hardware forbids."""
    for sizes in _meshes(subject, machine, fixed):
        layout = Layout(**sizes)
        stages = (3, 1) if layout.fsdp > 1 or layout.context > 1 else (3,)
        per_shard = subject.global_batch // layout.batch_shards
        for zero_stage, num in itertools.product(stages, _divisors(per_shard)):
            if layout.pipeline == 1 and num > 1 and per_shard // num < 1:
                continue
            with_rows = replace(
                layout, zero_stage=zero_stage, num_microbatches=num, rows=per_shard // num
            )
            for pipeline in _pipelines(subject, with_rows):
                for remat in REMATS:
                    one = replace(with_rows, remat=remat, **pipeline)
                    if all(getattr(one, name) == value for name, value in fixed.items()):
                        yield one


def _meshes(
    subject: Subject, machine: Machine, fixed: Mapping[str, Any]
) -> Iterator[dict[str, int]]:
    num = machine.num_devices
    names = [axis for axis in AXES if axis != "data"]
    options = {axis: [fixed[axis]] if axis in fixed else _divisors(num) for axis in names}
    if not subject.has_blocks:
        options["pipeline"] = [1]
    if not subject.work.num_experts:
        options["expert"] = [1]
    if not subject.shards_sequences:
        options["context"] = [1]
    for row in itertools.product(*options.values()):
        used = math.prod(row)
        if num % used:
            continue
        sizes = dict(zip(names, row, strict=True)) | {"data": num // used}
        if not _faults(subject, machine, sizes):
            yield sizes


def _faults(subject: Subject, machine: Machine, sizes: dict[str, int]) -> bool:
    mesh, model = MeshConfig(**sizes), subject.raw["model"]
    if checks.batch_faults(mesh, global_batch=subject.global_batch, num_microbatches=1):
        return True
    if checks.tensor_faults(model, mesh.tensor) or checks.expert_faults(model, mesh.expert):
        return True
    if checks.sequence_faults(subject.cfg.data, mesh.context):
        return True
    # A device works on two chunks of each sequence; attention of shorter ones leaves it idle.
    if mesh.context > 1 and subject.seq_len < 2 * SHORTEST_CHUNK * mesh.context:
        return True
    if subject.work.num_layers % mesh.pipeline:
        return True
    # Every layer waits for the collectives over `tensor`: not over the network.
    if mesh.tensor > machine.per_host:
        return True
    if machine.kind == "tpu" and mesh.fsdp > 1:
        return subject.work.d_model // mesh.fsdp < LANES
    return False


def _pipelines(subject: Subject, layout: Layout) -> Iterator[dict[str, Any]]:
    P, M = layout.pipeline, layout.num_microbatches
    if P == 1:
        yield {}
        return
    if M < P:
        return  # most of the stages would be idle most of the time
    for chunks in CHUNKS:
        if subject.work.num_layers % (P * chunks) or (chunks > 1 and M % P):
            continue
        for keep in ("residuals", "inputs"):
            schedule = "interleaved" if chunks > 1 else "1f1b"
            yield {"schedule": schedule, "num_chunks": chunks, "keep": keep}


def _rank(candidates: list[Candidate]):
    best = min((one.seconds for one in candidates), default=0.0)

    def key(one: Candidate):
        ties = math.floor(math.log(one.seconds / best) / TIE)
        axes = sum(size > 1 for size in one.layout.sizes().values())
        return ties, axes, one.seconds, one.memory_bytes

    return key


def _legal(subject: Subject, machine: Machine, ranked: list[Candidate], most: int = 20):
    """Returns the first candidates that the trainer accepts, one of each mesh and schedule."""
    found, seen = [], set()
    for one in ranked:
        p = one.layout
        kind = (*p.sizes().values(), p.schedule, p.num_chunks)
        if kind in seen:
            continue
        try:
            parse(settings(subject, p), num_devices=machine.num_devices)
        except ConfigError:
            continue
        seen.add(kind)
        found.append(one)
        if len(found) == most:
            break
    return found


def _near_misses(subject, machine, fits, too_large, limit, scale, most: int = 3):
    """Returns layouts that would be faster than the best, or all if none fits, with how much they lack."""
    best = fits[0].seconds if fits else math.inf
    found = []
    for layout, parts in sorted(too_large, key=lambda pair: sum(pair[1].values())):
        cost = _cost(subject, machine, layout, scale)
        if cost.seconds < best:
            over = sum(parts.values()) - limit
            found.append((Candidate(layout, cost, parts), f"{over / 1e9:.1f} GB too much"))
        if len(found) == most:
            break
    return found


def overrides(layout: Layout) -> dict[str, Any]:
    """Returns the keys of the config that make this layout."""
    keys = {f"mesh.{axis}": size for axis, size in layout.sizes().items()}
    keys |= {"train.zero_stage": layout.zero_stage, "train.remat": layout.remat}
    keys["train.num_microbatches"] = layout.num_microbatches
    if layout.pipeline > 1:
        keys["pipeline.schedule"] = layout.schedule
        keys["pipeline.num_chunks"] = layout.num_chunks
        keys["pipeline.keep"] = layout.keep
    return keys


def settings(subject: Subject, layout: Layout) -> dict[str, Any]:
    """Returns the config with this layout."""
    raw = copy.deepcopy(subject.raw)
    for key, value in overrides(layout).items():
        section, _, name = key.partition(".")
        raw[section][name] = value
    return raw


def fixed(flags: list[str]) -> dict[str, Any]:
    """Returns the values of layouts that KEY=VALUE fix; raises ConfigError for a key that no layout sets."""
    values, faults = {}, []
    for flag in flags:
        key, _, value = flag.partition("=")
        name = key.rpartition(".")[2]
        kind = type(getattr(Layout(), name)) if key in KEYS else None
        if kind is None:
            near = did_you_mean(key, KEYS)
            faults.append(f"--fix={flag}: unknown key{near}; use one of {', '.join(KEYS)}")
        elif kind is int and not value.isdecimal():
            faults.append(f"--fix={flag}: use a number, such as {key}=2")
        else:
            values[name] = kind(value)
    if faults:
        raise ConfigError(*faults)
    return values


def way_out(subject: Subject, machine: Machine, plan: Plan, limit: float) -> str:
    """Returns a line that says why no layout was found, and the nearest one."""
    if not plan.num_tried:
        return (
            f"--devices={machine.num_devices}: no mesh of them fits train.global_batch={subject.global_batch}, the "
            f"model and --fix; use a batch that is a multiple of {machine.num_devices}, or fix less"
        )
    if not plan.rejected:
        return f"--devices={machine.num_devices}: the trainer accepts no layout; fix less"
    one, reason = plan.rejected[0]
    need = one.memory_bytes / machine.device.memory
    return (
        f"--devices={machine.num_devices}: no layout fits {limit / 1e9:.0f} GB on each {machine.device.name}; the "
        f"nearest needs {one.memory_bytes / 1e9:.1f} GB ({reason}): "
        + " ".join(f"{key}={value}" for key, value in overrides(one.layout).items())
        + f"; use about {math.ceil(need * machine.num_devices)} devices, or devices with more memory"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
