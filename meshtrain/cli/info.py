"""Prints versions, processes, devices and settings, and tests an all-reduce; or draws a mesh.

  meshtrain info                       # with several processes, process 0 prints
  meshtrain info --simulate_devices=8

The all-reduce runs over all devices and, with several processes, over the processes. The exit code
is 1 if a result is wrong.

  meshtrain info --mesh --config=configs/quickstart.py --simulate_devices=8 --config.mesh.fsdp=4
  meshtrain info --mesh --config=configs/llama3.py --device=h200 --devices=64 --config.mesh.fsdp=8

--mesh draws the mesh of a config instead, on the devices of this job or on devices that need not be
there: which device is where, the slowest link along each axis, and which axes shard which
parameters. Nothing is compiled. All config keys can be set, as for training.

  meshtrain info --network             # with several processes, each prints its own

--network prints what is set for the network of this host instead: interfaces, the one that reaches
the coordinator, InfiniBand adapters, sockets of the kernel, and variables of NCCL, Gloo, libfabric,
jax and XLA. It uses no devices, and processes do not wait for each other.
"""

import argparse
import os
from typing import Any

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.cluster import environment
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError, minimum_faults


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("--mesh", action="store_true", help="draw the mesh of --config=FILE")
    add("--network", action="store_true", help="print what is set for the network of this host")
    add("--device", metavar="NAME", help="with --mesh: such as h200 or v5p, or a file NAME.toml")
    add("--devices", type=int, metavar="N", help="with --device: how many there are")
    add("--devices_per_host", type=int, metavar="N", help="default: 8; of TPUs, all are one slice")


def prepare(args: argparse.Namespace, config: Any) -> None:
    """Checks the flags, before jax is started."""
    if args.network:
        others = {
            "--mesh": args.mesh,
            "--config": config is not None,
            "--device": args.device is not None,
            "--simulate_devices": args.simulate_devices is not None,
        }
        faults = [
            f"{flag}: not with --network, which uses no devices; leave out one of them"
            for flag, is_given in others.items()
            if is_given
        ]
        if faults:
            raise ConfigError(*faults)
    counts = {"--devices": args.devices, "--devices_per_host": args.devices_per_host}
    counts = {flag: count for flag, count in counts.items() if count is not None}
    if args.mesh and config is None:
        raise ConfigError(
            "--mesh: draws the mesh of a config; add --config=FILE, such as quickstart"
        )
    if config is not None and not args.mesh:
        raise ConfigError(f"--config={args.config}: only --mesh reads a config; add it")
    if args.device is None and counts:
        faults = [f"{flag}={count}: only with --device=NAME" for flag, count in counts.items()]
        raise ConfigError(*faults)
    if args.device is not None and not args.mesh:
        raise ConfigError(f"--device={args.device}: only with --mesh")
    if args.device is not None:
        from meshtrain.tools.hlo import target

        _check_devices(args, counts)
        # The devices of this host are not used.
        target.prepare()


def _check_devices(args: argparse.Namespace, counts: dict[str, int]) -> None:
    """Replaces --device by its `hardware.Device`, and completes --devices_per_host.

    Raises ConfigError.
    """
    from meshtrain import hardware

    for given in ("simulate_devices", "num_devices"):
        if getattr(args, given) is not None:
            raise ConfigError(f"--device={args.device} and --{given}: use one of them")
    if args.devices is None:
        raise ConfigError(f"--device={args.device}: say how many there are, such as --devices=8")
    faults = minimum_faults(1, counts)
    if faults:
        raise ConfigError(*faults)
    args.device = hardware.device_named(args.device)
    per_host = args.devices_per_host or (8 if args.device.chip else args.devices)
    args.devices_per_host = min(per_host, args.devices)
    if args.devices % args.devices_per_host:
        raise ConfigError(
            f"--devices={args.devices} is not divisible by "
            f"--devices_per_host={args.devices_per_host}"
        )


def run(args: argparse.Namespace, cfg: Config | None) -> int:
    """Prints the report, or what a flag asks for instead; returns the exit code."""
    if args.network:
        from meshtrain.tools import network

        flags = (args.coordinator, args.num_processes, args.process_id)
        process, faults = None, []
        try:
            process = environment.process_info(os.environ, flags)
        except ConfigError as error:
            faults = error.faults
        console.say(*network.lines(os.environ, process, faults=faults))
        return 2 if faults else 0
    from meshtrain.tools import info

    return info.print_mesh(args, cfg) if cfg else info.print_report(args)


VERB = Verb(
    summary="print devices or the network, test an all-reduce, or draw a mesh",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="config",
    config_is_optional=True,
    needs_devices=lambda args: not args.network,
    prepare=prepare,
)
