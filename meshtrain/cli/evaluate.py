"""Evaluates a trained or converted model: loss, perplexity and bits per byte, each sample
counted once.

  meshtrain evaluate --workdir=runs/quickstart
  meshtrain evaluate --workdir=runs/llama --split=all --config.data.path=prepared/text

It uses the data of the run; change it with --config.data.KEY=VALUE.
"""

import argparse

from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--split",
        choices=("heldout", "train", "all"),
        default="heldout",
        help="part of the data to evaluate; data.heldout sets its size (default: %(default)s)",
    )
    flags.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences per batch, over all devices (default: train.global_batch)",
    )
    flags.add_argument(
        "--max_batches", type=int, default=0, metavar="N", help="evaluate at most N batches; 0: all"
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the evaluation; returns the exit code."""
    # Here: `--help` needs no jax, which takes seconds to load.
    from meshtrain.inference import evaluate

    return evaluate.run(
        cfg,
        args.workdir,
        split=args.split,
        global_batch=args.batch,
        max_batches=args.max_batches,
    )


VERB = Verb(
    summary="measure loss and bits per byte",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="run",
)
