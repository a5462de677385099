"""Latency and bus bandwidth of collectives by size: between GPUs, processes or simulated devices.

  python benchmarks/parallel/bandwidth.py [--largest=256] [--output=PATH]
  python benchmarks/parallel/bandwidth.py --nproc=2 [--devices=2] [--mbit=100] [--largest=64]
  python benchmarks/parallel/bandwidth.py --simulate_devices=8

Without --nproc and --simulate_devices it measures between all GPUs of this host, from one process;
for a single GPU there is nothing to measure. With --nproc, each process is pinned to a core and has
one XLA thread and one device, or --devices; with --mbit it is a host of its own (network.py; as
root), with a link of that rate. Two times are measured: `device` is the compiled collective on
float32 arrays that are on the devices already, `host` a complete call of
meshtrain.tools.collectives, from numpy to numpy. Each time is the median over calls after
warm-up, on the slowest process. The size S is the larger of a member's input and output, and bus
bandwidth is S/t times a factor that depends on the collective, both as in nccl-tests:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md The last column is the share of
the link's rate in meshtrain/hardware.toml. Between simulated devices this measures copies
within one process. collectives.py counts the bytes that a training step sends.

A second table compares the patterns of all_reduce on float32 arrays, called one after the other;
"hierarchical" needs several hosts with several devices each.
"""

import argparse
import contextlib
import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.lib import devices, network, record
from benchmarks.lib.workers import launch, read_reply
from meshtrain import hardware
from meshtrain.cluster import distributed, runtime
from meshtrain.cluster.launchers import JAX_VARIABLES
from meshtrain.config.schema import SYNC_PATTERNS
from meshtrain.tools import collectives

# Each collective, with its reduction or its root.
COLLECTIVES = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": None}
COLLECTIVES |= {"all_to_all": None, "broadcast": 0}
SMALLEST_SIZE = 1 << 10  # bytes
BYTES_PER_SIZE = 1 << 28  # bytes of all timed calls of one size, over all members
MIN_CALLS, MAX_CALLS = 7, 101  # timed calls of one size
MIB = 1 << 20
LARGEST, LARGEST_ON_GPUS = 64, 256  # MiB
PORT = 9911  # of a host with a network of its own


def bus_factor(name: str, num_members: int) -> float:
    share = (num_members - 1) / num_members
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(name, share)


def median_seconds(call: Callable[[], Any], count: int) -> float:
    """Returns the median seconds of a call on the slowest process."""
    call(), call()  # the first call compiles
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return max(distributed.gather(statistics.median(seconds)))


def run_and_wait(compute: Callable, inputs: list[jax.Array]) -> None:
    jax.block_until_ready(compute(inputs))


def members_of_all() -> dict[str, Any]:
    return {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("member",)), "axis": "member"}


