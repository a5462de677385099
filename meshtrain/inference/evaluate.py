"""Measures a trained or converted model on data: loss, perplexity and bits per byte, each row counted once.

python -m meshtrain.inference.evaluate --workdir=runs/quickstart
python -m meshtrain.inference.evaluate --workdir=runs/llama --split=all --config.data.path=prepared/text

The tokens are those that `config.data` names; --config.KEY=VALUE changes it.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import checkpoint
from meshtrain.cluster import distributed
from meshtrain.config import checks
from meshtrain.config.build import build_data
from meshtrain.config.schema import Config
from meshtrain.data import tokenizer
from meshtrain.data.loader import Loader
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.huggingface import convert
from meshtrain.inference import restore
from meshtrain.models.base import Params
from meshtrain.program import Program


class Measured(NamedTuple):
    loss: float  # nats per token, by weight
    tokens: float  # their weights together
    num_bytes: float | None  # of text that they stand for; None: not known

    def lines(self) -> list[str]:
        bits = self.loss * self.tokens / math.log(2)
        told = {
            "tokens": f"{self.tokens:,.0f}",
            "loss": f"{self.loss:.6f} nats per token",
            "perplexity": f"{math.exp(min(self.loss, 700)):.4f}",
        }
        if self.num_bytes:
            told["bits per byte"] = f"{bits / self.num_bytes:.6f} over {self.num_bytes:,.0f} bytes"
        return [f"{name:14}{value}" for name, value in told.items()]


def evaluate(
    program: Program, params: Params, source: Source, *, global_batch: int, max_batches: int = 0
) -> Measured:
    """Returns what the model makes of every sample of an epoch of `source`, or of so many batches."""
    num_batches = -(-source.size // global_batch)
    num_batches = min(num_batches, max_batches or num_batches)
    loader = Loader(_once(source), program.mesh, program.rules, global_batch=global_batch)
    bytes_V = None if source.token_bytes is None else source.token_bytes.astype(np.float32)

    def measure(params: Params, batch: Batch):
        metrics = program.eval_step(params, batch)
        nats = metrics.extra.get("cross_entropy", metrics.loss)  # without the z-loss
        text = jnp.float32(0) if bytes_V is None else _bytes_of(batch, bytes_V)
        return nats, metrics.weight, text

    sums = np.zeros(3)
    with contextlib.closing(loader), program.active():
        compiled = jax.jit(measure).lower(params, loader.peek()).compile()
        distributed.barrier("evaluation compiled")
        for _ in range(num_batches):
            sums += jax.device_get(compiled(params, next(loader)))
    nats, weight, num_bytes = sums.tolist()
    if not weight:
        raise ConfigError("data: no token of it counts; see data.separator and data.seq_len")
    return Measured(nats / weight, weight, None if bytes_V is None else num_bytes)


def _bytes_of(batch: Batch, bytes_V: np.ndarray) -> jax.Array:
    return jnp.sum(jnp.asarray(bytes_V)[batch.targets] * batch.weights)


def _once(source: Source) -> Source:
    """Returns a source whose samples past the first epoch count nothing, to fill the last batch up."""

    def read(indices: np.ndarray) -> Batch:
        batch = source.read(np.minimum(indices, source.size - 1))
        return batch._replace(weights=batch.weights * (indices < source.size)[:, None])

    return dataclasses.replace(source, read=read)


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--split",
        choices=("heldout", "train", "all"),
        default="heldout",
        help="of the data, by data.heldout (default: %(default)s)",
    )
    flags.add_argument("--batch", type=int, metavar="N", help="sequences at a time, on all devices")
    flags.add_argument("--max_batches", type=int, default=0, metavar="N", help="0: all of the data")


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Returns the exit code."""
    step = cfg.mesh.data * cfg.mesh.fsdp * cfg.train.num_microbatches
    global_batch = cfg.train.global_batch if args.batch is None else args.batch
    faults = minimum_faults(1, {"--batch": global_batch}) + minimum_faults(
        0, {"--max_batches": args.max_batches}
    )
    if not faults and global_batch % step:
        faults.append(
            f"--batch={global_batch}: is no multiple of mesh.data={cfg.mesh.data} x mesh.fsdp={cfg.mesh.fsdp} x "
            f"train.num_microbatches={cfg.train.num_microbatches}"
        )
    faults += checks.position_faults(cfg)
    if faults:
        raise ConfigError(*faults)
    source = _source(cfg, args.split)
    if jax.process_index() == 0 and _other_tokenizer(cfg, checkpoint.workdir_of(args.workdir)):
        told = "was prepared with another tokenizer than the model's: its numbers say nothing"
        print(f"data.path={cfg.data.options['path']}: {told}", file=sys.stderr)
    program, params = restore.restore(cfg, args.workdir)
    sizes = dict(global_batch=global_batch, max_batches=args.max_batches)
    measured = evaluate(program, params, source, **sizes)
    if jax.process_index() == 0:
        print(f"{'data':14}{source.description}", *measured.lines(), sep="\n")
    return 0


def _other_tokenizer(cfg: Config, workdir: Path) -> bool:
    """Whether the data's tokenizer is known not to be that of the model, or of the data that it learned from."""
    raw = json.loads((workdir / "config.json").read_text())
    digests = map(tokenizer.digest_of, convert.companions_of(workdir, raw))
    own = next(filter(None, digests), "")
    new = tokenizer.digest_of(Path(cfg.data.options.get("path") or workdir))
    return bool(own and new) and own != new


def _source(cfg: Config, split: str) -> Source:
    """Returns what is to be evaluated; raises ConfigError for data without an end."""
    section = cfg.data
    if split == "all":
        options, split = {**section.options, "heldout": 0.0}, "train"
        section = dataclasses.replace(section, options=options)
    source = build_data(section, split)
    if source.size is None:
        raise ConfigError(
            f"data.build={section.build}: this data says no size, so it has no end; of a mixture evaluate one "
            f"after the other: --config.data.mixture='()' --config.data.path=PATH"
        )
    return source
