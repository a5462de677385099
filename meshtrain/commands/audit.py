"""Compiles the train step of a config and compares the bytes that its collectives send with the minimum.

  meshtrain audit --config=configs/quickstart.py --simulate_devices=8 --config.mesh.data=8

Nothing is trained, and the token file is not read. All config keys can be set, as for training. The
minimum is what the layout needs: along data, each gradient is summed once; along fsdp, parameters are
gathered for the forward and the backward pass of each micro-batch, and gradients are reduce-scattered;
along tensor, the partial products of row-parallel matrices are all-reduced. The program may avoid
gathers by keeping parameters gathered; the minimum leaves these out, and a note lists them. All bytes
above the minimum are listed with a reason. A collective that the layout does not need is a warning.
"""

import argparse
from typing import Any


def add_flags(flags: argparse.ArgumentParser) -> None:
    """This command adds no flags."""


def run(args: argparse.Namespace, config: Any) -> int:
    """Prints the audit; returns the exit code."""
    from meshtrain.analysis.audit import audit, text

    print(*text.lines(audit.audit(config)), sep="\n")
    return 0
