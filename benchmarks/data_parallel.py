"""Step time of data-parallel processes, a core each, beside one process that does all the work.

  python benchmarks/data_parallel.py [--processes=2] [--rounds=5] [--output=FILE.json]

A float32 Llama-style model (8.0 M parameters), the same global batch for all, Linux. Each process is
pinned to a core and has one XLA thread; they take turns, see benchmarks/workers.py. Efficiency is the
speed-up over the number of processes. "One process on each core" at once, each with the whole batch,
says what a core loses when its neighbours work: what no parallelism can give back.
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

from benchmarks.workers import about, measure, seconds_of, serve
from configs import default
from meshtrain import config, state
from meshtrain.data.loader import Loader
from meshtrain.program import assemble

NUMBERS = {"processes": 2, "rows": 32, "layers": 8, "width": 256, "seq-len": 256}
NUMBERS |= {"rounds": 5, "steps": 2}  # steps of a turn


def prepare(args):
    """Returns the compiled step, the initial state, the batch, and facts of them."""
    c = default.get_config()
    c.train.global_batch = args.rows
    c.model.update(num_layers=args.layers, d_model=args.width, d_ff=4 * args.width)
    c.model.update(num_heads=8, num_kv_heads=4, vocab_size=256)
    c.data.update(seq_len=args.seq_len, build="meshtrain.data.synthetic:build")
    cfg = config.parse(c, num_devices=jax.device_count())
    program = assemble(cfg, cfg.model)
    with program.active():
        loader = Loader(cfg.train_data, program.mesh, cfg.rules, global_batch=args.rows)
        batch = loader.read(0)
        loader.close()
        began = time.perf_counter()
        compiled = program.compile(batch)
        facts = {"compile_seconds": time.perf_counter() - began}
        facts["parameters"] = state.count(program.abstract_state.params)
        return compiled, program.start(0), batch, facts


def show(args, measured: dict) -> dict:
    """Prints a table, returns its figures."""
    kinds, figures = seconds_of(measured, "data parallel"), {}
    count = measured["facts"][0]["parameters"]
    print(f"{count:,} parameters, {args.rows} x {args.seq_len} tokens a step; losses agree")
    for kind, steps in kinds.items():
        figures[kind] = statistics.median(steps)
        print(f"{kind:>26} {figures[kind]:8.3f} s/step, fastest {steps.min():.3f}")
    alone, together, parallel = figures.values()
    figures |= {"speedup": alone / parallel, "efficiency": alone / parallel / args.processes}
    figures["efficiency_over_busy_core"] = together / parallel / args.processes
    print(
        f"speed-up {figures['speedup']:.3f}, efficiency {figures['efficiency']:.1%}; "
        f"{figures['efficiency_over_busy_core']:.1%} over a core whose neighbours work too"
    )
    return figures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve(lambda: prepare(args))
    cores, record = sorted(os.sched_getaffinity(0)), about(args)
    if len(cores) < args.processes:
        parser.error(f"--processes={args.processes} and {len(cores)} cores: one each")
    record |= measure(__file__, cores[: args.processes], "data parallel", args.rounds, args.steps)
    record["figures"] = show(args, record)
    if args.output:
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
