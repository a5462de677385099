"""Compiles the train step of a config and compares the bytes that its collectives send with the
minimum.

  meshtrain audit --config=configs/quickstart.py --simulate_devices=8 --config.mesh.data=8

Nothing is trained, and the token file is not read, except for a few batches if mesh.context shards
sequences: for how evenly its devices share the work of attention. All config keys can be set, as
for training. The minimum is what the layout needs: along data, each gradient is summed once; along
fsdp, parameters are gathered for the forward and the backward pass of each micro-batch, and
gradients are reduce-scattered; along context, parameters and gradients are sent as along fsdp, and
keys and values between parts of a sequence; along tensor, the partial products of row-parallel
matrices are all-reduced. The program may avoid gathers by keeping parameters gathered; the minimum
leaves these out, and a note lists them. All bytes above the minimum are listed with a reason. A
collective that the layout does not need is a warning.

  meshtrain audit --config=configs/gpt2.py --target=h200:8 --config.mesh.data=8

compiles for devices that this host lacks: the compiler's wheels are enough. For devices whose
figures are known it prints the memory of the step as well, and a roofline: the least time of each
kind of work, the MFU that the compiled program can reach at most, and the operations that move the
most bytes.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--target",
        metavar="NAME:SIZE[:SLICES]",
        help="devices to compile for, such as h200:8, h200:32x8 (hosts x devices), v5e:4x4 (a "
        "torus) or v5e:4x4:2 (two slices)",
    )
    flags.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    flags.add_argument(
        "--keep_hlo", type=Path, metavar="FILE", help="write the optimised HLO of the step"
    )


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Checks the files and the target, and sets what the compilers read when jax is imported."""
    for flag in ("output", "keep_hlo"):
        file = getattr(args, flag)
        if file and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            raise ConfigError(f"--{flag}={file}: use a file in a folder that can be written")
    if not args.target:
        return
    from meshtrain.tools.hlo import target

    for given in ("simulate_devices", "num_devices"):
        if getattr(args, given) is not None:
            raise ConfigError(f"--target={args.target} and --{given}: use one of them")
    target.parse(args.target)
    target.prepare()


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the audit; returns the exit code."""
    from meshtrain.tools.audit import audit, text
    from meshtrain.tools.hlo import target

    devices = target.devices_of(args.target) if args.target else None
    try:
        result = audit.audit(cfg, devices=devices)
    except ConfigError as error:
        if not args.target:
            raise
        # The way out of a wrong number of devices is here another --target.
        name = f"--target={args.target.partition(':')[0]}:"
        faults = [fault.replace("--simulate_devices=", name) for fault in error.faults]
        raise ConfigError(*faults) from error
    if args.keep_hlo:
        args.keep_hlo.write_text(result.hlo, encoding="utf-8")
    if args.output:
        args.output.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    console.say(*text.lines(result))
    return 0


VERB = Verb(
    summary="count the bytes that a step sends",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    prepare=prepare,
)
