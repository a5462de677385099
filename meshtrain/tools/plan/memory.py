"""Bytes that a step needs on each device, in closed form. The state is exact: it is that of the shardings."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshtrain import state as states
from meshtrain.config import schema
from meshtrain.models.base import trained_part
from meshtrain.ops.losses import MIB
from meshtrain.parallel import sharding
from meshtrain.state import TrainState
from meshtrain.tools.plan.layout import Layout
from meshtrain.tools.plan.sizes import BYTES, ModelWork


@dataclass(frozen=True)
class StoredState:
    """What the step stores whatever the layout: the abstract state, the names of its dims, and how it is placed."""

    shapes: TrainState
    axes: Any
    optimizer: Any
    rules: sharding.Rules
    is_trained: Callable[[str], bool] | None = None  # see `Model.is_trained`

    def bytes(self, layout: Layout) -> tuple[int, int, int]:
        """Returns the bytes of parameters, optimizer state and gradients on a device."""
        return self._bytes(tuple(layout.sizes().items()), layout.zero_stage)

    @functools.lru_cache(None)  # noqa: B019, as long-lived as the plan
    def _bytes(self, sizes: tuple[tuple[str, int], ...], zero_stage: int) -> tuple[int, int, int]:
        names, numbers = zip(*sizes, strict=True)
        mesh = jax.sharding.AbstractMesh(numbers, names)
        placed, gradients = states.state_shardings(
            self.shapes,
            self.axes,
            self.optimizer,
            self.rules,
            mesh,
            zero_stage=zero_stage,
            is_trained=self.is_trained,
        )
        pairs = (
            (self.shapes.params, placed.params),
            (self.shapes.opt_state, placed.opt_state),
            (trained_part(self.shapes.params, self.is_trained), gradients),
        )
        return tuple(_bytes_per_device(*pair) for pair in pairs)

    __hash__ = object.__hash__


def _bytes_per_device(shapes: Any, shardings: Any) -> int:
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(leaf.dtype.itemsize * math.prod(one.shard_shape(leaf.shape)) for leaf, one in leaves)


def parts(work: ModelWork, layout: Layout, stored: StoredState, seq_len: int) -> dict[str, float]:
    """Returns the predicted bytes at the peak, by what they hold."""
    w, p = work, layout
    params, opt_state, gradients = stored.bytes(p)
    tokens = p.rows * seq_len / p.context
    wide, other = w.kept_bytes(p.remat)
    # The residual stream is sharded over `tensor` by the rule residual_seq alone; counted as if it was not.
    layer = tokens * (wide + other / p.tensor)
    residual = tokens * BYTES * w.d_model
    all_wide, all_other = w.kept_bytes("none")
    one_layer = tokens * (all_wide + all_other / p.tensor)
    per_stage = w.num_layers / p.pipeline
    if p.pipeline == 1:
        kept = per_stage * layer
        again = one_layer if p.remat != "none" else 0.0
    else:
        chunk = per_stage / p.num_chunks
        kept = p.table.num_slots * (residual if p.keep == "inputs" else chunk * layer)
        # Compiled programs hold what the backward pass of a chunk recomputes twice.
        again = (2 * chunk * layer if p.keep == "inputs" else 0.0) + one_layer
    gathered = 0.0
    if p.zero_stage == 3 and p.zero_shards > 1:
        # A layer, the next one, and float32 gradients; the output head and its gradients.
        gathered = w.layer / p.tensor / p.expert * (2 * BYTES + 4)
        gathered += w.vocab_size * w.d_model / p.tensor * (BYTES + 4)
    logits = p.logits_bytes(w.vocab_size, seq_len)
    if p.loss_chunk_mib:
        logits = min(logits, p.loss_chunk_mib * MIB)
    has_residual = p.members[0] > 1 and schema.has_sync_feedback(p.sync)
    return {
        "parameters": params,
        "optimizer state": opt_state,
        "gradients": gradients,
        # Of compressed gradients, what the last step lost: as large as the gradients.
        "residual": gradients if has_residual else 0,
        "activations": kept,
        "temporaries": again + gathered + logits,
    }
