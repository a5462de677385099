"""Compiles the step of a config and says what its collectives move, beside the least that they could.

  meshtrain audit --config=configs/quickstart.py --simulate_devices=8 --config.mesh.data=8

Nothing is trained, and the token file is not read. Every key can be set, as for training. The
minimum is what the layout calls for: along data each gradient summed once, along fsdp parameters
gathered for each pass of a micro-batch and gradients scattered, along tensor the sums between
matrices. Gathers that the program saves by keeping parameters whole are not in it, but noted. What
moves beyond it is explained, and a warning where nothing calls for it.
"""

import argparse
from typing import Any

from meshtrain.analysis.audit import audit, text


def add_flags(flags: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def run(args: argparse.Namespace, config: Any) -> int:
    """Returns the exit code."""
    print(*text.lines(audit(config)), sep="\n")
    return 0
