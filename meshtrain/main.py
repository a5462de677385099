"""Trains a model.

  python -m meshtrain.main --config=configs/quickstart.py --workdir=runs/quickstart

Every key of configs/default.py can be set: --config.train.steps=1000 --config.mesh.fsdp=4 ...
A run whose workdir holds a checkpoint goes on from it.
"""

import argparse
import logging
import signal
import sys

import jax

from meshtrain import configfile, distributed
from meshtrain.config import parse
from meshtrain.errors import ConfigError
from meshtrain.train import train

EXIT_USER = 2  # the configuration or the data is wrong
EXIT_PREEMPTED = 75  # stopped from outside, state saved
EXIT_NOT_FINITE = 17


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="meshtrain train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="a Python file with get_config()"
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="where metrics and checkpoints go; without it nothing is saved",
    )
    parser.add_argument(
        "--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices"
    )
    parser.add_argument("--config.KEY", metavar="VALUE", dest="_", help="set a key of the config")
    args, overrides = parser.parse_known_args(argv)
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        if args.simulate_devices is not None:
            if args.simulate_devices < 1:
                raise ConfigError(f"--simulate_devices={args.simulate_devices}: use 1 or more")
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", args.simulate_devices)
            # A CPU program of several devices hangs in its collectives when read back from the cache.
            jax.config.update("jax_enable_compilation_cache", False)
        settings, faults = configfile.read(args.config, overrides)
        distributed.initialize()
        if faults:
            raise ConfigError(*faults, *_faults_of(settings))
        result = train(settings, workdir=args.workdir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USER
    except FloatingPointError as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_FINITE
    except KeyboardInterrupt:
        print("aborted: what was not saved by then is lost", file=sys.stderr)
        return 128 + signal.SIGINT
    return EXIT_PREEMPTED if result.interrupted else 0


def _faults_of(settings) -> tuple[str, ...]:
    """What else is wrong, so that all is told at once."""
    try:
        parse(settings, num_devices=jax.device_count())
        return ()
    except ConfigError as error:
        return error.faults


if __name__ == "__main__":
    sys.exit(main())
