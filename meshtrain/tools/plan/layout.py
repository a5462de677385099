"""A layout: a mesh and the settings of the step that the planner chooses; its config keys."""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtrain.config import schema
from meshtrain.config.schema import AXES, Config, SyncConfig
from meshtrain.schedules import SCHEDULES, Table

REMATS = ("none", "dots", "full")


@dataclass(frozen=True)
class Layout:
    """A mesh and the settings of the step. `rows` of each micro-batch go to each batch shard."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    zero_stage: int = 3
    rows: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    keep: str = "residuals"
    remat: str = "none"
    sync: SyncConfig = SyncConfig()
    loss_chunk_mib: float = 0.0  # of logits that a device computes together; 0: all

    def sizes(self) -> dict[str, int]:
        """Returns the mesh: the size of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return self.pipeline * self.batch_shards * self.context * self.tensor

    @property
    def table(self) -> Table:
        """The schedule of the pipeline."""
        return _table(self.schedule, self.pipeline, self.num_microbatches, self.num_chunks)

    @property
    def idle_turns(self) -> float:
        """How long a stage waits for others, in passes of a micro-batch forward and backward.

        A backward pass takes twice as long as a forward pass; the ratio matters little.
        """
        return self.table.cost(1 / 3, 2 / 3) - self.num_microbatches

    @property
    def batch_shards(self) -> int:
        return self.data * self.fsdp * self.expert

    @property
    def zero_shards(self) -> int:
        """The number of devices over which ZeRO shards: `sharding.ZERO_AXES`."""
        return self.fsdp * self.context

    @property
    def zero_stride(self) -> int:
        return self.stride("context" if self.context > 1 else "fsdp")

    @property
    def members(self) -> tuple[int, int]:
        """The number of devices with partial sums of one gradient, and their distance.

        `sync` adds these sums.
        """
        if self.zero_stage >= 2:
            return self.data, self.stride("data")
        return self.data * self.fsdp, self.stride("fsdp")

    def logits_bytes(self, vocab_size: int, seq_len: int) -> float:
        """Returns the bytes of a micro-batch's float32 logits on a device, which stages share."""
        tokens = self.rows * seq_len / self.context / self.pipeline
        return 4 * tokens * vocab_size / self.tensor

    def stride(self, axis: str) -> int:
        """Returns the distance of neighbours along an axis, in devices.

        It is the product of the sizes of all later axes.
        """
        return math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])


@functools.cache
def _table(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Table:
    return SCHEDULES[schedule](num_stages, num_microbatches, num_chunks)


class StateBytes(NamedTuple):
    """Bytes of the state and of the gradients on each device of a layout."""

    params: int
    opt_state: int
    gradients: int


def name_of(layout: Layout) -> str:
    """Returns a layout in one line: 'fsdp 4 x tensor 2 · zero 3 · 2 x 1 rows · remat full'."""
    p = layout
    mesh = " x ".join(f"{axis} {size}" for axis, size in p.sizes().items() if size > 1)
    words = [mesh or "one device", f"zero {p.zero_stage}", f"{p.num_microbatches} x {p.rows} rows"]
    if p.pipeline > 1:
        chunks = f" of {p.num_chunks} chunks" if p.num_chunks > 1 else ""
        words.append(f"{p.schedule}{chunks}, {p.keep} kept")
    words.append(f"remat {p.remat}")
    if p.members[0] > 1 and schema.changed_sync_key(p.sync):
        words.append(f"gradients in {p.sync.dtype}, {p.sync.pattern}")
    return " · ".join(words)


def overrides(layout: Layout) -> dict[str, Any]:
    """Returns the keys of the config that make this layout."""
    keys = {f"mesh.{axis}": size for axis, size in layout.sizes().items()}
    keys["train.zero_stage"] = layout.zero_stage
    keys["train.remat"] = layout.remat
    keys["train.num_microbatches"] = layout.num_microbatches
    if layout.pipeline > 1:
        keys["pipeline.schedule"] = layout.schedule
        keys["pipeline.num_chunks"] = layout.num_chunks
        keys["pipeline.keep"] = layout.keep
    if layout.members[0] > 1:
        keys["sync.dtype"] = layout.sync.dtype
        keys["sync.pattern"] = layout.sync.pattern
    if layout.loss_chunk_mib:
        keys["model.loss_chunk_mib"] = layout.loss_chunk_mib
    return keys


def with_layout(cfg: Config, layout: Layout) -> Config:
    """Returns the config with this layout, which is no longer the planner's to choose.

    Raises ConfigError if a section rejects it.
    """
    return cfg.with_keys({**overrides(layout), "mesh.auto": False})
