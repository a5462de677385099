"""Latency and bus bandwidth of collectives by size, over processes or over simulated devices.

  python benchmarks/bandwidth.py --nproc=2 [--largest=64] [--output=PATH]
  python benchmarks/bandwidth.py --simulate_devices=8

Each process is pinned to a core and has one XLA thread and one device. Two times are taken: `device` is
the compiled collective on float32 that is on the devices already, `host` a whole call of
meshtrain.parallel.collectives, from numpy to numpy. Each is the median of its calls on the slowest process, none
of which is the first. The size S is that of the larger buffer of a member, and bus bandwidth S/t times
a factor of the collective, both as nccl-tests have them:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
Over simulated devices it is the speed of copies within one process. For how many bytes a step sends see
collectives.py.
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

from benchmarks import record
from benchmarks.workers import answer, launch
from meshtrain.cluster import distributed, runtime
from meshtrain.cluster.environment import JAX_VARIABLES
from meshtrain.parallel import collectives

OPTIONS = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": None}
OPTIONS |= {"all_to_all": None, "broadcast": 0}
SMALLEST, BUDGET = 1 << 10, 1 << 28  # bytes: of the first size, and of all calls that are timed
FEWEST, MOST = 7, 101  # calls that are timed
MIB = 1 << 20


def factor(name: str, num: int) -> float:
    return {"all_reduce": 2 * (num - 1) / num, "broadcast": 1.0}.get(name, (num - 1) / num)


def median(call: Callable[[], Any], count: int) -> float:
    """Returns the seconds that a call takes on the slowest process."""
    call(), call()  # the first compiles
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return max(distributed.gather(statistics.median(seconds)))


def run(compute: Callable, inputs: list[jax.Array]) -> None:
    jax.block_until_ready(compute(inputs))


def measure(largest: int, *, over_processes: bool) -> list[dict[str, Any]]:
    """Returns a row of figures for each collective and size."""
    num, table = jax.device_count(), []
    members = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("member",)), "axis": "member"}
    for name, option in OPTIONS.items():
        size = SMALLEST
        while size <= largest:
            length = size // 4 // (num if name == "all_gather" else 1)
            rows = np.ones((jax.local_device_count(), length), np.float32)
            compute = collectives.program(name, option, **members)
            inputs = [collectives.to_devices(rows, **members)]
            args = [option] * (option is not None)
            value, where = (rows[0], {}) if over_processes else (rows, members)
            count = min(MOST, max(FEWEST, BUDGET // size // num))
            calls = {
                "device": functools.partial(run, compute, inputs),
                "host": functools.partial(getattr(collectives, name), value, *args, **where),
            }
            times = {kind: median(call, count) for kind, call in calls.items()}
            bus = {f"{kind}_bus": size / t * factor(name, num) for kind, t in times.items()}
            table.append({"collective": name, "bytes": size, "calls": count, **times, **bus})
            size *= 4
    return table


def show(table: list[dict[str, Any]]) -> None:
    rows = []
    for one in table:
        row = {"collective": one["collective"], "KiB": one["bytes"] // 1024}
        for kind in ("device", "host"):
            row |= {f"{kind} us": one[kind] * 1e6, f"{kind} bus GB/s": one[f"{kind}_bus"] / 1e9}
        rows.append(row)
    record.show(rows)


def run_workers(num: int, cores: list[int]) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    places = [
        dict(zip(JAX_VARIABLES, (address, str(num), str(i)), strict=True)) for i in range(num)
    ]
    workers = [launch(__file__, core, **place) for core, place in zip(cores, places, strict=True)]
    try:
        table = answer(workers[0])["table"]
        assert not any([worker.wait(60) for worker in workers])
        return table
    finally:
        for worker in workers:
            worker.kill()


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--nproc", type=int, metavar="N", help="processes, a core each")
    parser.add_argument("--simulate_devices", type=int, metavar="N", help="in one process")
    parser.add_argument("--largest", type=float, default=64, metavar="MIB")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.nproc) == bool(args.simulate_devices):
        parser.error("give one of --nproc and --simulate_devices")
    largest = int(args.largest * MIB)
    if args.worker:
        distributed.initialize()
        table = measure(largest, over_processes=True)
        return print(json.dumps({"table": table}), flush=True)
    cores = sorted(os.sched_getaffinity(0))
    if args.nproc and len(cores) < args.nproc:
        parser.error(
            f"--nproc={args.nproc} and {len(cores)} cores: one each, or --simulate_devices"
        )
    runtime.simulate(args.simulate_devices or 1)
    found, model = record.about(args), f"{args.simulate_devices}-simulated-devices"
    if args.simulate_devices:
        found["table"] = measure(largest, over_processes=False)
    else:
        found["table"] = run_workers(args.nproc, cores[: args.nproc])
        model = f"{args.nproc}-processes"
    show(found["table"])
    record.save(args.output, found, model=f"bandwidth-{model}")


if __name__ == "__main__":
    main()
