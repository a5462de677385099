"""Ranks layouts of a config on devices that need not be there, by predicted step time and memory.

  meshtrain plan --config=configs/llama3.py --device=h200 --devices=256

Tries every legal mesh over all axes, ZeRO stage, number of micro-batches, pipeline schedule, remat,
and size of loss chunks; the batch and the sequence length are those of the config. The closed form
adds what devices compute, read and write, what they send that computation does not hide, and the
idle ticks of the pipeline's schedule. --compile=N compiles the best N ahead of time, as
`meshtrain audit --target` does, and removes those that do not fit. docs/guides/plan.md says how
wrong the predictions are.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add(
        "--device",
        required=True,
        metavar="NAME",
        help="such as h100, h200 or v5p, or a file NAME.toml",
    )
    add("--devices", required=True, type=int, metavar="N", help="how many there are")
    add(
        "--largest_batch",
        action="store_true",
        help="find the most rows per device that a layout fits at a time, instead of the config's "
        "batch",
    )
    add("--devices_per_host", type=int, metavar="N", help="default: 8; of TPUs, all are one slice")
    add("--memory", type=float, default=0.9, help="part of a device's memory that a step may use")
    add(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key that all layouts have, such as mesh.tensor=8 or train.remat=full; "
        "may be repeated",
    )
    add(
        "--explain",
        metavar="KEY=VALUE,...",
        help="take the best layout with these values apart, such as mesh.fsdp=8,mesh.tensor=8",
    )
    add("--svg", type=Path, metavar="FILE.svg", help="draw what --explain prints")
    add("--compile", type=int, default=0, metavar="N", help="compile the best N ahead of time")
    add("--measured", type=Path, metavar="DIR", help="workdir of a run on such devices: one factor")
    add("--tokens", type=float, default=0.0, help="print the days for this many tokens")
    add("--price", type=float, default=0.0, help="of a device-hour, for the cost of --tokens")
    add("--output", type=Path, metavar="FILE", help="write the plan as JSON")


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Checks the flags, before jax is started."""
    if args.num_devices is not None:
        raise ConfigError(
            f"--num_devices={args.num_devices}: is for devices that are here; --devices says how "
            f"many to plan for"
        )
    from meshtrain import hardware
    from meshtrain.tools.hlo import target
    from meshtrain.tools.plan import constraints
    from meshtrain.tools.plan import machine as machines

    target.prepare()  # the devices of this host are not used
    args.device = hardware.device_named(args.device)
    faults = _flag_faults(args)
    if not faults:
        default = 8 if args.device.chip else args.devices
        args.devices_per_host = min(args.devices_per_host or default, args.devices)
        if args.devices % args.devices_per_host:
            faults.append(
                f"--devices={args.devices} is not divisible by "
                f"--devices_per_host={args.devices_per_host}"
            )
        elif args.compile:
            base = hardware.devices_by_kind()[args.device.kinds[0]]  # of a device of a file
            args.target = target.text_of(base, args.devices, args.devices_per_host)
            target.parse(args.target)
    if faults:
        raise ConfigError(*faults)
    flags = [("--fix", flag) for flag in args.fix]
    flags += [("--explain", flag) for flag in (args.explain or "").split(",") if flag]
    args.fix = constraints.values(flags)
    args.fixed_by = {flag.partition("=")[0].rpartition(".")[2]: name for name, flag in flags}
    args.measured = machines.measured_factor(args.measured) if args.measured else None
    _leave_out_what_is_chosen(config)


def _leave_out_what_is_chosen(config: Any) -> None:
    """Sets the mesh and the micro-batches of a config to 1: the plan chooses them.

    Otherwise a config that is right on its own mesh would be rejected for another batch.
    """
    from meshtrain.config.schema import AXES

    keys = [("mesh", axis) for axis in AXES] + [("train", "num_microbatches")]
    for section, key in keys:
        # What is no number stays, to be reported.
        if isinstance(config.get(section, {}).get(key), int):
            config[section][key] = 1


def _flag_faults(args: argparse.Namespace) -> list[str]:
    """Returns what is wrong with each flag by itself."""
    faults = []
    for name in ("devices", "devices_per_host"):
        value = getattr(args, name)
        if value is not None and value < 1:
            faults.append(f"--{name}={value}: use 1 or more")
    if not 0 < args.memory <= 1:
        faults.append(f"--memory={args.memory:g}: use a part of the memory, such as 0.9")
    for name in ("compile", "tokens", "price"):
        value = getattr(args, name)
        if not 0 <= value < math.inf:
            faults.append(f"--{name}={value:g}: use 0 or more")
    for name in ("output", "svg"):
        file = getattr(args, name)
        if file and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            faults.append(f"--{name}={file}: use a file in a folder that can be written")
    if args.svg and args.explain is None:
        faults.append(f"--svg={args.svg}: draws what --explain prints; use --explain as well")
    return faults


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the plan; returns the exit code."""
    from meshtrain.tools.plan import compiled, constraints, from_config, search, text
    from meshtrain.tools.plan.machine import Machine

    machine = Machine(args.device, args.devices, args.devices_per_host)
    limit = args.memory * args.device.memory
    platform = "gpu" if args.device.chip else "tpu"
    plan_input = None
    if args.largest_batch:
        args.fix.setdefault("num_microbatches", 1)
        plan_input = search.with_largest_batch(
            from_config.plan_input(cfg, platform=platform), machine, limit=limit, fixed=args.fix
        )
        if plan_input:
            cfg = plan_input.cfg
            num_rows = cfg.train.global_batch // args.devices
            console.say(
                f"train.global_batch={cfg.train.global_batch} is the largest that fits with "
                f"train.num_microbatches={args.fix['num_microbatches']}: {num_rows:,} rows per "
                f"device; twice as many micro-batches fit twice as many rows",
                "",
            )
    if faults := constraints.fixed_faults(cfg, args.fix, args.devices, args.fixed_by):
        raise ConfigError(*faults)
    plan_input = plan_input or from_config.plan_input(cfg, platform=platform)
    plan = search.search(
        plan_input,
        machine,
        limit=limit,
        fixed=args.fix,
        scale=args.measured or 1,
    )
    if plan.candidates and args.compile:
        plan = compiled.compile_best(
            plan, args.target, cfg, limit=limit, most=args.compile, log=print
        )
    if not plan.candidates:
        reason = search.way_out(plan_input, machine, plan, limit, args.fix)
        raise ConfigError(f"--devices={args.devices}: {reason}")

    report = text.Report(plan_input, machine, limit=limit, scale=args.measured)
    if args.output:
        args.output.write_text(
            json.dumps(text.to_dict(plan, report), indent=2) + "\n", encoding="utf-8"
        )
    if args.explain is not None:
        best = plan.candidates[0]
        console.say(*text.explain_lines(best, report))
        if args.svg:
            args.svg.write_text(text.explain_svg(best, report), encoding="utf-8")
    else:
        console.say(*text.lines(plan, report, tokens=args.tokens, price=args.price))
    return 0


VERB = Verb(
    summary="rank layouts for devices",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    ignores_mesh=True,
    prepare=prepare,
)
