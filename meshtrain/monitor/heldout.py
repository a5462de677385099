"""The held-out loss during training."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshtrain.cluster import distributed
from meshtrain.config.schema import Config
from meshtrain.data.loader import ADD_WEIGHTS, has_weights, leading_dim, one_epoch, open_loader
from meshtrain.data.source import Source, with_stride
from meshtrain.errors import ConfigError
from meshtrain.state import TrainState, evaluation_params


def fixed_batches(data: Any, cfg: Config, *, check: Callable[[Any], None] | None = None) -> Any:
    """Returns the held-out data, of which each evaluation uses the same first batches.

    They are those of a Source, in which no sample counts twice, or else a list of the first
    `eval.batches` batches: an iterator can be read only once. `check` is `Model.check_batch`.
    """
    if data is None or not cfg.eval.batches:
        return None
    if isinstance(data, Source):
        return _counted_once(with_stride(data, cfg.eval.stride), cfg.train.global_batch)
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
    return _without_short_batch(batches, cfg)


def _without_short_batch(batches: list[Any], cfg: Config) -> list[Any]:
    """Returns the batches without a short last one, unless it has weights and can be padded.

    Raises ConfigError if there is no other, or if processes have different numbers of batches.
    """
    size = cfg.train.global_batch
    if per_process := cfg.data.options.get("per_process", False):
        size //= distributed.num_processes()
    is_short = 0 < leading_dim(batches[-1]) < size
    if is_short and not has_weights(batches[-1]):
        batches = batches[:-1]
    counts = distributed.gather(len(batches)) if per_process else [len(batches)]
    if not all(counts):
        raise ConfigError(
            f"eval_data: its only batch has fewer rows than train.global_batch="
            f"{cfg.train.global_batch}; give more rows, or {ADD_WEIGHTS}"
        )
    if len(set(counts)) > 1:
        # All processes take part in the evaluation of each batch.
        raise ConfigError(
            f"eval_data: the processes have {', '.join(map(str, counts))} batches; give each the "
            f"same number"
        )
    return batches


def _counted_once(source: Source, global_batch: int) -> Source:
    """Returns the source with the last batch of its only epoch filled by samples of weight 0.

    Without weights that batch is left out. Raises ConfigError if there is no other.
    """
    size = source.size
    if not size or size % global_batch == 0:
        return source
    if has_weights(source.read(np.arange(1))):
        return one_epoch(source)
    if size < global_batch:
        raise ConfigError(
            f"eval: the held-out data has {size} samples, and train.global_batch={global_batch}; "
            f"hold out more, set eval.batches=0, or {ADD_WEIGHTS}"
        )
    return dataclasses.replace(source, size=size - size % global_batch)


def make_heldout_metrics(
    eval_step: Callable,
    data: Any,
    cfg: Config,
    mesh: jax.sharding.Mesh,
    *,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], bool] = lambda: False,
    check: Callable[[Any], None] | None = None,
) -> Callable[[TrainState], dict[str, float | None] | None] | None:
    """Returns the function state -> metrics of the first `eval.batches` held-out batches.

    None without held-out data. A metric is None, and a line is logged, if these batches have no
    weight. The function returns None instead of metrics if the run is asked to stop before its last
    batch. `check` is `Model.check_batch`.
    """
    if data is None:
        return None
    sum_batch: jax.stages.Compiled | None = None
    num_batches = cfg.eval.batches
    # There may be fewer: none counts twice.
    if isinstance(data, list):
        num_batches = min(num_batches, len(data))
    elif data.size:
        num_batches = min(num_batches, math.ceil(data.size / cfg.train.global_batch))

    def evaluate(state: TrainState) -> dict[str, float | None] | None:
        nonlocal sum_batch
        params = evaluation_params(state)
        opened = open_loader(data, cfg, mesh, 0, check=check, num_batches=num_batches)
        with opened as heldout:
            if sum_batch is None:
                sum_batch = jax.jit(eval_step).lower(params, heldout.peek()).compile()
                distributed.barrier("evaluation compiled")
            # One batch at a time: on CPU, processes confuse the messages of two programs in flight,
            # and hang.
            sums = []
            for _ in range(num_batches):
                # A long evaluation would leave no time for the save. Process 0 decides for all.
                if sums and distributed.broadcast(stop_requested()):
                    return None
                sums.append(jax.device_get(sum_batch(params, next(heldout))))
        if not sum(batch_sums.weight for batch_sums in sums):
            log("held-out data: every token or example has weight 0, so there is no held-out loss")
            return {"eval_loss": None}
        means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
        return {"eval_loss": float(means.get("cross_entropy", means["loss"]))}  # without z-loss

    return evaluate
