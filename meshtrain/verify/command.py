"""Proves a model's parallelism: in float64, every layout takes the same steps as one device.

  meshtrain verify --config=configs/quickstart.py --simulate_devices=8

Layouts hold every pair of: sizes of mesh axes, ZeRO stages, numbers of micro-batches, remat, pipeline
schedules, packed rows, token weights, sequence-sharded residuals, a loss scale. Each runs the trainer's
own step, and is compared with plain maths (meshtrain/verify/reference_step.py) in loss, gradients, norm, parameters
and optimizer state.
The model's sizes are made small, its structure stays. Exit code 1: something differs, and is named.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from meshtrain.verify import OPTIONAL, QUICK, verify

EXIT_DIFFERS = 1
# Numbers are wanted, not speed.
QUICK_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--quick", action="store_true", help=f"only the {QUICK} fullest layouts")
    flags.add_argument("--keep_sizes", action="store_true", help="do not make the model small")
    flags.add_argument(
        "--without", default="", metavar="NAME,...", help=f"leave out: {', '.join(OPTIONAL)}"
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("certificate"),
        metavar="DIR",
        help="for verify.json, .md",
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Sets the compiler's flags, which are read when the backend starts."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE_FLAGS}"


def run(args: argparse.Namespace, config: Any) -> int:
    """Returns the exit code."""
    without = [name for name in args.without.split(",") if name]
    began = time.perf_counter()
    found = verify(config, quick=args.quick, keep_sizes=args.keep_sizes, without=without)
    found.write(args.output)
    failed = sum(result.fault is not None for result in found.results) + len(found.broken_laws)
    verdict = f"{failed} FAILED" if failed else "all equal to one device"
    print(
        f"{verdict} · {time.perf_counter() - began:.0f} s · written to {args.output}/verify.md and .json"
    )
    return EXIT_DIFFERS if failed else 0
