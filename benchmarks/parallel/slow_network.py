"""Training over a slow network: seconds and bytes per step by sync.dtype and sync.pattern.

  python benchmarks/parallel/slow_network.py [--layouts 2x1 4x1] [--mbit 20 100] [--output=PATH]

Hosts are network namespaces (network.py). Linux only, as root; without permission the exit code is
2. A layout 2x1 is two hosts with one device each. Each host runs one process on one core, or shares
a core if there are fewer cores than hosts. The processes train the quickstart's model on mesh.data,
with one program after the other in each round.

A step takes as long as on its slowest host; medians. The bytes of a step are those that the
interface of the host that sends most has counted, headers and acknowledgements included, compared
with `meshtrain audit` of the same config with mesh.slices = number of hosts.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from benchmarks.lib import network, record, workers
from meshtrain.cluster import distributed, runtime
from meshtrain.cluster.launchers import JAX_VARIABLES
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import quickstart
from meshtrain.data.loader import Loader
from meshtrain.program import assemble
from meshtrain.tools.audit.audit import audit

PORT = 9911  # every host has all ports for itself
WIRES = ("float32", "bfloat16", "int8", "int4")


class Layout(NamedTuple):
    hosts: int
    devices: int  # of each host

    @classmethod
    def parse(cls, text: str) -> "Layout":
        return cls(*map(int, text.split("x")))

    @property
    def name(self) -> str:
        return f"{self.hosts}x{self.devices}"

    def cases(self, wires) -> list[tuple[str, str]]:
        """Returns the pairs of sync.dtype and sync.pattern that differ on this layout."""
        found = [(wire, "xla") for wire in wires]
        if self.hosts * self.devices > 2:
            found += [("float32", "ring"), ("float32", "tree")]
        if self.devices > 1:
            found += [(wire, "hierarchical") for wire in wires]
        return found


def settings(args, layout: Layout, wire: str, pattern: str):
    c = quickstart.get_config()
    c.train.steps = 1_000_000
    c.mesh.update(data=layout.hosts * layout.devices, slices=layout.hosts)
    c.model.update(num_layers=args.layers, d_model=args.width, d_ff=args.width * 8 // 3)
    c.sync.update(dtype=wire, pattern=pattern)
    return c


def expected_bytes(args, layout: Layout, case: tuple[str, str]) -> float:
    """Returns the bytes per step that the audit finds to leave the host that sends most."""
    devices = jax.devices()[: layout.hosts * layout.devices]
    return audit(settings(args, layout, *case), devices=devices).links.leaving_slice


# ---- the process of a host ----


class Run:
    """A program of one config with its state and data."""

    def __init__(self, config):
        cfg = parse(config, num_devices=jax.device_count())
        parts = build(cfg)
        self.program = assemble(cfg, parts)
        data = parts.train_data, self.program.mesh, cfg.rules
        self.loader = Loader(*data, global_batch=cfg.train.global_batch)
        with self.program.active():
            self.state = self.program.initial_state(0)
            self.compiled = self.program.compile(self.loader.peek())
        distributed.barrier("compiled")

    def steps(self, count: int) -> dict[str, list[float]]:
        """Returns the seconds and the losses of so many steps."""
        reply = {"seconds": [], "losses": []}
        with self.program.active():
            for _ in range(count):
                batch = jax.block_until_ready(next(self.loader))
                began = time.perf_counter()
                self.state, metrics = self.compiled(self.state, batch)
                jax.block_until_ready((self.state, metrics))
                reply["seconds"].append(time.perf_counter() - began)
                reply["losses"].append(float(metrics["loss"]))
        return reply


def serve(args) -> None:
    """Compiles all programs of a layout, then runs the one that each line of stdin names."""
    layout = Layout.parse(args.layout)
    jax.config.update("jax_num_cpu_devices", layout.devices)
    distributed.initialize()
    runtime.setup()
    runs = [Run(settings(args, layout, *case)) for case in layout.cases(args.wires)]
    print(json.dumps({"devices": jax.device_count()}), flush=True)
    for line in sys.stdin:
        number, count = map(int, line.split())
        print(json.dumps(runs[number].steps(count)), flush=True)
    for run in runs:
        run.loader.close()


# ---- the process that measures ----


def launch(hosts: network.Hosts, layout: Layout) -> list:
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for number in range(layout.hosts):
        rank = (f"{hosts.address(0)}:{PORT}", str(layout.hosts), str(number))
        variables = dict(zip(JAX_VARIABLES, rank, strict=True))
        options = ("--layout", layout.name)
        core, prefix = cores[number % len(cores)], hosts.prefix(number)
        running.append(workers.launch(__file__, core, *options, prefix=prefix, **variables))
    return running


def run_steps(running: list, number: int, count: int) -> dict[str, Any]:
    """Returns the seconds of steps on the slowest host, and the losses.

    These must be equal on all hosts.
    """
    for worker in running:
        print(number, count, file=worker.stdin, flush=True)
    replies = [workers.read_reply(worker) for worker in running]
    assert all(reply["losses"] == replies[0]["losses"] for reply in replies), replies
    seconds = [max(each) for each in zip(*(reply["seconds"] for reply in replies), strict=True)]
    return {"seconds": seconds, "losses": replies[0]["losses"]}


def measure(args, layout: Layout) -> list[dict[str, Any]]:
    """Returns a row of samples for each rate and case."""
    cases = layout.cases(args.wires)
    with network.joined(layout.hosts) as hosts:
        running = launch(hosts, layout)
        try:
            for worker in running:
                workers.read_reply(worker)
            for number in range(len(cases)):
                run_steps(running, number, 1)  # warm-up
            return [row for mbit in args.mbit for row in at_rate(args, hosts, running, cases, mbit)]
        finally:
            workers.stop(running)


def at_rate(args, hosts: network.Hosts, running: list, cases, mbit: float) -> list[dict[str, Any]]:
    hosts.limit(mbit)
    rows = [
        {"mbit": mbit, "wire": wire, "pattern": pattern, "seconds": [], "losses": [], "sent": []}
        for wire, pattern in cases
    ]
    for turn in range(args.rounds):
        for number in [*range(len(cases))][:: -1 if turn % 2 else 1]:
            before = hosts.sent()
            reply = run_steps(running, number, args.steps)
            after = hosts.sent()
            rows[number]["seconds"] += reply["seconds"]
            rows[number]["losses"] += reply["losses"]
            sent = [(b - a) / args.steps for a, b in zip(before, after, strict=True)]
            rows[number]["sent"].append(sent)
    return rows


def figures(layout: Layout, samples: list[dict[str, Any]], audited: dict) -> list[dict[str, Any]]:
    """Returns a row of the table for each rate and case."""
    table, exact = [], {}
    for row in samples:
        seconds = statistics.median(row["seconds"])
        exact.setdefault(row["mbit"], seconds)  # the first case: float32, xla
        sent = statistics.median(max(each) for each in row["sent"])
        expected = audited[row["wire"], row["pattern"]]
        entry = {"hosts x devices": layout.name, "Mbit/s": row["mbit"], "wire": row["wire"]}
        entry |= {"pattern": row["pattern"], "s per step": seconds}
        entry |= {"speed / float32 xla": exact[row["mbit"]] / seconds}
        entry |= {"MB sent": sent / 1e6, "audit": expected / 1e6, "sent / audit": sent / expected}
        table.append(entry)
    return table


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--layouts", nargs="+", default=["2x1", "4x1", "2x2"], metavar="HxD")
    parser.add_argument("--mbit", nargs="+", type=float, default=[20, 100, 1000], metavar="RATE")
    parser.add_argument("--wires", nargs="+", default=WIRES, choices=WIRES, metavar="WIRE")
    for name, value in dict(layers=4, width=192, rounds=5, steps=2).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve(args)
    if why := network.fault():
        parser.exit(2, f"{why}\n")
    layouts = [Layout.parse(text) for text in args.layouts]
    runtime.simulate(max(layout.hosts * layout.devices for layout in layouts))
    results = {**record.about(args), "layouts": {}}
    for layout in layouts:
        audited = {case: expected_bytes(args, layout, case) for case in layout.cases(args.wires)}
        samples = measure(args, layout)
        table = figures(layout, samples, audited)
        results["layouts"][layout.name] = {"samples": samples, "figures": table}
        record.show(table)
        sys.stdout.flush()
    record.save(args.output, results, model="-".join(["slow-network", *args.layouts]))


if __name__ == "__main__":
    main()
