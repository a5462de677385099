"""Speed-up of several processes, one per core, over one process that does all the work; or overhead of sharding.

  python benchmarks/scaling.py [--processes=2] [--layouts data fsdp 1f1b] [--output=PATH]
  python benchmarks/scaling.py --simulate [--output=PATH]

A float32 Llama-style model (8.0 M parameters), with the same global batch and the same rows per micro-batch and
device everywhere; Linux only. Each process is pinned to a core and has one XLA thread; all processes stay alive
and run alternately, and their losses must agree. A round is a few steps of a run of all processes, of one process
alone (on another core each round), and of independent processes on all cores at once. The last kind shows how
much busy cores slow each other down, which parallelism cannot avoid. Efficiency is the speed-up divided by the
number of processes. The ideal speed-up of a pipeline is what its bubble leaves, times 3/4 if the backward pass
runs the forward pass again (1f1b-inputs).

`--simulate` does not measure scaling: 1, 2, 4 and 8 simulated devices of one process share one core and one
thread, and each has the same number of rows. T(n) / (n T(1)), the work-normalized overhead, is the cost of
sharding the work and of collectives as copies within memory; 1 is no overhead. The stages of a pipeline run in
lockstep even when idle, so the minimum for a pipeline is 1 / (1 - bubble).
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

DEVICE_COUNTS = (1, 2, 4, 8)  # simulated devices
CHUNKS = {"interleaved": 2}  # per stage; 1 for the other schedules
LAYOUTS = ("data", "fsdp", "1f1b", "1f1b-inputs", "interleaved")


def sections(args) -> dict:
    """Returns the config sections that put all devices along one axis."""
    layout, _, inputs = args.layouts[0].partition("-")
    axis = layout if layout in ("data", "fsdp") else "pipeline"
    changed = {"mesh": {"data": 1, axis: -1}, "train": {"global_batch": args.rows * args.devices}}
    # The same rows per micro-batch and device everywhere: fewer rows run faster, because they fit a core's cache.
    replicas = 1 if axis == "pipeline" else jax.device_count() // args.devices
    changed["train"]["num_microbatches"] = args.microbatches // replicas
    if axis == "pipeline":
        changed["pipeline"] = {"schedule": layout, "num_chunks": CHUNKS.get(layout, 1)}
        changed["pipeline"]["keep"] = inputs or "residuals"
    return changed


def prepare(args):
    """Returns the compiled step, the initial state, the batch, and a dict of facts."""
    c = llama.settings(args, **sections(args))
    _, program, batch = llama.program_of(c, jax.devices())
    with program.active():
        began = time.perf_counter()
        compiled = program.compile(batch)
        facts = {"compile_seconds": time.perf_counter() - began}
        facts["parameters"] = state.count(program.abstract_state.params)
        return compiled, program.start(0), batch, facts


def busy_fraction(args, layout: str, num_stages: int) -> float:
    """Returns the fraction of the time in which a pipeline stage has work; 1 for other layouts."""
    schedule = layout.partition("-")[0]
    if schedule in ("data", "fsdp") or num_stages == 1:
        return 1.0
    return 1 - SCHEDULES[schedule](num_stages, args.microbatches, CHUNKS.get(schedule, 1)).bubble


def measure_speedups(args, cores: list[int]) -> dict:
    """Prints and returns the speed-up of processes on one core each."""
    measured, rows = {}, []
    for layout in args.layouts:
        options = ("--layouts", layout)
        measured[layout] = workers.measure(
            __file__, cores, *options, rounds=args.rounds, steps=args.steps
        )
        seconds = workers.seconds_of(measured[layout])
        medians = {kind: statistics.median(steps) for kind, steps in seconds.items()}
        alone, busy, together = (
            medians[kind] for kind in (workers.ALONE, workers.BUSY, workers.TOGETHER)
        )
        ideal = len(cores) * busy_fraction(args, layout, len(cores))
        row = {"seconds per step": layout, **medians, "speed-up": alone / together}
        row |= {"efficiency": alone / together / len(cores), "over busy core": busy / together}
        rows.append(row | {"ideal": ideal * (0.75 if layout.endswith("inputs") else 1)})
    record.show(rows)
    return {"layouts": measured, "figures": rows}


def measure_overheads(args, core: int) -> dict:
    """Prints and returns the overhead of simulated devices that share one core."""
    measured, rows = {}, []
    for layout in args.layouts:
        options = [("--layouts", layout, "--devices", str(num)) for num in DEVICE_COUNTS]
        processes = [workers.launch(__file__, core, *flags) for flags in options]
        try:
            facts = [workers.read_reply(process) for process in processes]
            first = [workers.run_steps([process], 1)[0] for process in processes]  # warm-up
            turns = {num: [] for num in DEVICE_COUNTS}
            for i in range(args.rounds):
                pairs = list(zip(DEVICE_COUNTS, processes, strict=True))
                for num, process in pairs[:: 1 if i % 2 else -1]:
                    turns[num] += workers.run_steps([process], args.steps)
        finally:
            workers.stop(processes)
        measured[layout] = {"facts": facts, "first": first, "turns": turns}
        seconds = {n: [s for reply in turns[n] for s in reply["seconds"]] for n in DEVICE_COUNTS}
        medians = {num: statistics.median(steps) for num, steps in seconds.items()}
        row = {"T(n) / (n T(1))": layout, "T(1) in s": medians[1]}
        for num in DEVICE_COUNTS[1:]:
            row |= {f"n = {num}": medians[num] / num / medians[1]}
            row |= {f"minimum, {num}": 1 / busy_fraction(args, layout, num)}
        rows.append(row)
    record.show(rows)
    return {"layouts": measured, "figures": rows}


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, processes=2, rows=32, microbatches=8, rounds=5, steps=2)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS, metavar="NAME")
    parser.add_argument(
        "--simulate", action="store_true", help="measure overhead; --rows is per device"
    )
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.simulate:
            runtime.simulate(args.devices)
        return workers.serve(lambda: prepare(args))
    cores = sorted(os.sched_getaffinity(0))
    if not args.simulate and len(cores) < args.processes:
        parser.error(
            f"--processes={args.processes} needs a core for each process and there are {len(cores)}; "
            f"use --processes={len(cores)}"
        )
    runtime.simulate(1)  # this process only waits
    results = record.about(args)
    if args.simulate:
        results |= measure_overheads(args, cores[0])
    else:
        results |= measure_speedups(args, cores[: args.processes])
    kind = "overhead" if args.simulate else "scaling"
    record.save(args.output, results, model=f"{kind}-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
