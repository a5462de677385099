"""Scaling over the GPUs of this host, or over processes with one core; overhead of sharding.

  python benchmarks/parallel/scaling.py [--layouts data fsdp 1f1b] [--output=PATH]
  python benchmarks/parallel/scaling.py --processes=2 [--output=PATH]
  python benchmarks/parallel/scaling.py --simulate [--output=PATH]

On GPUs (also with --toy, on two simulated devices): 1, 2, 4, ... and all of them train GPT-2, with
the same rows per device and as many as fit its memory. Each case is a process of its own.
Efficiency is T(1) / T(n); the ideal one of a pipeline is what its bubble leaves. Layouts that
cannot split the model over n devices are left out. The MFU that the compiled program can reach at
most is by the rule of `meshtrain audit`.

With --processes: a float32 Llama-style model (8.0 M parameters), with the same global batch and the
same rows per micro-batch and device everywhere; Linux only. Each process is pinned to a core and
has one XLA thread; all processes stay alive and run alternately, and their losses must agree. A
round is a few steps of a run of all processes, of one process alone (on another core each round),
and of independent processes on all cores at once. The last kind shows how much busy cores slow each
other down, which parallelism cannot avoid. Efficiency is the speed-up divided by the number of
processes. The ideal speed-up of a pipeline is what its bubble leaves, times 3/4 if the backward
pass runs the forward pass again (1f1b-inputs).

With --min-efficiency=0.85 both end with exit code 1 if a row is below 0.85; the record is written
before. The bubble of a pipeline counts.

`--simulate` does not measure scaling: 1, 2, 4 and 8 simulated devices of one process share one core
and one thread, and each has the same number of rows. T(n) / (n T(1)), the work-normalized overhead,
is the cost of sharding the work and of collectives as copies within memory; 1 is no overhead. The
stages of a pipeline run in lockstep even when idle, so the minimum for a pipeline is 1 / (1 -
bubble).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from benchmarks.lib import comparison, devices, gpu_models, llama, record, workers
from benchmarks.lib.devices import Devices
from meshtrain import state
from meshtrain.cluster import runtime
from meshtrain.hardware import peak_flops
from meshtrain.schedules import SCHEDULES

DEVICE_COUNTS = (1, 2, 4, 8)  # simulated devices
CHUNKS = {"interleaved": 2}  # per stage; 1 for the other schedules
LAYOUTS = ("data", "fsdp", "1f1b", "1f1b-inputs", "interleaved")
LAYOUTS_ON_GPUS = ("data", "fsdp", "1f1b")
MODELS_ON_GPUS = ("gpt2-350m", "gpt2-124m")  # the first that fits one GPU
MICROBATCHES_PER_STAGE = 4


def sections(args) -> dict:
    """Returns the config sections that put all devices along one axis."""
    layout, _, inputs = args.layouts[0].partition("-")
    axis = layout if layout in ("data", "fsdp") else "pipeline"
    changed = {"mesh": {"data": 1, axis: -1}, "train": {"global_batch": args.rows * args.devices}}
    # The same rows per micro-batch and device everywhere: fewer rows run faster, because they fit a
    # core's cache.
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
        return compiled, program.initial_state(0), batch, facts


def busy_fraction(layout: str, num_stages: int, num_microbatches: int) -> float:
    """Returns the fraction of the time in which a pipeline stage has work; 1 for other layouts."""
    schedule = layout.partition("-")[0]
    if schedule in ("data", "fsdp") or num_stages == 1:
        return 1.0
    return 1 - SCHEDULES[schedule](num_stages, num_microbatches, CHUNKS.get(schedule, 1)).bubble


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
        ideal = len(cores) * busy_fraction(layout, len(cores), args.microbatches)
        row = {"seconds per step": layout, **medians, "speed-up": alone / together}
        row |= {"efficiency": alone / together / len(cores), "over busy core": busy / together}
        rows.append(row | {"ideal": ideal * (0.75 if layout.endswith("inputs") else 1)})
    record.show(rows)
    return {"layouts": measured, "figures": rows}


def measure_overheads(args, core: int) -> dict:
    """Prints and returns the overhead of simulated devices that share one core."""
    measured, rows = {}, []
    for layout in args.layouts:
        size = dict(counts=DEVICE_COUNTS, rounds=args.rounds, steps=args.steps)
        measured[layout] = workers.measure_simulated(__file__, core, "--layouts", layout, **size)
        medians = workers.medians_of(measured[layout]["turns"])
        row = {"T(n) / (n T(1))": layout, "T(1) in s": medians[1]}
        for num in DEVICE_COUNTS[1:]:
            row |= {f"n = {num}": medians[num] / num / medians[1]}
            row |= {f"minimum, {num}": 1 / busy_fraction(layout, num, args.microbatches)}
        rows.append(row)
    record.show(rows)
    return {"layouts": measured, "figures": rows}


def counts_up_to(num_devices: int) -> list[int]:
    """Returns 1, 2, 4, ... and the number itself."""
    return sorted({1 << power for power in range(num_devices.bit_length())} | {num_devices})


def cases_on(
    num_devices: int, model: str, layouts: tuple[str, ...], *, rows: int, dtype: str
) -> Iterator:
    """Yields layout, number of devices and config of each case; first, one device on data."""
    for num in counts_up_to(num_devices):
        for layout in layouts[:1] if num == 1 else layouts:
            c = gpu_models.settings(model, rows=rows * num, dtype=dtype)
            c.mesh.data = 1
            if layout == "fsdp" and c.model.d_model % num:
                continue  # the parameters would be replicated
            if layout in ("data", "fsdp"):
                c.mesh[layout] = num
            elif num > 1:
                chunks = CHUNKS.get(layout, 1)
                if c.model.num_layers % (num * chunks):
                    continue
                c.mesh.pipeline, c.pipeline.num_chunks = num, chunks
                c.pipeline.schedule, _, inputs = layout.partition("-")
                c.pipeline.keep = inputs or "residuals"
                c.train.num_microbatches = min(MICROBATCHES_PER_STAGE, rows) * num
            yield layout, num, c


def time_case(c, *, rounds: int, steps: int) -> dict:
    """Returns the facts of a process that trains with this config, and its seconds per step.

    There is one time for each round.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(c.to_dict()), encoding="utf-8")
        process = comparison.Implementation("meshtrain", file)
        try:
            process.run_steps(1)
            replies = [process.run_steps(steps) for _ in range(rounds)]
        finally:
            process.close()
    losses = [loss for reply in replies for loss in reply["losses"]]
    seconds, size = [reply["seconds"] for reply in replies], replies[-1]["bytes"]
    return {**process.facts, "seconds": seconds, "losses": losses, "bytes": size}


