"""Latency and bus bandwidth of each collective by size: between GPUs, processes, or simulated devices.

  python benchmarks/bandwidth.py [--largest=256] [--output=PATH]
  python benchmarks/bandwidth.py --nproc=2 [--largest=64]
  python benchmarks/bandwidth.py --simulate_devices=8

Without --nproc and --simulate_devices it measures between all GPUs of this host, from one process; for a single GPU
there is nothing to measure. With --nproc, each process is pinned to a core and has one XLA thread and one device.
Two times are measured: `device` is the compiled collective on float32 arrays that are on the devices already, `host`
a complete call of meshtrain.parallel.collectives, from numpy to numpy. Each time is the median over calls after
warm-up, on the slowest process. The size S is the larger of a member's input and output, and bus bandwidth is S/t
times a factor that depends on the collective, both as in nccl-tests:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
The last column is the share of the link's rate in meshtrain/analysis/hardware.py. Between simulated devices this
measures copies within one process. collectives.py counts the bytes that a training step sends.
"""

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import devices, record
from benchmarks.workers import launch, read_reply
from meshtrain.analysis import hardware
from meshtrain.cluster import distributed, runtime
from meshtrain.cluster.environment import JAX_VARIABLES
from meshtrain.parallel import collectives

# Each collective, with its reduction or its root.
COLLECTIVES = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": None}
COLLECTIVES |= {"all_to_all": None, "broadcast": 0}
SMALLEST_SIZE = 1 << 10  # bytes
BYTES_PER_SIZE = 1 << 28  # bytes of all timed calls of one size, over all members
MIN_CALLS, MAX_CALLS = 7, 101  # timed calls of one size
MIB = 1 << 20
LARGEST, LARGEST_ON_GPUS = 64, 256  # MiB


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


def measure(largest: int, *, over_processes: bool) -> list[dict[str, Any]]:
    """Returns a row for each collective and size."""
    num_members, table = jax.device_count(), []
    members = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("member",)), "axis": "member"}
    for name, option in COLLECTIVES.items():
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


def show(table: list[dict[str, Any]], kind: str = "cpu") -> None:
    rows, device = [], hardware.device_of(kind)
    for entry in table:
        row = {"collective": entry["collective"], "KiB": entry["bytes"] // 1024}
        for kind in ("device", "host"):
            row |= {f"{kind} us": entry[kind] * 1e6, f"{kind} bus GB/s": entry[f"{kind}_bus"] / 1e9}
        row["% of link"] = device and 100 * entry["device_bus"] / device.link
        rows.append(row)
    record.show(rows)


def run_workers(num_processes: int, cores: list[int]) -> list[dict[str, Any]]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    ranks = [(address, str(num_processes), str(rank)) for rank in range(num_processes)]
    variables = [dict(zip(JAX_VARIABLES, rank, strict=True)) for rank in ranks]
    workers = [launch(__file__, core, **env) for core, env in zip(cores, variables, strict=True)]
    try:
        table = read_reply(workers[0])["table"]
        assert not any([worker.wait(60) for worker in workers])
        return table
    finally:
        for worker in workers:
            worker.kill()


def measure_gpus(args, found: devices.Devices) -> None:
    """Measures between all GPUs of this host, prints and saves the table; no table for a single GPU."""
    results = record.about(args, devices=[found.kind] * found.count)
    results["table"] = []
    if found.count == 1:
        print(f"one {found.kind}: no other device to communicate with")
    else:
        results["table"] = measure(_bytes_of(args, LARGEST_ON_GPUS), over_processes=False)
        show(results["table"], found.kind)
    record.save(args.output, results, model=f"bandwidth-{found.count}-devices")


def _bytes_of(args, default: float) -> int:
    return int((args.largest or default) * MIB)


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--nproc", type=int, metavar="N", help="processes, each on its own core")
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
        "--toy", action="store_true", help="the measurement on GPUs, small and on CPU"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        distributed.initialize()
        table = measure(_bytes_of(args, LARGEST), over_processes=True)
        return print(json.dumps({"table": table}), flush=True)
    if bool(args.nproc) + bool(args.simulate_devices) + args.toy > 1:
        parser.error("give one of --nproc, --simulate_devices and --toy")
    if args.toy:
        os.environ |= devices.TOY  # of the child process
        runtime.simulate(int(devices.TOY["JAX_NUM_CPU_DEVICES"]))
        args.largest = args.largest or 1 / 16
    if not (args.nproc or args.simulate_devices):
        found = devices.find()
        if found.is_gpu or args.toy:
            return measure_gpus(args, found)
        parser.error("this host has no GPU; give one of --nproc and --simulate_devices")
    cores = sorted(os.sched_getaffinity(0))
    if args.nproc and len(cores) < args.nproc:
        parser.error(
            f"--nproc={args.nproc} needs a core for each process and there are {len(cores)}; "
            f"use --nproc={len(cores)}, or --simulate_devices"
        )
    runtime.simulate(args.simulate_devices or 1)
    results, model = record.about(args), f"{args.simulate_devices}-simulated-devices"
    if args.simulate_devices:
        results["table"] = measure(_bytes_of(args, LARGEST), over_processes=False)
    else:
        results["table"] = run_workers(args.nproc, cores[: args.nproc])
        model = f"{args.nproc}-processes"
    show(results["table"])
    record.save(args.output, results, model=f"bandwidth-{model}")


if __name__ == "__main__":
    main()
