"""Verifies a model's parallelism: each layout must compute the same steps as one device, in float64.

  meshtrain verify --config=configs/quickstart.py --simulate_devices=8

The layouts are a pairwise (all-pairs) selection: each possible pair of two settings occurs in at least
one of them. The settings are the sizes of mesh axes, ZeRO stage, number of micro-batches, remat,
pipeline schedule, packed rows, token weights, sequence-sharded residuals and loss scale. Each layout
runs the trainer's own step. Loss, gradients, gradient norm, parameters and optimizer state are compared
with a plain step on one device (meshtrain/verify/reference_step.py). The model is made smaller; its
structure is unchanged. The exit code is 1 if a layout differs; its line says where.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from meshtrain.verify import OPTIONAL, QUICK_LAYOUTS

EXIT_DIFFERS = 1
# Compile time matters here, not the speed of the programs.
QUICK_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--quick",
        action="store_true",
        help=f"only the {QUICK_LAYOUTS} layouts that cover most pairs",
    )
    flags.add_argument("--keep_sizes", action="store_true", help="do not reduce the model's sizes")
    flags.add_argument(
        "--without",
        default="",
        metavar="NAME,...",
        help=f"checks to leave out: {', '.join(OPTIONAL)}",
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("certificate"),
        metavar="DIR",
        help="folder for verify.json and verify.md (default: %(default)s)",
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Sets XLA flags that shorten compilation; the backend reads them when it starts."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE_FLAGS}"


def run(args: argparse.Namespace, config: Any) -> int:
    """Verifies, writes the certificate, and returns the exit code."""
    from meshtrain.verify.verify import verify

    without = [name for name in args.without.split(",") if name]
    began = time.perf_counter()
    certificate = verify(config, quick=args.quick, keep_sizes=args.keep_sizes, without=without)
    certificate.write(args.output)
    failed = sum(result.fault is not None for result in certificate.results)
    failed += len(certificate.broken_laws)
    verdict = f"{failed} FAILED" if failed else "all equal to one device"
    print(
        f"{verdict} · {time.perf_counter() - began:.0f} s · written to {args.output}/verify.md and .json"
    )
    return EXIT_DIFFERS if failed else 0
