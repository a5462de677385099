"""Trains a model.

  meshtrain train --config=configs/quickstart.py --workdir=runs/quickstart

Every key of configs/default.py can be set: --config.train.steps=1000 --config.mesh.fsdp=4 ...
If the workdir has a checkpoint, the run resumes from it.

`meshtrain help` lists the other verbs; flags without a verb are those of train.
"""

import argparse
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import EXIT_FAILED, EXIT_NOT_FINITE, ConfigError


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--workdir",
        metavar="DIR",
        help="folder for metrics and checkpoints, or s3://BUCKET/RUN or gs://BUCKET/RUN; without "
        "it nothing is saved",
    )
    flags.add_argument(
        "--from_scratch",
        action="store_true",
        help="if all checkpoints in the workdir are corrupt, quarantine them and start from step 0",
    )
    flags.add_argument(
        "--elastic",
        action="store_true",
        help="set mesh.data to -1, all remaining devices, unless another axis is -1 already",
    )

    flags.add_argument(
        "--quiet",
        action="store_true",
        help="print only warnings, faults and the last line; files of the run have everything",
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Checks --workdir and applies --elastic to the config, before the config is parsed."""
    if args.workdir == "":
        raise ConfigError("--workdir=: is empty; name a folder, or omit the flag to save nothing")
    if args.elastic and -1 not in config.mesh.to_dict().values():
        config.mesh.data = -1


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Trains and returns the exit code."""
    from meshtrain.monitor.health import CorruptState
    from meshtrain.train import train

    try:
        with console.quiet(args.quiet):
            result = train(
                cfg,
                workdir=args.workdir,
                from_scratch=args.from_scratch,
                trust_code=args.trust_code,
            )
    except FloatingPointError as error:
        console.say(str(error), stream="stderr")
        return EXIT_NOT_FINITE
    except CorruptState as error:
        console.say(str(error), stream="stderr")
        return EXIT_FAILED
    return result.exit_code


VERB = Verb(
    summary="train a model, or resume a run",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    reads_data=True,
    prepare=prepare,
)
