"""Lists the layouts that `verify` chooses from; new axes and schedules are included automatically."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import jax

from meshtrain.config import checks
from meshtrain.config.schema import AXES, KEEP, MeshConfig
from meshtrain.parallel.pipeline.schedules import SCHEDULES
from meshtrain.verify.covering import Row
from meshtrain.verify.subject import Subject


def possible(subject: Subject, without: Iterable[str] = ()) -> Iterator[Row]:
    """Yields every layout of all devices, with every combination of the other settings of a step.

    These are remat, packing, token weights, sequence-sharded residuals and the loss scale.
    """
    num_devices = jax.device_count()
    axes = [axis for axis in AXES if axis not in checks.UNSUPPORTED_AXES]
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]

    def levels(supported: bool, name: str = "") -> list[bool]:
        return [True, False] if supported and name not in without else [False]

    variants = {
        "remat": ["none", "full", "dots", "names:attention,mlp"],
        "packing": levels(subject.rows is not None, "packing"),
        "masks": levels(subject.is_text, "masks"),
        "sequence_parallel": levels(
            any(name == "residual_seq" for name, _ in subject.raw["rules"])
        ),
        "loss_scale": levels(True),
    }
    variants = [
        dict(zip(variants, row, strict=True)) for row in itertools.product(*variants.values())
    ]
    for row in itertools.product(*[divisors] * len(axes)):
        sizes = dict(zip(axes, row, strict=True))
        if math.prod(row) != num_devices:
            continue
        # ZeRO stages differ only in what they shard over fsdp.
        for zero_stage in [3, 0, 1, 2] if sizes["fsdp"] > 1 else [3]:
            for num, pipeline in itertools.product([1, 2, 4, 8], _pipelines(subject, sizes)):
                layout = {**sizes, "zero_stage": zero_stage, "num_microbatches": num, **pipeline}
                if not _faults(subject, layout):
                    yield from ({**layout, **variant} for variant in variants)


def _pipelines(subject: Subject, sizes: Mapping[str, int]) -> list[Row]:
    """Returns every supported combination of pipeline settings for these axis sizes."""
    keys = ("schedule", "num_chunks", "keep")
    if sizes["pipeline"] == 1:
        return [dict.fromkeys(keys)]
    if subject.model.block is None:
        return []
    num_layers = len(jax.tree.leaves(subject.start.params["layers"])[0])
    return [
        dict(zip(keys, (schedule, chunks, keep), strict=True))
        for schedule, keep in itertools.product(SCHEDULES, KEEP)
        for chunks in ([2] if schedule == "interleaved" else [1])
        if not checks.layer_faults(num_layers, sizes["pipeline"], chunks)
    ]


def _faults(subject: Subject, layout: Row) -> list[str]:
    mesh = MeshConfig(**{axis: layout[axis] for axis in AXES if axis in layout})
    sizes = {"num_microbatches": layout["num_microbatches"], "global_batch": subject.global_batch}
    return checks.batch_faults(mesh, **sizes) + checks.tensor_faults(
        subject.raw["model"], mesh.tensor
    )