def measure(args, largest: int, *, over_processes: bool) -> list[dict[str, Any]]:
    """Returns a row for each collective and size."""
    num_members, table, members = jax.device_count(), [], members_of_all()
    for name in args.collectives:
        option = COLLECTIVES[name]
        size = SMALLEST_SIZE
        while size <= largest:
            length = size // 4 // (num_members if name == "all_gather" else 1)
            rows = np.ones((jax.local_device_count(), length), np.float32)
            compute = collectives.program(name, option, **members)
            inputs = [collectives.to_devices(rows, **members)]
            args = [option] * (option is not None)
            value, over = (rows[0], {}) if over_processes else (rows, members)
            count = min(MAX_CALLS, max(MIN_CALLS, BYTES_PER_SIZE // size // num_members))
            calls = {
                "device": functools.partial(run_and_wait, compute, inputs),
                "host": functools.partial(getattr(collectives, name), value, *args, **over),
            }
            times = {kind: median_seconds(call, count) for kind, call in calls.items()}
            factor = bus_factor(name, num_members)
            bus = {f"{kind}_bus": size / t * factor for kind, t in times.items()}
            table.append({"collective": name, "bytes": size, "calls": count, **times, **bus})
            size *= 4
    return table


def measure_patterns(largest: int) -> list[dict[str, Any]]:
    """Returns a row for each size: median seconds of an all_reduce, on the slowest process.

    Each pattern of messages has its own.
    """
    members, table, size = members_of_all(), [], SMALLEST_SIZE
    num_hosts, num_members = jax.process_count(), jax.device_count()
    # Elsewhere hierarchical is one collective, that of xla.
    has_levels = 1 < num_hosts < num_members
    names = [name for name in SYNC_PATTERNS if has_levels or name != "hierarchical"]
    while size <= largest:
        rows = np.ones((jax.local_device_count(), size // 4), np.float32)
        inputs = [collectives.to_devices(rows, **members)]
        programs = {
            name: collectives.program("all_reduce", "sum", **members, pattern=name)
            for name in names
        }
        seconds = {name: [] for name in names}
        for compute in programs.values():
            run_and_wait(compute, inputs)
        for _ in range(min(MAX_CALLS, max(MIN_CALLS, BYTES_PER_SIZE // size // num_members // 8))):
            for name, compute in programs.items():
                began = time.perf_counter()
                run_and_wait(compute, inputs)
                seconds[name].append(time.perf_counter() - began)
        medians = distributed.gather([statistics.median(seconds[name]) for name in names])
        table.append(
            {"bytes": size, **dict(zip(names, map(max, zip(*medians, strict=True)), strict=True))}
        )
        size *= 4
    return table


def show_patterns(table: list[dict[str, Any]], link: str) -> None:
    """Prints the patterns, and the fastest one, by size."""
    rows = []
    for entry in table:
        row = {"all_reduce, KiB": entry["bytes"] // 1024, "link": link}
        times = {name: entry.get(name) for name in SYNC_PATTERNS}
        row |= {f"{name} us": t and t * 1e6 for name, t in times.items()}
        known = {name: t for name, t in times.items() if t}
        rows.append(row | {"fastest": min(known, key=known.get)})
    record.show(rows)


def show(table: list[dict[str, Any]], kind: str = "cpu") -> None:
    rows, device = [], hardware.device_of(kind)
    for entry in table:
        row = {"collective": entry["collective"], "KiB": entry["bytes"] // 1024}
        for kind in ("device", "host"):
            row |= {f"{kind} us": entry[kind] * 1e6, f"{kind} bus GB/s": entry[f"{kind}_bus"] / 1e9}
        row["% of link"] = device and 100 * entry["device_bus"] / device.link
        rows.append(row)
    record.show(rows)


def run_workers(args, cores: list[int]) -> dict[str, Any]:
    """Returns the tables of processes, each on a core.

    They share one if each is a host with a slow network.
    """
    with contextlib.ExitStack() as stack:
        if args.mbit:
            hosts = stack.enter_context(network.joined(args.nproc))
            hosts.limit(args.mbit)
            prefixes = [hosts.prefix(rank) for rank in range(args.nproc)]
            address = f"{hosts.address(0)}:{PORT}"
        else:
            prefixes = [()] * args.nproc
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{unused.getsockname()[1]}"
        running = []
        for rank, prefix in enumerate(prefixes):
            values = (address, str(args.nproc), str(rank))
            variables = dict(zip(JAX_VARIABLES, values, strict=True))
            core = cores[rank % len(cores)]
            running.append(launch(__file__, core, prefix=prefix, **variables))
        try:
            reply = read_reply(running[0])
            assert not any([worker.wait(60) for worker in running])
            return reply
        finally:
            for worker in running:
                worker.kill()


def measure_gpus(args, found: devices.Devices) -> None:
    """Measures between all GPUs of this host, prints and saves the table.

    For a single GPU there is no table.
    """
    results = record.about(args, devices=[found.kind] * found.count)
    results["table"] = []
    if found.count == 1:
        print(f"one {found.kind}: no other device to communicate with")
    else:
        results |= tables(args, LARGEST_ON_GPUS, over_processes=False)
        show(results["table"], found.kind)
        show_patterns(results["patterns"], "one host")
    record.save(args.output, results, model=f"bandwidth-{found.count}-devices")


def tables(args, default: float, *, over_processes: bool) -> dict[str, Any]:
    largest = int((args.largest or default) * MIB)
    return {
        "table": measure(args, largest, over_processes=over_processes),
        "patterns": measure_patterns(largest),
    }


def parse_args() -> argparse.Namespace:
    parser = record.parser(__doc__)
    parser.add_argument("--nproc", type=int, metavar="N", help="processes, each on its own core")
    parser.add_argument("--devices", type=int, metavar="N", default=1, help="of each process")
    parser.add_argument("--mbit", type=float, metavar="RATE", help="rate of the processes' links")
    parser.add_argument(
        "--simulate_devices", type=int, metavar="N", help="simulated devices, in one process"
    )
    parser.add_argument(
        "--largest",
        type=float,
        metavar="MIB",
        help=f"largest size (default: {LARGEST}; {LARGEST_ON_GPUS} on GPUs)",
    )
    parser.add_argument(
        "--collectives",
        nargs="*",
        default=[*COLLECTIVES],
        metavar="NAME",
        help="of the first table",
    )
    parser.add_argument(
        "--toy", action="store_true", help="the measurement on GPUs, small and on CPU"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args, cores = parser.parse_args(), len(os.sched_getaffinity(0))
    if unknown := {*args.collectives} - {*COLLECTIVES}:
        parser.error(f"--collectives {unknown.pop()}: use one of {', '.join(COLLECTIVES)}")
    if bool(args.nproc) + bool(args.simulate_devices) + args.toy > 1:
        parser.error("give one of --nproc, --simulate_devices and --toy")
    if args.mbit and not args.nproc:
        parser.error("--mbit: a rate between processes; give --nproc too")
    if args.mbit and (why := network.fault()):
        parser.exit(2, f"{why}\n")
    if args.nproc and not (args.mbit or args.worker) and cores < args.nproc:
        parser.error(
            f"--nproc={args.nproc} needs a core for each process and there are {cores}; "
            f"use --nproc={cores}, or --simulate_devices"
        )
    return args


def main():
    args = parse_args()
    if args.worker:
        jax.config.update("jax_num_cpu_devices", args.devices)
        distributed.initialize()
        return print(json.dumps(tables(args, LARGEST, over_processes=True)), flush=True)
    if args.toy:
        os.environ |= devices.TOY  # of the child process
        runtime.simulate(int(devices.TOY["JAX_NUM_CPU_DEVICES"]))
        args.largest = args.largest or 1 / 16
    if not (args.nproc or args.simulate_devices):
        found = devices.find()
        if found.is_gpu or args.toy:
            return measure_gpus(args, found)
        print("this host has no GPU; give one of --nproc and --simulate_devices", file=sys.stderr)
        raise SystemExit(2)
    runtime.simulate(args.simulate_devices or 1)
    results, model = record.about(args), f"{args.simulate_devices}-simulated-devices"
    link = "one process"
    if args.simulate_devices:
        results |= tables(args, LARGEST, over_processes=False)
    else:
        results |= run_workers(args, sorted(os.sched_getaffinity(0)))
        link = f"{args.mbit:g} Mbit/s" if args.mbit else "loopback"
        model = f"{args.nproc}-processes"
        model += f"-{args.devices}-devices" * (args.devices > 1)
        model += f"-{args.mbit:g}-mbit" if args.mbit else ""
    if results["table"]:
        show(results["table"])
    show_patterns(results["patterns"], link)
    record.save(args.output, results, model=f"bandwidth-{model}")


if __name__ == "__main__":
    main()
