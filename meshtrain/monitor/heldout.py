"""The held-out loss during training."""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from meshtrain.cluster import distributed
from meshtrain.config.schema import Config
from meshtrain.data.loader import open_loader
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.state import TrainState, evaluation_params


def fixed_batches(data: Any, cfg: Config, *, check: Callable[[Any], None] | None = None) -> Any:
    """Returns `data` if it is a Source, else a list of its first `eval.batches` batches.

    Each evaluation uses the same batches, also those of an iterator, which can be read only once.
    `check` is `Model.check_batch`.
    """
    if isinstance(data, Source) or not cfg.eval.batches:
        return data
    batches = list(itertools.islice(data, cfg.eval.batches))
    if not batches:
        raise ConfigError(
            "eval_data: it yields no batch; an iterator can be used only once: give a list, or a "
            "new "
            "iterator"
        )
    if check is not None:
        for batch in batches:
            check(batch)
    return batches


def make_heldout_loss(
    eval_step: Callable,
    data: Any,
    cfg: Config,
    mesh: jax.sharding.Mesh,
    *,
    check: Callable[[Any], None] | None = None,
) -> Callable[[TrainState], float | None]:
    """Returns the function state -> loss on the first `eval.batches` held-out batches.

    `check` is `Model.check_batch`.
    """
    evaluate: jax.stages.Compiled | None = None
    num_batches = cfg.eval.batches
    if isinstance(data, list):  # an iterable may have fewer: none counts twice
        num_batches = min(num_batches, len(data))

    def loss(state: TrainState) -> float | None:
        nonlocal evaluate
        if data is None or not cfg.eval.batches:
            return None
        params = evaluation_params(state)
        with open_loader(data, cfg, mesh, 0, check=check) as heldout:
            if evaluate is None:
                evaluate = jax.jit(eval_step).lower(params, heldout.peek()).compile()
                distributed.barrier("evaluation compiled")
            # One batch at a time: on CPU, processes confuse the messages of two programs in flight,
            # and hang.
            sums = []
            for _ in range(num_batches):
                sums.append(jax.device_get(evaluate(params, next(heldout))))
        means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
        return float(means.get("cross_entropy", means["loss"]))  # without the z-loss

    return loss