def measure_devices(args, found: Devices) -> dict:
    """Prints and returns the efficiency of each layout on 1 to all devices."""
    models = ["gpt2-toy"] if args.toy else MODELS_ON_GPUS
    fitting = {model: gpu_models.rows_that_fit(model, found) for model in models}
    model = next((model for model, rows in fitting.items() if rows), None)
    if model is None:
        raise SystemExit(f"{models[-1]} does not fit {found.kind}; nothing to measure")
    layouts = tuple(args.layouts or LAYOUTS_ON_GPUS)
    size = dict(rows=fitting[model], dtype=found.dtype)
    rows, measured, alone = [], [], None
    for layout, num, c in cases_on(found.count, model, layouts, **size):
        row = {"layout": layout, "devices": num}
        try:
            facts = time_case(c, rounds=args.rounds, steps=args.steps)
        except comparison.Failed as error:
            print(f"{layout} on {num} devices failed: {error}", file=sys.stderr)
            measured.append(row | {"error": str(error)})
            continue
        measured.append(row | facts)
        seconds = statistics.median(facts["seconds"])
        alone = alone or seconds
        rate = c.train.global_batch * c.data.seq_len / seconds
        peak, flops = peak_flops(found.kind), gpu_models.model_flops(model)["PaLM"]
        most = facts["mfu_at_most"]
        rows.append(row | {
            "ms per step": 1e3 * seconds,
            "tokens/s": rate,
            "efficiency %": 100 * alone / seconds,
            "ideal %": 100 * busy_fraction(layout, num, c.train.num_microbatches),
            "MFU %": peak and 100 * rate * flops / num / peak,
            "MFU % at most": most and 100 * most,
            "GB": facts["bytes"] / 1e9,
        })  # fmt: skip
    print(f"{model}: {size['rows']} rows per device, {found.dtype}, {found.count} x {found.kind}")
    if rows:
        record.show(rows)
    return {"model": model, **size, "cases": measured, "figures": rows}


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, rows=32, microbatches=8, rounds=5, steps=2)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, metavar="NAME")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes, each on its own core"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="measure overhead; --rows is per device"
    )
    parser.add_argument(
        "--toy", action="store_true", help="the measurement on GPUs, tiny and on CPU"
    )
    parser.add_argument(
        "--min-efficiency",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="end with exit code 1 if a row has a lower efficiency, such as 0.85",
    )
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.layouts = args.layouts or LAYOUTS
        if args.simulate:
            runtime.simulate(args.devices)
        return workers.serve(lambda: prepare(args))
    if not 0 <= args.min_efficiency <= 1:
        parser.error(f"--min-efficiency={args.min_efficiency:g}: use a fraction from 0 to 1")
    if args.min_efficiency and args.simulate:
        parser.error(
            f"--min-efficiency={args.min_efficiency:g}: --simulate measures overhead, which is no "
            f"efficiency; leave out one of them"
        )
    if not (args.processes or args.simulate):
        os.environ |= devices.environment() | (devices.TOY if args.toy else {})
        found = devices.find()
        if found.is_gpu or args.toy:
            return save_devices(args, found)
        args.processes = 2
    args.layouts = args.layouts or LAYOUTS
    cores = sorted(os.sched_getaffinity(0))
    if not args.simulate and len(cores) < args.processes:
        parser.error(
            f"--processes={args.processes} needs a core for each process and there are "
            f"{len(cores)}; use --processes={len(cores)}"
        )
    runtime.simulate(1)  # this process only waits
    results = record.about(args)
    if args.simulate:
        results |= measure_overheads(args, cores[0])
    else:
        results |= measure_speedups(args, cores[: args.processes])
    kind = "overhead" if args.simulate else "scaling"
    record.save(args.output, results, model=f"{kind}-{llama.name_of(args)}")
    if not args.simulate:
        efficiencies = {row["seconds per step"]: row["efficiency"] for row in results["figures"]}
        check_efficiency(efficiencies, args.min_efficiency)


def save_devices(args, found: Devices) -> None:
    """Measures on devices and saves the record.

    Ends with exit code 1 if a case failed or is below --min-efficiency.
    """
    results = record.about(args, devices=[found.kind] * found.count)
    results |= measure_devices(args, found)
    record.save(args.output, results, model=f"scaling-{results['model']}")
    failed = [case for case in results["cases"] if "error" in case]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(results['cases'])} cases failed")
    efficiencies = {
        f"{row['layout']} on {row['devices']} devices": row["efficiency %"] / 100
        for row in results["figures"]
    }
    check_efficiency(efficiencies, args.min_efficiency)


def check_efficiency(efficiencies: dict[str, float], minimum: float) -> None:
    """Ends with exit code 1, and one line, if the efficiency of a row is below the minimum."""
    below = [f"{row} {value:.3f}" for row, value in efficiencies.items() if value < minimum]
    if below:
        raise SystemExit(f"efficiency below --min-efficiency={minimum:g}: {', '.join(below)}")


if __name__ == "__main__":
    main()
