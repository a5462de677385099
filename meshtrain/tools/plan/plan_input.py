"""What the planner knows of a config: the model's work, and the state that a step stores."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshtrain import state as states
from meshtrain.config.schema import Config
from meshtrain.models.base import Model, trained_part
from meshtrain.parallel import sharding
from meshtrain.state import TrainState
from meshtrain.tools.plan.layout import Layout, StateBytes
from meshtrain.tools.plan.sizes import ModelWork


@dataclass(frozen=True, eq=False)
class StoredState:
    """The state that the step stores whatever the layout: shapes, dims, and what shards them."""

    shapes: TrainState
    axes: Any  # names of the dims of each parameter
    optimizer: Any
    rules: sharding.Rules
    is_trained: Callable[[str], bool] | None = None  # see `Model.is_trained`
    offload: bool = False  # config key optim.offload

    def bytes(self, layout: Layout) -> StateBytes:
        """Returns the bytes of a layout, exactly: those of the trainer's own shardings."""
        return self._bytes(tuple(layout.sizes().items()), layout.zero_stage)

    # Layouts that differ in micro-batches, remat or schedule share the answer.
    @functools.lru_cache(None)  # noqa: B019, as long-lived as the plan
    def _bytes(self, sizes: tuple[tuple[str, int], ...], zero_stage: int) -> StateBytes:
        names, numbers = zip(*sizes, strict=True)
        mesh = jax.sharding.AbstractMesh(numbers, names)
        state_shardings, grad_shardings = states.state_shardings(
            self.shapes,
            self.axes,
            self.optimizer,
            self.rules,
            mesh,
            zero_stage=zero_stage,
            is_trained=self.is_trained,
            offload=self.offload,
        )
        grad_shapes = trained_part(self.shapes.params, self.is_trained)
        return StateBytes(
            params=_bytes_per_device(self.shapes.params, state_shardings.params),
            opt_state=_bytes_per_device(self.shapes.opt_state, state_shardings.opt_state),
            gradients=_bytes_per_device(grad_shapes, grad_shardings),
        )


def _bytes_per_device(shapes: Any, shardings: Any) -> int:
    return states.bytes_per_device(states.with_shardings(shapes, shardings))


@dataclass(frozen=True, eq=False)
class PlanInput:
    """A config without its mesh, and what follows from it for every layout."""

    cfg: Config
    model: Model
    work: ModelWork
    stored: StoredState
    seq_len: int  # tokens of a row of the batch

    @property
    def global_batch(self) -> int:
        return self.cfg.train.global_batch

    @property
    def loss_chunk_mib(self) -> float | None:
        """The size of the loss chunks; None if the model has no such key."""
        return self.cfg.model.options.get("loss_chunk_mib")
