"""Verifies a model's parallelism: each layout must compute the steps of one device, in float64.

  meshtrain verify --config=configs/quickstart.py --simulate_devices=8

The layouts are a pairwise (all-pairs) selection: each possible pair of two settings occurs in at
least one of them. The settings are the sizes of mesh axes, ZeRO stage, number of micro-batches,
pipeline schedule, remat, unroll, implementation of attention, chunks of the loss, packed rows,
token weights, sequence-sharded residuals and loss scale. Each layout runs the trainer's own step.
Loss, gradients, gradient norm, parameters and optimizer state are compared with a plain step on one
device (meshtrain/tools/verify/reference/step.py). The model is made smaller; its structure is
unchanged. The batch and the mesh of the config do not matter. The exit code is 1 if a layout
differs; its line says where.

With --here the layouts run in train.dtype with the kernels of these devices, such as cuDNN's
attention. The errors of their gradients from float64 are compared with the errors of one device.
"""

import argparse
import gc
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.cluster import limits
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError
from meshtrain.tools.verify import GC_THRESHOLDS, OPTIONAL, QUICK_LAYOUTS

EXIT_DIFFERS = 1
MAX_JOBS = 4
BYTES_PER_JOB = 3 << 30

# Compile time matters here, not the speed of the programs.
QUICK_COMPILE_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_prefer_vector_width=128 "
    # A program is compiled in one part: --jobs uses the cores.
    "--xla_cpu_parallel_codegen_split_count=1"
)

# A third less time. jax ends the process for a flag that it does not know.
if version("jaxlib").startswith("0.10."):
    QUICK_COMPILE_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# Operations without the lines of the code that made them: tests/test_parity.py takes 4 % less time.
NO_LOCATIONS = ("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--quick",
        action="store_true",
        help=f"only the {QUICK_LAYOUTS} layouts that cover most pairs",
    )
    flags.add_argument("--keep_sizes", action="store_true", help="do not reduce the model's sizes")
    flags.add_argument(
        "--here",
        action="store_true",
        help="in train.dtype, with the kernels of these devices; errors from float64 are compared",
    )
    flags.add_argument(
        "--without",
        default="",
        metavar="NAME,...",
        help=f"checks to leave out: {', '.join(OPTIONAL)}",
    )
    flags.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that share the work on simulated devices "
        f"(default: one per core, up to {MAX_JOBS})",
    )
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("certificate"),
        metavar="DIR",
        help="folder for verify.json and verify.md (default: %(default)s)",
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Sets what shortens tracing and compilation, before jax reads it, and garbage collection."""
    gc.set_threshold(*GC_THRESHOLDS)
    if args.here:  # verifies what the compiler makes by default
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE_FLAGS}"
    os.environ.setdefault(*NO_LOCATIONS)
    # Without XLA's warnings about speed, such as "Involuntary full rematerialization".
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Verifies, writes the certificate, and returns the exit code."""
    without = [name for name in args.without.split(",") if name]
    jobs = num_jobs(args)
    if args.here:
        from meshtrain.tools.verify.on_devices import verify_here

        began = time.perf_counter()
        # One process uses the devices.
        certificate = verify_here(
            cfg, quick=args.quick, keep_sizes=args.keep_sizes, without=without
        )
        passed = "no layout is less precise than one device"
    else:
        from meshtrain.tools.verify.verify import verify

        began = time.perf_counter()
        certificate = verify(
            cfg, quick=args.quick, keep_sizes=args.keep_sizes, without=without, jobs=jobs
        )
        passed = "all equal to one device"
    seconds = time.perf_counter() - began

    certificate.write(args.output)
    failed = sum(result.fault is not None for result in certificate.results)
    failed += len(certificate.broken_laws)
    verdict = f"{failed} FAILED" if failed else passed
    console.say(f"{verdict} · {seconds:.0f} s · written to {args.output}/verify.md and .json")
    return EXIT_DIFFERS if failed else 0


def num_jobs(args: argparse.Namespace) -> int:
    """Returns the number of processes that share the work: one unless the devices are simulated."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs={args.jobs}: use 1 or more")
    if not args.simulate_devices:
        return 1
    by_memory = int(limits.available_memory() / BYTES_PER_JOB)
    return args.jobs or max(1, min(MAX_JOBS, os.cpu_count() or 1, by_memory))


VERB = Verb(
    summary="compare layouts with one device",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    ignores_mesh=True,
    prepare=prepare,
)
