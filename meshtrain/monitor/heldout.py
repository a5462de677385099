"""The held-out loss during training."""

from collections.abc import Callable
from typing import Any

import jax

from meshtrain.cluster import distributed
from meshtrain.config.schema import Config
from meshtrain.data.loader import opened
from meshtrain.models.base import Params


def heldout_loss(
    eval_step: Callable, data: Any, cfg: Config, mesh: jax.sharding.Mesh
) -> Callable[[Params], float | None]:
    """Returns the function params -> loss on the first `eval.batches` held-out batches."""
    compiled: list[jax.stages.Compiled] = []

    def loss(params: Params) -> float | None:
        if data is None or not cfg.eval.batches:
            return None
        with opened(data, cfg, mesh, 0) as heldout:
            if not compiled:
                example = params, heldout.peek()
                compiled.append(jax.jit(eval_step).lower(*example).compile())
                distributed.barrier("evaluation compiled")
            (evaluate,) = compiled
            # One batch at a time: on CPU, processes confuse the messages of two programs in flight, and
            # hang.
            sums = [
                jax.device_get(evaluate(params, next(heldout))) for _ in range(cfg.eval.batches)
            ]
        means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
        return float(means.get("cross_entropy", means["loss"]))  # without the z-loss

    return loss
