"""Speed-up of processes, a core each, over one process that does all the work; or what cutting costs.

  python benchmarks/scaling.py [--processes=2] [--layouts data fsdp 1f1b] [--output=PATH]
  python benchmarks/scaling.py --simulate [--output=PATH]

A float32 Llama-style model (8.0 M parameters), the same global batch for all, as many rows of it at a
time, Linux. Each process is pinned to a core and has one XLA thread; all stay alive and take turns, and
their losses must agree. A round is a few steps of all processes together, of one alone (on another core
each round), and of one on every core at once: that says how much cores that work slow each other down,
which no parallelism can give back. Efficiency is the speed-up over the number of processes; the ideal of
a pipeline is what its bubble leaves, and where a backward runs its forward again (1f1b-inputs) 3/4 of it.

`--simulate` is no scaling: 1, 2, 4 and 8 simulated devices of one process share one core and one
thread, each with the same number of rows. T(n) / (n T(1)), the work-normalised overhead, is what it
costs to cut the work up and to put the pieces together by copies within memory; 1 is free. Stages of a
pipeline work in lock step, also without work: theirs is at least 1 / (1 - bubble).
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from benchmarks import llama, record, workers
from meshtrain import state
from meshtrain.cluster import runtime
from meshtrain.parallel.pipeline.schedules import SCHEDULES

COUNTS = (1, 2, 4, 8)  # of simulated devices
CHUNKS = {"interleaved": 2}
LAYOUTS = ("data", "fsdp", "1f1b", "1f1b-inputs", "interleaved")


def sections(args) -> dict:
    """Returns sections of the config: all devices along one axis."""
    layout, _, inputs = args.layouts[0].partition("-")
    axis = layout if layout in ("data", "fsdp") else "pipeline"
    found = {"mesh": {"data": 1, axis: -1}, "train": {"global_batch": args.rows * args.devices}}
    # As many rows at a time wherever it runs: fewer are faster, for they fit a core's cache.
    at_once = 1 if axis == "pipeline" else jax.device_count() // args.devices
    found["train"]["num_microbatches"] = args.microbatches // at_once
    if axis == "pipeline":
        found["pipeline"] = {"schedule": layout, "num_chunks": CHUNKS.get(layout, 1)}
        found["pipeline"]["keep"] = inputs or "residuals"
    return found


def prepare(args):
    """Returns the compiled step, the initial state, the batch, and facts of them."""
    c = llama.settings(args, **sections(args))
    _, program, batch = llama.program_of(c, jax.devices())
    with program.active():
        began = time.perf_counter()
        compiled = program.compile(batch)
        facts = {"compile_seconds": time.perf_counter() - began}
        facts["parameters"] = state.count(program.abstract_state.params)
        return compiled, program.start(0), batch, facts


def busy(args, layout: str, num: int) -> float:
    """Returns the fraction of the time in which a stage has something to do; 1 without stages."""
    schedule = layout.partition("-")[0]
    if schedule in ("data", "fsdp") or num == 1:
        return 1.0
    return 1 - SCHEDULES[schedule](num, args.microbatches, CHUNKS.get(schedule, 1)).bubble


def speedups(args, cores: list[int]) -> dict:
    """Returns, and prints, what processes on a core each gain."""
    found, rows = {}, []
    for layout in args.layouts:
        options = ("--layouts", layout)
        found[layout] = workers.measure(
            __file__, cores, *options, rounds=args.rounds, steps=args.steps
        )
        kinds = workers.seconds_of(found[layout])
        medians = {kind: statistics.median(steps) for kind, steps in kinds.items()}
        alone, beside, together = medians.values()
        ideal = len(cores) * busy(args, layout, len(cores))
        row = {"seconds of a step": layout, **medians, "speed-up": alone / together}
        row |= {"efficiency": alone / together / len(cores), "over busy cores": beside / together}
        rows.append(row | {"ideal": ideal * (0.75 if layout.endswith("inputs") else 1)})
    record.show(rows)
    return {"layouts": found, "figures": rows}


def overheads(args, core: int) -> dict:
    """Returns, and prints, what simulated devices of one core lose."""
    found, rows = {}, []
    for layout in args.layouts:
        options = [("--layouts", layout, "--devices", str(num)) for num in COUNTS]
        team = [workers.launch(__file__, core, *one) for one in options]
        try:
            facts = [workers.answer(worker) for worker in team]
            first = [workers.ask([worker], 1)[0] for worker in team]  # warms up
            turns = {num: [] for num in COUNTS}
            for i in range(args.rounds):
                for num, worker in list(zip(COUNTS, team, strict=True))[:: 1 if i % 2 else -1]:
                    turns[num] += workers.ask([worker], args.steps)
        finally:
            workers.end(team)
        found[layout] = {"facts": facts, "first": first, "turns": turns}
        row = {"T(n) / (n T(1)), no scaling": layout}
        seconds = {n: [s for reply in turns[n] for s in reply["seconds"]] for n in COUNTS}
        medians = {num: statistics.median(steps) for num, steps in seconds.items()}
        row |= {"T(1) in s": medians[1]}
        for num in COUNTS[1:]:
            row |= {f"n = {num}": medians[num] / num / medians[1]}
            row |= {f"least, {num}": 1 / busy(args, layout, num)}
        rows.append(row)
    record.show(rows)
    return {"layouts": found, "figures": rows}


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, processes=2, rows=32, microbatches=8, rounds=5, steps=2)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS, metavar="NAME")
    parser.add_argument("--simulate", action="store_true", help="--rows are those of a device then")
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.simulate:
            runtime.simulate(args.devices)
        return workers.serve(lambda: prepare(args))
    cores = sorted(os.sched_getaffinity(0))
    if not args.simulate and len(cores) < args.processes:
        parser.error(f"--processes={args.processes} and {len(cores)} cores: one each")
    runtime.simulate(1)  # of this process, which only waits
    found = record.about(args)
    if args.simulate:
        found |= overheads(args, cores[0])
    else:
        found |= speedups(args, cores[: args.processes])
    kind = "overhead" if args.simulate else "scaling"
    record.save(args.output, found, model=f"{kind}-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
