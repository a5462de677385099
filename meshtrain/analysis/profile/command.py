"""Traces some steps of a config, and says where their time went.

  meshtrain profile --config=configs/quickstart.py --steps=3..5

Runs the train step on the config's data up to the last step that is traced. Nothing is saved but the
trace, which xprof, TensorBoard and Perfetto show. Printed are, for each device, the share of the time
in which it was busy, and that of collectives, `exposed` where nothing else ran beside them; then the
operations that cost most, those of one kind, pass and line of source together, each by its own time,
without what it calls. Of several processes each writes to DIR/rank-N, the first tells of its devices.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import jax

from meshtrain.analysis.profile import profile, text
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError, minimum_faults


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--steps", default="3..5", metavar="FIRST..LAST", help="to trace (default: %(default)s)"
    )
    flags.add_argument(
        "--top", type=int, default=15, metavar="N", help="rows to print (default: %(default)s)"
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help="for the trace (default: %(default)s)",
    )


def run(args: argparse.Namespace, config: Any) -> int:
    """Returns the exit code."""
    with distributed.raise_on_all_processes():
        if faults := minimum_faults(1, {"--top": args.top}):
            raise ConfigError(*faults)
        steps = _steps(args.steps)
    found = profile(config, steps=steps, output=args.output)
    if jax.process_index() == 0:
        print(*text.lines(found, top=args.top), sep="\n")
    return 0


def _steps(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not steps or steps.start < 1:
        raise ConfigError(
            f"--steps={text}: use N or FIRST..LAST, from 1 on: the first step, 0, warms up"
        )
    return steps
