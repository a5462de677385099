"""Evaluates a model on one epoch of its data: loss, perplexity and bits per byte.

Each sample counts once.
"""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import console
from meshtrain.cluster import distributed
from meshtrain.config import checks
from meshtrain.config.build import build_data
from meshtrain.config.schema import BATCH_AXES, Config
from meshtrain.data.loader import Loader, one_epoch
from meshtrain.data.source import Batch, Source, with_stride
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference.restore import restore_params
from meshtrain.models.base import Params
from meshtrain.program import Program


def run(
    cfg: Config,
    path: Path,
    *,
    split: str,
    global_batch: int | None,
    max_batches: int,
    stride: int | None,
) -> int:
    """Prints the evaluation of a run; returns the exit code.

    `path` is the workdir of the run, or one of its checkpoints. `split` is "heldout", "train" or
    "all"; a `global_batch` of None is train.global_batch, a `stride` of None eval.stride,
    `max_batches` 0 is no limit.
    """
    if global_batch is None:
        global_batch = cfg.train.global_batch
    num_shards = math.prod(getattr(cfg.mesh, axis) for axis in BATCH_AXES)
    faults = minimum_faults(1, {"--batch": global_batch})
    faults += minimum_faults(0, {"--max_batches": max_batches})
    faults += minimum_faults(1, {"--stride": 1 if stride is None else stride})
    if not faults and global_batch % (num_shards * cfg.train.num_microbatches):
        faults.append(
            f"--batch={global_batch}: is not a multiple of {checks.batch_sizes(cfg.mesh)} x "
            f"train.num_microbatches={cfg.train.num_microbatches}"
        )
    faults += checks.position_faults(cfg)
    if faults:
        raise ConfigError(*faults)
    source = _build_source(cfg, split, cfg.eval.stride if stride is None else stride)
    if jax.process_index() == 0:
        for warning in source.warnings:
            console.say(warning, stream="stderr")
    program, params = restore_params(cfg, path, tokenizer=source.identity.get("tokenizer", ""))
    evaluation = evaluate(
        program,
        params,
        source,
        global_batch=global_batch,
        max_batches=max_batches,
    )
    if jax.process_index() == 0:
        console.say(f"{'data':14}{source.description}", *evaluation.lines())
    return 0


def _build_source(cfg: Config, split: str, stride: int) -> Source:
    """Returns the data to evaluate; raises ConfigError if it is infinite.

    `stride` is that of `with_stride`.
    """
    section = cfg.data
    if split == "all":
        # The training split of data of which nothing is held out.
        split = "train"
        section = dataclasses.replace(section, options={**section.options, "heldout": 0.0})
    source = with_stride(build_data(section, split), stride)
    if source.size is None:
        raise ConfigError(
            f"data.build={section.build}: this data has no size, so it has no epochs; evaluate the "
            f"parts of a mixture one at a time: --config.data.mixture='()' "
            f"--config.data.phases='()' --config.data.path=PATH"
        )
    return source


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    loss: float  # nats per token, weighted mean
    tokens: float  # sum of the weights of all tokens
    num_bytes: float | None  # of text in these tokens; None: unknown

    def lines(self) -> list[str]:
        """Returns the lines to print."""
        bits = self.loss * self.tokens / math.log(2)
        values = {
            "tokens": f"{self.tokens:,.0f}",
            "loss": f"{self.loss:.6f} nats per token",
            "perplexity": f"{math.exp(min(self.loss, 700)):.4f}",
        }
        if self.num_bytes:
            values["bits per byte"] = (
                f"{bits / self.num_bytes:.6f} over {self.num_bytes:,.0f} bytes"
            )
        return [f"{name:14}{value}" for name, value in values.items()]


def evaluate(
    program: Program, params: Params, source: Source, *, global_batch: int, max_batches: int = 0
) -> Evaluation:
    """Evaluates the model on one epoch of `source`, or on `max_batches` batches (0: no limit)."""
    num_batches = -(-source.size // global_batch)
    if max_batches:
        num_batches = min(num_batches, max_batches)
    loader = Loader(
        one_epoch(source),
        program.mesh,
        program.rules,
        global_batch=global_batch,
        check=program.model.check_batch,
    )
    bytes_V = None if source.token_bytes is None else source.token_bytes.astype(np.float32)
    added_V = None if source.added_bytes is None else source.added_bytes()

    def measure(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the sums of nats, of weights and of text bytes."""
        metrics = program.eval_step(params, batch)
        nats = metrics.extra.get("cross_entropy", metrics.loss)  # the loss without z-loss
        num_bytes = jnp.float32(0) if bytes_V is None else _num_bytes(batch, bytes_V, added_V)
        return nats, metrics.weight, num_bytes

    sums = np.zeros(3)
    with contextlib.closing(loader), program.active():
        compiled = jax.jit(measure).lower(params, loader.peek()).compile()
        distributed.barrier("evaluation compiled")
        with console.progress("evaluating", num_batches) as advance:
            for _ in range(num_batches):
                # Sums in float64 on the host: float32 would lose small terms.
                sums += jax.device_get(compiled(params, next(loader)))
                advance()
    nats, weight, num_bytes = sums.tolist()
    if not weight:
        raise ConfigError("data: every token has weight 0; see data.separator and data.seq_len")
    return Evaluation(nats / weight, weight, None if bytes_V is None else num_bytes)


def _num_bytes(batch: Batch, bytes_V: np.ndarray, added_V: np.ndarray | None) -> jax.Array:
    """Returns the number of bytes of text in the targets that count."""
    bytes_BS = jnp.asarray(bytes_V)[batch.targets]
    if added_V is not None:
        bytes_BS -= jnp.asarray(added_V)[batch.tokens]
    return jnp.sum(bytes_BS * batch.weights)
