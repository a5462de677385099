"""Trains a model.

  python -m meshtrain.main --config=configs/quickstart.py --workdir=runs/quickstart

Every key of configs/default.py can be set: --config.train.steps=1000 --config.mesh.fsdp=4 ...
A run whose workdir holds a checkpoint goes on from it.
"""

import argparse
import sys
from typing import Any

from meshtrain import cli
from meshtrain.cluster import signals
from meshtrain.errors import EXIT_FAILED, EXIT_NOT_FINITE, EXIT_PREEMPTED, ConfigError
from meshtrain.monitor.health import CorruptState
from meshtrain.train import train


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    flags = cli.parser("train", __doc__)
    flags.add_argument(
        "--workdir",
        metavar="DIR",
        help="where metrics and checkpoints go; without it nothing is saved",
    )
    flags.add_argument(
        "--from_scratch",
        action="store_true",
        help="start anew where the workdir has checkpoints and none is good, instead of stopping",
    )

    flags.add_argument(
        "--elastic",
        action="store_true",
        help="mesh.data takes all devices that the other axes leave, whatever the config says",
    )

    def follow(args: argparse.Namespace, config: Any) -> None:
        if args.elastic and -1 not in config.mesh.to_dict().values():
            config.mesh.data = -1

    def run() -> int:
        args, config = cli.settings(flags, argv, follow)
        if args.workdir == "":
            raise ConfigError(
                "--workdir=: is empty; name a folder, or leave it out to save nothing"
            )
        try:
            result = train(config, workdir=args.workdir, from_scratch=args.from_scratch)
        except (FloatingPointError, CorruptState) as error:
            print(error, file=sys.stderr)
            return EXIT_NOT_FINITE if isinstance(error, FloatingPointError) else EXIT_FAILED
        return EXIT_PREEMPTED if result.interrupted else 0

    with signals.watched():
        return cli.told(run)


if __name__ == "__main__":
    sys.exit(main())
