"""Selects the layouts that `verify` tries; new axes and schedules are included automatically."""

import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from meshtrain.config import checks
from meshtrain.config.schema import (
    AXES,
    CONTEXT_METHODS,
    EXPERT_KERNELS,
    EXPERT_METHODS,
    KEEP,
    KERNELS,
    SYNC_PATTERNS,
    MeshConfig,
)
from meshtrain.ops.kernels import why_not
from meshtrain.parallel import expert, sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.parallel.sharding import ZERO_AXES
from meshtrain.schedules import SCHEDULES
from meshtrain.tools.verify import adapters
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.pairwise import Row, pairwise

NUM_MICROBATCHES = (1, 3, 6, 12)  # multiples of the number of stages, and not
NUM_CHUNKS = (2, 3)  # of interleaved schedules, on each stage

# 3 divides neither the 8 layers of a shallow case nor those of its stages: 2 are unrolled then.
UNROLL = (1, 3)

# Several blocks at the sequence length of a case, the last one shorter. The first, for chunks of a
# sequence, without dropout: the first row has both.
ATTENTION_IMPLS = ("emulated", "xla", "xla:6", "blockwise:3", "splash")
LOSS_CHUNKS = (0, 3)

# Says whether the last group of micro-batches of an interleaved schedule is shorter; covered in
# pairs as well.
SHORT_GROUP = "short_group"
REMAT = ("full", "dots", "names:attention,mlp")
# With the moments, in the host's memory.
OFFLOAD = "offload:attention,layer_input"


