"""Evaluates a model on one epoch of its data: loss, perplexity and bits per byte, each sample counted once."""

import argparse
import contextlib
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import console
from meshtrain.cluster import distributed
from meshtrain.config import checks
from meshtrain.config.build import build_data
from meshtrain.config.checks import BATCH_AXES
from meshtrain.config.schema import Config
from meshtrain.data.loader import Loader
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference import generate
from meshtrain.models.base import Params
from meshtrain.program import Program


class Evaluation(NamedTuple):
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
    num_batches = min(num_batches, max_batches or num_batches)
    loader = Loader(_one_epoch(source), program.mesh, program.rules, global_batch=global_batch)
    bytes_V = None if source.token_bytes is None else source.token_bytes.astype(np.float32)

    def measure(params: Params, batch: Batch):
        metrics = program.eval_step(params, batch)
        nats = metrics.extra.get("cross_entropy", metrics.loss)  # the loss without z-loss
        num_bytes = jnp.float32(0) if bytes_V is None else _num_bytes(batch, bytes_V)
        return nats, metrics.weight, num_bytes

    sums = np.zeros(3)
    with contextlib.closing(loader), program.active():
        compiled = jax.jit(measure).lower(params, loader.peek()).compile()
        distributed.barrier("evaluation compiled")
        with console.progress("evaluating", num_batches) as advance:
            for _ in range(num_batches):
                sums += jax.device_get(compiled(params, next(loader)))
                advance()
    nats, weight, num_bytes = sums.tolist()
    if not weight:
        raise ConfigError("data: every token has weight 0; see data.separator and data.seq_len")
    return Evaluation(nats / weight, weight, None if bytes_V is None else num_bytes)


def _num_bytes(batch: Batch, bytes_V: np.ndarray) -> jax.Array:
    return jnp.sum(jnp.asarray(bytes_V)[batch.targets] * batch.weights)


def _one_epoch(source: Source) -> Source:
    """Returns a source whose samples after the first epoch have weight 0; they fill the last batch."""

    def read(indices: np.ndarray) -> Batch:
        batch = source.read(np.minimum(indices, source.size - 1))
        return batch._replace(weights=batch.weights * (indices < source.size)[:, None])

    return dataclasses.replace(source, read=read)


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the evaluation of a run; returns the exit code."""
    divisor = math.prod(getattr(cfg.mesh, axis) for axis in BATCH_AXES) * cfg.train.num_microbatches
    global_batch = cfg.train.global_batch if args.batch is None else args.batch
    faults = minimum_faults(1, {"--batch": global_batch}) + minimum_faults(
        0, {"--max_batches": args.max_batches}
    )
    if not faults and global_batch % divisor:
        faults.append(
            f"--batch={global_batch}: is not a multiple of {checks.batch_sizes(cfg.mesh)} x "
            f"train.num_microbatches={cfg.train.num_microbatches}"
        )
    faults += checks.position_faults(cfg)
    if faults:
        raise ConfigError(*faults)
    source = _source(cfg, args.split)
    used = source.identity.get("tokenizer", "")
    program, params = generate.restore_params(cfg, args.workdir, tokenizer=used)
    sizes = dict(global_batch=global_batch, max_batches=args.max_batches)
    evaluation = evaluate(program, params, source, **sizes)
    if jax.process_index() == 0:
        print(f"{'data':14}{source.description}", *evaluation.lines(), sep="\n")
    return 0


def _source(cfg: Config, split: str) -> Source:
    """Returns the data to evaluate; raises ConfigError if it is infinite."""
    section = cfg.data
    if split == "all":
        options, split = {**section.options, "heldout": 0.0}, "train"
        section = dataclasses.replace(section, options=options)
    source = build_data(section, split)
    if source.size is None:
        raise ConfigError(
            f"data.build={section.build}: this data has no size, so it has no epochs; evaluate the parts of "
            f"a mixture one at a time: --config.data.mixture='()' --config.data.path=PATH"
        )
    return source
