"""Step time of a pipeline of processes beside one process that does all the work, a core for each.

  python benchmarks/pipeline.py [--stages=2] [--rounds=5] [--output=FILE.json]
  python benchmarks/pipeline.py --simulate --stages=4

A float32 Llama-style model (8.0 M parameters), synthetic batch, Linux. Each process is pinned to a
core and has one XLA thread. All stay alive and take turns; who has none waits for a line on stdin.
A round is a few steps of the pipeline, of one process alone (on another core each round), and of one
process on every core at once: that says how much cores that work slow each other down. The losses of
all must agree. `--simulate` runs the stages as devices of one process: no scaling figure.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks.workers import about, measure, run, seconds_of, serve
from configs import default
from meshtrain import config, state
from meshtrain.data.source import Batch
from meshtrain.pipeline import schedules
from meshtrain.program import assemble

HEADS, KV_HEADS, VOCAB = 8, 4, 256
NUMBERS = {"stages": 2, "microbatches": 8, "chunks": 1, "rows": 4, "layers": 8, "width": 256}
NUMBERS |= {"seq-len": 256, "rounds": 5, "steps": 2}  # rows of a micro-batch, steps of a turn


def settings(args, stages: int):
    c = default.get_config()
    c.mesh.pipeline, c.train.num_microbatches = stages, args.microbatches
    c.train.global_batch = args.microbatches * args.rows
    c.pipeline.update(schedule=args.schedule, num_chunks=args.chunks, keep=args.keep)
    c.model.update(num_layers=args.layers, d_model=args.width, d_ff=4 * args.width)
    c.model.update(num_heads=HEADS, num_kv_heads=KV_HEADS, vocab_size=VOCAB)
    c.data.update(seq_len=args.seq_len, build="meshtrain.data.synthetic:build")
    return config.parse(c, num_devices=stages)


def prepare(args, stages: int):
    """Returns the compiled step, the initial state, the batch, and facts of them."""
    cfg = settings(args, stages)
    program = assemble(cfg, cfg.model)
    shape = (cfg.train.global_batch, args.seq_len)
    rows = np.random.default_rng(0).integers(0, VOCAB, (shape[0], shape[1] + 1)).astype(np.int32)
    batch = Batch(rows[:, :-1], rows[:, 1:], np.ones(shape, np.float32))
    where = jax.sharding.NamedSharding(program.mesh, jax.P())
    batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(where, x, x.shape), batch)
    with program.active():
        began = time.perf_counter()
        compiled = program.compile(batch)
        facts = {"compile_seconds": time.perf_counter() - began}
        facts["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        facts["parameters"] = state.count(program.abstract_state.params)
        return compiled, program.start(0), batch, facts


def show(args, measured: dict) -> dict:
    """Prints a table, returns its figures."""
    kinds, figures = seconds_of(measured, "pipeline"), {}
    size = f"{args.microbatches} micro-batches of {args.rows} x {args.seq_len} tokens"
    count = measured["facts"][0]["parameters"]
    print(f"{count:,} parameters, {size}, {args.schedule}, keep={args.keep}; losses agree")
    print(f"{'':26}   s/step  fastest  cores in use  waiting for a core")
    for kind, turns in measured["turns"].items():
        steps = kinds[kind]
        replies = [reply for turn in turns for reply in turn]
        wall = sum(sum(r["seconds"]) for r in replies)
        cpu = sum(sum(r["cpu_seconds"]) for r in replies) / wall
        waited = sum(r["waited_seconds"] for r in replies) / wall
        figures[kind] = statistics.median(steps)
        print(f"{kind:>26} {figures[kind]:8.3f} {steps.min():8.3f} {cpu:13.2f} {waited:19.1%}")
    ideal = args.stages * (1 - schedules.bubble(args.stages, args.microbatches, args.chunks))
    alone, together, pipeline = figures.values()
    figures |= {"speedup": alone / pipeline, "speedup_over_busy_core": together / pipeline}
    figures |= {"ideal": ideal, "ideal_with_recomputation": ideal * 3 / 4}
    lines = "speed-up {:.3f}; {:.3f} over a core whose neighbours work too\n"
    lines += "ideal    {:.3f}; {:.3f} where a backward runs its forward again (keep=inputs)"
    print(lines.format(*list(figures.values())[3:]))
    return figures


def simulate(args) -> dict:
    """Prints and returns what there is to know of stages that share one process."""
    table = schedules.SCHEDULES[args.schedule](args.stages, args.microbatches, args.chunks)
    compiled, carry, batch, facts = prepare(args, args.stages)
    carry, _ = run(compiled, carry, batch, 1)
    facts |= {"ticks": table.num_ticks, "bubble": table.bubble}
    facts |= run(compiled, carry, batch, args.rounds)[1]
    facts["step_seconds"] = statistics.median(facts["seconds"])
    print(f"{args.stages} simulated stages share one process: the time is no scaling figure")
    line = "{ticks} ticks, bubble {bubble:.1%}, compiled in {compile_seconds:.1f} s, "
    line += "{temporary_bytes:,} temporary bytes a stage, {step_seconds:.3f} s/step"
    print(line.format(**facts))
    return facts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="1f1b", choices=schedules.SCHEDULES)
    parser.add_argument("--keep", default="residuals", choices=("inputs", "residuals"))
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve(lambda: prepare(args, jax.device_count()))
    cores, record = sorted(os.sched_getaffinity(0)), about(args)
    if args.simulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.stages)
        record |= simulate(args)
    elif len(cores) < args.stages:
        parser.error(f"--stages={args.stages} and {len(cores)} cores: one each, or --simulate")
    else:
        record |= measure(__file__, cores[: args.stages], "pipeline", args.rounds, args.steps)
        record["figures"] = show(args, record)
    if args.output:
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
