"""Selects the layouts that `verify` tries; new axes and schedules are included automatically."""

import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from meshtrain.config import checks
from meshtrain.config.schema import AXES, CONTEXT_METHODS, KEEP, SYNC_PATTERNS, MeshConfig
from meshtrain.parallel.sharding import ZERO_AXES
from meshtrain.schedules import SCHEDULES
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.pairwise import Row, pairwise

NUM_MICROBATCHES = (1, 3, 6, 12)  # multiples of the number of stages, and not

NUM_CHUNKS = (2, 3)  # of interleaved schedules, on each stage

# 3 divides neither the 8 layers of a shallow subject nor those of its stages: 2 are unrolled then.
UNROLL = (1, 3)

# Several blocks at the sequence length of a subject, the last one shorter.
ATTENTION_IMPLS = ("xla", "xla:6", "blockwise:3")

LOSS_CHUNKS = (0, 3)

# Whether the last group of micro-batches of an interleaved schedule is shorter; covered in pairs as well.
SHORT_GROUP = "short_group"

REMAT = ("full", "dots", "names:attention,mlp")


def select(
    subject: VerifyCase,
    without: Iterable[str] = (),
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> list[Row]:
    """Returns layouts of all devices in which every possible pair of two settings occurs.

    The settings in `fixed` have the same value in all of them.
    """
    factors = [
        factor for factor in _factors(subject, without) if not fixed.keys() & factor[0].keys()
    ]
    rows = pairwise(_bases(subject), [*factors, [dict(fixed)]])
    return [{name: row[name] for name in row if name != SHORT_GROUP} for row in rows]


def _factors(subject: VerifyCase, without: Iterable[str]) -> list[list[Row]]:
    """Returns the settings that combine with every mesh: for each, a row of each of its values."""
    raw, model = subject.raw, subject.raw["model"]

    def switch(name: str, supported: bool = True) -> list[Row]:
        return [{name: value} for value in ([True, False] if supported else [False])]

    # With remat, layers are never unrolled.
    recompute = [{"remat": "none", "unroll": number} for number in UNROLL]
    recompute += [{"remat": name, "unroll": 1} for name in REMAT]
    factors = [
        recompute,
        # The capacity of experts is that of a row, and the reference has a row for each document.
        switch(
            "packing",
            subject.rows is not None
            and "packing" not in without
            and not model.get("capacity_factor"),
        ),
        switch("masks", subject.is_text and "masks" not in without),
        switch("sequence_parallel", any(name == "residual_seq" for name, _ in raw["rules"])),
        switch("loss_scale"),
        switch("dropout", subject.model.row_keys),
        [{"sync_pattern": name} for name in SYNC_PATTERNS],
    ]
    if subject.is_transformer and "attention_impl" in model:
        factors.append([{"attention_impl": name} for name in ATTENTION_IMPLS])
        factors.append([{"loss_chunks": number} for number in LOSS_CHUNKS])
    return factors


def _bases(subject: VerifyCase) -> list[Row]:
    """Returns every layout of all devices: sizes of axes, ZeRO stage, micro-batches, pipeline settings."""
    num_devices = jax.device_count()
    # Without experts the axis `expert` only shards the batch, as data does.
    axes = [axis for axis in AXES if axis != "expert" or subject.raw["model"].get("num_experts")]
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    found = []
    for row in itertools.product(*[divisors] * len(axes)):
        sizes = dict(zip(axes, row, strict=True))
        if math.prod(row) != num_devices:
            continue
        # ZeRO stages differ only in what they shard over these axes.
        stages = [3, 0, 1, 2] if any(sizes[axis] > 1 for axis in ZERO_AXES) else [3]
        combinations = itertools.product(
            stages, NUM_MICROBATCHES, _pipelines(subject, sizes), _methods(subject, sizes)
        )
        for zero_stage, num, pipeline, method in combinations:
            layout = {**sizes, "zero_stage": zero_stage, "num_microbatches": num, **pipeline}
            layout["context_method"] = method
            layout[SHORT_GROUP] = num % sizes["pipeline"] > 0
            if not _faults(subject, layout):
                found.append(layout)
    return found


def _pipelines(subject: VerifyCase, sizes: Mapping[str, int]) -> list[Row]:
    """Returns every supported combination of pipeline settings for these axis sizes."""
    keys = ("schedule", "num_chunks", "keep")
    if sizes["pipeline"] == 1:
        return [dict.fromkeys(keys)]
    if subject.model.block is None:
        return []
    # With one layer in a chunk, the order of its layers could not be wrong.
    least = 2 if subject.is_shrunk else 1
    return [
        dict(zip(keys, (schedule, chunks, keep), strict=True))
        for schedule, keep in itertools.product(SCHEDULES, KEEP)
        for chunks in (NUM_CHUNKS if schedule == "interleaved" else [1])
        if not checks.layer_faults(subject.num_layers, sizes["pipeline"], chunks)
        and subject.num_layers >= least * sizes["pipeline"] * chunks
    ]


def _methods(subject: VerifyCase, sizes: Mapping[str, int]) -> list[str | None]:
    """Returns every supported method of context parallelism for these axis sizes."""
    if sizes["context"] == 1:
        return [None]
    options = subject.cfg.data.options
    if not subject.model.shards_sequences or checks.sequence_faults(options, sizes["context"]):
        return []
    num_heads, shards = subject.raw["model"]["num_heads"], sizes["context"] * sizes["tensor"]
    methods = [name for name in CONTEXT_METHODS if name != "auto"]
    return methods if num_heads % shards == 0 else [name for name in methods if name != "ulysses"]


def _faults(subject: VerifyCase, layout: Row) -> list[str]:
    mesh = MeshConfig(**{axis: layout[axis] for axis in AXES if axis in layout})
    sizes = {"num_microbatches": layout["num_microbatches"], "global_batch": subject.global_batch}
    model = subject.raw["model"]
    faults = checks.tensor_faults(model, mesh.tensor) + checks.expert_faults(model, mesh.expert)
    return checks.batch_faults(mesh, **sizes) + faults
