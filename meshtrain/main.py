"""Trains a model.

  python -m meshtrain.main --config=configs/quickstart.py --workdir=runs/quickstart

Every key of configs/default.py can be set: --config.train.steps=1000 --config.mesh.fsdp=4 ...
A run whose workdir holds a checkpoint goes on from it.
"""

import signal
import sys

from meshtrain import cli
from meshtrain.errors import ConfigError
from meshtrain.train import train

EXIT_PREEMPTED = 75  # stopped from outside, state saved
EXIT_NOT_FINITE = 17


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

    def run() -> int:
        args, config = cli.settings(flags, argv)
        if args.workdir == "":
            raise ConfigError(
                "--workdir=: is empty; name a folder, or leave it out to save nothing"
            )
        result = train(config, workdir=args.workdir, from_scratch=args.from_scratch)
        return EXIT_PREEMPTED if result.interrupted else 0

    try:
        return cli.told(run)
    except FloatingPointError as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_FINITE
    except KeyboardInterrupt:
        print("aborted: what was not saved by then is lost", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
