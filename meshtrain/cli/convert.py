"""Converts a Hugging Face folder to a workdir, or a run's newest checkpoint to such a folder.

  meshtrain convert HF_FOLDER WORKDIR    reads config.json and safetensors; writes a checkpoint of
                                         step 0
  meshtrain convert WORKDIR HF_FOLDER    WORKDIR, or one checkpoint: WORKDIR/checkpoints/STEP
  meshtrain convert WORKDIR FOLDER --adapter
                                         only the adapter of a run with adapter.rank, as PEFT
                                         stores it

Parameters are copied bit for bit unless --dtype changes them. TARGET must not exist; it appears
only when it is complete.
"""

import argparse
from pathlib import Path

from meshtrain.cli.verbs import Verb
from meshtrain.cluster import environment


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("source", type=Path, metavar="SOURCE", help="folder to convert")
    flags.add_argument("target", type=Path, metavar="TARGET", help="new folder")
    flags.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the parameters (default: unchanged)",
    )
    flags.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with adapter.rank, write only the adapter, in the layout of PEFT "
        "(default: merged weights)",
    )
    flags.add_argument(
        "--max_shard_gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="size limit of each file, in 10^9 bytes (default: 5); a larger tensor has its own",
    )
    flags.add_argument(
        "--config",
        default="configs/default.py",
        metavar="FILE",
        help="config of the new workdir, except its model section (default: %(default)s)",
    )
    environment.add_flags(flags)


def run(args: argparse.Namespace) -> int:
    """Converts a folder; returns the exit code."""
    from meshtrain.huggingface import convert

    return convert.run(args)


VERB = Verb(
    summary="convert from and to Hugging Face folders",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
