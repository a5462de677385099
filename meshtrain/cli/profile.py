"""Traces some train steps of a config and prints where the time goes.

  meshtrain profile --config=configs/quickstart.py --steps=3..5

It runs the train step on the config's data up to the last traced step, and saves only the trace,
for xprof, TensorBoard or Perfetto. It prints for each device the share of time in which it is busy,
in which it runs collectives, and in which collectives are exposed (nothing else runs). Then it
prints the costliest operations, grouped by kind, pass and source line; their time excludes nested
operations. With several processes, each writes its trace to DIR/rank-N, and process 0 prints its
own devices.
"""

import argparse
import re
from pathlib import Path

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError, minimum_faults


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--steps",
        default="3..5",
        metavar="FIRST..LAST",
        help="steps to trace (default: %(default)s)",
    )
    flags.add_argument(
        "--top", type=int, default=15, metavar="N", help="rows to print (default: %(default)s)"
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help="folder for the trace (default: %(default)s)",
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the profile; returns the exit code."""
    import jax

    from meshtrain.cluster import distributed
    from meshtrain.tools.profile import profile, text

    with distributed.raise_on_all_processes():
        faults = minimum_faults(1, {"--top": args.top})
        if faults:
            raise ConfigError(*faults)
        steps = _steps(args.steps)
    result = profile.profile(cfg, steps=steps, output=args.output)
    if jax.process_index() == 0:
        console.say(*text.lines(result, top=args.top))
    return 0


def _steps(value: str) -> range:
    """Returns the steps of N or FIRST..LAST."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", value)
    steps = range(0)
    if match:
        first, last = match.groups()
        steps = range(int(first), int(last or first) + 1)
    if not steps or steps.start < 1:
        raise ConfigError(f"--steps={value}: use N or FIRST..LAST, 1 or later (step 0 warms up)")
    return steps


VERB = Verb(
    summary="show where a step's time goes",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
)