def select(
    case: VerifyCase,
    without: Iterable[str] = (),
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> list[Row]:
    """Returns layouts of all devices in which every possible pair of two settings occurs.

    The settings in `fixed` have the same value in all of them.
    """
    factors = [factor for factor in _factors(case, without) if not fixed.keys() & factor[0].keys()]
    rows = pairwise(_bases(case), [*factors, [dict(fixed)]])
    has_sinks = case.raw["model"].get("attention_sinks", False)
    for row in rows:
        # These methods compute in blocks, and so does attention with sinks.
        in_blocks = has_sinks or row["context_method"] in ("ring", "gather")
        if row.get("attention_impl") == "splash" and in_blocks:
            row["attention_impl"] = "blockwise:3"
        # A pipeline offloads only its moments.
        if row["remat"] == OFFLOAD and row["pipeline"] > 1:
            row["remat"] = "full"
    return [{name: row[name] for name in row if name != SHORT_GROUP} for row in rows]


def _factors(case: VerifyCase, without: Iterable[str]) -> list[list[Row]]:
    """Returns the settings that combine with every mesh: for each, a row of each of its values."""
    model = case.raw["model"]

    def switch(name: str, supported: bool = True) -> list[Row]:
        return [{name: True}, {name: False}] if supported else [{name: False}]

    # With remat, layers are never unrolled.
    recompute = [{"remat": "none", "unroll": number} for number in UNROLL]
    recompute += [{"remat": name, "unroll": 1} for name in REMAT]
    recompute = [{**row, "optim_offload": False} for row in recompute]
    if case.model.block is not None:
        recompute.append({"remat": OFFLOAD, "unroll": 1, "optim_offload": True})
    has_residual_rule = any(name == "residual_seq" for name, _ in case.raw["rules"])
    factors = [
        recompute,
        switch("packing", case.can_pack and "packing" not in without),
        switch("masks", case.is_text and "masks" not in without),
        switch("sequence_parallel", has_residual_rule),
        switch("loss_scale"),
        [{"sync_pattern": name} for name in SYNC_PATTERNS],
        _adapters(case),
    ]
    dropout = switch("dropout", case.model.row_keys)[::-1]
    if case.is_transformer and "attention_impl" in model:
        factors.append(_implementations(dropout))
        factors.append([{"loss_chunks": number} for number in LOSS_CHUNKS])
        device = jax.devices()[0]
        formulas = [name for name in KERNELS if name != "auto" and not why_not(name, device)]
        factors.append([{"kernels": name} for name in formulas])
        if model["num_experts"]:
            # The first rows, which `--quick` tries, have what a GPU and a CPU run by default.
            factors.append([{"expert_kernel": name} for name in EXPERT_KERNELS if name != "auto"])
    else:
        factors.append(dropout)
    return factors


def _implementations(dropout: list[Row]) -> list[Row]:
    """Returns each implementation of attention with each level of dropout that it supports.

    Early rows have the first levels: those are every implementation once, which `--quick` tries.
    """
    levels = []
    for shift in range(len(dropout)):
        for number, name in enumerate(ATTENTION_IMPLS):
            level = dropout[(number + shift) % len(dropout)]
            if name != "splash" or not level["dropout"]:
                levels.append({"attention_impl": name, **level})
    return levels


def _adapters(case: VerifyCase) -> list[Row]:
    """Returns the adapters; between them nothing is adapted, as a layout has all gradients then."""
    levels = [{"adapter": adapters.NONE}]
    for name in [name for name in case.adapters if name != adapters.NONE]:
        levels += [{"adapter": adapters.NONE}, {"adapter": name}]
    return levels


def _bases(case: VerifyCase) -> list[Row]:
    """Returns every layout of all devices.

    It has the sizes of the axes, ZeRO stage, number of micro-batches, pipeline settings, and the
    methods of context and expert parallelism.
    """
    num_devices = jax.device_count()
    # Without experts the axis `expert` only shards the batch, as data does.
    axes = [axis for axis in AXES if axis != "expert" or case.raw["model"].get("num_experts")]
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    layouts = []
    for row in itertools.product(*[divisors] * len(axes)):
        if math.prod(row) != num_devices:
            continue
        sizes = dict(zip(axes, row, strict=True))
        # ZeRO stages differ only in what they shard over these axes.
        zero_stages = [3, 0, 1, 2] if any(sizes[axis] > 1 for axis in ZERO_AXES) else [3]
        combinations = itertools.product(
            zero_stages,
            NUM_MICROBATCHES,
            _pipelines(case, sizes),
            _context_methods(case, sizes),
            _expert_methods(case, sizes),
        )
        for zero_stage, num_microbatches, pipeline, context_method, expert_method in combinations:
            layout = {
                **sizes,
                "zero_stage": zero_stage,
                "num_microbatches": num_microbatches,
                **pipeline,
                "context_method": context_method,
                "expert_method": expert_method,
                SHORT_GROUP: num_microbatches % sizes["pipeline"] > 0,
            }
            if not _faults(case, layout):
                layouts.append(layout)
    return layouts


def _pipelines(case: VerifyCase, sizes: Mapping[str, int]) -> list[Row]:
    """Returns every supported combination of pipeline settings for these axis sizes."""
    num_stages = sizes["pipeline"]
    if num_stages == 1:
        return [{"schedule": None, "num_chunks": None, "keep": None}]
    if case.model.block is None:
        return []
    # With one layer in a chunk, the order of its layers could not be wrong.
    layers_per_chunk = 2 if case.is_shrunk else 1
    pipelines = []
    for schedule, keep in itertools.product(SCHEDULES, KEEP):
        for num_chunks in NUM_CHUNKS if schedule == "interleaved" else [1]:
            is_legal = not checks.layer_faults(case.num_layers, num_stages, num_chunks)
            if is_legal and case.num_layers >= layers_per_chunk * num_stages * num_chunks:
                pipelines.append({"schedule": schedule, "num_chunks": num_chunks, "keep": keep})
    return pipelines


def _context_methods(case: VerifyCase, sizes: Mapping[str, int]) -> list[str | None]:
    """Returns every supported method of context parallelism for these axis sizes."""
    context = sizes["context"]
    if context == 1:
        return [None]
    if not case.model.shards_sequences or checks.sequence_faults(case.cfg.data.options, context):
        return []
    methods: list[str | None] = [name for name in CONTEXT_METHODS if name != "auto"]
    if case.raw["model"]["num_heads"] % (context * sizes["tensor"]):
        methods.remove("ulysses")
    return methods


def _expert_methods(case: VerifyCase, sizes: Mapping[str, int]) -> list[str | None]:
    """Returns every method by which tokens reach the experts, for these axis sizes."""
    if sizes.get("expert", 1) == 1:
        return [None]
    with jax.set_mesh(make_mesh(**sizes)), sharding.use_rules(case.raw["rules"]):
        num_experts = case.raw["model"]["num_experts"]
        axes = expert.layout(case.global_batch, 2 * jax.device_count(), num_experts)
    if axes.num_gathered == 1:
        return [None]  # by these rules devices exchange no tokens
    return [name for name in EXPERT_METHODS if name != "auto"]


def _faults(case: VerifyCase, layout: Row) -> list[str]:
    """Returns why the trainer rejects a layout."""
    mesh = MeshConfig(**{axis: layout[axis] for axis in AXES if axis in layout})
    model = case.raw["model"]
    faults = checks.batch_faults(
        mesh, num_microbatches=layout["num_microbatches"], global_batch=case.global_batch
    )
    faults += checks.tensor_faults(model, mesh.tensor)
    faults += checks.expert_faults(model, mesh.expert)
    return faults
